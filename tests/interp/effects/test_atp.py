"""The options of AtP*, compared with their definitions, also with saturated attention."""

import itertools

import pytest
import torch

from hooks import HookedRunner
from interp import Pairs, activation_patching, attribution_patching, compare_effects, edits
from models import Transformer, TransformerConfig
from tests.interp.effects.by_hand import (
    BASE,
    LEFT,
    PAIRS,
    RIGHT,
    RIGHT_PADDED,
    TARGET,
    WRONG,
    changed,
    close,
    paired,
    values_and_gradients,
)
from tests.reference import BATCH, POS, some_tokens, variant


def other_patterns(base, other, site, pos, pattern, cap):
    """Return the pattern with the scores of one query, or of one key, from another run."""
    if cap:
        base, other = (cap * torch.tanh(scores / cap) for scores in (base, other))
    scores = base.clone()
    at = (slice(None), slice(None), pos) if site == "q" else (..., pos)
    scores[at] = other[at]
    seen = pattern > 0
    return torch.where(seen, scores, -torch.inf).softmax(-1).where(seen, 0)


@pytest.mark.parametrize(
    ("form", "mask"),
    [("grouped", LEFT), ("window", RIGHT_PADDED), ("qk_norm all", None), ("attn_cap", LEFT)],
)
@pytest.mark.parametrize("site", ["q", "k"])
def test_the_softmax_is_computed_again_for_one_position_at_a_time(form, mask, site):
    model = variant(form)
    given = dict(site=site, over=("layer", "pos", "head"))
    found = attribution_patching(model, paired(mask), qk_correction=True, **given)
    for layer in range(2):
        own, scores, pattern = (
            f"blocks.{layer}.attn.{part}" for part in (site, "scores", "pattern")
        )
        base = values_and_gradients(model, [scores, pattern], BASE, mask)
        source = values_and_gradients(model, [own], TARGET, mask)[own][0]
        with changed(model, {own: lambda output, source=source: source}):
            other = values_and_gradients(model, [scores], BASE, mask)[scores][0]
        weights, gradient = base[pattern]
        for pos in range(POS):
            scored = (base[scores][0], other, site, pos, weights, model.config.attn_cap)
            change = other_patterns(*scored) - weights
            by_head = (change * gradient).sum((2, 3)).T
            heads = found.values.shape[2]
            close(found.values[layer, pos], by_head.unflatten(0, (heads, -1)).sum(1))


def saturated(gain, **changes):
    """Return a model that is linear after attention. A larger gain makes attention sharper."""
    model = variant("attention only", norm="none", n_kv_heads=3, **changes)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.mul_(gain)
            block.attn.b_Q.mul_(gain)
    return model


@pytest.mark.parametrize("site", ["q", "k"])
@pytest.mark.parametrize(("mask", "dtype"), [(LEFT, torch.float64), (None, torch.float32)])
@pytest.mark.parametrize("cap", [0.0, 9.0])
def test_the_correction_is_exact_if_the_rest_is_linear(site, mask, dtype, cap):
    model = saturated(40.0, attn_cap=cap).to(dtype)
    pairs, given = paired(mask), dict(site=site, over=("head", "pos"), layers=[1])
    exact = activation_patching(model, pairs, **given)
    found = attribution_patching(model, pairs, qk_correction=True, **given)
    close(found.values, exact.values, 1e-9 if dtype == torch.float64 else 1e-4)
    plain = attribution_patching(model, pairs, **given)
    assert (plain.values - exact.values).abs().max() > 0.3 * exact.values.abs().max()


def test_spans_are_corrected_one_position_at_a_time():
    model = saturated(5.0)
    corrupted = some_tokens(2, (BATCH, POS + 2))
    spans, others = {"a": [[4]] * 5, "b": [[6]] * 5}, {"a": [[3]] * 5, "b": [[8]] * 5}
    answers = torch.stack([RIGHT, WRONG], 1)
    pairs = Pairs(BASE, corrupted, answers, spans=spans, corrupted_spans=others)
    for site in ("q", "k"):
        given = dict(site=site, over=("span", "head"), layers=[1])
        exact = activation_patching(model, pairs, **given)
        found = attribution_patching(model, pairs, qk_correction=True, **given)
        close(found.values, exact.values)


@pytest.mark.parametrize("site", ["q", "k"])
def test_edits_that_act_already_act_in_repeated_attention(site):
    model = saturated(5.0)
    outer = {
        "blocks.1.attn.scores": edits.knockout(key=[2, 4]),
        "blocks.1.attn.v": edits.scale(2.0),
    }
    given = dict(site=site, over=("pos", "head"), layers=[1])
    with HookedRunner(model).hooks(outer):
        found = attribution_patching(model, PAIRS, qk_correction=True, **given)
        exact = activation_patching(model, PAIRS, **given)
    close(found.values, exact.values)


N = 7


