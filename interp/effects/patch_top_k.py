"""Exact effects at the top places of an estimate, and bounds on the places that it missed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hooks.base import is_same_metric, require_integer, seeded, shows_progress
from interp.edits import Edit
from interp.json_form import Table, form
from interp.pairs.pairs import Pairs, of_pairs
from interp.results.result import Result
from interp.runs.runs import runs_of
from interp.runs.sites import SELECTS, Choice, Sites
from interp.runs.sweep import effects_of_edits

_CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Verified:
    """Exact effects of the top places of an estimate, and of a sample of all other places.

    This is the result of `patch_top_k`. The bounds hold with 95% confidence over samples. "Larger"
    compares absolute mean effects.

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

    def as_json(self) -> dict[str, Any]:
        """Return the exact effects, the estimates and the bounds, in the JSON form of all results;
        see `interp.json_form`.
        """
        tables: dict[str, Table] = {}
        for name in ("top", "outside", "estimate"):
            tables |= getattr(self, name).tables(name)
        for name in ("n_outside", "missed", "missed_at_most", "larger_at_most"):
            tables[name] = Table(getattr(self, name), unit="places")
        return form("Verified", tables, {**self.top.about, "confidence": _CONFIDENCE})

    def __repr__(self) -> str:
        n_places = self.n_outside + len(self.top.values)
        missed, larger = (
            f"at most {bound} of {self.n_outside} ({bound / self.n_outside:.0%})"
            for bound in (self.missed_at_most, self.larger_at_most)
        )
        lines = [
            f"The top {len(self.top.values)} of {n_places} places",
            *repr(self.top.top(3)).splitlines(),
            f"outside, {len(self.outside.values)} sampled: {self.missed} larger than the smallest "
            f"of the top; {missed} are, with {_CONFIDENCE:.0%} confidence",
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
    edit: "Edit | None" = None,
    k: int = 10,
    budget: int = 100,
    seed: int = 0,
    max_bytes: int | None = None,
    progress: bool = True,
) -> Verified:
    """Return exact effects of the places with the largest estimates, and of a sample of the rest.

    The top alone does not show which large effects the estimate missed. The sample bounds the
    number of other places whose effects belong to the top (with the hypergeometric distribution),
    and shows how large their effects are.

    Args:
        model, pairs: the model and the pairs of the estimate.
        estimate: a result of `attribution_patching` or `integrated_gradients` at a site of
            `activation_patching`.
        edit: the edit of the estimate, if it estimates the effects of an edit. Default: None.
        k: the number of places with the largest estimates to patch. Default: 10.
        budget: the largest number of forward passes: two for the unedited runs, and one for each
            place (a place usually costs less than a whole pass; see `sweep`). The sample uses the
            passes that the top does not use. Default: 100.
        seed: the seed of the sample.
        max_bytes: a bound on the memory of the runs in bytes, not counting the model; see `sweep`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The exact effects of both groups of places, in the metric's unit, the estimates at these
        places, and the bounds; see `Verified`.

    Raises:
        ValueError: if there are no more than `k` places, the budget is too small for a sample, or
            the estimate belongs to another model, metric, edit or texts.

    >>> from models import load
    >>> from interp import attribution_patching
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> estimate = attribution_patching(model, pairs, "z", layers=0)
    >>> verified = patch_top_k(model, pairs, estimate=estimate, k=1, budget=6)
    >>> verified.top.top(1)  # The estimate was -8.6.
    place layer 0, head 3  -0.7379
    >>> verified.outside.top(1)  # a larger effect that the estimate missed
    place layer 0, head 1  +1.134
    """
    choice = _choice(estimate)
    _require_same_edit(estimate, edit)
    direction = estimate.about.get("direction", "denoising")
    runs = runs_of(model, pairs, direction=direction, source=None, edit=edit)
    sites = Sites(runs, choice, edit)
    estimated_sizes = estimate.mean().flatten().abs().nan_to_num(nan=-1.0)
    n_places = len(estimated_sizes)
    require_integer("k", k, most=n_places - 1)
    require_integer("budget", budget, k + 3)
    estimated_labels = {axis: [*estimate.labels[axis]] for axis in estimate.axes[:-1]}
    value = next(iter(sites.values.values()))
    have_same_places = estimated_labels == sites.labels
    _require_same(have_same_places)
    if edit is None:
        target = runs.per_example(runs.target)
        _require_same(is_same_metric(estimate.target, target, value.dtype))
    order = estimated_sizes.argsort(descending=True, stable=True).tolist()
    n_outside = n_places - k
    n_sampled = min(budget - 2 - k, n_outside)
    generator = seeded(seed)
    sample = torch.randperm(n_outside, generator=generator)[:n_sampled].tolist()
    patched = order[:k] + [order[k + n] for n in sample]
    jobs = sites.edits()
    patches = [jobs[place] for place in patched]
    base, effects = effects_of_edits(runs, patches, max_bytes, of_rows=runs.has_source)
    _require_same(is_same_metric(estimate.base, runs.per_example(base), value.dtype))
    facts: dict[str, Any] = {"site": choice.site}
    if edit is not None:
        facts["edit"] = repr(edit)
    exact = runs.result(effects, {"place": patched}, base, **facts)
    return _verified(estimate, exact, patched, k=k, n_outside=n_outside)


