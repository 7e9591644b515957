"""Means inside and outside event windows, and around events, with intervals over walks.

Steps of one walk depend on each other, so walks are drawn again with replacement, whole: the
bootstrap by clusters. Its plain percentiles are too narrow for few walks, as the sample's own spread
stands in for that of all walks; they are taken further out here, by as much as Student's t of n - 1
is wider than the normal, and the spread with n - 1 wider than that with n (Hesterberg 2015, "What
teachers should know about the bootstrap", the expanded percentile interval).
"""

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# With fewer no percentile helps: two walks have three different samples, three have ten, and null
# differences exclude zero in a quarter of trials over three walks, in up to an eighth over five.
FEWEST = 12
RESAMPLES = 4000


class Compared(NamedTuple):
    """Means over steps inside and outside event windows, their difference, and its 95% interval."""

    inside: float
    outside: float
    difference: float
    low: float
    high: float


class AtLag(NamedTuple):
    """The mean over events so many steps after them, and its 95% interval."""

    lag: int
    mean: float
    low: float
    high: float


def interval(
    values: Float[Tensor, "walk step"], inside: Bool[Tensor, "walk step"], seed: int
) -> Compared:
    """Compares steps inside with steps outside; NaN counts in neither.

    Args:
        values: what is compared.
        inside: which steps are inside.
        seed: of the draws, so that comparisons of one seed and number of walks share them.

    Raises:
        ValueError: if there are fewer than two walks.
    """
    known = ~values.isnan()
    sums = torch.stack(
        [
            torch.where(known & where, part, 0).sum(1)
            for where in (inside, ~inside)
            for part in (values, torch.ones_like(values))
        ]
    ).double()
    total = sums[:, _drawn(len(values), seed)].sum(-1)
    low, high = _percentiles(total[0] / total[1] - total[2] / total[3], len(values))
    within, outside = ((sums[at].sum() / sums[at + 1].sum()).item() for at in (0, 2))
    return Compared(within, outside, within - outside, low, high)


def locked(
    values: Float[Tensor, "walk step"],
    events: Bool[Tensor, "walk step"],
    lags: Iterable[int],
    seed: int,
) -> list[AtLag]:
    """The mean of values at each lag from an event, before it where the lag is negative.

    Args:
        values: what is averaged; NaN does not count.
        events: where events begin.
        lags: in steps, each shorter than a walk.
        seed: of the draws.

    Raises:
        ValueError: if there are fewer than two walks.
    """
    rows, drawn = [], _drawn(len(values), seed)
    for lag in lags:
        here = events.roll(lag, 1)
        # Nothing wraps around the ends of a walk.
        here[:, : max(lag, 0)] = here[:, events.shape[1] + min(lag, 0) :] = False
        here = here & ~values.isnan()
        sums, counts = values.where(here, 0).sum(1).double(), here.sum(1)
        means = sums[drawn].sum(1) / counts[drawn].sum(1)
        low, high = _percentiles(means, len(values))
        rows.append(AtLag(lag, (sums.sum() / counts.sum()).item(), low, high))
    return rows


def _drawn(walks: int, seed: int) -> Int[Tensor, "resample walk"]:
    if walks < 2:
        raise ValueError(f"an interval must be over at least 2 walks; got {walks}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(walks, (RESAMPLES, walks), generator=generator)


def _percentiles(found: Float[Tensor, " resample"], walks: int) -> tuple[float, float]:
    """The interval's ends; a resample without any step of a kind is NaN and left out."""
    normal, free = NormalDist(), walks - 1
    z = normal.inv_cdf(0.975)
    # Student's t to 0.002 from 11 degrees of freedom on (Abramowitz & Stegun 1964, 26.7.5).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    tail = normal.cdf(-t * math.sqrt(walks / free))
    low, high = found.nanquantile(torch.tensor([tail, 1 - tail], dtype=found.dtype))
    return low.item(), high.item()
