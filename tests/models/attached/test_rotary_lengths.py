"""Rotary frequencies that depend on the longest text: no batch mixes texts that change each other.

The expected numbers are of plain models of `transformers`, of each text alone.
"""

import copy
import itertools
import warnings

import pytest
import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, edits, log_prob, sweep
from interp.store import HarvestConfig, harvest, statistics
from models import attach

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

VOCAB, MOST = 23, 12
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    initializer_range=0.3,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=100.0,
    short_factor=[1.0, 1.3],
    long_factor=[2.0, 5.0],
    factor=5.0,
    original_max_position_embeddings=MOST,
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)


def fresh(kind):
    """Return a model that has run no text."""
    torch.manual_seed(0)
    if kind == "longrope":
        sizes = dict(max_position_embeddings=64, original_max_position_embeddings=MOST)
        config = transformers.Phi3Config(
            **SIZES, **sizes, pad_token_id=0, eos_token_id=0, rope_parameters=LONGROPE
        )
        return transformers.Phi3ForCausalLM(config).eval()
    config = transformers.LlamaConfig(
        **SIZES, max_position_embeddings=MOST, rope_parameters=DYNAMIC
    )
    return transformers.LlamaForCausalLM(config).eval()


def drawn(*lengths):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (length,), generator=draw).tolist() for length in lengths]


@torch.no_grad()
def alone(kind, texts, layer=None):
    """Return the last logits of each text, or its stream after a block, each in a new model."""
    rows = []
    for text in texts:
        output = fresh(kind)(torch.tensor([text]), output_hidden_states=True)
        rows.append(output.logits[0, -1] if layer is None else output.hidden_states[layer + 1][0])
    return rows


def batch(texts, side, more=0):
    """Return tokens and a mask with padding on a side, and `more` columns that are all padding."""
    size = max(map(len, texts)) + more
    tokens, mask = torch.zeros(2, len(texts), size, dtype=torch.long)
    for row, text in enumerate(texts):
        where = slice(size - len(text), size) if side == "left" else slice(len(text))
        tokens[row, where], mask[row, where] = torch.tensor(text), 1
    return tokens, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "lengths", "more"),
    [
        ("longrope", (MOST, MOST + 1), 0),
        ("longrope", (5, 8, 20), 0),
        ("dynamic", (MOST, MOST + 1), 0),
        ("dynamic", (15, 20), 0),
    ],
)
@torch.no_grad()
def test_a_text_in_the_frequencies_of_a_longer_text_is_refused(kind, lengths, more, side):
    texts = drawn(*lengths)
    tokens, mask = batch(texts, side, more)
    # In transformers, the numbers of the shortest text depend on its batch.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = fresh(kind)(tokens, attention_mask=mask, position_ids=positions).logits[0]
    differs = plain[mask[0].nonzero()[-1, 0]] - alone(kind, texts[:1])[0]
    assert differs.abs().max() > 1e-3
    model = fresh(kind)
    attach(model)
    pairs = Pairs(tokens, answers=[(3, 4)] * len(texts), attention_mask=mask)
    for run in (
        lambda: model(tokens, attention_mask=mask),
        lambda: HookedRunner(model).run_with_cache(tokens, attention_mask=mask),
        lambda: HookedRunner(model).run_with_cache(texts),
        lambda: sweep(model, pairs, [{"blocks.0.mlp_out": edits.zero()}]),
        lambda: activation_patching(
            model, Pairs(texts, [text[::-1] for text in texts], [(3, 4)] * len(texts)), "z"
        ),
    ):
        with pytest.raises(ValueError, match=f"more than {MOST} tokens must not be in a batch"):
            run()


@torch.no_grad()
def test_columns_that_are_all_padding_make_no_short_text_long():
    texts = drawn(5, 8)
    model = fresh("longrope")
    attach(model)
    tokens, mask = batch(texts, "right", more=8)
    with pytest.raises(ValueError, match="padding in all texts"):
        model(tokens, attention_mask=mask)
    tokens, mask = batch(texts, "left", more=8)
    last = model(tokens, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(last, torch.stack(alone("longrope", texts)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("longrope", (5, MOST, 8)),
        ("longrope", (MOST + 1, 20, 15)),
        ("dynamic", (5, MOST, 8)),
        ("dynamic", (20, 20)),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_texts_on_one_side_have_the_numbers_of_each_text_alone(kind, lengths, side):
    texts = drawn(*lengths)
    tokens, mask = batch(texts, side)
    model = fresh(kind)
    attach(model)
    pairs = Pairs(tokens, answers=[(3, 4)] * len(texts), attention_mask=mask)
    swept = sweep(model, pairs, [{"blocks.0.mlp_out": edits.zero()}], log_prob(3))
    expected = torch.stack(alone(kind, texts)).log_softmax(-1)[:, 3]
    torch.testing.assert_close(swept.base, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_batches_of_stores_and_statistics_mix_no_such_texts(kind, size, tmp_path):
    # With `dynamic`, only a run shorter than MOST makes transformers forget a long text.
    texts = drawn(5, 8, 20, 6, MOST - 1, MOST + 1, 9)
    streams = alone(kind, texts, layer=0)
    name = "blocks.0.resid_post"
    model = fresh(kind)
    attach(model)
    if kind == "longrope":
        # A harvest cuts texts at the `max_position_embeddings` of the config, so with `dynamic` all
        # pieces are short.
        store = harvest(model, texts, name, tmp_path / "store", HarvestConfig(batch=size))
        for number, stream in enumerate(streams):
            torch.testing.assert_close(store.rows(number)[name], stream, atol=1e-5, rtol=1e-5)
    of_all = statistics(model, texts, name, batch=size)[name]
    assert of_all.n == sum(map(len, texts))
    expected = torch.cat(streams).double().mean(0)
    torch.testing.assert_close(of_all.mean, expected, atol=1e-5, rtol=1e-5)
    values = torch.cat(streams)
    places = [(n, at) for n, text in enumerate(texts) for at in range(len(text))]
    assert tuple(of_all.top_places[0, 0].tolist()) == places[int(values[:, 0].argmax())]


@torch.no_grad()
def test_a_generation_of_such_prompts_warns_and_is_the_generation_of_transformers():
    """Prompts may reach the length in different steps, so an error would come in the middle."""
    tokens, mask = batch(drawn(9, 11), "left")
    options = dict(max_new_tokens=4, do_sample=False, attention_mask=mask, eos_token_id=None)
    expected = fresh("longrope").generate(tokens, **options)
    model = fresh("longrope")
    attach(model)
    with pytest.warns(UserWarning, match="must not be in a batch with shorter texts"):
        given = model.generate(tokens, **options)
    assert torch.equal(given, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = options | dict(max_new_tokens=2)
        assert torch.equal(model.generate(tokens, **few), expected[:, :-2])


def test_other_models_have_one_group():
    kinds = [None, dict(rope_type="linear", rope_theta=100.0, factor=4.0)]
    for parameters in kinds:
        config = transformers.LlamaConfig(
            **SIZES, max_position_embeddings=MOST, rope_parameters=copy.deepcopy(parameters)
        )
        attached = attach(transformers.LlamaForCausalLM(config).eval())
        assert {attached.length_group(length) for length in range(1, 40)} == {()}
    groups = [attach(fresh(kind)) for kind in ("longrope", "dynamic")]
    for first, second in itertools.pairwise(range(10, 16)):
        longrope, dynamic = (
            attached.length_group(first) == attached.length_group(second) for attached in groups
        )
        assert longrope == (first != MOST)
        assert dynamic == (second <= MOST)
