"""Joined runs: one value for all positions, from the values of the steps of a generation.

A generation runs the model once for each new token. The joined value is the value that one run of
the whole text would have.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from hooks.base import POSITION_AXES, piece_read
from hooks.base.errors import HookError
from hooks.base.pieces import piece_is_known
from hooks.point import Point


def require_next(pieces: Sequence[Tensor], point: Point) -> None:
    """Check that the present piece of the texts continues the earlier pieces of a point's value.

    Args:
        pieces: the values of the earlier pieces.
        point: the point.

    Raises:
        HookError: if the present piece starts at a different column, or has different rows.
    """
    piece = piece_read()
    axis = _position_axis(point.name, point.axes)
    next_column = sum(part.shape[axis] for part in pieces)
    if pieces and piece_is_known() and (piece.start != next_column or piece.moved):
        got = "different rows" if piece.moved else f"column {piece.start or 0}"
        raise HookError(
            f"the pieces of a joined run must follow one another, for {point.name} from column "
            f"{next_column} of the same rows; got {got} (a generation without a cache of keys, "
            "with beams or with an assistant)"
        )


def _position_axis(name: str, axes: tuple[str, ...]) -> int:
    """Return the index of the only axis of positions.

    Raises:
        HookError: if the value has no axis of positions, or several.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        rule = "joining the values of several runs needs one axis of positions"
        raise HookError(f"{rule}; {name} has [{' '.join(axes)}]")
    return axes.index(along[0])


def join(pieces: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """Join the values of the steps of a generation as if one run covered all positions.

    Along `key`, the last key of a step is the last position that the step read. Later keys, and
    earlier keys that a step does not have, are zero.

    Args:
        pieces: the value of each run, in order.
        name: the name of the point, for errors.
        axes: the axes of the value.

    Raises:
        HookError: if the value does not have exactly one axis of positions.
    """
    axis = _position_axis(name, axes)
    if "key" in axes:
        key = axes.index("key")
        n_cached = pieces[0].shape[key] - pieces[0].shape[axis]
        lengths = [piece.shape[axis] for piece in pieces]
        ends = [n_cached + end for end in accumulate(lengths)]
        # `pad` takes two sizes for each axis, and the last axis comes first.
        later_axes = [0, 0] * (len(axes) - 1 - key)
        pieces = [
            pad(piece, [*later_axes, end - piece.shape[key], ends[-1] - end])
            for piece, end in zip(pieces, ends, strict=True)
        ]
    return torch.cat(list(pieces), axis)
