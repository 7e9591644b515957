"""Checks that an edit does not copy padding of its source to a real token."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks import EditError
from hooks.base import POSITION_AXES, FakeTensor, padding_messages, piece_read
from interp.edits.places import Region, Where, by_row
from interp.edits.sources import ValueSource


def require_real_source(source: ValueSource, place: Region, where: Where) -> None:
    """Check that no value of padding would be copied to a real token.

    Columns that are counted from the end of the source's texts are always real tokens. So this
    function checks only values that are copied to the same column. Keys are always copied to the
    same column.

    Args:
        source: the source of the edit.
        place: the part of the activation that changes.
        where: the places that the edit selects.

    Raises:
        EditError: if padding would be copied. The error names the text and the column.
    """
    if source.rows == "all" or not source.knows_its_padding or torch.compiler.is_compiling():
        return
    axes = place.axes
    batch = axes.index("batch") if "batch" in axes else None
    n_rows = 1 if batch is None else place.sizes[batch]
    for dim, axis in enumerate(axes):
        if axis in source.whole:
            continue
        size = place.sizes[dim]
        run_mask = piece_read().mask_along(axis, n_rows, size)
        source_mask = _mask_of_source(source, place, axis, n_rows, size)
        # A user may pass a mask of the source but run the model without a mask. Then the padding of
        # the run is unknown, so do not compare.
        is_unchecked = source.attention_mask is not None and run_mask is None
        if is_unchecked or (run_mask is None and source_mask is None):
            continue
        if run_mask is None or source_mask is None:
            all_real = torch.ones(n_rows, size, dtype=torch.bool)
            run_mask = all_real if run_mask is None else run_mask
            source_mask = all_real if source_mask is None else source_mask
        source_mask = source_mask.expand(n_rows, -1)
        # With the same padding in both, each padded value is copied to padding.
        if torch.equal(run_mask, source_mask):
            continue
        if source.rows == "donor" and axis in where and where[axis].counts_back:
            _require_same(run_mask, source_mask, place)
        elif dim != place.positions or place.source_columns is None:
            _require_real(run_mask, source_mask, place, dim)
        if axis not in POSITION_AXES and "query" in axes:
            _require_same_keys(run_mask, source_mask, place, where, dim)


def require_same_starts(source: ValueSource, place: Region) -> None:
    """Check that all texts begin in the same column, before a mean over texts at each column.

    If texts are padded on the left, one column contains different positions of the texts.

    Args:
        source: the texts of the mean.
        place: the part of the activation that changes.

    Raises:
        EditError: if a text of the source or of the run begins in another column.
    """
    if place.positions is None or not source.knows_its_padding or torch.compiler.is_compiling():
        return
    axis = place.axes[place.positions]
    n_rows = place.sizes[place.axes.index("batch")]
    of_source = source.mask_of_columns(place.point.name, place.axes)
    of_run = piece_read().mask_along(axis, n_rows, place.sizes[place.positions])
    starts = set()
    for mask in (of_source, of_run):
        if mask is None or mask.is_meta or isinstance(mask, FakeTensor):
            starts.add(0)
        else:
            starts.update(mask.int().argmax(1).tolist())
    if len(starts) > 1:
        raise EditError(padding_messages.different_starts(str(place.point), axis, sorted(starts)))


def _mask_of_source(
    source: ValueSource, place: Region, axis: str, n_rows: int, size: int
) -> Bool[Tensor, "_rows column"] | None:
    """Return the mask of the first `size` columns of a source; None if it has no padding, or if its
    mask does not fit the edited texts.
    """
    mask = source.mask(place.point.name, axis)
    if mask is None or mask.is_meta or isinstance(mask, FakeTensor):
        return None
    mask = by_row(mask, 0, n_rows)
    fits = len(mask) in (1, n_rows) and mask.shape[1] >= size
    return mask[:, :size].bool() if fits else None


def _require_real(run_mask: Tensor, source_mask: Tensor, place: Region, dim: int) -> None:
    """Check that no padding would be copied to a real token in the changed columns."""
    rows, columns = _box(place, dim)
    is_padding = run_mask[rows, columns] & ~source_mask[rows, columns]
    copied = _changed(place, dim) & is_padding
    if copied.any():
        axis = place.axes[dim]
        remedy = (
            "source_pos=-1 copies the last real token"
            if axis in POSITION_AXES
            else _shared_keys(axis)
        )
        where = f"{axis} {_first(copied, rows.start, columns.start)}"
        what = f"the source at {place.point}"
        raise EditError(padding_messages.padding_selected(what, where, remedy))


def _shared_keys(axis: str) -> str:
    """Return the advice for a source with padding at other keys."""
    return f"use {axis}= to select keys that are real in both texts"


def _require_same(run_mask: Tensor, source_mask: Tensor, place: Region) -> None:
    """Check that the source of `resample` has the same padding as the edited texts.

    `resample` replaces the values of each text with values of another text of the source. If its
    positions count from the end, they must be the same columns in both.

    Args:
        run_mask: True for the real columns of the edited texts.
        source_mask: True for the real columns of the texts of the source.
        place: the part of the activation that changes.

    Raises:
        EditError: if the padding differs.
    """
    different = run_mask != source_mask
    if different.any():
        raise EditError(
            padding_messages.different_padding(
                f"the source of resample at {place.point} and the edited texts",
                given=f"different padding at column {_first(different)}",
                reason="because positions count from the end",
            )
        )


def _require_same_keys(
    run_mask: Tensor, source_mask: Tensor, place: Region, where: Where, dim: int
) -> None:
    """Check that the source has padding at the same keys as the edited texts.

    An attention pattern is copied for all keys. With padding at other keys, a real key would get
    the weight 0 of a padded key, and the weights of a query would not sum to 1.

    Raises:
        EditError: if the padding differs.
    """
    axis = place.axes[dim]
    rows, _ = _box(place, dim)
    # Padding after the last real token does not matter: no real query attends to these keys.
    is_before_the_end = run_mask.flip(1).cumsum(1).flip(1) > 0
    different = run_mask != source_mask
    if axis not in where and place.source_columns is None:
        different &= is_before_the_end
    elif axis in where and not where[axis].counts_back:
        return
    if different[rows].any():
        first = f"{axis} {_first(different[rows], rows.start)}"
        raise EditError(
            padding_messages.different_padding(
                f"the source at {place.point} and the edited texts",
                given=f"different padding at {first} ({_shared_keys(axis)})",
            )
        )


def _box(place: Region, dim: int) -> tuple[slice, slice]:
    """Return the rows of a region's box, and its columns along an axis. Columns of virtual tokens,
    which come before the text, are left out.
    """
    batch = place.axes.index("batch") if "batch" in place.axes else None
    rows = slice(0, 1) if batch is None else place.box[batch]
    first = max(place.firsts[dim], 0)
    return rows, slice(first, place.firsts[dim] + place.lengths[dim])


def _changed(place: Region, dim: int) -> Bool[Tensor, "_row _column"]:
    """Return a mask of texts and columns: True where the edit changes at least one number.

    The mask covers the box of `place`, the part of the activation around all places that change,
    without the columns of virtual tokens.

    Args:
        place: the part of the activation that changes.
        dim: the axis of the columns.
    """
    rows, columns = _box(place, dim)
    shape = rows.stop - rows.start, columns.stop - columns.start
    if place.mask is None:
        return torch.ones(shape, dtype=torch.bool)
    batch = place.axes.index("batch") if "batch" in place.axes else None
    other_dims = [n for n in range(place.mask.ndim) if n not in (batch, dim)]
    mask = place.mask.any(other_dims) if other_dims else place.mask
    if batch is None:
        mask = mask[None]
    elif batch > dim:
        mask = mask.T
    return mask[:, -shape[1] :].expand(shape)


def _first(places: Tensor, first_row: int = 0, first_column: int = 0) -> str:
    """Return a description of the first place that is True.

    Args:
        places: a boolean table [row, column].
        first_row, first_column: the text and the column at the start of the table.
    """
    row, column = places.nonzero()[0].tolist()
    return f"{first_column + column} of text {first_row + row}"
