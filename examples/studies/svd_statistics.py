"""Means inside and outside event windows, and around events, with intervals over walks.

The steps of one walk depend on each other, so walks are the independent examples of an interval.

1. A mean over steps is a ratio: the mean over walks of the sum of a walk's values, divided by the
   mean over walks of the number of its steps. Its interval is Fieller's interval.
2. The difference of two such means is not a ratio. Its interval is Student's interval of the amount
   that each walk contributes to the difference (the delta method).
3. With too few walks, the ends of the interval are NaN. A difference needs three walks, and a ratio
   needs four.
"""

from collections.abc import Iterable
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from interp.numbers import intervals

# The interval of a ratio needs at least this many values.
FEWEST = 4


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
    """Compare the mean over the steps inside event windows with the mean over all other steps.

    Args:
        values: the values to compare. NaN is ignored.
        inside: True for the steps inside event windows.
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
        events: True at the steps where events begin.
        lags: numbers of steps, each smaller than the length of a walk.
    """
    rows = []
    for lag in lags:
        here = events.roll(lag, 1)
        # `roll` moves steps from one end of a walk to the other end. Remove these steps.
        here[:, : max(lag, 0)] = here[:, events.shape[1] + min(lag, 0) :] = False
        here = here & ~values.isnan()
        sums, counts = values.where(here, 0).sum(1).double(), here.sum(1).double()
        low, high = intervals.interval(sums[None], counts)
        rows.append(AtLag(lag, (sums.sum() / counts.sum()).item(), low.item(), high.item()))
    return rows
