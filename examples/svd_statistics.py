"""Means inside and outside event windows, and around events, with intervals over walks.

Steps of one walk depend on each other, so the bootstrap draws whole walks with replacement (a cluster
bootstrap). For few walks its plain percentiles are too narrow, because they use the spread of the sample.
The percentiles here are further out: by the ratio of Student's t with n - 1 degrees of freedom to the
normal, and by sqrt(n / (n - 1)). This is the expanded percentile interval of Hesterberg 2015, "What
teachers should know about the bootstrap".
"""

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Fewer walks have too few different samples: two have three, three have ten. Without any true difference
# intervals exclude zero in a quarter of trials with three walks, and in up to an eighth with five.
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
    """The mean at `lag` steps after events, and its 95% interval."""

    lag: int
    mean: float
    low: float
    high: float


def interval(
    values: Float[Tensor, "walk step"], inside: Bool[Tensor, "walk step"], seed: int
) -> Compared:
    """Compares the means of steps inside and outside, without NaN.

    Args:
        values: the values to compare.
        inside: which steps are inside.
        seed: the seed of the draws. Comparisons with the same seed and number of walks share them.

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
    """The mean of values at each lag from an event; negative lags are before it.

    Args:
        values: the values to average; NaN does not count.
        events: where events begin.
        lags: in steps, each shorter than a walk.
        seed: the seed of the draws.

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
    """The interval's ends, without resamples that are NaN because they have no steps of one kind."""
    normal, free = NormalDist(), walks - 1
    z = normal.inv_cdf(0.975)
    # Student's t to 0.002 from 11 degrees of freedom on (Abramowitz & Stegun 1964, 26.7.5).
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    tail = normal.cdf(-t * math.sqrt(walks / free))
    low, high = found.nanquantile(torch.tensor([tail, 1 - tail], dtype=found.dtype))
    return low.item(), high.item()
