"""Verified estimates, compared with exact sweeps of every place.

Bounds are compared with all possible samples.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from interp import Pairs, activation_patching, attribution_patching, patch_top_k
from tests.interp.effects.by_hand import BASE, LEFT, METRIC, PAIRS, TARGET, close, paired
from tests.reference import variant


def bound(n, sampled, missed):
    """Return the upper bound for the number of large places among `n` places, with 95% confidence.

    `sampled` places were drawn, and `missed` of them were large. The bound is the largest number
    for which more than 5% of all possible samples contain at most `missed` large places.
    """
    samples = list(itertools.combinations(range(n), sampled))
    chances = [
        sum(sum(one < kind for one in sample) <= missed for sample in samples) / len(samples)
        for kind in range(n + 1)
    ]
    return max(kind for kind, chance in enumerate(chances) if chance > 0.05)


@pytest.mark.parametrize(
    ("site", "over", "options", "k", "budget"),
    [
        ("resid_pre", ("layer", "pos"), {}, 4, 11),
        ("z", ("head", "layer"), {"heads": [4, 0, 3, 1], "layers": [1, 0]}, 2, 8),
        ("mlp.post", ("neuron",), {"layers": [1], "neurons": 2, "direction": "noising"}, 3, 7),
        ("v", ("layer", "head"), {"mask": LEFT}, 1, 100),
        ("embed", ("pos",), {}, 2, 6),
        ("resid_pre", ("layer", "pos"), {"mask": LEFT}, 7, 100),
    ],
)
def test_the_top_and_a_sample_are_patched_exactly(site, over, options, k, budget):
    model = variant("pre")
    pairs = paired(options.pop("mask", None))
    estimate = attribution_patching(model, pairs, site, over, **options)
    exact = activation_patching(model, pairs, site, over, **options)
    found = patch_top_k(model, pairs, estimate=estimate, k=k, budget=budget, seed=5)
    labels = itertools.product(*(exact.labels[axis] for axis in over))
    names = [", ".join(f"{a} {n}" for a, n in zip(over, each, strict=True)) for each in labels]
    truth = dict(zip(names, exact.values.flatten(0, -2), strict=True))
    guesses = dict(zip(names, estimate.values.flatten(0, -2), strict=True))
    estimates = dict(zip(names, estimate.mean().flatten().tolist(), strict=True))
    means = dict(zip(names, exact.mean().flatten(), strict=True))
    top, outside = found.top.labels["place"], found.outside.labels["place"]
    assert set(top) == set(sorted(names, key=lambda n: -abs(estimates[n]))[:k])
    assert len(outside) == min(budget - 2 - k, len(names) - k)
    assert not {*top} & {*outside}
    for part in (found.top, found.outside):
        close(part.values, torch.stack([truth[name] for name in part.labels["place"]]))
        close(part.mean(), torch.stack([means[name] for name in part.labels["place"]]))
        sizes = part.mean().abs().tolist()
        assert sizes == sorted(sizes, reverse=True)
    close(found.estimate.values, torch.stack([guesses[name] for name in (*top, *outside)]))
    assert found.n_outside == len(names) - k
    least = found.top.mean().abs().min()
    assert found.missed == sum(means[name].abs() > least for name in outside)
    assert found.missed_at_most == bound(found.n_outside, len(outside), found.missed)
    assert found.larger_at_most == bound(found.n_outside, len(outside), 0)
    close(found.top.base, exact.base)
    close(found.top.target, exact.target)
    assert f"{found.missed} larger" in repr(found)


def test_a_wrong_estimate_is_found_out():
    model = variant("pre")
    exact = activation_patching(model, PAIRS)
    wrong = replace(exact, values=1 / exact.values.abs().clamp(min=1e-3))
    found = patch_top_k(model, PAIRS, estimate=wrong, k=4, budget=100)
    assert found.missed == found.missed_at_most > 4
    assert found.outside.top(1)[0].effect == pytest.approx(exact.top(1)[0].effect)
    assert found.larger_at_most == 0


def test_the_budget_bounds_the_forward_passes():
    model, rows = variant("pre"), []
    estimate = attribution_patching(model, PAIRS)
    model.blocks[-1].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    samples = set()
    for seed in range(5):
        rows.clear()
        found = patch_top_k(model, PAIRS, estimate=estimate, k=3, budget=9, seed=seed)
        assert sum(rows) <= 9 * len(BASE)
        samples.add(frozenset(found.outside.labels["place"]))
    assert len(samples) > 1


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("k .*1 to 13.*14", {"k": 14}),
        ("k .*1 to 13.*0", {"k": 0}),
        ("budget .*8.*7", {"k": 5, "budget": 7}),
        ("a different result", {"model": variant("pre", n_layers=3)}),
        ("a different result", {"pairs": Pairs(BASE, BASE, metric=METRIC)}),
        ("a different result", {"pairs": Pairs(TARGET, TARGET, metric=METRIC)}),
        ("a different result", {"select": {"pos": [1, 2, 3, 4, 5, 6]}}),
        ("site", {"about": {}}),
        ("whole", {"select": {"pos": 3}}),
    ],
)
def test_bad_input_is_refused(match, options):
    model = variant("pre")
    estimate = attribution_patching(model, PAIRS).select(**options.pop("select", {}))
    estimate = replace(estimate, about=options.pop("about", estimate.about))
    options = {"k": 3, "budget": 9, "model": model, "pairs": PAIRS} | options
    with pytest.raises(ValueError, match=match):
        patch_top_k(estimate=estimate, **options)
