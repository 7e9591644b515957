"""The bootstrap: how sure a mean over examples is."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_MEANS_AT_ONCE = 2**22  # 32 MiB in float64


class Interval(NamedTuple):
    """The two ends of a confidence interval, in the unit of the effects."""

    low: Float[Tensor, "*axes"]
    high: Float[Tensor, "*axes"]


def bootstrap(
    values: Float[Tensor, "place example"],
    gap: Float[Tensor, " example"] | None,
    confidence: float = 0.95,
    seed: int = 0,
    n: int = 2000,
    of: Callable[[Float[Tensor, "place n"]], Float[Tensor, "number n"]] | None = None,
) -> Interval:
    """Percentile intervals of the means over examples, in float64 (Efron & Tibshirani 1993).

    All places share the drawn examples.

    Args:
        values: one number for each place and example.
        gap: where given, of mean values / mean gap, with the same examples drawn for both.
        confidence: how often such an interval should hold the true mean, between 0 and 1.
        seed: the seed of the draws.
        n: how many samples of all examples are drawn.
        of: a function of the means of all places, where intervals of its numbers are asked for instead.

    Returns:
        The ends for each place, or number. They are NaN if there is one example.

    Raises:
        ValueError: if confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}")
    examples = values.shape[1]
    if examples < 2:
        nan = torch.full(values.shape, math.nan, dtype=torch.float64)
        ends_of = nan[:, 0] if of is None else of(nan)[:, 0]
        return Interval(ends_of, ends_of)
    drawn = torch.randint(examples, (n, examples), generator=torch.Generator().manual_seed(seed))
    # How often each example was drawn, as shares: a sample's mean is then a product of matrices.
    shares = torch.zeros(n, examples, dtype=torch.float64)
    shares.scatter_add_(1, drawn, torch.full_like(shares, 1 / examples))
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    found = []
    at_once = max(1, _MEANS_AT_ONCE // n) if of is None else len(values)
    for part in values.detach().cpu().double().split(at_once):
        means = part @ shares.T
        if gap is not None:
            means = means / (shares @ gap.detach().cpu().double())
        found.append((means if of is None else of(means)).quantile(ends, dim=1))
    return Interval(*torch.cat(found, 1))
