"""Attributions, compared with PyTorch's own hooks and gradients and with finite differences.

In linear models, they are also compared with patching.
"""

import gc
import itertools
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooks import HookedRunner, HookError, HookPoint, ModeError, UnknownNameError
from interp import (
    Pairs,
    accuracy,
    activation_patching,
    attribution_patching,
    edge_attribution,
    integrated_gradients,
    kl_divergence,
    top_attributions,
)
from tests.interp.effects.by_hand import (
    BASE,
    LEFT,
    METRIC,
    PAIRS,
    RIGHT,
    RIGHT_PADDED,
    TARGET,
    WRONG,
    changed,
    close,
    measured,
    paired,
    values_and_gradients,
)
from tests.reference import BATCH, POS, some_tokens, variant

EVERY = slice(None)


SITES = {
    **dict.fromkeys(
        ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "mlp.post"), "bpm"
    ),
    **dict.fromkeys(("z", "q", "k", "v"), "bphd"),
    **dict.fromkeys(("scores", "pattern"), "bhqk"),
}


def name_of(site, layer):
    return f"blocks.{layer}.{'attn.' if SITES[site][1:] != 'pm' else ''}{site}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("form", "mask"),
    [
        *(("pre", None), ("post", LEFT), ("sandwich", RIGHT_PADDED), ("parallel", LEFT)),
        *(("attention only", None), ("like gemma 2", RIGHT_PADDED), ("qk_norm all", None)),
    ],
)
def test_every_site_is_difference_times_gradient(form, mask):
    model = variant(form)
    there = {name for name, _ in model.named_modules()}
    names = {site: [name_of(site, layer) for layer in range(2)] for site in SITES}
    names = {site: both for site, both in names.items() if both[0] in there}
    every = list(itertools.chain(*names.values()))
    base = values_and_gradients(model, every, BASE, mask)
    target = values_and_gradients(model, every, TARGET, mask)
    for site, both in names.items():
        found = attribution_patching(model, paired(mask), site)
        kept = "p" if SITES[site] == "bpm" else "h"
        assert found.values.shape[0] == 2
        for layer, name in enumerate(both):
            (value, gradient), (other, _) = base[name], target[name]
            sides = f"{SITES[site]},{SITES[site]}->{kept}b"
            close(found.values[layer], torch.einsum(sides, other - value, gradient))
    with torch.no_grad():
        close(found.base, measured(model, BASE, mask))
        close(found.target, measured(model, TARGET, mask))


@torch.no_grad()
@pytest.mark.parametrize("direction", ["noising", "denoising"])
def test_it_is_the_effect_of_a_small_step(direction):
    model, draw, step = variant("grouped"), random.Random(direction), 1e-4
    texts = [BASE, TARGET] if direction == "denoising" else [TARGET, BASE]
    caches = [HookedRunner(model).run_with_cache(text)[1] for text in texts]
    cases = [
        ("resid_pre", "pos", 1),
        ("v", "head", 2),
        ("scores", "key", 3),
        ("mlp.post", "neuron", 2),
    ]
    for site, axis, at in cases:
        options = dict(over=("layer", axis), direction=direction)
        found = attribution_patching(model, PAIRS, site, **options)
        layer, place = draw.randrange(2), draw.randrange(found.values.shape[1])
        name = name_of(site, layer)
        index = (EVERY,) * at + (place,)
        direction_of_change = torch.zeros_like(caches[0][name])
        direction_of_change[index] = (caches[1][name] - caches[0][name])[index]
        ends = []
        for sign in (1, -1):
            by = sign * step * direction_of_change
            with changed(model, {name: lambda value, by=by: value + by}):
                ends.append(measured(model, texts[0]))
        close(found.values[layer, place], (ends[0] - ends[1]) / (2 * step), 1e-6)
        assert found.about["direction"] == direction


# The model is linear after these values, so the estimate equals the effect.
LINEAR = [
    ("z", ("head", "pos"), {"heads": [5, 1]}),
    ("v", ("pos", "layer", "head"), {"heads": [2, 0]}),
    ("pattern", ("key", "head", "query"), {"heads": [0]}),
    ("resid_post", ("layer",), {}),
    ("attn_out", ("span",), {}),
    ("z", ("head", "span", "layer"), {"heads": [4]}),
]


@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
@pytest.mark.parametrize(("site", "over", "options"), LINEAR)
def test_attribution_equals_patching_in_linear_models(site, over, options, analysis):
    model = variant("attention only", norm="none", n_kv_heads=3)
    clean, corrupted, spans, others = BASE, TARGET, {"a": [[1, 2, 2]] * 4 + [[6, 4, 6]]}, None
    spans |= {"b": [[6]] * 5}
    if "span" in over:
        corrupted = some_tokens(2, (BATCH, POS + 2))
        others = {"a": [[3, 2, 5]] * 4 + [[7, 8, 8]], "b": [[8]] * 5}
    answers = torch.stack([RIGHT, WRONG], 1)
    pairs = Pairs(clean, corrupted, answers, spans=spans, corrupted_spans=others)
    direction = "denoising" if len(over) == 1 else "noising"
    given = dict(site=site, over=over, layers=[1], direction=direction, **options)
    one_step = {"steps": 1} if analysis is integrated_gradients else {}
    found = analysis(model, pairs, **given, **one_step)
    exact = activation_patching(model, pairs, **given)
    assert (found.axes, found.labels, found.unit) == (exact.axes, exact.labels, exact.unit)
    close(found.values, exact.values)
    close(found.base, exact.base)
    close(found.target, exact.target)
    assert exact.values.abs().max() > 0.01


