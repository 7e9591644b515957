"""Confidence intervals of means and of ratios of means, also for few examples.

1. Each example has a value x and, for ratios, a gap y, by whose mean the mean of x is divided. Both
   are first divided by the mean of y, so y has the mean 1, and the estimate r is the mean of x.
2. Both ends solve |mean(x - r y)| = t · (standard error of x - r y), a quadratic in r: Fieller's
   theorem (1954). Without a gap, y is 1, and this is Student's interval, mean ± t s / √n.
3. With few skewed numbers, the interval is too short on the side of the long tail: with
   log-normal numbers and n = 4, only 0.82 of the 95 % intervals contain the mean. On this side, t
   is multiplied by 1 + 2.5 g / √(n - 2), where g is the skewness of x - r y. The direction is
   from Johnson (1978), and the size was chosen by simulation
   (`tests/interp/results/test_result.py`).
4. The examples of one text (`groups`) count once: x and y are the means over the examples of a
   text, and n is the number of texts. A text with more examples has a larger weight in the mean:
   its weight w is its number of examples, divided by the mean number of examples of a text. In the
   standard error, the difference between the text and the mean is multiplied by
   w (n - 1) / (n - w). This gives the standard error of the jackknife, which leaves out one text
   after another.
5. Means of numbers between two bounds, and AUROCs, have score intervals, which never exceed the
   bounds. Both ends m solve |estimate - m| = q √V(m), where V(m) is the variance of the estimate if
   m is the true mean, and q is the quantile of the normal distribution, 1.96 for 95%
   (`share_interval`, `auroc_interval`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import shown

_ANGLES = 2**16
# The largest number of intervals whose ends are printed.
_PRINTED = 20


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the effects.

    Attributes:
        low: the smaller end.
        high: the larger end.
    """

    low: Float[Tensor, "*axes"]
    high: Float[Tensor, "*axes"]

    def __repr__(self) -> str:
        """Return both ends, or the range of many ends; if there is no interval, the reason."""
        if self.low.isnan().all() and self.high.isnan().all():
            return (
                f"Interval {[*self.low.shape]}: NaN, because an interval needs at least three "
                "different texts (four for shares)"
            )
        if self.low.numel() > _PRINTED:
            lowest, highest = self.low[~self.low.isnan()].min(), self.high[~self.high.isnan()].max()
            return (
                f"Interval {[*self.low.shape]}: .low and .high contain the ends, between "
                f"{lowest:+.4g} and {highest:+.4g}; result.top() prints the largest effects with "
                "their intervals"
            )
        return f"Interval(low={self.low}, high={self.high})"


def interval_text(low: float, high: float, form: str = "+.4g") -> str:
    """Return an interval as text, after a space. If there is no interval, return an empty string.

    Args:
        low, high: the ends of the interval; NaN without an interval.
        form: the format of the ends.

    >>> interval_text(-0.5, 1.5)
    ' [-0.5, +1.5]'
    """
    return "" if math.isnan(low) else f" [{low:{form}}, {high:{form}}]"


def interval(
    values: Float[Tensor, "place example"],
    gap: Float[Tensor, "*#place example"] | None = None,
    confidence: float = 0.95,
    groups: Sequence[int] | None = None,
) -> Interval:
    """Return intervals of the means over examples, in float64.

    With a gap, return intervals of the ratios (mean of the values) / (mean of the gap). For 3 to 20
    normal or log-normal examples, between 0.88 and 0.97 of the 95% intervals contain the true mean.

    Args:
        values: one number for each place and example.
        gap: a number for each example, or for each place and example. The means of the gap must not
            be 0.
        confidence: the share of intervals that contain the true mean, between 0 and 1.
        groups: the number of the text of each example. The examples of one text count once.
            Default: all texts are different.

    Returns:
        The ends for each place. They are NaN if there are fewer than three texts, or fewer than
        four with a gap. An end is infinite if the gap is so uncertain that the ratio has no bound
        on this side.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if it is not between 0 and 1.
    """
    _checked(confidence)
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[1]
    if n < (3 if gap is None else 4):
        return Interval(*torch.full((2, len(x)), math.nan, dtype=torch.float64))
    y = torch.ones(n, dtype=torch.float64) if gap is None else _by_text(gap, groups)[0]
    mean_gap = (weight * y).mean(-1, keepdim=True)
    x = x / mean_gap
    y = y / mean_gap
    mean = (weight * x).mean(1, keepdim=True)
    x_residual = of_residual * (x - mean)
    y_residual = of_residual * (y - 1)
    residual = x_residual - mean * y_residual
    skewness = residual.pow(3).mean(1) / residual.square().mean(1).pow(1.5)
    stretch = 2.5 * skewness.nan_to_num() / math.sqrt(n - 2)
    x_variance = (x_residual * x_residual).sum(-1) / (n * (n - 1))
    covariance = (x_residual * y_residual).sum(-1) / (n * (n - 1))
    y_variance = (y_residual * y_residual).sum(-1) / (n * (n - 1))

    def end(sign: int) -> Float[Tensor, " place"]:
        # The end is a root of a r² - 2 b r + c.
        t = student(confidence, n - 1) * (1 + (sign * stretch).clamp(min=0))
        a = 1 - t**2 * y_variance
        b = mean[:, 0] - t**2 * covariance
        c = mean[:, 0] ** 2 - t**2 * x_variance
        root = (b + sign * (b * b - a * c).clamp(min=0).sqrt()) / a
        return torch.where(a <= 0, sign * math.inf, root)

    return Interval(end(-1), end(1))


