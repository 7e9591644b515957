"""Means along paths by the trapezoid rule, with as many steps as each path needs."""

from collections.abc import Callable, Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor

_FIRST, _MOST = 4, 1024

Steps = int | Literal["auto"]
"""The number of steps of each path; `auto` doubles them until its gap is small enough, at most 1024."""


def averaged(
    at: Callable[[Sequence[int], float], Float[Tensor, "_some *axes"]],
    first: Float[Tensor, "path *axes"],
    last: Float[Tensor, "path *axes"],
    steps: Steps,
    gaps: Callable[[Float[Tensor, "path *axes"]], Float[Tensor, " path"]],
    tolerance: float,
) -> tuple[Float[Tensor, "path *axes"], list[int]]:
    """The mean of a function along each path, and how many steps that took. No value is computed twice.

    Args:
        at: gives the values on some paths, by index, after a share of them.
        first, last: the values at the ends.
        steps: see `Steps`.
        gaps: how far the means so far are off.
        tolerance: how far they may be.

    Raises:
        ValueError: if steps are less than 1.

    >>> import torch
    >>> at, ends = lambda paths, share: torch.full((1,), share**2), torch.tensor([[0.0], [1.0]])
    >>> averaged(at, *ends, 4, lambda means: means - 1 / 3, 0.0)
    (tensor([0.3438]), [4])
    """
    if steps != "auto" and steps < 1:
        raise ValueError(f"steps must be at least 1, or 'auto'; got {steps}")
    sums, taken = (first + last) / 2, [1] * len(first)
    paths, before, now = [*range(len(first))], 1, _FIRST if steps == "auto" else steps
    while True:
        for n in range(1, now):
            if n * before % now:
                sums[paths] += at(paths, n / now)
        for path in paths:
            taken[path] = now
        means = sums / sums.new_tensor(taken).view(-1, *[1] * (sums.ndim - 1))
        if steps != "auto" or now == _MOST:
            return means, taken
        off = gaps(means).tolist()
        paths, before, now = [p for p in paths if off[p] > tolerance], now, 2 * now
        if not paths:
            return means, taken
