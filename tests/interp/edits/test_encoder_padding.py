"""Edits at keys and values of attention to an encoder, whose texts have padding.

The expected values come from runs of each text alone, in a model without points.
"""

import pytest
import torch

from hooks import EditError, HookedRunner
from interp import edits
from models import attach
from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")

ENCODED = [[3, 9, 4], [7, 2, 8, 11, 6, 13]]
SITES = {"decoder.blocks.1.cross.k": "k", "decoder.blocks.1.cross.v": "v"}


def given(texts, side="right"):
    """Return the padded texts, each with a decoder text of another length."""
    tokens, mask = tiny.padded(texts, side)
    decoded = torch.tensor([[1, 9, 2, 4]] * len(texts))
    decoded_mask = torch.ones_like(decoded)
    decoded_mask[0, 2:] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "decoder_input_ids": decoded,
        "decoder_attention_mask": decoded_mask,
    }


@torch.no_grad()
def alone(text, site):
    """Return the keys or values of one text, [column, head, d_head], by a hook of PyTorch."""
    twin = tiny.t5()
    seen = []
    module = getattr(twin.decoder.block[1].layer[1].EncDecAttention, SITES[site])
    module.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    twin(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([[1, 9]]))
    return seen[0].unflatten(-1, (2, 6))


def edited(model, site, edit, texts):
    """Return the value at a point after an edit."""
    runner = HookedRunner(model)
    with runner.hooks({site: edit}):
        return runner.run_with_cache(given(texts), names=site)[1][site]


@pytest.fixture
def model():
    model = tiny.t5()
    with attach(model):
        yield model


def cached(model, texts, side="right"):
    return HookedRunner(model).run_with_cache(given(texts, side))[1]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("from_tensor", [False, True])
def test_a_mean_is_over_the_real_tokens_of_the_encoder(model, site, from_tensor):
    cache = cached(model, ENCODED)
    source, options = cache, {}
    if from_tensor:
        source, options = cache[site], {"attention_mask": given(ENCODED)["attention_mask"]}
    values = [alone(text, site) for text in ENCODED]
    run = [[5, 6, 7, 8, 9, 10]]
    everything = edits.mean(source, across=("batch", "encoder_pos"), **options)
    expected = torch.cat(values).mean(0).expand(1, 6, 2, 6)
    torch.testing.assert_close(edited(model, site, everything, run), expected)
    by_column = edits.mean(source, across="batch", **options)
    both = (values[0] + values[1][:3]) / 2
    expected = torch.cat([both, values[1][3:]])[None]
    torch.testing.assert_close(edited(model, site, by_column, run), expected)
    of_last = edits.mean(source, across="batch", encoder_pos=-1, **options)
    changed = edited(model, site, of_last, run)
    torch.testing.assert_close(changed[0, -1], (values[0][-1] + values[1][-1]) / 2)
    torch.testing.assert_close(changed[0, :-1], alone(run[0], site)[:-1])


def test_a_mean_at_each_column_needs_encoder_texts_that_begin_together(model):
    cache = cached(model, ENCODED, side="left")
    site = "decoder.blocks.1.cross.v"
    with pytest.raises(EditError, match="encoder_pos"):
        edited(model, site, edits.mean(cache, across="batch"), [[5, 6, 7, 8, 9, 10]])
    values = [alone(text, site) for text in ENCODED]
    of_last = edits.mean(cache, across="batch", encoder_pos=-1)
    changed = edited(model, site, of_last, [[5, 6, 7], [5, 8]])
    for row, last in enumerate((2, 1)):
        torch.testing.assert_close(changed[row, last], (values[0][-1] + values[1][-1]) / 2)


@pytest.mark.parametrize("site", SITES)
def test_a_donor_has_the_same_padding_in_the_encoder(model, site):
    with pytest.raises(EditError, match="same padding"):
        edited(model, site, edits.resample(cached(model, ENCODED)), ENCODED)
    texts = [*ENCODED, [5, 12, 2], [3, 2, 1, 4, 6, 5]]
    changed = edited(model, site, edits.resample(cached(model, texts)), texts)
    for row, donor in enumerate((2, 3, 0, 1)):
        expected = alone(texts[donor], site)
        torch.testing.assert_close(changed[row, : len(expected)], expected)


def test_the_last_token_of_a_source_is_its_last_real_token_of_the_encoder(model):
    site = "decoder.blocks.1.cross.v"
    edit = edits.replace(cached(model, ENCODED), encoder_pos=-1)
    run = [[5, 6, 7, 8, 9, 10], [5, 8]]
    changed = edited(model, site, edit, run)
    torch.testing.assert_close(changed[0, 5], alone(ENCODED[0], site)[-1])
    torch.testing.assert_close(changed[1, 1], alone(ENCODED[1], site)[-1])
    torch.testing.assert_close(changed[1, 0], alone(run[1], site)[0])


@pytest.mark.parametrize("site", SITES)
def test_source_pos_selects_tokens_of_the_encoder(model, site):
    cache = cached(model, ENCODED)
    values = [alone(text, site) for text in ENCODED]
    run = [[5, 8], [5, 6, 7, 8, 9, 10]]
    own = [alone(text, site) for text in run]
    changed = edited(model, site, edits.replace(cache, source_pos=-1), run)
    for row, text in enumerate(run):
        expected = values[row][-1:].expand(len(text), -1, -1)
        torch.testing.assert_close(changed[row, : len(text)], expected)
    edit = edits.replace(cache, source_pos=[[2], [4]], encoder_pos=[[0], [3]])
    changed = edited(model, site, edit, run)
    torch.testing.assert_close(changed[0, 0], values[0][2])
    torch.testing.assert_close(changed[1, 3], values[1][4])
    torch.testing.assert_close(changed[0, 1], own[0][1])
    torch.testing.assert_close(changed[1, [0, 1, 2, 4, 5]], own[1][[0, 1, 2, 4, 5]])
    # Column 3 is padding in the first text of the source.
    with pytest.raises(EditError, match="source_pos"):
        edited(model, site, edits.replace(cache, source_pos=3, encoder_pos=0), run)


