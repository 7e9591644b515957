"""Confidence intervals of means and of ratios of means, from a few examples on.

1. Values x and, for ratios, a gap y of mean 1 for each example: the estimate is r, the mean of x.
2. Both ends solve |mean(x - r y)| = t · (standard error of x - r y), a quadratic in r: Fieller's theorem
   (1954). Where y is 1 everywhere, that is Student's mean ± t s / √n.
3. Few skewed numbers have too short an interval towards their long tail (of log-normal ones 0.82 of the 95 %
   intervals hold the mean at n = 4). On that side, t is 1 + 2.5 g / √(n - 2) times as large, where g is the
   skewness of x - r y; its direction is Johnson's (1978), its size is chosen by simulation (`tests/test_result.py`).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_ANGLES = 2**16


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the effects."""

    low: Float[Tensor, "*axes"]
    high: Float[Tensor, "*axes"]


def interval(
    values: Float[Tensor, "place example"],
    gap: Float[Tensor, "*#place example"] | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Intervals of the means over examples, in float64; of mean values / mean gap, where a gap is given.

    Of normal and log-normal examples, 3 to 20 of them, between 0.88 and 0.97 of the 95% intervals hold the true mean.

    Args:
        values: one number for each place and example.
        gap: a number for each example, or for each place and example. Its means must not be 0.
        confidence: how often such an interval should hold the true mean, between 0 and 1.

    Returns:
        The ends for each place. They are NaN below three examples, with a gap below four. An end is infinite
        where the gap is so uncertain that the ratio has no bound on that side.

    Raises:
        ValueError: if confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}")
    x, n = values.detach().cpu().double(), values.shape[1]
    if n < (3 if gap is None else 4):
        return Interval(*torch.full((2, len(x)), math.nan, dtype=torch.float64))
    y = torch.ones(n, dtype=torch.float64) if gap is None else gap.detach().cpu().double()
    x, y = x / y.mean(-1, keepdim=True), y / y.mean(-1, keepdim=True)
    mean = x.mean(1, keepdim=True)
    x_apart, y_apart = x - mean, y - 1
    rest = x_apart - mean * y_apart
    skewness = rest.pow(3).mean(1) / rest.square().mean(1).pow(1.5)
    stretch = 2.5 * skewness.nan_to_num() / math.sqrt(n - 2)
    variance, shared, of_gap = (
        (one * other).sum(-1) / (n * (n - 1))
        for one, other in ((x_apart, x_apart), (x_apart, y_apart), (y_apart, y_apart))
    )

    def end(sign: int) -> Float[Tensor, " place"]:
        t = student(confidence, n - 1) * (1 + (sign * stretch).clamp(min=0))
        a = 1 - t**2 * of_gap
        b = mean[:, 0] - t**2 * shared
        c = mean[:, 0] ** 2 - t**2 * variance
        root = (b + sign * (b * b - a * c).clamp(min=0).sqrt()) / a
        return torch.where(a <= 0, sign * math.inf, root)

    return Interval(end(-1), end(1))


def student(confidence: float, df: int) -> float:
    """The number of standard errors within which Student's t stays with this probability, at `df` degrees of freedom.

    With t = √df tan(a), the density over the angle a is proportional to cos(a)^(df - 1), which is added up.

    >>> round(student(0.95, 2), 4), round(student(0.95, 30), 4)
    (4.3027, 2.0423)
    """
    angles = torch.linspace(0, math.pi / 2, _ANGLES, dtype=torch.float64)
    within = torch.cumulative_trapezoid(angles.cos() ** (df - 1))
    wanted = confidence * within[-1]
    after = int(torch.searchsorted(within, wanted))
    before = within[after - 1] if after else 0
    share = (wanted - before) / (within[after] - before)
    return math.sqrt(df) * math.tan(angles[after].lerp(angles[after + 1], share))
