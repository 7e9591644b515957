"""Exact effects at the top places of an estimate, and bounds on the places that it missed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hooks.base import metric_rounding, require_integer, shows_progress
from interp import edits
from interp.pairs.pairs import Pairs, of_pairs
from interp.results.result import Result
from interp.runs.runs import Runs
from interp.runs.sites import SELECTS, Choice, Sites

_CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Verified:
    """Exact effects at the top of an estimate and at a sample outside; returned by `patch_top_k`.

    The bounds hold with 95% confidence over samples. "Larger" compares absolute mean effects.

    Attributes:
        top: exact effects [place, example] of the places with the largest estimates, the largest
            effect first.
        outside: exact effects of a sample of the other places, the largest effect first.
        estimate: the estimates at the places of `top`, followed by the places of `outside`.
        n_outside: the number of places outside the top.
        missed: the number of places in the sample with a larger effect than the smallest effect of
            the top.
        missed_at_most: a bound on the number of places outside the top with a larger effect than
            the smallest effect of the top.
        larger_at_most: a bound on the number of places outside the top with a larger effect than
            the largest effect of the sample.
    """

    top: Result
    outside: Result
    estimate: Result
    n_outside: int
    missed: int
    missed_at_most: int
    larger_at_most: int

    def __repr__(self) -> str:
        every = self.n_outside + len(self.top.values)
        missed, larger = (
            f"at most {bound} of {self.n_outside} ({bound / self.n_outside:.0%})"
            for bound in (self.missed_at_most, self.larger_at_most)
        )
        lines = [
            f"The top {len(self.top.values)} of {every} places",
            *repr(self.top.top(3)).splitlines(),
            f"outside, {len(self.outside.values)} sampled: {self.missed} larger than the smallest "
            "of the top; "
            f"{missed} are, with {_CONFIDENCE:.0%} confidence",
            f"the largest there: {self.outside.top(1)}; {larger} are larger",
        ]
        return "\n  ".join(lines)


@shows_progress
@of_pairs
def patch_top_k(
    model: nn.Module,
    pairs: Pairs,
    *,
    estimate: Result,
    k: int = 10,
    budget: int = 100,
    seed: int = 0,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Verified:
    """Patch the places with the largest estimates, and a random sample of all other places.

    The top alone does not show which large effects the estimate missed. The sample bounds the
    number of other places whose effects belong to the top (with the hypergeometric distribution),
    and shows how large their effects are.

    Args:
        model, pairs: the model and the pairs of the estimate.
        estimate: a result of `attribution_patching` or `integrated_gradients` at a site of
            `activation_patching`.
        k: the number of places with the largest estimates to patch. Default: 10.
        budget: the largest number of forward passes: two for the unedited runs, and one for each
            place, which usually costs less (see `sweep`). The sample uses the passes that the top
            does not use. Default: 100.
        seed: the seed of the sample.
        max_bytes: see `sweep`.
        progress: whether to show a bar after two seconds.

    Raises:
        ValueError: if there are no more than `k` places, the budget is too small for a sample, or
            the estimate belongs to another model, metric or texts.

    >>> from models import load
    >>> from interp import attribution_patching
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> estimate = attribution_patching(model, pairs, "z", layers=0)
    >>> patch_top_k(model, pairs, estimate=estimate, k=1, budget=4).top.labels["place"]
    ('layer 0, head 3',)
    """
    choice = _choice(estimate)
    runs = Runs(model, pairs, estimate.about["direction"], max_bytes)
    sites = Sites(runs, choice)
    guess = estimate.mean().flatten().abs()
    require_integer("k", k, most=len(guess) - 1)
    require_integer("budget", budget, k + 3)
    estimated_labels = {axis: [*estimate.labels[axis]] for axis in estimate.axes[:-1]}
    value = next(iter(sites.values.values()))
    precision = metric_rounding(runs.target.dtype, value.dtype)
    have_same_places = estimated_labels == sites.labels
    _require_same(have_same_places and _are_close(estimate.target, runs.target, precision))
    order = guess.argsort(descending=True, stable=True).tolist()
    n = min(budget - 2 - k, len(order) - k)
    draw = torch.Generator().manual_seed(seed)
    others = torch.randperm(len(order) - k, generator=draw)[:n].tolist()
    chosen = order[:k] + [order[k + other] for other in others]
    jobs = sites.edits(partial(edits.replace, sites.values))
    base, effects = runs.edited([jobs[at] for at in chosen])
    _require_same(_are_close(estimate.base, base, precision))
    exact = runs.result(effects, {"place": chosen}, base, site=choice.site)
    return _verified(estimate, exact, chosen, k, len(order) - k)


def _verified(
    estimate: Result, exact: Result, chosen: Sequence[int], k: int, n_outside: int
) -> Verified:
    """Return the exact effects of the first `k` places and the sample, and bounds for the rest."""
    size = exact.values.mean(-1).abs().tolist()
    ranked = sorted(range(len(chosen)), key=lambda at: (at >= k, -size[at]))
    guessed = _listed(estimate, [chosen[at] for at in ranked])
    ordered = replace(
        guessed,
        values=exact.values[ranked],
        base=exact.base,
        target=exact.target,
        about=exact.about,
        groups=exact.groups,
    )
    labels = ordered.labels["place"]
    top, outside = ordered.select(place=labels[:k]), ordered.select(place=labels[k:])
    sampled, missed = len(chosen) - k, sum(one > min(size[:k]) for one in size[k:])
    bounds = (_bound(sampled, count, n_outside) for count in (missed, 0))
    return Verified(top, outside, guessed, n_outside, missed, *bounds)


def _choice(estimate: Result) -> Choice:
    """Return the places of an estimate.

    Raises:
        ValueError: if the estimate does not cover a whole site.
    """
    known = estimate.about.keys()
    if not {"site", "direction"} <= known or known & SELECTS.keys():
        raise ValueError(
            f"estimate must cover a whole site and have a direction; got {dict(estimate.about)}"
        )
    labels, about = estimate.labels, estimate.about
    return Choice(
        site=about["site"],
        over=estimate.axes[:-1],
        layers=labels.get("layer", about.get("layer")),
        heads=labels.get("head"),
        neurons=about.get("neurons"),
    )


def _require_same(is_same: bool) -> None:
    if not is_same:
        raise ValueError(
            "estimate must be a whole result of this model, metric and texts; got a different "
            "result"
        )


def _are_close(ours: Tensor | None, theirs: Tensor | None, precision: float) -> bool:
    if ours is None or theirs is None:
        return False
    return torch.allclose(ours, theirs, rtol=precision, atol=precision)


def _listed(result: Result, chosen: Sequence[int]) -> Result:
    """Return some places of a result along one axis, `place`, with labels in words."""
    return replace(
        result,
        values=result.values.flatten(0, -2)[chosen],
        axes=("place", "example"),
        labels={"place": [place.name for place in result.places(chosen)]},
        words={},
    )


def _bound(sampled: int, missed: int, n: int) -> int:
    """Return an upper bound, with 95% confidence, on the number of places that belong to the top.

    A random sample of `sampled` of the `n` places contains `missed` places that belong to the top.
    If the number were larger than the bound, fewer than 5% of all samples would contain so few
    (hypergeometric distribution).
    """

    def chance(kind: int) -> float:
        ways = (math.comb(kind, i) * math.comb(n - kind, sampled - i) for i in range(missed + 1))
        return sum(ways) / math.comb(n, sampled)

    possible = range(missed, n - sampled + missed + 1)
    return max(kind for kind in possible if chance(kind) > 1 - _CONFIDENCE)