def test_groups_of_neurons_add_up():
    model = variant("pre")
    given = dict(site="mlp.post", over=("neuron", "layer"), layers=[1, 0])
    each, groups = (attribution_patching(model, PAIRS, neurons=n, **given) for n in (1, 5))
    assert groups.labels == {
        "neuron": ("0-4", "5-9", "10-12"),
        "layer": (1, 0),
        "example": (0, 1, 2, 3, 4),
    }
    expected = torch.stack([part.sum(0) for part in each.values.split(5)])
    close(groups.values, expected)


def test_weights_need_no_gradient_and_get_none():
    model, frozen = variant("pre"), variant("pre").requires_grad_(False)
    with torch.no_grad():
        found = attribution_patching(model, PAIRS, "z")
    close(attribution_patching(frozen, PAIRS, "z").values, found.values)
    assert not found.values.requires_grad
    assert not found.base.requires_grad


@pytest.mark.filterwarnings("ignore:effects should add up")
@pytest.mark.parametrize(
    ("analysis", "options"),
    [(attribution_patching, {"site": "z"}), (integrated_gradients, {"steps": 8})],
)
def test_half_precision_is_summed_in_float32(analysis, options):
    model = variant("pre")
    exact = analysis(model, PAIRS, **options).values
    found = analysis(model.bfloat16(), PAIRS, **options).values
    assert found.dtype == torch.float32
    close(found.double(), exact, 0.05)


def test_edits_that_act_already_are_in_both_runs():
    model = variant("attention only", norm="none")
    with HookedRunner(model).hooks({"blocks.1.attn.z": lambda z, point: z * 3}):
        found = attribution_patching(model, PAIRS, "attn_out", layers=1)
        exact = activation_patching(model, PAIRS, "attn_out", layers=1)
    close(found.values, exact.values)


def live_tensors():
    return sum(type(kept) is torch.Tensor for kept in gc.get_objects())


@pytest.mark.sampled(8)
@pytest.mark.filterwarnings("ignore:.* should add up")
@pytest.mark.parametrize(
    ("analysis", "options"),
    [
        (attribution_patching, {"site": "q", "qk_correction": True}),
        (attribution_patching, {"grad_drop": True}),
        (integrated_gradients, {"steps": 2}),
        (top_attributions, {}),
        (edge_attribution, {}),
        (edge_attribution, {"method": "eap_ig_inputs", "steps": 2}),
        (edge_attribution, {"method": "eap_ig_activations", "steps": 2}),
    ],
)
def test_memory_is_freed_without_the_garbage_collector(analysis, options):
    model = variant("pre", n_layers=1) if analysis is edge_attribution else variant("pre")
    analysis(model, PAIRS, **options)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        analysis(model, PAIRS, **options)
        assert live_tensors() == before
    finally:
        gc.enable()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("analysis", [attribution_patching, integrated_gradients])
def test_a_point_that_the_metric_does_not_read_has_no_effect(analysis):
    model = variant("pre")
    stream = {}
    keep = changed(model, {"blocks.0.mlp_out": lambda out: stream.update(x=out)})
    pairs = paired(metric=lambda logits: stream["x"].sum((1, 2)))
    with keep, pytest.warns(UserWarning, match=r"blocks\.1\.attn\.z") as warned:
        found = analysis(model, pairs, "z")
    assert len(warned) == 1
    assert found.values[0].abs().min() > 0
    assert not found.values[1].any()
    assert found.about.get("steps", [1, 0])[1] == 0


@pytest.mark.parametrize("model", [variant("pre"), variant("pre").float()], ids=["64", "32"])
@pytest.mark.parametrize("analysis", [attribution_patching, top_attributions, edge_attribution])
def test_a_metric_without_a_gradient_at_the_base_run_gives_a_warning(analysis, model):
    divergence = kl_divergence(model(BASE).detach(), pos=None)
    direction = "noising" if analysis is edge_attribution else "denoising"
    pairs = paired(metric=divergence)
    pairs = Pairs(BASE, TARGET, metric=divergence) if direction == "noising" else pairs
    with pytest.warns(UserWarning, match="its gradient is 0"):
        found = analysis(model, pairs, direction=direction)
    assert found.values.abs().max() < 1e-5 * found.target.mean()
    # At the other run and between the two runs, the gradient is not zero.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        analysis(model, Pairs(pairs.corrupted, pairs.clean, metric=divergence), direction=direction)


