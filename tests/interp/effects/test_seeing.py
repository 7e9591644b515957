"""Analyses of models of images, sounds, and encoder-decoder models, compared with raw hooks on a
copy.
"""

import copy

import pytest
import torch

from hooks import HookedRunner
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    decompose,
    direct_logit_attribution,
    edits,
    log_prob,
    logit_diff,
    sweep,
)
from models import attach
from tests import seeing, tiny
from tests.reference import separately
from tests.seeing import drawn, made

ANSWERS = torch.tensor([[5, 6], [7, 8]])


def difference(output):
    """Return the logit difference of each text at the last position, by hand."""
    logits = getattr(output, "logits", output)
    logits = logits if logits.ndim == 2 else logits[:, -1]
    return logits.gather(1, ANSWERS[:, :1])[:, 0] - logits.gather(1, ANSWERS[:, 1:])[:, 0]


def read_by(twin, block, given):
    """Return the input of a block in a run, recorded by PyTorch's own hook."""
    seen = {}

    def keep(module, args, kwargs):
        seen["x"] = (args[0] if args else kwargs["hidden_states"]).clone()

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    twin(**given)
    handle.remove()
    return seen["x"]


def with_row(twin, block, value, pos, given):
    """Return the output of a run in which the input of a block is changed at one position.

    It has the value of another run there, in all rows.
    """

    def put(module, args, kwargs):
        x = (args[0] if args else kwargs["hidden_states"]).clone()
        x.view(-1, *value.shape[-2:])[:, pos] = value.view(-1, *value.shape[-2:])[:, pos]
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    handle = block.register_forward_pre_hook(put, with_kwargs=True)
    output = twin(**given)
    handle.remove()
    return output


CASES = {
    "llava": ("vision.", "pixel_values"),
    "paligemma": ("vision.", "pixel_values"),
    "qwen2_audio": ("audio.", "input_features"),
    "t5": ("encoder.", "input_ids"),
    "mbart": ("decoder.", "input_ids"),
    "whisper": ("encoder.", "input_features"),
    "vit": ("", "pixel_values"),
}