def lookup(sharpness):
    """Return a model of two heads. One head attends from a token n to the token n + 1 and copies
    it. The other head attends evenly.
    """
    config = TransformerConfig(
        vocab_size=2 * N,
        n_ctx=N,
        n_layers=1,
        n_heads=2,
        d_model=2 * N,
        d_head=2 * N,
        mlp="none",
        norm="none",
        positions="none",
        tied_unembed=False,
    )
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        one = torch.eye(2 * N).double()
        model.token_embedding.weight.copy_(one)
        model.unembedding.weight.copy_(one)
        attn = model.blocks[0].attn
        attn.W_Q[0] = sharpness * one.roll(1, 1)
        attn.W_K[0] = attn.W_V[0] = attn.W_O[0] = one
        attn.W_V[1] = attn.W_O[1] = 0.1 * one
        attn.W_Q[1], attn.W_K[1] = 0.01 * torch.randn(2, 2 * N, 2 * N).double()
    return model


@pytest.mark.parametrize(("sharpness", "is_saturated"), [(1.0, False), (300.0, True)])
def test_a_circuit_by_hand(sharpness, is_saturated):
    model = lookup(sharpness)
    clean = torch.tensor([[1, 3, 5, 9, 0], [4, 2, 6, 11, 3]])
    corrupted = clean.clone()
    corrupted[:, -1] = torch.tensor([2, 5])
    # The metric is the logit of the token that the head copies.
    pairs = Pairs(corrupted, clean, metric=lambda logits: logits[[0, 1], -1, [1, 4]])
    given = dict(site="q", over=("head", "pos"))
    exact = activation_patching(model, pairs, **given)
    plain, corrected = (
        attribution_patching(model, pairs, qk_correction=on, **given) for on in (False, True)
    )
    node = {"head": 0, "pos": 4}
    assert exact.top(1)[0].where == node
    assert corrected.top(1)[0].where == node
    assert corrected.top(1)[0].effect == pytest.approx(exact.top(1)[0].effect)
    if is_saturated:
        assert abs(plain.select(**node).mean()) < 1e-6 < 0.9 < -exact.top(1)[0].effect
    else:
        assert compare_effects(exact, plain).rank_correlation > 0.9


@pytest.mark.parametrize("form", ["pre", "parallel", "sandwich", "attention only"])
def test_grad_drop_is_the_mean_size_without_each_block(form):
    model = variant(form, n_layers=3)
    sites = {"resid_pre": "bpm,bpm->pb", "attn_out": "bpm,bpm->pb", "z": "bphd,bphd->hb"}
    names = {s: [f"blocks.{n}.{'attn.' * (s == 'z')}{s}" for n in range(3)] for s in sites}
    every = list(itertools.chain(*names.values()))
    base, target = (
        {n: v for n, (v, _) in values_and_gradients(model, every, text).items()}
        for text in (BASE, TARGET)
    )
    gradients = []
    for layer in range(3):
        outs = [f"blocks.{layer}.attn_out", f"blocks.{layer}.mlp_out"]
        outs = outs if form != "attention only" else outs[:1]
        with changed(model, {name: lambda output: output.detach() for name in outs}):
            found = values_and_gradients(model, [n for n in every if n not in outs], BASE)
        gradients.append({name: gradient for name, (_, gradient) in found.items()})
    for site, sides in sites.items():
        found = attribution_patching(model, PAIRS, site, grad_drop=True)
        for layer, name in enumerate(names[site]):
            each = [
                torch.einsum(sides, target[name] - base[name], g[name]).abs()
                for g in gradients
                if name in g
            ]
            # Inside a layer, the gradient is 0 if the outputs of this layer block it.
            close(found.values[layer], sum(each) / (3 if site == "resid_pre" else 2))
    assert found.about["signed"] is False


def test_both_options_together():
    model = saturated(10.0, n_layers=3)
    given = dict(site="q", over=("layer", "head", "pos"))
    found = attribution_patching(model, PAIRS, qk_correction=True, grad_drop=True, **given)
    exact = activation_patching(model, PAIRS, layers=[2], **given)
    # GradDrop leaves out the gradients of one layer at a time. The queries of the last block act
    # only through the output of this block, so one of the estimates is 0.
    close(found.values[2], exact.values[0].abs())


@pytest.mark.parametrize(
    ("match", "form", "options"),
    [
        ("site.*'z'", {}, {"site": "z", "qk_correction": True}),
        ("2 layers.*1", {"n_layers": 1}, {"grad_drop": True}),
    ],
)
def test_bad_input_is_refused(match, form, options):
    with pytest.raises(ValueError, match=match):
        attribution_patching(variant("pre", **form), PAIRS, **options)


def test_patterns_that_are_no_softmax_are_refused():
    model = variant("pre")
    halved = HookedRunner(model).hooks({"blocks.1.attn.pattern": edits.scale(0.5)})
    with halved, pytest.raises(ValueError, match=r"softmax.*blocks.1.attn.pattern"):
        attribution_patching(model, PAIRS, "k", qk_correction=True)