def standard_error(
    values: Float[Tensor, "*place example"], groups: Sequence[int] | None = None
) -> Float[Tensor, "*place"]:
    """Return the standard error of the mean over examples, in float64.

    The standard error is NaN for a single text.

    Args:
        values: one number for each place and example.
        groups: the number of the text of each example. The examples of one text count once.
            Default: all texts are different.

    >>> standard_error(torch.tensor([3.0, 1.0, 1.0, 3.0, 2.0, 2.0]), [0, 1, 1, 0, 2, 2])
    tensor(0.5774, dtype=torch.float64)
    """
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[-1]
    residual = of_residual * (x - (weight * x).mean(-1, keepdim=True))
    return residual.square().sum(-1).div(n * (n - 1)).sqrt()


def _by_text(
    values: Float[Tensor, "*place example"], groups: Sequence[int] | None
) -> tuple[Float[Tensor, "*place text"], Float[Tensor, " text"], Float[Tensor, " text"]]:
    """Return for each text, as in step 4: the mean over its examples, its weight w, and the factor
    w (n - 1) / (n - w) of its difference from the mean.
    """
    means = values.detach().cpu().double()
    weight = torch.ones(means.shape[-1], dtype=torch.float64)
    if groups is not None:
        numbers, sizes = torch.tensor(groups).unique(return_inverse=True, return_counts=True)[1:]
        sums = means.new_zeros(*means.shape[:-1], len(sizes)).index_add_(-1, numbers, means)
        means = sums / sizes
        weight = sizes / sizes.double().mean()
    n = len(weight)
    return means, weight, weight * (n - 1) / (n - weight)


def share_interval(
    values: Float[Tensor, "place example"],
    bounds: tuple[float, float],
    confidence: float = 0.95,
    groups: Sequence[int] | None = None,
) -> Interval:
    """Return intervals of the means of numbers between two bounds, in float64.

    The intervals are NaN if there are fewer than three texts.

    Both ends m of an interval solve |estimate - m| = q √V(m). Here V(m) is the variance of the
    estimate if m is the true mean. For numbers from 0 to 1, V(m) = φ m (1 - m) / n, where n is the
    number of texts. If all numbers are 0 or 1, φ is 1 and q is a quantile of the normal
    distribution, 1.96 for a confidence of 0.95. This is the interval of Wilson (1927, "Probable
    Inference, the Law of Succession, and Statistical Inference"). For other numbers, φ is estimated
    as the variance divided by m (1 - m), and q is a quantile of Student's t. For 3 to 20 numbers
    from beta distributions, between 0.87 and 0.96 of the 95% intervals contain the mean.

    Args:
        values: one number for each place and example.
        bounds: the smallest and the largest possible number.
        confidence: the share of intervals that contain the true mean, between 0 and 1.
        groups: the number of the text of each example. The examples of one text count once.
            Default: all texts are different.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if it is not between 0 and 1.

    >>> share_interval(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), (0.0, 1.0)).low.round(decimals=4)
    tensor([0.3006], dtype=torch.float64)
    """
    low, high = bounds
    width = high - low
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[1]
    if n < 3 or math.isinf(width):
        ends = interval(values, confidence=confidence, groups=groups)
        return Interval(*(end.clamp(*bounds) for end in ends))
    # Rounding can move a value beyond a bound.
    x = ((x - low) / width).clamp(0, 1)
    mean = (weight * x).mean(1)
    residual = of_residual * (x - mean[:, None])
    spread = residual.square().mean(1) / (mean * (1 - mean)) / (n - 1)
    are_shares = ((x == 0) | (x == 1)).all(1)
    normal = _normal(confidence)
    t = student(confidence, n - 1)
    factor = torch.where(are_shares, normal**2 * weight.square().mean() / n, t**2 * spread)
    ends = _score(mean, lambda m: factor * m * (1 - m))
    return Interval(*(low + width * end for end in ends))


