"""Checks that an edit copies no padding of its source to a real token."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks import EditError
from hooks.base import POSITION_AXES, FakeTensor, piece_read
from interp.edits.places import Region, Where
from interp.edits.sources import ValueSource


def require_real_source(source: ValueSource, place: Region, where: Where) -> None:
    """Raise an error if values of padding would go to real tokens.

    Columns that the edit counts from the end of the source's own texts are real tokens already. So
    the check is about values that go to the same column, and about keys, which always do.

    Args:
        source: the source of the edit.
        place: the part of the activation that changes.
        where: the places that the edit selects.

    Raises:
        EditError: naming the text and the column.
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
        # A mask that the user gave is believed where the run has none.
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
    """Refuse values of padding for real tokens among the columns that change."""
    rows, columns = _box(place, at)
    copied = _changed(place, at) & ours[rows, columns] & ~theirs[rows, columns]
    if copied.any():
        axis = place.axes[at]
        remedy = (
            "source_pos=-1 takes the last real token"
            if axis in POSITION_AXES
            else f"select keys that are real in both, with {axis}="
        )
        raise EditError(
            f"the source at {place.point} must be a real token at {axis} "
            f"{_first(copied, rows.start, columns.start)}; got padding ({remedy})"
        )


def _require_same(ours: Tensor, theirs: Tensor, place: Region) -> None:
    """Refuse a source of donors whose texts have other padding than the edited texts."""
    different = ours != theirs
    if different.any():
        raise EditError(
            f"resample at {place.point} must have a source with the padding of the edited texts, because "
            f"positions count from the end; got other padding at column {_first(different)}"
        )


def _require_same_keys(ours: Tensor, theirs: Tensor, place: Region, where: Where, at: int) -> None:
    """Refuse attention to other keys than the edited text has: its weights would not add up to 1."""
    axis = place.axes[at]
    rows, _ = _box(place, at)
    # Keys after the last real one of a text are later than its queries, and have no weight.
    is_before_the_end = ours.flip(1).cumsum(1).flip(1) > 0
    different = ours != theirs
    if axis not in where and place.source_columns is None:
        different &= is_before_the_end
    elif axis in where and not where[axis].counts_back:
        return
    if different[rows].any():
        raise EditError(
            f"the source at {place.point} must have the keys of the edited texts; got other padding "
            f"at {axis} {_first(different[rows], rows.start)} (select keys that are real in both, "
            f"with {axis}=)"
        )


def _box(place: Region, at: int) -> tuple[slice, slice]:
    """The rows of a box, and its columns along an axis without virtual tokens."""
    batch = place.axes.index("batch") if "batch" in place.axes else None
    rows = slice(0, 1) if batch is None else place.box[batch]
    first = max(place.firsts[at], 0)
    return rows, slice(first, place.firsts[at] + place.lengths[at])


def _changed(place: Region, at: int) -> Bool[Tensor, "_row _column"]:
    """True at the columns of a box, along an axis, in which something changes."""
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
    """The first of some places, in words."""
    row, column = places.nonzero()[0].tolist()
    return f"{first_column + column} of text {first_row + row}"
