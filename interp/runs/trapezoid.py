"""Means of functions along paths by the trapezoid rule, with enough steps for a known sum.

A path leads from one run (share 0) to another run (share 1). The function returns, for example, the
gradient of the metric at a share of the path. The mean gradient times (target - base), summed over
all places, should equal the change of the metric from the start to the end of the path. `added`
computes this sum.

1. Compute the function at both ends, and take half of the sum.
2. Add the function at the shares between the ends, except at shares that have already been added.
   The sum divided by the number of steps is the mean.
3. The gap of a path is the difference between the sum by `added` and the change of the metric. With
   `steps="auto"`, double the steps of the paths whose gap is too large, and repeat from step 2.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import progress_of, require_integer, to_device
from interp.inputs.parts import require_whole

TOLERANCE = 0.01
"""The largest gap without a warning."""

_FIRST, _MOST = 4, 1024

Steps = int | Literal["auto"]
"""The steps of each path. `auto` doubles them until the gap is at most `TOLERANCE`, up to 1024."""

AtShare = Callable[
    [Sequence[int], float], tuple[Float[Tensor, "_some *axes"], Float[Tensor, "_some batch"]]
]
"""A function from the indices of some paths and a share to the values and metrics there."""


class Mean(NamedTuple):
    """The means of values along paths.

    Attributes:
        values: the mean on each path.
        steps: the number of steps of each path.
        gaps: for each path and example, the absolute difference between the sum by `added` and the
            change of the metric, divided by the `size` of `averaged`.
        changes: the change of the metric along each path, for each example.
    """

    values: Float[Tensor, "path *axes"]
    steps: list[int]
    gaps: Float[Tensor, "path batch"]
    changes: Float[Tensor, "path batch"]


def averaged(
    at: AtShare,
    first: Float[Tensor, "path *axes"],
    base: Float[Tensor, " batch"],
    added: Callable[[Float[Tensor, "path *axes"]], Float[Tensor, "path batch"]],
    steps: Steps,
    size: Float[Tensor, ""] | None = None,
) -> Mean:
    """Return the mean of a function along each path.

    No value of the function is computed twice, even if the number of steps is doubled.

    Args:
        at: the function. It gets the indices of some paths and a share, and returns the values and
            the metrics there.
        first: the values of the function at the start.
        base: the metric at the start.
        added: a function from the means to one number for each path and example, which should equal
            the change of the metric.
        steps: see `Steps`.
        size: the number by which gaps are divided. Default: the mean absolute change of the metric.

    Raises:
        ValueError: if steps are less than 1, or the metric is not finite at an end. Or if steps are
            `auto` in a part of many examples; see `interp.inputs.parts`.

    >>> import torch
    >>> at = lambda paths, share: (torch.tensor([[share**2]]), torch.tensor([[share**3 / 3]]))
    >>> averaged(at, torch.zeros(1, 1), torch.zeros(1), lambda means: means, 4)[:3]
    (tensor([[0.3438]]), [4], tensor([[0.0312]]))
    """
    if steps == "auto":
        require_whole("steps must be a number", "steps='auto'")
    require_integer("steps, if not 'auto',", 1 if steps == "auto" else steps)
    last, end = at(range(len(first)), 1.0)
    change = to_device(end - base, first.device)
    if not change.isfinite().all():
        raise ValueError("the metric must be finite at both ends of a path; got infinity or NaN")
    size = change.abs().mean() if size is None else size
    sums = (first + last) / 2
    paths = [*range(len(first))]
    steps_of_paths = [1] * len(first)
    n_before = 1
    n_steps = _FIRST if steps == "auto" else steps
    while True:
        # Skip the shares that earlier rounds have added: they are multiples of 1 / n_before.
        shares = [n / n_steps for n in range(1, n_steps) if n * n_before % n_steps]
        rows = to_device(torch.tensor(paths), sums.device)
        for share in progress_of(shares, "steps on the way", len(shares)):
            sums.index_add_(0, rows, at(paths, share)[0])
        for path in paths:
            steps_of_paths[path] = n_steps
        steps_taken = to_device(torch.tensor(steps_of_paths, dtype=sums.dtype), sums.device)
        means = sums / steps_taken.view(-1, *[1] * (sums.ndim - 1))
        # If the metric does not change, the gap is 0 / 0, and counts as 0.
        gaps = ((added(means) - change).abs() / size).nan_to_num()
        if steps != "auto" or n_steps == _MOST:
            return Mean(means, steps_of_paths, gaps, change)
        largest = gaps.amax(1).tolist()
        paths = [path for path in paths if largest[path] > TOLERANCE]
        if not paths:
            return Mean(means, steps_of_paths, gaps, change)
        n_before, n_steps = n_steps, 2 * n_steps
