"""Means inside and outside event windows, and around events, with intervals over walks.

Steps of one walk depend on each other, so an interval is over walks. A mean over steps is the sum
of a walk's values over the count of its steps, both averaged over walks: a ratio, by Fieller's
theorem. The difference of two such ratios is none; its interval is Student's, of what each walk
contributes to the difference (the delta method). The ends are NaN below three walks, those of a
ratio below four.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from interp.numbers import intervals

FEWEST = 4  # a ratio's interval needs them


class Compared(NamedTuple):
    """Means over steps inside and outside event windows, their difference, and its 95% interval."""

    inside: float
    outside: float
    difference: float
    low: float
    high: float


class AtLag(NamedTuple):
    """The mean at `lag` steps after events, and its 95% interval."""

    lag: int
    mean: float
    low: float
    high: float


def interval(values: Float[Tensor, "walk step"], inside: Bool[Tensor, "walk step"]) -> Compared:
    """Compares the means of steps inside and outside, without NaN.

    Args:
        values: the values to compare.
        inside: which steps are inside.
    """
    known = ~values.isnan()
    means, contributed = [], []
    for steps in (known & inside, known & ~inside):
        sums, counts = values.where(steps, 0).sum(1).double(), steps.sum(1).double()
        means.append((sums.sum() / counts.sum()).item())
        contributed.append((sums - means[-1] * counts) / counts.mean())
    difference = means[0] - means[1]
    ends = intervals.interval((contributed[0] - contributed[1] + difference)[None])
    return Compared(means[0], means[1], difference, *(end.item() for end in ends))


def locked(
    values: Float[Tensor, "walk step"], events: Bool[Tensor, "walk step"], lags: Iterable[int]
) -> list[AtLag]:
    """Return the mean of values at each lag from an event. Negative lags are before the event.

    Args:
        values: the values to average. NaN is ignored.
        events: where events begin.
        lags: in steps, each shorter than a walk.
    """
    rows = []
    for lag in lags:
        here = events.roll(lag, 1)
        # Nothing wraps around the ends of a walk.
        here[:, : max(lag, 0)] = here[:, events.shape[1] + min(lag, 0) :] = False
        here = here & ~values.isnan()
        sums, counts = values.where(here, 0).sum(1).double(), here.sum(1).double()
        low, high = intervals.interval(sums[None], counts)
        rows.append(AtLag(lag, (sums.sum() / counts.sum()).item(), low.item(), high.item()))
    return rows
