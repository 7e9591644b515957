"""The bootstrap: how sure a mean over examples is."""

import math
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
) -> Interval:
    """Percentile intervals of the means over examples, in float64 (Efron & Tibshirani 1993).

    All places share the drawn examples.

    Args:
        values: one number for each place and example.
        gap: where given, of mean values / mean gap, with the same examples drawn for both.
        confidence: how often such an interval should hold the true mean, between 0 and 1.
        seed: the seed of the draws.
        n: how many samples of all examples are drawn.

    Returns:
        The ends for each place. They are NaN if there is one example.

    Raises:
        ValueError: if confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1; got {confidence}")
    examples = values.shape[1]
    if examples < 2:
        nan = torch.full((len(values),), math.nan, dtype=torch.float64)
        return Interval(nan, nan)
    drawn = torch.randint(examples, (n, examples), generator=torch.Generator().manual_seed(seed))
    # How often each example was drawn, as shares: a sample's mean is then a product of matrices.
    shares = torch.zeros(n, examples, dtype=torch.float64)
    shares.scatter_add_(1, drawn, torch.full_like(shares, 1 / examples))
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    found = []
    for part in values.detach().cpu().double().split(max(1, _MEANS_AT_ONCE // n)):
        means = part @ shares.T
        if gap is not None:
            means = means / (shares @ gap.detach().cpu().double())
        found.append(means.quantile(ends, dim=1))
    return Interval(*torch.cat(found, 1))
