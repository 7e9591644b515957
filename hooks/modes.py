"""Modes, positions, and windows of the residual stream: ways to choose what a run keeps."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import SupportsIndex

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks.errors import HookError
from hooks.point import POSITION_AXES, Point, index_by_axis, is_mask

Positions = slice | Sequence[SupportsIndex]


class Mode(StrEnum):
    """How much of a run to keep.

    `none` keeps nothing. `svd_targets` keeps the attention scores, patterns and values. `residual`
    adds the residual stream. Both need a model with `HookPoint`s. `full` keeps every point.

    Scores are those before the mask, so they are not zero above the diagonal. `interp.svd_targets`
    gives QK^T with zeros there, and the other matrices to decompose.

    >>> Mode("residual")
    <Mode.residual: 'residual'>
    """

    @classmethod
    def _missing_(cls, value: object) -> "Mode":
        raise ValueError(f"mode must be one of {', '.join(cls)}; got {value!r}")

    none = "none"
    svd_targets = "svd_targets"
    residual = "residual"
    full = "full"


RESIDUAL_STREAM = frozenset({"resid_pre", "resid_mid", "resid_post"})
SVD_TARGETS = frozenset({"scores", "pattern", "v"})

# The one place that maps a mode to the last part of a name; `full` asks for every last part.
LAST_PARTS: Mapping[Mode, frozenset[str] | None] = {
    Mode.none: frozenset(),
    Mode.svd_targets: SVD_TARGETS,
    Mode.residual: SVD_TARGETS | RESIDUAL_STREAM,
    Mode.full: None,
}


class Windows:
    """Positions where vectors of the residual stream are kept. Elsewhere only their norms are kept.

    Args:
        mask: [batch, pos], True inside a window.

    Raises:
        ValueError: if the mask is not boolean.
    """

    def __init__(self, mask: Bool[Tensor, "batch pos"]) -> None:
        if mask.dtype != torch.bool:
            raise ValueError(f"windows must be boolean; got {mask.dtype}")
        self.shape = mask.shape
        # Computed here, because fake tensors could not tell the number of rows later.
        self.inside = mask.nonzero(as_tuple=True)

    def applies_to(self, point: Point) -> bool:
        """Whether the value of `point` is part of the residual stream."""
        return point.name.rpartition(".")[2] in RESIDUAL_STREAM

    def reduce(self, value: Tensor, point: Point) -> list[Tensor]:
        """The vectors inside the windows, [window, d_model], and the norms of all, [batch, pos].

        Raises:
            HookError: if the shape of the mask is not that of the residual stream.
        """
        if self.shape != value.shape[:2]:
            raise HookError(
                f"windows must be [batch, pos], {tuple(value.shape[:2])} at {point.name}; "
                f"got {tuple(self.shape)}"
            )
        wide = torch.promote_types(value.dtype, torch.float32)
        return [value[self.inside], torch.linalg.vector_norm(value, dim=-1, dtype=wide)]


def take_positions(value: Tensor, point: Point, positions: Positions) -> Tensor:
    """A copy of `value` at the given positions of its `pos` or `query` axis."""
    if not point.axes:
        raise HookError(f"positions= needs named axes, and {point.name} declares none")
    for axis in POSITION_AXES:
        if axis not in point.axes:
            continue
        size = value.shape[point.axes.index(axis)]
        if is_mask(positions):  # as integers, because fake tensors cannot be indexed by masks
            if len(positions) != size:
                raise HookError(f"a mask at {point} must have length {size}; got {len(positions)}")
            positions = [n for n, inside in enumerate(positions) if inside]
        if not isinstance(positions, slice) and not all(-size <= int(p) < size for p in positions):
            raise HookError(f"positions must lie within the {size} of {point}; got {positions}")
        value = value[index_by_axis(point.axes, {axis: positions}, point.name)]
        value = value.clone() if isinstance(positions, slice) else value
        if value.shape[point.axes.index(axis)] == 0:
            raise HookError(f"positions must select some of the {size} of {point}; got {positions}")
    return value
