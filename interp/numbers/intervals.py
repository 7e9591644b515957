"""Confidence intervals of means and of ratios of means, from a few examples on.

1. Values x and, for ratios, a gap y of mean 1 for each example: the estimate is r, the mean of x.
2. Both ends solve |mean(x - r y)| = t · (standard error of x - r y), a quadratic in r: Fieller's theorem
   (1954). Where y is 1 everywhere, that is Student's mean ± t s / √n.
3. Few skewed numbers have too short an interval towards their long tail (of log-normal ones 0.82 of the 95 %
   intervals hold the mean at n = 4). On that side, t is 1 + 2.5 g / √(n - 2) times as large, where g is the
   skewness of x - r y; its direction is Johnson's (1978), its size is chosen by simulation (`tests/interp/results/test_result.py`).
4. Examples of one text (`groups`) count once: x and y are the means of each text, and n is the number
   of texts. A text with more examples than others weighs more in the mean. Its weight w is its number
   of examples, divided by the mean number. Its residual is multiplied by w (n - 1) / (n - w). That
   gives the standard error of the jackknife, which leaves out one text after another.
5. Means of numbers between two bounds, and AUROCs, have score intervals, which never leave the bounds: both ends m solve
   |estimate - m| = q √V(m), where V(m) is what the variance would be if m were the truth (`share_interval`, `auroc_interval`).
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import shown

_ANGLES = 2**16


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the effects."""

    low: Float[Tensor, "*axes"]
    high: Float[Tensor, "*axes"]


def interval_text(low: float, high: float, form: str = "+.4g") -> str:
    """Return an interval as text, with a space before it; no text where there is no interval.

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
    """Intervals of the means over examples, in float64; of mean values / mean gap, where a gap is given.

    Of normal and log-normal examples, 3 to 20 of them, between 0.88 and 0.97 of the 95% intervals hold the true mean.

    Args:
        values: one number for each place and example.
        gap: a number for each example, or for each place and example. Its means must not be 0.
        confidence: how often such an interval should hold the true mean, between 0 and 1.
        groups: the number of each example's text. Examples of one text count once. None if all texts
            are different.

    Returns:
        The ends for each place. They are NaN below three texts, with a gap below four. An end is
        infinite where the gap is so uncertain that the ratio has no bound on that side.

    Raises:
        ValueError: if confidence is not between 0 and 1.
    """
    _checked(confidence)
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[1]
    if n < (3 if gap is None else 4):
        return Interval(*torch.full((2, len(x)), math.nan, dtype=torch.float64))
    y = torch.ones(n, dtype=torch.float64) if gap is None else _by_text(gap, groups)[0]
    size = (weight * y).mean(-1, keepdim=True)
    x, y = x / size, y / size
    mean = (weight * x).mean(1, keepdim=True)
    x_apart, y_apart = of_residual * (x - mean), of_residual * (y - 1)
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


def standard_error(
    values: Float[Tensor, "*place example"], groups: Sequence[int] | None = None
) -> Float[Tensor, "*place"]:
    """The standard error of the mean over examples, in float64; NaN for a single text.

    For `groups` see `interval`.

    >>> standard_error(torch.tensor([3.0, 1.0, 1.0, 3.0, 2.0, 2.0]), [0, 1, 1, 0, 2, 2])
    tensor(0.5774, dtype=torch.float64)
    """
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[-1]
    apart = of_residual * (x - (weight * x).mean(-1, keepdim=True))
    return apart.square().sum(-1).div(n * (n - 1)).sqrt()


def _by_text(
    values: Float[Tensor, "*place example"], groups: Sequence[int] | None
) -> tuple[Float[Tensor, "*place text"], Float[Tensor, " text"], Float[Tensor, " text"]]:
    """Return the mean of each text's examples, its weight and the factor of its residual (step 4)."""
    means = values.detach().cpu().double()
    weight = torch.ones(means.shape[-1], dtype=torch.float64)
    if groups is not None:
        numbers, sizes = torch.tensor(groups).unique(return_inverse=True, return_counts=True)[1:]
        sums = means.new_zeros(*means.shape[:-1], len(sizes)).index_add_(-1, numbers, means)
        means, weight = sums / sizes, sizes / sizes.double().mean()
    n = len(weight)
    return means, weight, weight * (n - 1) / (n - weight)