FORMS = {
    "a cache": lambda cache, site: edits.replace(cache),
    "a tensor": lambda cache, site: edits.add(cache[site] / 3),
    "the last token": lambda cache, site: edits.replace(cache, encoder_pos=-1),
    "source_pos": lambda cache, site: edits.replace(cache, source_pos=1, encoder_pos=[[0], [2]]),
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["num_beams", "num_return_sequences"])
def test_all_beams_of_a_text_get_the_source_of_the_text(model, site, form, how):
    texts = [[3, 9, 4], [7, 2, 8]]
    others = [[5, 6, 7], [11, 8, 4]]
    rows = [[0], [2]]
    options = dict(max_new_tokens=3, eos_token_id=None, pad_token_id=0, **{how: 2})
    options |= dict(do_sample=how != "num_beams", top_k=1)
    options |= dict(output_logits=True, return_dict_in_generate=True)

    def generated(texts, edit):
        with HookedRunner(model).hooks({site: edit}):
            return model.generate(torch.tensor(texts), **options).logits[0]

    found = generated(texts, FORMS[form](cached(model, others), site))
    for n, text in enumerate(texts):
        cache = cached(model, others[n : n + 1])
        edit = FORMS[form](cache, site)
        if form == "source_pos":
            edit = edits.replace(cache, source_pos=1, encoder_pos=rows[n])
        torch.testing.assert_close(found[2 * n : 2 * n + 2], generated([text], edit))
    plain = generated(texts, edits.scale(1.0))
    assert not torch.allclose(found, plain)
    wrong = torch.zeros(3, 3, 2, 6)
    with pytest.raises(EditError, match="size 4 along batch; got 3.*2 rows, such as beams.*size 2"):
        generated(texts, edits.add(wrong))


def test_all_beams_of_a_text_have_one_donor(model):
    site = "decoder.blocks.1.cross.v"
    options = dict(max_new_tokens=1, num_beams=2, eos_token_id=None, pad_token_id=0)
    edit = edits.resample(cached(model, [[3, 9, 4], [7, 2, 8]]))
    values = []
    runner = HookedRunner(model)
    with runner.hooks({site: edit}), runner.hooks({site: lambda value, _: values.append(value)}):
        model.generate(torch.tensor([[5, 6, 7], [9, 8, 2]]), **options)
    for row, donor in enumerate([[7, 2, 8], [7, 2, 8], [3, 9, 4], [3, 9, 4]]):
        torch.testing.assert_close(values[0][row], alone(donor, site))


def test_a_source_of_one_token_is_not_repeated_along_the_encoder(model):
    edit = edits.replace(cached(model, [[4], [5]]))
    with pytest.raises(EditError, match="encoder_pos"):
        edited(model, "decoder.blocks.1.cross.v", edit, [[5, 6, 7], [5, 8, 9]])


def test_a_mean_has_one_last_token_for_all_texts_of_the_encoder(model):
    site = "decoder.blocks.1.cross.v"
    texts = [[3, 9, 4], [7, 2, 8]]
    edit = edits.mean(cached(model, texts), across="batch", encoder_pos=[[-1], [-2]])
    changed = edited(model, site, edit, [[5, 6, 7], [5, 8, 9]])
    values = [alone(text, site) for text in texts]
    for row, column in enumerate((2, 1)):
        expected = (values[0][column] + values[1][column]) / 2
        torch.testing.assert_close(changed[row, column], expected)
    with pytest.raises(EditError, match="one encoder_pos"):
        edited(model, site, edit, [[5, 6, 7], [5, 8]])


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_the_last_token_of_the_encoder_stays_the_same_in_a_generation(model, use_cache):
    twin = tiny.t5()

    def without_last(module, args, output):
        output = output.clone()
        for row, text in enumerate(ENCODED):
            output[row, len(text) - 1] = 0
        return output

    twin.decoder.block[1].layer[1].EncDecAttention.v.register_forward_hook(without_last)
    options = {
        "input_ids": given(ENCODED)["input_ids"],
        "attention_mask": given(ENCODED)["attention_mask"],
        "decoder_input_ids": torch.tensor([[1, 9, 2, 4]] * 2),
        "max_new_tokens": 4,
        "do_sample": False,
        "use_cache": use_cache,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = twin.generate(**options)
    edit = edits.zero(encoder_pos=-1)
    with HookedRunner(model).hooks({"decoder.blocks.1.cross.v": edit}):
        output = model.generate(**options)
    assert torch.equal(output.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(expected.logits))


def test_texts_may_be_given_as_the_output_of_the_encoder(model):
    """The texts that an edit selects are then the rows of this output."""
    tokens = torch.tensor([[3, 9, 4], [7, 2, 8]])
    options = dict(max_new_tokens=3, num_beams=2, eos_token_id=None, pad_token_id=0)
    options |= dict(output_logits=True, return_dict_in_generate=True)
    encoded = model.get_encoder()(input_ids=tokens)
    edit = edits.zero(batch=1, encoder_pos=[[0], [2]])
    with HookedRunner(model).hooks({"decoder.blocks.1.cross.v": edit}):
        found = model.generate(encoder_outputs=encoded, **options).logits[0]
        expected = model.generate(tokens, **options).logits[0]
    torch.testing.assert_close(found, expected)
