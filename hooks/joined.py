"""Joined runs: the values of a generation's steps as if one run had covered all positions."""

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
    """Check that a piece continues the earlier pieces of the same rows.

    Raises:
        HookError: if the piece starts at a different column, or has different rows.
    """
    piece, axis = piece_read(), _position_axis(point.name, point.axes)
    next_column = sum(part.shape[axis] for part in pieces)
    if pieces and piece_is_known() and (piece.start != next_column or piece.moved):
        got = "different rows" if piece.moved else f"column {piece.start or 0}"
        raise HookError(
            f"the pieces of a joined run must follow one another, for {point.name} from column "
            f"{next_column} of the "
            f"same rows; got {got} (a generation without a cache of keys, with beams or with an "
            "assistant)"
        )


def _position_axis(name: str, axes: tuple[str, ...]) -> int:
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        rule = "joining the values of several runs needs one axis of positions"
        raise HookError(f"{rule}; {name} has [{' '.join(axes)}]")
    return axes.index(along[0])


def join(pieces: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """Join the values of several runs (a generation's steps) as if one run covered all positions.

    Along `key` each piece ends at its own last position, and later keys are zero.
    """
    axis = _position_axis(name, axes)
    if "key" in axes:
        key = axes.index("key")
        cached = pieces[0].shape[key] - pieces[0].shape[axis]
        ends = [cached + end for end in accumulate(piece.shape[axis] for piece in pieces)]
        after = [0, 0] * (len(axes) - 1 - key)
        pieces = [
            pad(piece, [*after, end - piece.shape[key], ends[-1] - end])
            for piece, end in zip(pieces, ends, strict=True)
        ]
    return torch.cat(list(pieces), axis)