def share_interval(
    values: Float[Tensor, "place example"],
    bounds: tuple[float, float],
    confidence: float = 0.95,
    groups: Sequence[int] | None = None,
) -> Interval:
    """Intervals of the means of numbers between two bounds, in float64; NaN below three texts.

    For `groups` see `interval`.

    From 0 to 1, V(m) = φ m (1 - m) / n. Of zeros and ones φ is 1 and q normal: the interval of Wilson (1927, "Probable
    Inference, the Law of Succession, and Statistical Inference"). Of other numbers φ is estimated, the variance over
    m (1 - m), and q is Student's. Of shares of the beta distribution, and 3 to 20 of them, between 0.87 and 0.96 of the 95%
    intervals hold the mean.

    Raises:
        ValueError: if confidence is not between 0 and 1.

    >>> share_interval(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), (0.0, 1.0)).low.round(decimals=4)
    tensor([0.3006], dtype=torch.float64)
    """
    low, width = bounds[0], bounds[1] - bounds[0]
    x, weight, of_residual = _by_text(values, groups)
    n = x.shape[1]
    if n < 3 or math.isinf(width):
        ends = interval(values, None, confidence, groups)
        return Interval(*(end.clamp(*bounds) for end in ends))
    x = ((x - low) / width).clamp(0, 1)  # rounding may pass a bound
    mean, normal, t = (weight * x).mean(1), _normal(confidence), student(confidence, n - 1)
    apart = of_residual * (x - mean[:, None])
    spread = apart.square().mean(1) / (mean * (1 - mean)) / (n - 1)
    is_extreme = ((x == 0) | (x == 1)).all(1)
    per = torch.where(is_extreme, normal**2 * weight.square().mean() / n, t**2 * spread)
    return Interval(*(low + width * end for end in _score(mean, lambda m: per * m * (1 - m))))


def auroc_interval(
    values: Float[Tensor, "place fold"], counts: tuple[float, float], confidence: float = 0.95
) -> Interval:
    """Intervals of the mean AUROC of folds, in float64; NaN below three texts of a kind.

    Of k folds, each of a and b texts, V(m) = m (1 - m) (1 + ((a + b) / 2 - 1) ((1 - m) / (2 - m) + m / (1 + m))) / (a b k),
    the variance of Hanley & McNeil (1982) as Newcombe has it (2006, "Confidence intervals for an effect size measure based
    on the Mann-Whitney statistic", part 2, method 5). Positions of one text count as one. Copies of a
    text count as one too.

    Folds share the texts that they are trained on. In simulations (5 to 50 texts of a kind, 2 to 10 folds) 0.82 to 1 of the
    95% intervals hold the AUROC where there is something to find, and 0.80 to 0.98 where there is nothing.

    Args:
        values: the AUROC of each fold.
        counts: how many different texts of each kind a fold has, the mean.

    Raises:
        ValueError: if confidence is not between 0 and 1.
    """
    (a, b), k = counts, values.shape[1]
    mean, normal = values.detach().cpu().double().mean(1), _normal(confidence)
    if k * min(counts) < 3:
        return Interval(*torch.full((2, len(mean)), math.nan, dtype=torch.float64))

    def variance(m: Tensor) -> Tensor:
        pairs = (1 - m) / (2 - m) + m / (1 + m)
        return normal**2 * m * (1 - m) * (1 + ((a + b) / 2 - 1) * pairs) / (a * b * k)

    return _score(mean, variance)


def _score(mean: Float[Tensor, " place"], variance: Callable[[Tensor], Tensor]) -> Interval:
    """Both solutions of (mean - m)² = variance(m) between 0 and 1, by halving."""

    def end(bound: float) -> Float[Tensor, " place"]:
        inside, outside = mean, torch.full_like(mean, bound)
        for _ in range(60):
            middle = (inside + outside) / 2
            holds = (middle - mean).square() <= variance(middle)
            inside, outside = middle.where(holds, inside), outside.where(holds, middle)
        return inside.where(~mean.isnan(), math.nan)

    return Interval(end(0.0), end(1.0))


def _normal(confidence: float) -> float:
    """The number of standard deviations within which a normal number stays with this probability."""
    level = torch.tensor((1 + _checked(confidence)) / 2, dtype=torch.float64)
    return float(torch.special.ndtri(level))


def _checked(confidence: float) -> float:
    if not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {shown(confidence)}")
    return confidence


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
