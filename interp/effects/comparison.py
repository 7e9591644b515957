"""Comparisons of estimated effects with exact effects: how far an estimate can be trusted."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from hooks.base import number_of, sum_rounding
from interp import plots
from interp.json_form import Table, columns, form
from interp.kinds import require_made
from interp.numbers.ranks import rank_correlation
from interp.results.result import Result

if TYPE_CHECKING:
    from interp.plots.figure import Picture

_MISSES = 10
_OTHER_NUMBERS = (
    "interp.rank_correlation(exact.mean(), estimate.mean()) compares the order of the places in "
    "any two results"
)
"""The way to compare numbers that are not effects of the same kind, for errors."""


class Miss(NamedTuple):
    """A place where an estimate is wrong.

    Attributes:
        where: the labels of the place by axis.
        exact, estimate: the mean effects.
    """

    where: Mapping[str, Any]
    exact: float
    estimate: float

    @property
    def place(self) -> str:
        """The labels of the place as text."""
        return ", ".join(f"{axis} {label}" for axis, label in self.where.items())

    def __repr__(self) -> str:
        return f"{self.place}  exact {self.exact:+.4g}, estimate {self.estimate:+.4g}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Comparison(plots.Shown):
    """Exact and estimated mean effects at the same places; returned by `compare_effects`.

    Attributes:
        exact, estimate: the mean effect at each place, in `unit`.
        rank_correlation: Spearman's rank correlation over all places. It is 1 if both effects order
            the places alike, and NaN if all exact or all estimated effects are equal, as with a
            single place.
        sign_agreement: the share of places where both effects have the same sign. Places count only
            if the exact effect is larger than rounding. NaN if there are no such places, or the
            estimate has no signs.
        misses: the places where the effects differ most, at most 10, the largest difference first.
        unit: the unit of the effects.
    """

    exact: Float[Tensor, " place"]
    estimate: Float[Tensor, " place"]
    rank_correlation: float
    sign_agreement: float
    misses: tuple[Miss, ...]
    unit: str

    is_plot = True

    def view(self) -> plots.View:
        """Return a view of both effects of each place, in the order of the exact effects."""
        order = self.exact.argsort(descending=True)
        lines = {"exact": self.exact[order], "estimate": self.estimate[order]}
        says = repr(self).splitlines()
        shown = plots.curves(
            lines,
            axis="places, by the exact effect",
            unit=self.unit,
            title="exact and estimated effects",
        )
        return plots.View(says[0], shown.parts, plot=self.plot, says=says[1:])

    def plot(self) -> "Picture":
        """Plot the estimate against the exact effect, one dot for each place.

        It needs the extra `plots`.
        """
        from interp.plots.matplotlib_figures import scatter

        named = [(miss.exact, miss.estimate, miss.place) for miss in self.misses]
        title = repr(self).splitlines()[1].strip()
        return scatter(self.exact, self.estimate, named, unit=self.unit, title=title)

    def as_json(self) -> dict[str, Any]:
        """Return both effects of each place, the two scores and the largest differences, in the
        JSON form of all results; see `interp.json_form`.
        """
        units = {"exact": self.unit, "estimate": self.unit}
        tables = {
            "exact": Table(self.exact, "place", self.unit),
            "estimate": Table(self.estimate, "place", self.unit),
            "rank_correlation": Table(self.rank_correlation, unit="correlation"),
            "sign_agreement": Table(self.sign_agreement, unit="share of places"),
            **columns("miss", self.misses, "where exact estimate", units),
        }
        return form("Comparison", tables)

    def __repr__(self) -> str:
        signs = f", the same sign at {self.sign_agreement:.0%}"
        known_signs = "" if math.isnan(self.sign_agreement) else signs
        unit = f" in {self.unit}" if self.unit else ""
        title = f"Comparison of {number_of(len(self.exact), 'place')}{unit}"
        correlation = f"rank correlation {self.rank_correlation:+.3f}{known_signs}"
        return "\n  ".join([title, correlation, *map(repr, self.misses[:3])])


def compare_effects(exact: Result, estimate: Result) -> Comparison:
    """Return a comparison of the mean effects of an estimate with exact mean effects.

    If the estimate has no signs, it is compared with means of absolute exact effects. Other numbers
    of the same places, such as scores of heads, are not an estimate of effects;
    `interp.rank_correlation` compares only the order of the places.

    Args:
        exact: effects, such as a result of `activation_patching`.
        estimate: effects at the same places, such as a result of `attribution_patching`.

    Returns:
        The exact and the estimated mean effect of each place, with Spearman's rank correlation of
        the two, the share of places where their signs are equal, and the places where they differ
        most.

    Raises:
        ValueError: if axes, labels, sites, directions, edits, units, metrics or texts of the two
            results differ, or an effect is not finite.

    >>> import torch
    >>> exact = Result(torch.tensor([[2.0, 4.0], [0.0, -1.0], [0.0, 0.2]]), ("head", "example"))
    >>> estimate = Result(torch.tensor([[1.0, 1.0], [0.0, 0.5], [0.0, 0.2]]), ("head", "example"))
    >>> compare_effects(exact, estimate)
    Comparison of 3 places
      rank correlation +0.500, the same sign at 67%
      head 0  exact +3, estimate +1
      head 1  exact -0.5, estimate +0.25
      head 2  exact +0.1, estimate +0.1
    """
    require_made("exact", exact, Result)
    require_made("estimate", estimate, Result)
    for name in ("axes", "labels", "site", "direction", "edit", "unit", "metric", "texts"):
        ours, theirs = (_fact(result, name) for result in (exact, estimate))
        if ours != theirs:
            hint = "" if name in ("axes", "labels") else f"; {_OTHER_NUMBERS}"
            raise ValueError(
                f"exact and estimate must have the same {name}; got {ours:.60} and {theirs:.60}"
                f"{hint}"
            )
    is_signed = estimate.about.get("signed", True)
    if not is_signed:
        exact = dataclasses.replace(exact, values=exact.values.abs())
    kept = exact.existing(range(exact.values[..., 0].numel()))
    exact_means = exact.mean().flatten()[kept].double()
    estimates = estimate.mean().flatten()[kept].double()
    if n_infinite := int((~(exact_means - estimates).isfinite()).sum()):
        raise ValueError(
            f"effects must be finite; got infinity or NaN at {n_infinite} of {len(exact_means)} "
            "places"
        )
    rounding = sum_rounding(exact.values.dtype) * exact_means.abs().max()
    has_effect = exact_means.abs() > rounding
    have_same_sign = (exact_means.sign() == estimates.sign())[has_effect].double()
    return Comparison(
        exact=exact_means,
        estimate=estimates,
        rank_correlation=rank_correlation(exact_means, estimates),
        sign_agreement=have_same_sign.mean().item() if is_signed else math.nan,
        misses=_misses(exact, kept, exact_means, estimates),
        unit=exact.unit,
    )


def _misses(
    exact: Result,
    kept: Sequence[int],
    exact_means: Float[Tensor, " place"],
    estimates: Float[Tensor, " place"],
) -> tuple[Miss, ...]:
    """Return the places where two effects differ most, the largest difference first.

    Args:
        exact: the result with the labels of all places.
        kept: the numbers of the places that are compared.
        exact_means, estimates: the mean effects of these places.
    """
    axes = exact.axes[:-1]
    all_places = list(itertools.product(*(exact.labels[axis] for axis in axes)))
    places = [all_places[place] for place in kept]
    differences = (estimates - exact_means).abs()
    misses = []
    for n in differences.argsort(descending=True, stable=True)[:_MISSES].tolist():
        where = dict(zip(axes, places[n], strict=True))
        misses.append(Miss(where, exact_means[n].item(), estimates[n].item()))
    return tuple(misses)


def _fact(result: Result, name: str) -> str:
    """Return an attribute of a result, or an entry of `about`, as text."""
    return str(getattr(result, name, result.about.get(name, "none")))
