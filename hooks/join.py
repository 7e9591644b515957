"""Values of several runs, a generation's for instance, put together as those of one run."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hooks.errors import HookError
from hooks.point import POSITION_AXES


def joined_by_position(parts: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """The values of several runs as those of one run over all their positions.

    Along `key` each part ends at its own last position; where a part has no key, there is zero.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        has = f"has the axes {' '.join(axes)}" if axes else "declares no axes"
        raise HookError(
            f"the values of several runs are joined along one axis of positions, and {name} {has}"
        )
    at = axes.index(along[0])
    if "key" in axes:
        key = axes.index("key")
        before = parts[0].shape[key] - parts[0].shape[at]
        ends = [before + end for end in accumulate(part.shape[at] for part in parts)]
        parts = [_placed(part, key, end, ends[-1]) for part, end in zip(parts, ends, strict=True)]
    return torch.cat(list(parts), at)


def _placed(part: Tensor, axis: int, end: int, size: int) -> Tensor:
    """`part` in a tensor of zeros whose `axis` has this size, so that it ends before `end`."""
    shape = [*part.shape[:axis], size, *part.shape[axis + 1 :]]
    whole = part.new_zeros(shape)
    whole.narrow(axis, end - part.shape[axis], part.shape[axis]).copy_(part)
    return whole
