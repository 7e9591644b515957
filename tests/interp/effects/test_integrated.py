"""Integrated gradients against the trapezoid rule written out, known integrals and whole replacements."""

import pytest
import torch
from torch import nn

from hooks import HookPoint, UnknownNameError
from interp import Pairs, integrated_gradients
from tests.interp.effects.test_attribution import (
    BASE,
    LEFT,
    METRIC,
    PAIRS,
    RIGHT_PADDED,
    TARGET,
    changed,
    close,
    measured,
    paired,
    values_and_gradients,
)
from tests.reference import BATCH, POS, some_tokens, variant


def along_the_path(model, name, mask, steps):
    """The mean gradient by the trapezoid rule, the whole change, and the metric at both ends."""
    (base, _), (target, _) = (
        values_and_gradients(model, [name], text, mask)[name] for text in (BASE, TARGET)
    )
    total, ends = 0, []
    for n in range(steps + 1):
        at = (base + n / steps * (target - base)).requires_grad_()
        with changed(model, {name: lambda output, at=at: at}):
            found = measured(model, BASE, mask)
        (gradient,) = torch.autograd.grad(found.sum(), at)
        total = total + gradient * (0.5 if n in (0, steps) else 1) / steps
        if n in (0, steps):
            ends.append(found.detach())
    return total, target - base, ends[1] - ends[0]


@pytest.mark.filterwarnings("ignore:effects should add up")
@pytest.mark.parametrize(
    ("form", "mask", "site", "name", "to", "steps"),
    [
        ("pre", None, "embed", "embed", "bpm,bpm->pb", 3),
        ("like llama", LEFT, "z", "blocks.1.attn.z", "bphd,bphd->hb", 5),
        ("like gemma 2", RIGHT_PADDED, "resid_pre", "blocks.1.resid_pre", "bpm,bpm->pb", 1),
    ],
)
def test_fixed_steps_are_the_trapezoid_rule(form, mask, site, name, to, steps):
    model = variant(form)
    mean, change, difference = along_the_path(model, name, mask, steps)
    found = integrated_gradients(model, paired(mask), site=site, steps=steps)
    ours = found.values if site == "embed" else found.values[1]
    close(ours, torch.einsum(to, change, mean))
    off = (change * mean).flatten(1).sum(1) - difference
    expected = off.abs() / difference.abs().mean()
    assert found.about["gaps"][-1] == pytest.approx(expected.tolist(), rel=0.06)
    assert set(found.about["steps"]) == {steps}


def test_where_nothing_changes_there_is_no_gap():
    found = integrated_gradients(variant("pre"), Pairs(BASE, BASE, metric=METRIC), steps=3)
    assert not found.values.any()
    assert found.about["gaps"] == [[0.0] * BATCH]


def counted(model):
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_steps_are_doubled_until_the_effects_add_up(tolerance):
    model = variant("pre")
    runs = counted(model)
    found = integrated_gradients(model, PAIRS, tolerance=tolerance)
    (steps,) = found.about["steps"]
    # The run that values come from, and one for each gradient.
    assert len(runs) == 1 + steps + 1
    assert max(found.about["gaps"][0]) <= tolerance
    missing = (found.values.sum(0) - (found.target - found.base)).abs()
    assert (missing <= tolerance * (found.target - found.base).abs().mean()).all()
    fixed = integrated_gradients(model, PAIRS, steps=steps, tolerance=tolerance)
    close(found.values, fixed.values)
    with pytest.warns(UserWarning, match=f"after {steps // 2} steps"):
        integrated_gradients(model, PAIRS, steps=steps // 2, tolerance=tolerance)


class Cubic(nn.Module):
    """A sum of weighted cubes of embeddings."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(23, 3).double()
        self.embed = HookPoint("batch pos d_model")
        self.weight = torch.randn(7, 3).double()

    def forward(self, tokens):
        cubes = self.embed(self.table(tokens)) ** 3
        return (cubes * self.weight).sum((1, 2))[:, None, None]


def test_a_known_integral():
    model = Cubic().eval()
    found = integrated_gradients(model, paired(metric=lambda out: out[:, 0, 0]), tolerance=1e-3)
    with torch.no_grad():
        cubes = [(model.table(text) ** 3 * model.weight).sum(2).T for text in (BASE, TARGET)]
    close(found.values, cubes[1] - cubes[0], 1e-2)


def test_the_effects_of_spans_add_up_to_that_of_moving_all_of_them():
    model, corrupted = variant("rotary"), some_tokens(2, (BATCH, POS + 2))
    spans = {"a": [[1, 2]] * 5, "b": [[5]] * 5}
    others = {"a": [[3, 2]] * 5, "b": [[8]] * 5}
    pairs = Pairs(BASE, corrupted, spans=spans, corrupted_spans=others, metric=METRIC)
    given = dict(over=("layer", "span"), layers=[0], tolerance=0.02, direction="noising")
    found = integrated_gradients(model, pairs, "attn_out", **given)
    name = "blocks.0.attn_out"
    source = values_and_gradients(model, [name], corrupted)[name][0]

    def move(value):
        value = value.clone()
        value[:, [1, 2, 5]] = source[:, [3, 2, 8]]
        return value

    with torch.no_grad(), changed(model, {name: move}):
        difference = measured(model, BASE) - found.base
    missing = (found.values[0].sum(0) - difference).abs()
    assert (missing <= 0.02 * difference.abs().mean()).all()
    assert found.values[0].abs().mean(1).min() > 0.01


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "steps.*0", {"steps": 0}),
        (ValueError, r"layers.*\[1\]", {"layers": [1]}),
        (ValueError, "pos.*'head'", {"over": ("head",)}),
        (ValueError, "finite", {"metric": lambda logits: logits[:, -1, 0] + torch.inf}),
    ],
)
def test_bad_input_is_refused(error, match, options):
    pairs = paired(metric=options.pop("metric", METRIC))
    with pytest.raises(error, match=match):
        integrated_gradients(variant("pre"), pairs, **options)


def test_a_model_without_embeddings_is_refused():
    with pytest.raises(UnknownNameError, match="embed"):
        integrated_gradients(nn.Sequential(HookPoint("batch")).eval(), PAIRS)
