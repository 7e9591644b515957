"""Checks that an edit does not copy padding of its source to a real token."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks import EditError
from hooks.base import POSITION_AXES, FakeTensor, piece_read
from interp.edits.places import Region, Where
from interp.edits.sources import ValueSource


def require_real_source(source: ValueSource, place: Region, where: Where) -> None:
    """Raise an error if values of padding would be copied to real tokens.

    Columns that are counted from the end of the source's texts are always real tokens. So this
    function checks values that are copied to the same column, and keys, which always are.

    Args:
        source: the source of the edit.
        place: the part of the activation that changes.
        where: the places that the edit selects.

    Raises:
        EditError: if so; the error names the text and the column.
    """
    if source.rows == "all" or not source.knows_its_padding or torch.compiler.is_compiling():
        return
    axes = place.axes
    batch = axes.index("batch") if "batch" in axes else None
    n_rows = 1 if batch is None else place.sizes[batch]
    for at, axis in enumerate(axes):
        if axis in source.whole:
            continue
        size = place.sizes[at]
        ours = piece_read().mask_along(axis, n_rows, size)
        theirs = _mask_of_source(source, place, axis, n_rows, size)
        # If the run has no mask, the mask of the user is not checked.
        is_given = source.attention_mask is not None and ours is None
        if is_given or (ours is None and theirs is None):
            continue
        everything = torch.ones(n_rows, size, dtype=torch.bool)
        ours = everything if ours is None else ours
        theirs = everything if theirs is None else theirs.expand(n_rows, -1)
        if source.rows == "donor" and axis in where and where[axis].counts_back:
            _require_same(ours, theirs, place)
        elif axis not in POSITION_AXES or place.source_columns is None:
            _require_real(ours, theirs, place, at)
        if axis not in POSITION_AXES and "query" in axes:
            _require_same_keys(ours, theirs, place, where, at)


def _mask_of_source(
    source: ValueSource, place: Region, axis: str, n_rows: int, size: int
) -> Bool[Tensor, "_rows column"] | None:
    """Return the mask of the first columns of a source; None if there is no padding."""
    mask = source.mask(place.point.name, axis)
    if mask is None or mask.is_meta or isinstance(mask, FakeTensor):
        return None
    fits = len(mask) in (1, n_rows) and mask.shape[1] >= size
    return mask[:, :size].bool() if fits else None


def _require_real(ours: Tensor, theirs: Tensor, place: Region, at: int) -> None:
    """Raise an error if padding would be copied to real tokens among the columns that change."""
    rows, columns = _box(place, at)
    copied = _changed(place, at) & ours[rows, columns] & ~theirs[rows, columns]
    if copied.any():
        axis = place.axes[at]
        remedy = (
            "source_pos=-1 copies the last real token"
            if axis in POSITION_AXES
            else f"use {axis}= to select keys that are real in both texts"
        )
        raise EditError(
            f"the source at {place.point} must be a real token at {axis} "
            f"{_first(copied, rows.start, columns.start)}; got padding ({remedy})"
        )


def _require_same(ours: Tensor, theirs: Tensor, place: Region) -> None:
    """Raise an error if the padding of a source of donors differs from the edited texts."""
    different = ours != theirs
    if different.any():
        raise EditError(
            f"resample at {place.point} must have a source with the padding of the edited texts, "
            "because "
            f"positions count from the end; got different padding at column {_first(different)}"
        )


def _require_same_keys(ours: Tensor, theirs: Tensor, place: Region, where: Where, at: int) -> None:
    """Raise an error if the keys of the source differ, because weights would not sum to 1."""
    axis = place.axes[at]
    rows, _ = _box(place, at)
    # Keys after the last real key of a text come after its queries, and have no weight.
    is_before_the_end = ours.flip(1).cumsum(1).flip(1) > 0
    different = ours != theirs
    if axis not in where and place.source_columns is None:
        different &= is_before_the_end
    elif axis in where and not where[axis].counts_back:
        return
    if different[rows].any():
        raise EditError(
            f"the source at {place.point} must have the keys of the edited texts; got different "
            f"padding at {axis} {_first(different[rows], rows.start)} (use {axis}= to select keys "
            "that are real in both texts)"
        )


def _box(place: Region, at: int) -> tuple[slice, slice]:
    """Return the rows of a box, and its columns along an axis without virtual tokens."""
    batch = place.axes.index("batch") if "batch" in place.axes else None
    rows = slice(0, 1) if batch is None else place.box[batch]
    first = max(place.firsts[at], 0)
    return rows, slice(first, place.firsts[at] + place.lengths[at])


def _changed(place: Region, at: int) -> Bool[Tensor, "_row _column"]:
    """Return a mask that is True for the columns of a box, along an axis, that change."""
    rows, columns = _box(place, at)
    shape = rows.stop - rows.start, columns.stop - columns.start
    if place.mask is None:
        return torch.ones(shape, dtype=torch.bool)
    batch = place.axes.index("batch") if "batch" in place.axes else None
    others = [axis for axis in range(place.mask.ndim) if axis not in (batch, at)]
    mask = place.mask.any(others) if others else place.mask
    if batch is None:
        mask = mask[None]
    elif batch > at:
        mask = mask.T
    return mask[:, -shape[1] :].expand(shape)


def _first(places: Tensor, first_row: int = 0, first_column: int = 0) -> str:
    """Return a description of the first place."""
    row, column = places.nonzero()[0].tolist()
    return f"{first_column + column} of text {first_row + row}"
