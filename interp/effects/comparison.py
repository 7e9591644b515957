"""Comparisons of estimated effects with exact effects: how far an estimate can be trusted."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import sum_rounding
from interp import plots
from interp.kinds import require_made
from interp.numbers.ranks import ranks
from interp.results.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MISSES = 10


class Miss(NamedTuple):
    """A place where an estimate is wrong: the labels by axis, and both mean effects."""

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
        return plots.View(says[0], shown.parts, self.plot, says[1:])

    def plot(self) -> "Figure":
        """Plot the estimate against the exact effect, one dot for each place.

        It needs the extra `plots`.
        """
        from interp.plots.matplotlib_figures import scatter

        named = [(miss.exact, miss.estimate, miss.place) for miss in self.misses]
        title = repr(self).splitlines()[1].strip()
        return scatter(self.exact, self.estimate, named, self.unit, title)

    def __repr__(self) -> str:
        signs = f", the same sign at {self.sign_agreement:.0%}"
        known = "" if math.isnan(self.sign_agreement) else signs
        title = f"Comparison of {len(self.exact)} places"
        correlation = f"rank correlation {self.rank_correlation:+.3f}{known}"
        return "\n  ".join([title, correlation, *map(repr, self.misses[:3])])


def compare_effects(exact: Result, estimate: Result) -> Comparison:
    """Compare the mean effects of an estimate with exact mean effects.

    If the estimate has no signs, it is compared with means of absolute exact effects.

    Args:
        exact: effects, such as a result of `activation_patching`.
        estimate: effects at the same places, such as a result of `attribution_patching`.

    Raises:
        ValueError: if axes, labels, sites, directions, units, metrics or texts of the two results
            differ, or an effect is not finite.

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
    for what in ("axes", "labels", "site", "direction", "unit", "metric", "texts"):
        ours, theirs = (_fact(result, what) for result in (exact, estimate))
        if ours != theirs:
            raise ValueError(
                f"exact and estimate must have the same {what}; got {ours:.60} and {theirs:.60}"
            )
    signed = estimate.about.get("signed", True)
    if not signed:
        exact = dataclasses.replace(exact, values=exact.values.abs())
    true, guess = (result.mean().flatten().double() for result in (exact, estimate))
    if wrong := int((~(true - guess).isfinite()).sum()):
        raise ValueError(
            f"effects must be finite; got infinity or NaN at {wrong} of {len(true)} places"
        )
    there = true.abs() > sum_rounding(exact.values.dtype) * true.abs().max()
    have_same_sign = (true.sign() == guess.sign())[there].double()
    sign_agreement = have_same_sign.mean().item() if signed else math.nan
    places = list(itertools.product(*(exact.labels[axis] for axis in exact.axes[:-1])))
    worst = (guess - true).abs().argsort(descending=True, stable=True)[:_MISSES].tolist()
    misses = [
        Miss(dict(zip(exact.axes[:-1], places[n], strict=True)), true[n].item(), guess[n].item())
        for n in worst
    ]
    both = torch.stack([ranks(true), ranks(guess)])
    correlation = torch.corrcoef(both)[0, 1].item() if len(true) > 1 else math.nan
    return Comparison(true, guess, correlation, sign_agreement, tuple(misses), exact.unit)


def _fact(result: Result, what: str) -> str:
    fact = getattr(result, what, result.about.get(what, "none"))
    # The text of a function contains its address, which differs between processes.
    return re.sub(" at 0x[0-9a-f]+", "", str(fact))