def nan_gradient(logits):
    return logits[:, -1, 3] + (logits[:, -1, 0] * 0).sqrt()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "layer.*'pos'", {"over": ("pos",)}),
        (ValueError, "graph", {"metric": accuracy([3, 0, 7, 22, 5])}),
        (ValueError, "graph", {"metric": lambda logits: logits.detach()[:, -1, 0]}),
        (ValueError, r"NaN.*blocks\.1\.resid_pre", {"metric": nan_gradient}),
        (ModeError, "eval", {"training": True}),
    ],
)
def test_bad_input_is_refused(error, match, options):
    model = variant(options.pop("form", "pre")).train(options.pop("training", False))
    pairs = paired(metric=options.pop("metric", METRIC))
    with pytest.raises(error, match=match):
        attribution_patching(model, pairs, **options)


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(ValueError, match="inference mode"):
        attribution_patching(variant("pre"), PAIRS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", ["no_grad", "checkpointing"])
def test_a_part_without_gradients_is_refused(how):
    model = variant("pre")
    block = model.blocks[1]
    block.forward = {
        "no_grad": torch.no_grad()(block.forward),
        "checkpointing": partial(checkpoint, block.forward, use_reentrant=True),
    }[how]
    with pytest.raises(HookError, match="blocks.1.attn.z.*no_grad"):
        attribution_patching(model, PAIRS, "z")


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Module()])
        self.blocks[0].resid_pre = HookPoint("batch pos d_model")

    def forward(self, tokens):
        return self.blocks[0].resid_pre(tokens[..., None].expand(-1, -1, 3)).float()


def test_integers_are_refused():
    with pytest.raises(HookError, match="int64"):
        attribution_patching(Counting().eval(), paired(metric=lambda x: x[:, -1, 0]))


def test_kernels_that_drop_gradients_are_refused():
    torch.library.define("hookscope_test::halved", "(Tensor x) -> Tensor")
    torch.library.impl("hookscope_test::halved", "CPU", lambda x: x.detach() / 2)
    model = variant("pre")
    model.blocks[1].mlp.activation = torch.ops.hookscope_test.halved
    with pytest.raises(HookError, match="hookscope_test::halved"):
        attribution_patching(model, PAIRS)


def along_the_path(model, name, mask, steps):
    """Return the mean gradient along the path (by the trapezoid rule), the change of the value, and
    the metric at both ends.
    """
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


def test_equal_runs_have_no_gap():
    with pytest.warns(UserWarning, match="text of example 0, 1.* are equal"):
        found = integrated_gradients(variant("pre"), Pairs(BASE, BASE, metric=METRIC), steps=3)
    assert not found.values.any()
    assert found.about["gaps"] == [[0.0] * BATCH]


def counted(model):
    runs = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("form", ["pre", "rotary"])
def test_steps_are_doubled_until_the_effects_add_up(form):
    model = variant(form)
    runs = counted(model)
    found = integrated_gradients(model, PAIRS)
    (steps,) = found.about["steps"]
    # There is one run for the target's values, and one run for each gradient.
    assert len(runs) == 1 + steps + 1
    assert max(found.about["gaps"][0]) <= 0.01
    missing = (found.values.sum(0) - (found.target - found.base)).abs()
    assert (missing <= 0.01 * (found.target - found.base).abs().mean()).all()
    fixed = integrated_gradients(model, PAIRS, steps=steps)
    close(found.values, fixed.values)
    with pytest.warns(UserWarning, match=f"after {steps // 2} steps"):
        integrated_gradients(model, PAIRS, steps=steps // 2)


class Cubic(nn.Module):
    """A model whose output is a weighted sum of the cubes of its embeddings."""

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
    found = integrated_gradients(model, paired(metric=lambda out: out[:, 0, 0]))
    with torch.no_grad():
        cubes = [(model.table(text) ** 3 * model.weight).sum(2).T for text in (BASE, TARGET)]
    close(found.values, cubes[1] - cubes[0], 1e-2)


def test_the_effects_of_spans_add_up_to_the_effect_of_all_spans():
    model, corrupted = variant("rotary"), some_tokens(2, (BATCH, POS + 2))
    spans = {"a": [[1, 2]] * 5, "b": [[5]] * 5}
    others = {"a": [[3, 2]] * 5, "b": [[8]] * 5}
    pairs = Pairs(BASE, corrupted, spans=spans, corrupted_spans=others, metric=METRIC)
    given = dict(over=("layer", "span"), layers=[0], direction="noising")
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
    assert (missing <= 0.01 * difference.abs().mean()).all()
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
def test_bad_steps_are_refused(error, match, options):
    pairs = paired(metric=options.pop("metric", METRIC))
    with pytest.raises(error, match=match):
        integrated_gradients(variant("pre"), pairs, **options)


def test_a_model_without_embeddings_is_refused():
    with pytest.raises(UnknownNameError, match="embed"):
        integrated_gradients(nn.Sequential(HookPoint("batch")).eval(), PAIRS)
