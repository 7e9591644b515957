"""Estimates of the effects of edits, compared with PyTorch's own hooks and gradients.

In linear models, they are also compared with the exact effects of the edits.
"""

import pytest
import torch

from hooks import EditError, HookedRunner, HookPoint, UnknownNameError
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    cross_entropy,
    edits,
    integrated_gradients,
    patch_top_k,
)
from tests.interp.effects.by_hand import (
    BASE,
    LEFT,
    METRIC,
    RIGHT,
    RIGHT_PADDED,
    TARGET,
    WRONG,
    changed,
    close,
    measured,
    values_and_gradients,
)
from tests.reference import BATCH, POS, variant

EVERY = slice(None)
AXES = {
    **dict.fromkeys(("resid_pre", "resid_mid", "attn_out", "mlp_out", "mlp.post"), "bpm"),
    **dict.fromkeys(("attn.z", "attn.q", "attn.v"), "bphd"),
    "attn.pattern": "bhqk",
}


def alone(mask=None, **options):
    """Return pairs without corrupted texts."""
    return Pairs(BASE, attention_mask=mask, metric=METRIC, **options)


def cached(model, tokens, mask=None):
    return HookedRunner(model).run_with_cache(tokens, attention_mask=mask, mode="full")[1]


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        *(("pre", None), ("post", LEFT), ("sandwich", RIGHT_PADDED)),
        *(("attention only", None), ("like gemma 2", RIGHT_PADDED)),
    ],
)
def test_the_estimate_of_zero_is_minus_the_value_times_the_gradient(form, mask):
    model = variant(form)
    there = {name for name, _ in model.named_modules()}
    for site, axes in AXES.items():
        names = [f"blocks.{layer}.{site}" for layer in range(2)]
        if names[0] not in there:
            continue
        by_hand = values_and_gradients(model, names, BASE, mask)
        found = attribution_patching(model, alone(mask), site, edit=edits.zero())
        kept = "p" if axes == "bpm" else "h"
        assert found.axes == ("layer", "pos" if kept == "p" else "head", "example")
        for layer, name in enumerate(names):
            close(found.values[layer], -torch.einsum(f"{axes},{axes}->{kept}b", *by_hand[name]))
    with torch.no_grad():
        close(found.base, measured(model, BASE, mask))
    assert found.target is None
    assert found.about["edit"] == "edits.zero()"
    assert found.about["estimate"] == "attribution"
    assert "direction" not in found.about


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT_PADDED])
def test_the_value_of_an_edit_is_computed_once_for_all_places(mask):
    model, name = variant("rotary"), "blocks.1.attn.z"
    ((value, gradient),) = values_and_gradients(model, [name], BASE, mask).values()
    ((other, _),) = values_and_gradients(model, [name], TARGET, mask).values()
    real = torch.ones(BATCH, POS).bool() if mask is None else mask
    reference = cached(model, TARGET, mask)
    vector = torch.arange(8.0).double()
    changes = {
        edits.scale(0.25): -0.75 * value,
        edits.add(vector, 2.0): (2 * vector).expand_as(value),
        edits.replace(reference): other - value,
        edits.mean(reference, ("batch", "pos")): other[real].mean(0) - value,
        edits.project_out(vector): -(value @ vector)[..., None] * vector / vector.norm() ** 2,
    }
    for edit, change in changes.items():
        found = attribution_patching(model, alone(mask), "z", layers=1, edit=edit)
        close(found.values[0], torch.einsum("bphd,bphd->hb", change, gradient))


def test_the_last_real_position_is_edited_in_padded_texts():
    model, name = variant("rotary"), "blocks.1.attn.z"
    for mask in (LEFT, RIGHT_PADDED):
        ((value, gradient),) = values_and_gradients(model, [name], BASE, mask).values()
        last = POS - 1 - mask.flip(1).int().argmax(1)
        rows = torch.arange(BATCH)
        expected = -torch.einsum("bhd,bhd->hb", value[rows, last], gradient[rows, last])
        given = dict(site="z", layers=1, edit=edits.zero(pos=-1))
        close(attribution_patching(model, alone(mask), **given).values[0], expected)


