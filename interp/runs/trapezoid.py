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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import progress_bar, require_integer, to_device
from interp.inputs.parts import require_whole

TOLERANCE = 0.01
"""The largest gap without a warning."""

FIRST, _MOST = 4, 1024
"""The first number of steps with `auto`, and the largest."""

PathSteps = int | Sequence[int] | Literal["auto"]
"""The number of steps of all paths, or a number for each path. `auto` doubles the number of a path
until its gap is at most `TOLERANCE`, up to 1024.
"""

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
    steps: PathSteps,
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
        steps: see `PathSteps`.
        size: the number by which gaps are divided. Default: the mean absolute change of the metric.

    Raises:
        ValueError: if steps are less than 1, or the metric is not finite at an end. Or if steps are
            `auto` in a part of many examples; see `interp.inputs.parts`.

    >>> import torch
    >>> at = lambda paths, share: (torch.tensor([[share**2]]), torch.tensor([[share**3 / 3]]))
    >>> averaged(at, torch.zeros(1, 1), torch.zeros(1), lambda means: means, 4)[:3]
    (tensor([[0.3438]]), [4], tensor([[0.0312]]))
    """
    with progress_bar("path from base to target", _n_steps(steps, len(first))) as count:

        def counted(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
            values = at(paths, share)
            count()
            return values

        return _averaged(counted, first, base=base, added=added, steps=steps, size=size)


def _n_steps(steps: PathSteps, n_paths: int) -> int | None:
    """Return how many shares are computed, except the first; None for `auto`."""
    numbers = of_paths(steps, n_paths)
    if not all(isinstance(number, int) for number in numbers):
        return None
    return 1 + sum(int(number) - 1 for number in {*numbers})


def _averaged(
    at: AtShare,
    first: Float[Tensor, "path *axes"],
    base: Float[Tensor, " batch"],
    added: Callable[[Float[Tensor, "path *axes"]], Float[Tensor, "path batch"]],
    steps: PathSteps,
    size: Float[Tensor, ""] | None,
) -> Mean:
    """Return the mean of a function along each path. See `averaged` for the arguments."""
    numbers = of_paths(steps, len(first))
    steps_of_paths = [FIRST if number == "auto" else number for number in numbers]
    for number in steps_of_paths:
        require_integer("steps, if not 'auto',", number)
    if steps == "auto":
        require_whole("steps must be a number", "steps='auto'")
    last, end = at(range(len(first)), 1.0)
    change = to_device(end - base, first.device)
    if not change.isfinite().all():
        raise ValueError("the metric must be finite at both ends of a path; got infinity or NaN")
    size = change.abs().mean() if size is None else size
    sums = (first + last) / 2

    def mean() -> Mean:
        """Return the means of the sums over all steps."""
        taken = to_device(torch.tensor(steps_of_paths, dtype=sums.dtype), sums.device)
        means = sums / taken.view(-1, *[1] * (sums.ndim - 1))
        # If the metric does not change, the gap is 0 / 0, and counts as 0.
        gaps = ((added(means) - change).abs() / size).nan_to_num()
        return Mean(means, [*steps_of_paths], gaps, change)

    if steps != "auto":
        for n_steps in sorted({*steps_of_paths}):
            paths = [path for path, number in enumerate(steps_of_paths) if number == n_steps]
            _add(sums, at, paths, shares=[n / n_steps for n in range(1, n_steps)])
        return mean()
    paths = [*range(len(first))]
    n_before, n_steps = 1, FIRST
    while True:
        # Skip the shares that earlier rounds have added: they are multiples of 1 / n_before.
        shares = [n / n_steps for n in range(1, n_steps) if n * n_before % n_steps]
        _add(sums, at, paths, shares=shares)
        for path in paths:
            steps_of_paths[path] = n_steps
        result = mean()
        largest = result.gaps.amax(1).tolist() if n_steps < _MOST else []
        paths = [path for path, gap in enumerate(largest) if gap > TOLERANCE and path in paths]
        if not paths:
            return result
        n_before, n_steps = n_steps, 2 * n_steps


def of_paths(steps: PathSteps, n_paths: int) -> list[int | Literal["auto"]]:
    """Return the number of steps, or `auto`, for each path.

    Raises:
        ValueError: if a list does not contain one number for each path.
    """
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        return [steps] * n_paths
    if len(steps) != n_paths:
        raise ValueError(
            f"steps must be 'auto', a number, or a list with a number for each of {n_paths} paths; "
            f"got {len(steps)} numbers"
        )
    return [*steps]


def _add(
    sums: Float[Tensor, "path *axes"], at: AtShare, paths: Sequence[int], shares: Sequence[float]
) -> None:
    """Add the values of the function at some shares of some paths to the sums of these paths."""
    rows = to_device(torch.tensor(paths), sums.device)
    for share in shares:
        sums.index_add_(0, rows, at(paths, share)[0])


def more_steps(sums: Mapping[str, Any]) -> list[int] | None:
    """Return the next number of steps of each path for many examples; None if there are enough.

    Args:
        sums: the numbers of an unfinished result of all examples, see `interp.inputs.parts`: the
            `steps` of each path, and the `gaps` and `changes` of each path and example.
    """
    steps = sums["largest"]["steps"]
    steps = [steps] if isinstance(steps, int) else steps
    gaps = gap_shares(**sums["examples"])
    if max(steps) >= _MOST or max(map(max, gaps)) <= TOLERANCE:
        return None
    return [
        2 * number if max(gaps_of_path) > TOLERANCE else number
        for number, gaps_of_path in zip(steps, gaps, strict=True)
    ]


def gap_shares(
    gaps: Sequence[Sequence[float]], changes: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Return gaps as shares of the mean absolute change of the metric on each path.

    Args:
        gaps: the gap of each path and example.
        changes: the absolute change of the metric for each path and example.
    """
    shares = []
    for gaps_of_path, changes_of_path in zip(gaps, changes, strict=True):
        size = sum(changes_of_path) / len(changes_of_path)
        shares.append([gap / size if size else 0.0 for gap in gaps_of_path])
    return shares
