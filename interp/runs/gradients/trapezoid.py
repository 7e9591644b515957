"""Means along paths by the trapezoid rule, with as many steps as each path needs."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from hooks.shared import require_whole, to_device

_FIRST, _MOST = 4, 1024

Steps = int | Literal["auto"]
"""The number of steps of each path; `auto` doubles them until its gap is small enough, at most 1024."""

AtShare = Callable[
    [Sequence[int], float], tuple[Float[Tensor, "_some *axes"], Float[Tensor, "_some batch"]]
]
"""The values on some paths, by index, after a share of them, and the metrics there."""


class Mean(NamedTuple):
    """Means of values along paths.

    Attributes:
        values: the mean on each path.
        steps: how many steps it took.
        gaps: how far they are from adding up to the change of the metric, as a share.
    """

    values: Float[Tensor, "path *axes"]
    steps: list[int]
    gaps: Float[Tensor, "path batch"]


def averaged(
    at: AtShare,
    first: Float[Tensor, "path *axes"],
    base: Float[Tensor, " batch"],
    added: Callable[[Float[Tensor, "path *axes"]], Float[Tensor, "path batch"]],
    steps: Steps,
    tolerance: float,
    size: Float[Tensor, ""] | None = None,
) -> Mean:
    """The mean of a function along each path. No value is computed twice.

    Args:
        at: gives the function.
        first, base: its values at the start, and the metric there.
        added: what means add up to, which should be the change of the metric.
        steps: see `Steps`.
        tolerance: how large gaps may be.
        size: what gaps are a share of; by default the mean absolute change of the metric.

    Raises:
        ValueError: if steps are less than 1, or the metric is not finite at an end.

    >>> import torch
    >>> at = lambda paths, share: (torch.tensor([[share**2]]), torch.tensor([[share**3 / 3]]))
    >>> averaged(at, torch.zeros(1, 1), torch.zeros(1), lambda means: means, 4, 0.0)
    Mean(values=tensor([[0.3438]]), steps=[4], gaps=tensor([[0.0312]]))
    """
    require_whole("steps", 1 if steps == "auto" else steps)
    last, end = at(range(len(first)), 1.0)
    change = to_device(end - base, first.device)
    if not change.isfinite().all():
        raise ValueError("the metric must be finite at both ends of a path; got others")
    size = change.abs().mean() if size is None else size
    sums, taken = (first + last) / 2, [1] * len(first)
    paths, before, now = [*range(len(first))], 1, _FIRST if steps == "auto" else steps
    while True:
        for n in range(1, now):
            if n * before % now:
                sums[paths] += at(paths, n / now)[0]
        for path in paths:
            taken[path] = now
        means = sums / sums.new_tensor(taken).view(-1, *[1] * (sums.ndim - 1))
        gaps = ((added(means) - change).abs() / size).nan_to_num()  # 0 / 0, where nothing changes
        off = gaps.amax(1).tolist()
        before, again = now, [path for path in paths if off[path] > tolerance]
        if steps != "auto" or now == _MOST or not again:
            return Mean(means, taken, gaps)
        paths, now = again, 2 * now
