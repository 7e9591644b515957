"""Effects of encoder-decoder models on padded texts, compared with hooks on each text alone."""

import re

import pytest
import torch

from interp import Pairs, activation_patching, attribution_patching, edits, top_attributions
from models import attach
from tests import tiny

pytest.importorskip("transformers", reason="needs the extra hf")

ENCODED = [[3, 9, 4], [7, 2, 8, 11, 6, 13]]
OTHERS = [[5, 9, 14], [7, 3, 8, 16, 4, 12]]
DECODED = [[1, 9, 2, 4], [1, 5]]
ANSWERS = [[5, 6], [7, 8]]


def given(encoded):
    tokens, mask = tiny.padded(encoded)
    decoded, decoded_mask = tiny.padded(DECODED)
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "decoder_input_ids": decoded,
        "decoder_attention_mask": decoded_mask,
    }


def pairs():
    return Pairs(given(ENCODED), given(OTHERS), torch.tensor(ANSWERS))


def place(model, site, layer):
    """Return the module with the value of a point, and whether the value is its input."""
    if site == "encoder.attn_out":
        return model.encoder.block[layer].layer[0].SelfAttention, False
    cross = model.decoder.block[layer].layer[1].EncDecAttention
    return (cross.v, False) if site == "decoder.cross.v" else (cross.o, True)


@torch.no_grad()
def run_alone(model, text, encoded, hooked=None, is_input=False, write=None):
    """Return the logit difference of one text, and the value at a module; write into the value."""
    seen = []

    def before(module, args):
        seen.append(args[0].clone())
        if write is not None:
            column, value = write
            changed = args[0].clone()
            changed[:, column] = value
            return (changed, *args[1:])
        return None

    def after(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        seen.append(first.clone())
        if write is not None:
            column, value = write
            first = first.clone()
            first[:, column] = value
            return (first, *output[1:]) if isinstance(output, tuple) else first
        return None

    handle = None
    if hooked is not None:
        handle = (
            hooked.register_forward_pre_hook(before)
            if is_input
            else hooked.register_forward_hook(after)
        )
    logits = model(
        input_ids=torch.tensor([encoded]), decoder_input_ids=torch.tensor([DECODED[text]])
    ).logits[0, -1]
    if handle is not None:
        handle.remove()
    right, wrong = ANSWERS[text]
    return float(logits[right] - logits[wrong]), seen[0] if seen else None


@pytest.mark.parametrize(
    ("site", "axis"),
    [("encoder.attn_out", "pos"), ("decoder.cross.v", "encoder_pos"), ("decoder.cross.z", "pos")],
)
def test_means_leave_out_padding_of_the_texts_that_a_point_reads(site, axis):
    model, twin = tiny.t5(), tiny.t5()
    n_layers = len(twin.encoder.block if site.startswith("encoder") else twin.decoder.block)
    lengths = [len(text) for text in (DECODED if site == "decoder.cross.z" else ENCODED)]
    expected = torch.full((n_layers, max(lengths), 2), torch.nan)
    for text in range(2):
        base, _ = run_alone(twin, text, OTHERS[text])
        for layer in range(n_layers):
            module, is_input = place(twin, site, layer)
            _, value = run_alone(twin, text, ENCODED[text], module, is_input)
            for column in range(lengths[text]):
                written = (column, value[:, column])
                edited, _ = run_alone(twin, text, OTHERS[text], module, is_input, written)
                expected[layer, column, text] = edited - base
    attach(model)
    result = activation_patching(model, pairs(), site, ["layer", axis])
    values = result.values.where(~expected.isnan(), torch.nan)
    torch.testing.assert_close(values.float(), expected, atol=1e-5, rtol=1e-4, equal_nan=True)
    mean = expected.nanmean(-1)
    torch.testing.assert_close(result.mean().float(), mean, atol=1e-5, rtol=1e-4)
    estimate = attribution_patching(model, pairs(), site, ["layer", axis])
    assert torch.equal(estimate.exists, result.exists)
    edited = activation_patching(model, pairs(), site, ["layer", axis], edit=edits.zero())
    assert torch.equal(edited.exists, result.exists)


@pytest.mark.parametrize(
    ("site", "axis", "texts"),
    [
        ("encoder.pattern", "query", ENCODED),
        ("encoder.pattern", "key", ENCODED),
        ("decoder.attn.pattern", "key", DECODED),
        ("decoder.cross.pattern", "query", DECODED),
        ("decoder.cross.pattern", "encoder_pos", ENCODED),
    ],
)
def test_effects_exist_at_real_tokens_of_the_texts_of_an_axis(site, axis, texts):
    model = tiny.t5()
    attach(model)
    result = activation_patching(model, pairs(), site, ["layer", axis])
    assert torch.equal(result.exists[0], tiny.padded(texts)[1].bool().T)


def test_top_attributions_rank_positions_of_the_encoder_by_the_texts_that_have_them():
    model = tiny.t5()
    attach(model)
    directions = {"encoder.blocks.1.resid_post": torch.eye(12).double()}
    result = top_attributions(model, pairs(), directions, k=72)
    assert len(result.labels["place"]) == 72
    for label, exists in zip(result.labels["place"], result.exists, strict=True):
        pos = int(re.search(r"pos (\d+)", str(label))[1])
        assert exists.tolist() == [pos < 3, True]
