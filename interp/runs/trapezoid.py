"""Means of functions along paths by the trapezoid rule, with as many steps as a known sum needs.

A path leads from one run to another, at share 0 to 1. The function is a gradient on the way, and
`added` says what its mean should add up to: the change of the metric between both ends.

1. Compute the function at both ends, and half their sum.
2. Add the function at the shares between that no earlier round has computed.
3. The gap of a path is how far its mean is from adding up to the change. With `steps="auto"` double
   the steps of the paths whose gap is too large, and go on with 2.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from hooks.base import progress_of, require_integer, to_device

TOLERANCE = 0.01
"""How large a gap may be without a warning."""

_FIRST, _MOST = 4, 1024

Steps = int | Literal["auto"]
"""The steps of each path; `auto` doubles them until its gap is within `TOLERANCE`, at most 1024."""

AtShare = Callable[
    [Sequence[int], float], tuple[Float[Tensor, "_some *axes"], Float[Tensor, "_some batch"]]
]
"""The values on some paths, by index, after a share of them, and the metrics there."""


class Mean(NamedTuple):
    """Means of values along paths.

    Attributes:
        values: the mean on each path.
        steps: how many steps it took.
        gaps: how far the means are from adding up to the change of the metric, as a share.
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
    size: Float[Tensor, ""] | None = None,
) -> Mean:
    """Return the mean of a function along each path. No value is computed twice.

    Args:
        at: gives the function.
        first, base: its values at the start, and the metric there.
        added: gives the sum that means add up to, which should be the change of the metric.
        steps: see `Steps`.
        size: the whole that gaps are a share of; by default the mean absolute change of the metric.

    Raises:
        ValueError: if steps are less than 1, or the metric is not finite at an end.

    >>> import torch
    >>> at = lambda paths, share: (torch.tensor([[share**2]]), torch.tensor([[share**3 / 3]]))
    >>> averaged(at, torch.zeros(1, 1), torch.zeros(1), lambda means: means, 4)
    Mean(values=tensor([[0.3438]]), steps=[4], gaps=tensor([[0.0312]]))
    """
    require_integer("steps, if not 'auto',", 1 if steps == "auto" else steps)
    last, end = at(range(len(first)), 1.0)
    change = to_device(end - base, first.device)
    if not change.isfinite().all():
        raise ValueError("the metric must be finite at both ends of a path; got others")
    size = change.abs().mean() if size is None else size
    sums = (first + last) / 2
    paths = [*range(len(first))]
    taken = [1] * len(first)
    n_before = 1
    n_steps = _FIRST if steps == "auto" else steps
    while True:
        shares = [n / n_steps for n in range(1, n_steps) if n * n_before % n_steps]
        for share in progress_of(shares, "steps on the way", len(shares)):
            sums[paths] += at(paths, share)[0]
        for path in paths:
            taken[path] = n_steps
        means = sums / sums.new_tensor(taken).view(-1, *[1] * (sums.ndim - 1))
        gaps = ((added(means) - change).abs() / size).nan_to_num()  # 0 / 0, where nothing changes
        largest = gaps.amax(1).tolist()
        paths = [path for path in paths if largest[path] > TOLERANCE]
        if steps != "auto" or n_steps == _MOST or not paths:
            return Mean(means, taken, gaps)
        n_before, n_steps = n_steps, 2 * n_steps