def _verified(
    estimate: Result, exact: Result, patched: Sequence[int], k: int, n_outside: int
) -> Verified:
    """Return the exact effects of the first `k` places and the sample, and bounds for the rest.

    Args:
        estimate: the estimates of all places.
        exact: the exact effects of the patched places.
        patched: the numbers of the patched places, the `k` places of the top first.
        k: the number of places of the top.
        n_outside: the number of places outside the top.
    """
    exact = replace(exact, exists=_listed(estimate, patched).exists)
    sizes = exact.mean().abs().nan_to_num(nan=-1.0).tolist()
    # Sort the top and the sample separately, the largest effect first.
    ranked = sorted(range(len(patched)), key=lambda n: (n >= k, -sizes[n]))
    estimates = _listed(estimate, [patched[n] for n in ranked])
    ordered = replace(
        estimates,
        values=exact.values[ranked],
        base=exact.base,
        target=exact.target,
        about=exact.about,
        groups=exact.groups,
    )
    labels = ordered.labels["place"]
    n_sampled = len(patched) - k
    smallest_of_top = min(sizes[:k])
    missed = sum(size > smallest_of_top for size in sizes[k:])
    return Verified(
        top=ordered.select(place=labels[:k]),
        outside=ordered.select(place=labels[k:]),
        estimate=estimates,
        n_outside=n_outside,
        missed=missed,
        missed_at_most=_bound(n_sampled, missed, n_outside),
        larger_at_most=_bound(n_sampled, 0, n_outside),
    )


def _choice(estimate: Result) -> Choice:
    """Return the places of an estimate.

    Raises:
        ValueError: if the estimate does not cover a whole site.
    """
    facts = estimate.about.keys()
    if "site" not in facts or not facts & {"direction", "edit"} or facts & SELECTS.keys():
        raise ValueError(
            "estimate must cover a whole site and have a direction or an edit; got "
            f"{dict(estimate.about)}"
        )
    about = estimate.about
    return Choice(
        site=about["site"],
        over=estimate.axes[:-1],
        layers=estimate.labels.get("layer", about.get("layer")),
        heads=estimate.labels.get("head"),
        neurons=about.get("neurons"),
    )


def _require_same_edit(estimate: Result, edit: Edit | None) -> None:
    """Check that an edit is the edit of an estimate.

    Raises:
        ValueError: if the edit or its absence does not fit the estimate.
    """
    needed = estimate.about.get("edit")
    given = None if edit is None else repr(edit)
    if needed != given:
        raise ValueError(f"edit must be the edit of the estimate, which is {needed}; got {given}")


def _require_same(is_same: bool) -> None:
    """Raise an error if `is_same` is False: the estimate is of another model, metric or texts."""
    if not is_same:
        raise ValueError(
            "estimate must be a whole result of this model, metric and texts; got a different "
            "result"
        )


def _listed(result: Result, indices: Sequence[int]) -> Result:
    """Return some places of a result, with the axes replaced by one axis `place`.

    The label of a place is its name, such as `layer 0, head 3`.

    Args:
        result: the result.
        indices: the numbers of the places, counted over all axes.
    """
    exists = result.exists
    if exists is not None:
        exists = exists.expand(result.shape).flatten(0, -2)[indices]
    return replace(
        result,
        values=result.values.flatten(0, -2)[indices],
        exists=exists,
        axes=("place", "example"),
        labels={"place": [place.name for place in result.places(indices)]},
        words={},
    )


def _bound(sampled: int, missed: int, n: int) -> int:
    """Return an upper bound, with 95% confidence, on the number of places that belong to the top.

    A random sample of `sampled` of the `n` places contains `missed` places that belong to the top.
    If more places than the bound belonged to the top, at most 5% of all samples would contain
    `missed` of them or fewer (hypergeometric distribution).

    Args:
        sampled: the size of the sample.
        missed: the number of places in the sample that belong to the top.
        n: the number of places that the sample is drawn from.
    """

    def chance(n_top: int) -> float:
        """Return the probability that a sample contains at most `missed` of `n_top` top places."""
        ways = 0
        for i in range(missed + 1):
            ways += math.comb(n_top, i) * math.comb(n - n_top, sampled - i)
        return ways / math.comb(n, sampled)

    possible = range(missed, n - sampled + missed + 1)
    return max(n_top for n_top in possible if chance(n_top) > 1 - _CONFIDENCE)