@torch.no_grad()
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_patches_match_raw_hooks(name):
    prefix, differs = CASES[name]
    model, example, given = made(seeing.ALL[name])
    twin = copy.deepcopy(model)
    value = given[differs]
    other = value.roll(1, 0) if not value.is_floating_point() else value + drawn(*value.shape)
    corrupted = {**given, differs: other}
    attach(model, example=example)
    owner = getattr(model, prefix[:-1]) if prefix else model
    paths = {module: path for path, module in model.named_modules()}
    block = twin.get_submodule(paths[owner.blocks[1].module])
    # PaliGemma reads its prompt in both directions.
    pairs = Pairs(given, corrupted, ANSWERS, pos=-1 if name == "paligemma" else None)
    effects = activation_patching(model, pairs, f"{prefix}resid_pre")
    assert effects.axes == ("layer", "pos", "example")
    assert not effects.words
    value, base = read_by(twin, block, given), difference(twin(**corrupted))
    torch.testing.assert_close(effects.base, base)
    torch.testing.assert_close(effects.target, difference(twin(**given)))
    for pos in range(0, value.shape[-2], 3):
        wanted = difference(with_row(twin, block, value, pos, corrupted)) - base
        torch.testing.assert_close(effects.values[1, pos], wanted, atol=1e-5, rtol=1e-4)
    last = [{f"{prefix}blocks.1.resid_pre": edits.scale(2.0, pos=value.shape[-2] - 1)}]
    exact = separately(model, pairs, last)
    torch.testing.assert_close(sweep(model, pairs, last).values, exact)
    with torch.enable_grad():
        estimates = attribution_patching(model, pairs, f"{prefix}resid_pre")
        there = read_by(twin, block, corrupted).requires_grad_()

        def put(module, args, kwargs):
            return (
                ((there, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": there})
            )

        handle = block.register_forward_pre_hook(put, with_kwargs=True)
        (slope,) = torch.autograd.grad(difference(twin(**corrupted)).sum(), there)
        handle.remove()
    torch.testing.assert_close(
        estimates.values[1], ((value - there) * slope).sum(-1).T, atol=1e-5, rtol=1e-4
    )


@torch.no_grad()
def test_images_that_stand_in_a_row_go_with_their_texts():
    model, _, given = made(seeing.qwen3_vl, rows=2)
    twin = copy.deepcopy(model)
    attach(model, example=seeing.of_qwen(1))
    images = [*given["pixel_values"].split(16)]
    others = [image + drawn(*image.shape) for image in images]
    pairs = Pairs({**given, "pixel_values": images}, {**given, "pixel_values": others}, ANSWERS)
    effects = activation_patching(model, pairs, "vision.resid_pre", layers=1)
    base = difference(twin(**given | {"pixel_values": torch.cat(others)}))
    block = twin.model.visual.blocks[1]
    value = read_by(twin, block, given)
    for pos in (3, 20):  # a position in the first image, and a position in the second
        new = with_row(twin, block, value[None], pos, given | {"pixel_values": torch.cat(others)})
        wanted = difference(new) - base
        torch.testing.assert_close(effects.values[0, pos], wanted, atol=1e-5, rtol=1e-4)
        assert (effects.values[0, pos].abs() > 1e-4).tolist() == [pos < 16, pos >= 16]
    one = activation_patching(model, pairs[1], "vision.resid_pre", layers=1)
    torch.testing.assert_close(one.values[0, 4, 0], effects.values[0, 20, 1], atol=1e-5, rtol=1e-4)
    joined = Pairs(given, given, ANSWERS)
    with pytest.raises(ValueError, match="pixel_values must .*32 for 2"):
        joined[0]
    alone = sweep(model, joined, [{"blocks.0.mlp_out": edits.zero()}])
    handle = twin.model.language_model.layers[0].mlp.register_forward_hook(
        lambda m, a, out: out * 0
    )
    without = difference(twin(**given))
    handle.remove()
    torch.testing.assert_close(alone.values[0], without - difference(twin(**given)))


@torch.no_grad()
def test_padding_of_an_encoder_is_not_read_in_its_decoder():
    model, _, given = made(seeing.t5)
    mask = torch.ones_like(given["input_ids"])
    mask[1, 4:] = 0
    decoded = given["decoder_input_ids"]
    written = torch.ones_like(decoded)
    written[0, 3:] = 0
    plain = model(**given, attention_mask=mask).logits
    attach(model)
    masks = {"attention_mask": mask, "decoder_attention_mask": written}
    pairs = Pairs({**given, **masks}, answers=ANSWERS)
    none = [{"decoder.blocks.1.mlp_out": edits.scale(1.0)}]
    base = sweep(model, pairs, none).base
    wanted = [plain[0, 2, 5] - plain[0, 2, 6], plain[1, -1, 7] - plain[1, -1, 8]]
    torch.testing.assert_close(base, torch.stack(wanted))
    last = [{"encoder.blocks.0.resid_post": edits.scale(n, pos=-1)} for n in (0.0, 2.0, -1.0)]
    together = sweep(model, pairs, last)
    torch.testing.assert_close(together.values, separately(model, pairs, last))
    column = [{"encoder.blocks.0.resid_post": edits.scale(0.0, pos=[[6], [3]])}]
    torch.testing.assert_close(together.values[0], sweep(model, pairs, column).values[0])
    keys = activation_patching(
        model,
        Pairs(given, given["input_ids"].roll(1, 0), ANSWERS),
        "decoder.cross.k",
        over=["layer", "encoder_pos"],
    )
    assert keys.values.shape == (2, 7, 2)


@torch.no_grad()
@pytest.mark.parametrize("make", [seeing.llava, seeing.qwen3_vl], ids=["llava", "qwen3_vl"])
def test_parts_with_an_image_add_up(make):
    model, example, given = made(make)
    attach(model, example=example)
    output, cache = HookedRunner(model).run_with_cache(**given)
    parts = decompose(model, cache)
    torch.testing.assert_close(parts.values.sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4)
    places = given["input_ids"] == seeing.IMAGE
    assert torch.equal(parts["input"][places], cache["merged"][places])
    assert not parts["input"][~places].any()
    # DeepStack adds more of the image to the stream between blocks.
    deep = [name for name in parts.names if name.startswith("input") and name != "input"]
    assert deep == (["input1", "input2"] if make is seeing.qwen3_vl else [])
    for name in deep:
        n = int(name[-1])
        added = cache["resid_pre", n] - cache["resid_post", n - 1]
        torch.testing.assert_close(parts[name], added)
        assert not parts[name][~places].any()
    shares = direct_logit_attribution(model, cache, right=7, pos=-1)
    torch.testing.assert_close(shares.values.sum(0), output.logits[:, -1, 7], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_metrics_of_a_classifier_read_its_only_position():
    model, example, given = made(seeing.vit)
    logits = model(**given).logits
    attach(model, example=example)
    pixels = given["pixel_values"]
    for metric, wanted in (
        (log_prob(3), logits.log_softmax(-1)[:, 3]),
        (logit_diff(2, 5), logits[:, 2] - logits[:, 5]),
        (lambda logits: logits[:, 0, 1] ** 2, logits[:, 1] ** 2),
    ):
        base = sweep(model, pixels, [{"blocks.0.mlp_out": edits.zero()}], metric).base
        torch.testing.assert_close(base, wanted)
    pairs = Pairs(pixels, pixels + drawn(*pixels.shape), logits.topk(2).indices)
    assert len(pairs.solved(model)) == 2
    title, answer = repr(pairs).splitlines()
    assert title == "Pairs: 2, read: clean [2, 3, 12, 12], corrupted [2, 3, 12, 12]"
    right, wrong = logits.topk(2).indices[0].tolist()
    assert answer == f"  first answer: right {right}, wrong {wrong}"
    assert "Pairs: 2" in str(pairs.view())


@torch.no_grad()
def test_a_classifier_of_padded_texts():
    model = tiny.model("BertForSequenceClassification", num_labels=9)
    tokens, mask = torch.randint(3, 23, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    logits = model(tokens, attention_mask=mask).logits
    handle = model.bert.encoder.layer[0].output.dense.register_forward_hook(
        lambda m, a, out: out * 0
    )
    without = model(tokens, attention_mask=mask).logits
    handle.remove()
    attach(model)
    pairs = Pairs(tokens, answers=ANSWERS, attention_mask=mask)
    swept = sweep(model, pairs, [{"blocks.0.mlp_out": edits.zero()}])
    torch.testing.assert_close(swept.base, difference(logits))
    torch.testing.assert_close(swept.base + swept.values[0], difference(without))
    other = Pairs(tokens, tokens.flip(1), ANSWERS, attention_mask=mask)
    noised = activation_patching(model, other, "resid_pre", direction="denoising")
    torch.testing.assert_close(noised.target, difference(logits))
    with torch.enable_grad():
        estimates = attribution_patching(model, other, "resid_pre")
    torch.testing.assert_close(estimates.base, noised.base)