class Sum(torch.nn.Module):
    """A user's model, which does not say which columns are real: sums of embeddings so far."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(23, 4).double()
        self.z = HookPoint("batch pos head d_head")

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        z = self.z(self.table(tokens).unflatten(-1, (2, 2)))
        return (z.flatten(2) * mask[..., None]).cumsum(1)


@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
def test_the_padding_of_a_users_model_is_known(analysis):
    model = Sum().eval()
    answers = torch.tensor([[3, 0]] * BATCH)
    pairs = Pairs(BASE, answers=answers, attention_mask=RIGHT_PADDED)
    found = analysis(model, pairs, "z", edit=edits.zero(pos=-1))
    last = POS - 1 - RIGHT_PADDED.flip(1).int().argmax(1)
    vectors = model.table(BASE[torch.arange(BATCH), last]).detach()
    # Logit 3 is in head 1, and logit 0 in head 0.
    close(found.values, torch.stack([vectors[:, 0], -vectors[:, 3]]))


def test_padded_keys_are_not_edited():
    model, name = variant("pre"), "blocks.1.attn.pattern"
    ((value, gradient),) = values_and_gradients(model, [name], BASE, LEFT).values()
    three = torch.full((), 3.0).double()
    for edit, change in ((edits.add(three), three), (edits.replace(three), three - value)):
        given = dict(site="pattern", over=("key",), layers=1, edit=edit)
        expected = torch.einsum("bhqk,bhqk->kb", change * LEFT[:, None, None] + 0 * value, gradient)
        close(attribution_patching(model, alone(LEFT), **given).values, expected)


# The model is linear after these values, so the estimate equals the effect.
LINEAR = [
    ("z", ("head", "pos"), {"heads": [5, 1]}),
    ("v", ("pos", "layer", "head"), {"heads": [2, 0]}),
    ("pattern", ("key", "head", "query"), {"heads": [0]}),
    ("resid_post", ("layer",), {}),
    ("attn_out", ("span",), {}),
    ("z", ("head", "span", "layer"), {"heads": [4]}),
]


def edits_at(site, cache):
    """Return edits for a site, with one number for each place along the last axis."""
    value = cache[f"blocks.1.{'' if site in ('resid_post', 'attn_out') else 'attn.'}{site}"]
    last = value.shape[-1]
    # Without the axis along which each place is one index, and without the batch.
    tensor = value[0, :, 0] if site in ("z", "v") else value[:1]
    return [
        edits.zero(),
        edits.scale(-0.5),
        edits.add(torch.linspace(-1, 2, last).double()),
        edits.replace(cache),
        edits.replace(tensor),
        edits.mean(cache),
        edits.resample(cache, seed=1),
        edits.noise(0.3, seed=2),
    ]


@pytest.mark.parametrize("mask", [None, RIGHT_PADDED])
@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
@pytest.mark.parametrize(("site", "over", "options"), LINEAR)
def test_estimates_equal_exact_effects_in_linear_models(site, over, options, analysis, mask):
    model = variant("attention only", norm="none", n_kv_heads=3)
    # With padding, the last tokens of the texts are at 3, 6, 6, 5 and 6.
    spans = {"a": [[1, 2, 2]] * 4 + [[6, 4, 6]], "b": [[3], [6], [6], [5], [6]]}
    spans = spans if "span" in over else None
    pairs = Pairs(BASE, answers=torch.stack([RIGHT, WRONG], 1), attention_mask=mask, spans=spans)
    given = dict(site=site, over=over, layers=[1], **options)
    one_step = {"steps": 1} if analysis is integrated_gradients else {}
    for edit in edits_at(site, cached(model, TARGET, mask)):
        if mask is not None and edit.name == "resample":
            continue
        exact = activation_patching(model, pairs, edit=edit, **given)
        found = analysis(model, pairs, edit=edit, **given, **one_step)
        assert (found.axes, found.labels, found.unit) == (exact.axes, exact.labels, exact.unit)
        assert found.about["edit"] == exact.about["edit"]
        close(found.values, exact.values)
        close(found.base, exact.base)
        assert exact.values.abs().max() > 0.01


OPTIONS = [
    dict(site="resid_pre"),
    dict(site="z", grad_drop=True),
    dict(site="q", qk_correction=True),
    dict(site="k", qk_correction=True, over=("layer", "pos", "head")),
]


@pytest.mark.parametrize("mask", [None, LEFT])
@pytest.mark.parametrize("options", OPTIONS)
def test_values_of_a_cache_are_values_of_the_other_run(options, mask):
    model = variant("grouped")
    both = Pairs(BASE, TARGET, attention_mask=mask, metric=METRIC)
    edit = edits.replace(cached(model, TARGET, mask))
    noised = attribution_patching(model, both, direction="noising", **options)
    close(attribution_patching(model, alone(mask), edit=edit, **options).values, noised.values)


@pytest.mark.filterwarnings("ignore:effects should add up")
def test_paths_lead_from_the_value_to_the_edited_value():
    model, name, steps = variant("like llama"), "blocks.0.mlp_out", 3
    ((value, _),) = values_and_gradients(model, [name], BASE).values()
    mean = torch.zeros_like(value)
    for n, weight in zip(range(steps + 1), (0.5, 1, 1, 0.5), strict=True):
        at = (value * (1 - n / steps)).requires_grad_()
        with changed(model, {name: lambda output, at=at: at}):
            total = measured(model, BASE).sum()
        mean += torch.autograd.grad(total, at)[0] * weight / steps
    given = dict(site="mlp_out", layers=0, edit=edits.zero())
    found = integrated_gradients(model, alone(), steps=steps, **given)
    close(found.values[0], -torch.einsum("bpm,bpm->pb", value, mean))
    # The sum is the effect of setting the whole value to zero.
    found = integrated_gradients(model, alone(), **given)
    with torch.no_grad(), changed(model, {name: torch.zeros_like}):
        difference = measured(model, BASE) - found.base
    assert max(found.about["gaps"][0]) <= 0.01
    missing = (found.values[0].sum(0) - difference).abs()
    assert (missing <= 0.01 * difference.abs().mean()).all()


def test_the_top_of_an_estimate_is_patched_with_the_same_edit():
    model, given = variant("pre"), dict(site="z", layers=1)
    estimate = attribution_patching(model, alone(LEFT), edit=edits.zero(), **given)
    exact = activation_patching(model, alone(LEFT), edit=edits.zero(), **given)
    found = patch_top_k(model, alone(LEFT), estimate=estimate, edit=edits.zero(), k=2, budget=6)
    assert found.top.about["edit"] == "edits.zero()"
    for part in (found.top, found.outside):
        heads = [int(label.rpartition(" ")[2]) for label in part.labels["place"]]
        close(part.values, exact.values[0, heads])
    assert not {*found.top.labels["place"]} & {*found.outside.labels["place"]}
    for edit in (None, edits.scale(0.5)):
        with pytest.raises(ValueError, match=r"which is edits.zero\(\)"):
            patch_top_k(model, alone(LEFT), estimate=estimate, edit=edit, k=2)
    other = Pairs(TARGET, attention_mask=LEFT, metric=METRIC)
    with pytest.raises(ValueError, match="different result"):
        patch_top_k(model, other, estimate=estimate, edit=edits.zero(), k=2)


def test_a_text_alone_is_enough():
    model = variant("pre")
    pairs = Pairs(BASE[:1], metric=cross_entropy(BASE[:1]))
    estimates = attribution_patching(model, pairs, "mlp_out", edit=edits.scale(0.999))
    exact = activation_patching(model, pairs, "mlp_out", edit=edits.scale(0.999))
    close(estimates.values, exact.values, 0.01)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "knockout.*-inf", dict(site="scores", edit=edits.knockout(query=-1))),
        (TypeError, "interp.edits.*sweep", dict(edit={"blocks.0.mlp_out": edits.zero()})),
        (TypeError, "interp.edits", dict(edit=lambda value, point: value * 0)),
        (ValueError, "direction", dict(edit=edits.zero(), direction="noising")),
        (ValueError, "source", dict(edit=edits.zero(), source=variant("pre"))),
        (ValueError, "already selects along pos", dict(edit=edits.zero(pos=-1))),
        (ValueError, "layer.*'pos'", dict(edit=edits.zero(), over=("pos",))),
        (UnknownNameError, "head", dict(edit=edits.zero(head=1))),
        (
            EditError,
            "1 numbers",
            dict(site="mlp.post", over=("layer", "neuron"), edit=edits.project_out(torch.ones(13))),
        ),
    ],
)
def test_bad_edits_are_refused(error, match, options, analysis):
    model = variant("pre")
    options = {"site": "resid_pre", **options}
    with pytest.raises(error, match=match):
        analysis(model, alone(), **options)


@pytest.mark.parametrize("edit", [edits.add(torch.tensor(0.02).double()), edits.scale(0.2)])
def test_spans_may_share_positions_on_a_path(edit):
    """A shared position moves once, so equal spans have the effects of one span."""
    model = variant("pre")
    spans = {"a": [[1, 2]] * BATCH, "b": [[1, 2]] * BATCH}
    given = dict(site="mlp_out", over=["layer", "span"], layers=0, steps=64, edit=edit)
    alone, both = (
        integrated_gradients(model, Pairs(BASE, spans=of_pairs, metric=METRIC), **given)
        for of_pairs in ({"a": spans["a"]}, spans)
    )
    for number in range(2):
        torch.testing.assert_close(both.values[:, number], alone.values[:, 0])