def auroc_interval(
    values: Float[Tensor, "place fold"], counts: tuple[float, float], confidence: float = 0.95
) -> Interval:
    """Return intervals of the mean AUROC of folds, in float64.

    The intervals are NaN if there are fewer than three texts of a kind.

    For k folds with a texts of one kind and b of the other, V(m) = m (1 - m) (1 + ((a + b) / 2 - 1)
    ((1 - m) / (2 - m) + m / (1 + m))) / (a b k), the variance of Hanley & McNeil (1982) in the form
    of Newcombe (2006, "Confidence intervals for an effect size measure based on the Mann-Whitney
    statistic", part 2, method 5). All positions of a text count as one text, and so do all copies
    of a text.

    The folds share training texts. In simulations (5 to 50 texts of a kind, 2 to 10 folds), 0.82 to
    1 of the 95% intervals contain the AUROC if the kinds differ, and 0.80 to 0.98 if they do not
    differ.

    Args:
        values: the AUROC of each fold.
        counts: the mean number of different texts in a fold, for each kind.
        confidence: the share of intervals that contain the true mean, between 0 and 1.

    Raises:
        TypeError: if confidence is not a number.
        ValueError: if it is not between 0 and 1.
    """
    a, b = counts
    k = values.shape[1]
    mean = values.detach().cpu().double().mean(1)
    normal = _normal(confidence)
    if k * min(counts) < 3:
        return Interval(*torch.full((2, len(mean)), math.nan, dtype=torch.float64))

    def variance(m: Tensor) -> Tensor:
        pairs = (1 - m) / (2 - m) + m / (1 + m)
        return normal**2 * m * (1 - m) * (1 + ((a + b) / 2 - 1) * pairs) / (a * b * k)

    return _score(mean, variance)


def _score(mean: Float[Tensor, " place"], variance: Callable[[Tensor], Tensor]) -> Interval:
    """Return both solutions of (mean - m)² = variance(m) between 0 and 1, by bisection."""

    def end(bound: float) -> Float[Tensor, " place"]:
        inside = mean
        outside = torch.full_like(mean, bound)
        for _ in range(60):
            middle = (inside + outside) / 2
            holds = (middle - mean).square() <= variance(middle)
            inside = middle.where(holds, inside)
            outside = outside.where(holds, middle)
        return inside.where(~mean.isnan(), math.nan)

    return Interval(end(0.0), end(1.0))


def _normal(confidence: float) -> float:
    """Return z such that a standard normal number is between -z and z with this probability."""
    level = torch.tensor((1 + _checked(confidence)) / 2, dtype=torch.float64)
    return float(torch.special.ndtri(level))


def _checked(confidence: float) -> float:
    """Return the confidence, or raise an error if it is not between 0 and 1."""
    rule = "confidence must be a number between 0 and 1"
    if isinstance(confidence, bool) or not isinstance(confidence, int | float):
        raise TypeError(f"{rule}; got {shown(confidence)}")
    if not 0 < confidence < 1:
        raise ValueError(f"{rule}; got {confidence}")
    return confidence


def student(confidence: float, df: int) -> float:
    """Return z such that Student's t is between -z and z with this probability.

    With t = √df tan(a), the density of the angle a is proportional to cos(a)^(df - 1). This
    function integrates the density.

    Args:
        confidence: the probability.
        df: the degrees of freedom.

    >>> round(student(0.95, 2), 4), round(student(0.95, 30), 4)
    (4.3027, 2.0423)
    """
    angles = torch.linspace(0, math.pi / 2, _ANGLES, dtype=torch.float64)
    integral = torch.cumulative_trapezoid(angles.cos() ** (df - 1))
    target = confidence * integral[-1]
    after = int(torch.searchsorted(integral, target))
    before = integral[after - 1] if after else 0
    share = (target - before) / (integral[after] - before)
    return math.sqrt(df) * math.tan(angles[after].lerp(angles[after + 1], share))
