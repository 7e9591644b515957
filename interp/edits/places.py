"""Places: the part of an activation that an edit changes, without padded keys, and its source.

`edits.replace(source, head=1, pos=-1)` at `attn.z`, [2, 5, head, d_head], of two texts. The first
text has 2 columns of padding on the right, so its last token is in column 2; the last token of the
second text is in column 4:

1. `where` is `{"head": 1, "pos": -1}`. Along `pos`, the selection refers to the real columns:
   `[[2], [4]]`.
2. `box` contains a slice of each axis around the selection: all texts, columns 2 to 4, head 1, all
   of `d_head`.
3. The texts differ inside the box, so a `mask` selects the columns of the box that change:
   `[[True, False, False], [False, False, True]]`.
4. With `source_pos`, `source_columns` contains the source's column for each column of the box.
5. In a generation whose activation is [2, 1, head, d_head] and starts at column 5, `pos=1` selects
   nothing: `locate_part` returns None.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.nn.functional import pad

from hooks import EditError, Point, SelectionError, start_of_piece
from hooks.base import (
    TEXT_AXES,
    Rows,
    Selection,
    broadcast,
    n_moved_columns,
    padding_messages,
    piece_read,
    require_axes,
    to_device,
)
from interp.inputs.parts import is_in_parts

Where = Mapping[str, Selection]
"""The selection along each axis."""


def axes_of(point: Point, ndim: int) -> tuple[str, ...]:
    """Return the names of the axes of a value.

    If a point declares no axes, the names are `batch` and then numbers.

    Args:
        point: the point of the value.
        ndim: the number of axes of the value.

    >>> axes_of(Point("any"), 3)
    ('batch', '1', '2')
    """
    return point.axes or ("batch", *map(str, range(1, ndim)))[:ndim]


def first_column(where: Where, point: Point, n_pos: int) -> int:
    """Return the first column of a text that is selected at a point; 0 if unknown.

    Args:
        where: the selection along each axis.
        point: the point.
        n_pos: the number of columns of the text.

    Raises:
        UnknownNameError: if the point lacks an axis.
        SelectionError: if a column is outside the text.
    """
    require_axes(where, point.axes, point.name)
    real = _unpadded(piece_read().columns, where, n_pos)
    firsts = {}
    for axis in TEXT_AXES:
        if axis in where:
            rows = where[axis].rows(n_pos, f"{axis} at {point.name}", real=real)
            firsts[axis] = min(itertools.chain(*rows))
    return firsts.get("pos", firsts.get("query", 0))


def selects_end(where: Where, point: Point, n_pos: int) -> bool | None:
    """Return whether the last column of a text is selected; None if texts differ.

    Args:
        where: the selection along each axis.
        point: the point.
        n_pos: the number of columns of the text so far.
    """
    if "pos" not in where:
        return True
    real = _unpadded(piece_read().columns, where, n_pos)
    rows = where["pos"].rows(n_pos, f"pos at {point.name}", real=real, whole=False)
    chosen = {n_pos - 1 in row for row in rows}
    return chosen.pop() if len(chosen) == 1 else None


def columns_axis(axes: Sequence[str]) -> str | None:
    """Return the axis of the columns of a text; None without this axis.

    It is `pos` or `query`. Keys and values of attention to an encoder have neither of them. Their
    columns are the columns of the encoder's text.

    >>> columns_axis(("batch", "head", "query", "encoder_pos"))
    'query'
    >>> columns_axis(("batch", "encoder_pos", "head", "d_head"))
    'encoder_pos'
    """
    return next((axis for axis in ("pos", "query", "encoder_pos") if axis in axes), None)


def by_row(value: Shaped[Tensor, "*axes"], dim: int, n_rows: int) -> Shaped[Tensor, "*_axes"]:
    """Return a value with a row for each text as a value with a row for each row of a run.

    A run may have several rows for each text, such as beams. They follow one another. A value with
    another number of rows is returned unchanged.

    Args:
        value: the value.
        dim: the axis of its rows.
        n_rows: the number of rows of the run.
    """
    copies = piece_read().copies
    is_by_text = copies > 1 and value.shape[dim] * copies == n_rows
    return value.repeat_interleave(copies, dim) if is_by_text else value


@dataclass(frozen=True, eq=False)
class SourceColumns:
    """The columns of a source for the positions that an edit selects.

    Attributes:
        selected: the columns, in order, or one column for all positions.
        n_columns: the number of columns of the source.
        real: the real columns of each text of the source; None if all are real.
    """

    selected: Selection
    n_columns: int
    real: Rows | None

    def rows(self, n_rows: int) -> Rows:
        """Return the columns for each of `n_rows` texts; one list if all texts have the same."""
        return self.selected.rows(self.n_columns, "source_pos", batch=n_rows, real=self.real)


@dataclass(frozen=True, eq=False)
class SourceValue:
    """The value of a source at a point: the numbers that an edit writes there.

    Attributes:
        value: the value for whole texts.
        axes: the axes of the value: some or all axes of the point, in the same order. The value is
            repeated along a missing axis, and along an axis of size 1 that is not in `fixed`.
        columns: the positions of the source that are copied to the selected positions; None if each
            position gets the value of the source at the same position.
        whole: the axes along which the edit needs all entries of the value, for example to compute
            a mean. The value and the activation may have different sizes along these axes.
        fixed: the axes along which the value must have the size of the text, so that the value of a
            text with one token is not repeated along a longer text.
        what: the name of the source in errors.
    """

    value: Shaped[Tensor, "..."]
    axes: tuple[str, ...]
    columns: SourceColumns | None = None
    whole: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    what: str = "source"


class Region(NamedTuple):
    """The part of one activation that an edit changes.

    Attributes:
        point: the point of the activation.
        axes: the axes of the activation; numbers if the point declares no axes.
        sizes: the size of each axis. Sizes of `TEXT_AXES` count the whole text so far.
        box: a slice of the activation along each axis.
        firsts: the start of the box along each axis. Starts along `TEXT_AXES` count from the start
            of the whole text, so they are negative at the virtual tokens of an adapter.
        n_virtual: the number of virtual tokens before the text. They are keys but not positions.
        positions: the index of the axis of a text's columns; None without this axis. See
            `columns_axis`.
        mask: a boolean mask of the places that change, which broadcasts to the box; None for the
            whole box. Padded keys never change.
        source_columns: the source's column for each position of the box, with the same number of
            axes as the box; None for the same columns.
    """

    point: Point
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    box: tuple[slice, ...]
    firsts: tuple[int, ...]
    n_virtual: int
    positions: int | None
    mask: Tensor | None
    source_columns: Tensor | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sizes of the box."""
        return tuple(part.stop - part.start for part in self.box)

    def source_values(self, source: SourceValue, device: torch.device) -> Shaped[Tensor, "..."]:
        """Return the part of a source for the box, with all axes of the box.

        Args:
            source: the value of the source.
            device: the device of the result.

        Raises:
            EditError: if a size does not fit.
        """
        value = source.value
        if [axis for axis in self.axes if axis in source.axes] != list(source.axes):
            got = " ".join(source.axes)
            raise EditError(
                f"the {source.what} at {self.point} must have axes of the point in order; got {got}"
            )
        for dim, axis in enumerate(self.axes):
            if axis == "batch" and axis in source.axes and axis not in source.whole:
                value = by_row(value, dim, n_rows=self.sizes[dim])
            if axis not in source.axes:
                value = value.unsqueeze(dim)
            elif axis in source.whole or (value.shape[dim] == 1 and axis not in source.fixed):
                continue
            elif dim == self.positions and self.source_columns is not None:
                value = self.in_order(value)
            else:
                n_virtual = self.n_virtual if axis == "key" else 0
                self._require_size(source, dim, value.shape[dim], n_virtual)
                value = value.narrow(dim, self.firsts[dim] + n_virtual, self.lengths[dim])
        return to_device(value, device)

    def _require_size(self, source: SourceValue, dim: int, size: int, n_virtual: int) -> None:
        """Check that the size of a source along an axis is the size of the whole text.

        Args:
            source: the source.
            dim: the index of the axis.
            size: the size of the source along the axis.
            n_virtual: the number of virtual tokens before the text.
        """
        axis = self.axes[dim]
        full = self.sizes[dim] + n_virtual
        end = self.firsts[dim] + self.lengths[dim] + n_virtual
        # In a generation, the text of the source may be longer than the text so far.
        grows = axis in TEXT_AXES and start_of_piece() is not None
        if size == full or (grows and size >= end):
            return
        rule = f"at least {end} columns (or pos select fewer)" if grows else f"size {full}"
        hint = ""
        if axis in TEXT_AXES and "batch" in source.whole:
            hint = f" (use across={(*source.whole, axis)} in edits.mean)"
        elif axis in TEXT_AXES:
            hint = " (for texts of another length, select columns with pos= and source_pos=)"
        elif axis == "batch" and source.whole:
            hint = f" (use across={('batch', *source.whole)} in edits.mean)"
        elif axis == "batch" and piece_read().copies > 1:
            n_texts = self.sizes[dim] // piece_read().copies
            hint = f" ({piece_read().copies} rows, such as beams, for each text: or size {n_texts})"
        elif axis == "batch" and not piece_read().copies:
            hint = " (it is unknown which text, or which beam, each row of this run belongs to)"
        elif axis == "batch" and is_in_parts():
            hint = " (over_examples does not divide the values of an edit: run one part)"
        raise EditError(
            f"the {source.what} at {self.point} must have {rule} along {axis}; got {size}{hint}"
        )

    def in_order(self, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return the columns of a source in the order of the box's positions."""
        if self.source_columns is None or self.positions is None:
            return value
        columns = to_device(self.source_columns, value.device)
        return torch.take_along_dim(value, columns, self.positions)


def locate_part(
    activation: Shaped[Tensor, "..."],
    point: Point,
    where: Where,
    source: SourceColumns | None = None,
) -> Region | None:
    """Return the part of an activation that `where` selects; None if this piece lacks it.

    Args:
        activation: the value at `point`.
        point: the point, whose axes define the names in `where`.
        where: the selection along each axis.
        source: the columns of a source for the selected positions. Default: the same columns.

    Raises:
        UnknownNameError: if the point lacks an axis.
        SelectionError: if an index is outside its axis, outside the text of a run of whole texts,
            or before the start of every text.
        EditError: if the axes do not fit.
    """
    require_axes(where, point.axes, point.name)
    frame = _frame(activation, point, source is not None)
    if frame.batch != -1 and piece_read().copies != 1:
        what = f"{{}} at {point.name}"
        where = {
            axis: _of_copies(selected, frame.n_rows, axis=axis, what=what.format(axis))
            for axis, selected in where.items()
        }
        if source is not None:
            of_rows = _of_copies(source.selected, frame.n_rows, axis="pos", what="source_pos")
            source = replace(source, selected=of_rows)
    n_axes = len(frame.axes)
    box = [slice(0, size) for size in frame.shape]
    mask: Tensor | None = None
    source_columns: Tensor | None = None
    # Select along the batch first, so that other selections use only the selected rows.
    for dim in sorted(range(n_axes), key=lambda n: n != frame.batch):
        source_here = source if dim == frame.positions else None
        if frame.axes[dim] not in where and source_here is None:
            continue
        rows = _source_column_of_each(frame, dim, where, source_here)
        rows = rows[box[frame.batch]] if len(rows) > 1 else rows
        box[dim] = _extent(rows)
        if box[dim].stop == 0:
            return None
        length = box[dim].stop - box[dim].start
        is_slice = len(rows) == 1 and sum(column >= 0 for column in rows[0]) == length
        if not is_slice or source_here is not None:
            columns = torch.tensor([row[box[dim]] for row in rows])
            columns = broadcast(columns, dim, frame.batch, n_axes)
            mask = _intersection(mask, columns >= 0)
            if source_here is not None:
                source_columns = columns.clamp(min=0)
    firsts = [first + part.start for first, part in zip(frame.firsts, box, strict=True)]
    return Region(
        point=point,
        axes=frame.axes,
        sizes=frame.sizes,
        box=tuple(box),
        firsts=tuple(firsts),
        n_virtual=max(0, *(-first for first in frame.firsts)),
        positions=frame.positions,
        mask=_intersection(mask, _real_keys(frame, box, firsts)),
        source_columns=source_columns,
    )


def _of_copies(selected: Selection, n_rows: int, axis: str, what: str) -> Selection:
    """Return a selection for a run in which each text has several rows, such as beams.

    Along the batch, a selected text becomes all its rows. A separate index for each text becomes
    the index of all rows of the text. Other selections do not change.

    Args:
        selected: the selection, which counts texts.
        n_rows: the number of rows of the run.
        axis: the axis of the selection.
        what: the name of the axis, for errors.

    Raises:
        SelectionError: if it is unknown which text a row belongs to, or if the index does not fit
            the number of texts.
    """
    if axis != "batch" and not selected.is_by_example:
        return selected
    copies = piece_read().copies
    if not copies:
        raise SelectionError(
            f"{what} must select texts, but it is unknown which text each of the {n_rows} rows of "
            f"this run belongs to; got {selected!r}"
        )
    n_texts = n_rows // copies
    if axis == "batch":
        (texts,) = selected.rows(n_texts, what)
        return Selection([text * copies + n for text in texts for n in range(copies)])
    if len(selected.parts) != n_texts:
        raise SelectionError(
            f"{what} must have one entry for each of {n_texts} texts, or one entry for all; got "
            f"{len(selected.parts)}"
        )
    return Selection([part for part in selected.parts for _ in range(copies)])


def _extent(rows: list[list[int]]) -> slice:
    """Return the smallest slice that contains all places that change in any row.

    If no place changes, the slice is empty.

    Args:
        rows: for each row, a number for each place; -1 means that the place does not change.
    """
    changing: set[int] = set()
    for row in rows:
        changing.update(n for n, column in enumerate(row) if column >= 0)
    return slice(min(changing), max(changing) + 1) if changing else slice(0, 0)


class _Frame(NamedTuple):
    """The axes of an activation, and the sizes of the whole texts to which it belongs.

    Attributes:
        point: the point of the activation.
        axes: the axes of the activation.
        shape: the shape of the activation.
        sizes: the size of each axis. Sizes of `TEXT_AXES` count the whole text so far.
        firsts: the index in the whole text at which the activation starts, along each axis. In a
            generation with a sliding window, the cache has dropped the first keys, so the keys
            start later.
        positions: the index of the axis `pos` or `query`; None without one of these axes.
        batch: the index of the axis of the batch; -1 if there is no batch.
        start: the column at which the piece starts; None for whole texts.
    """

    point: Point
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    firsts: tuple[int, ...]
    positions: int | None
    batch: int
    start: int | None

    @property
    def n_rows(self) -> int:
        """The number of texts; 1 without a batch."""
        return 1 if self.batch == -1 else self.shape[self.batch]


def _frame(activation: Tensor, point: Point, needs_positions: bool) -> _Frame:
    """Return the axes of an activation, and the sizes of its texts.

    Args:
        activation: the value at the point.
        point: the point.
        needs_positions: whether a source needs an axis of positions.

    Raises:
        EditError: if the axes do not fit the point, or a source needs an axis of positions that is
            missing.
    """
    axes = axes_of(point, activation.ndim)
    shape = tuple(activation.shape)
    if len(axes) != len(shape):
        raise EditError(f"{point} must have the axes that it declares; got shape {shape}")
    axis_of_columns = columns_axis(axes)
    positions = None if axis_of_columns is None else axes.index(axis_of_columns)
    if needs_positions and positions is None:
        raise EditError(f"source_pos needs an axis of positions; got {point}")
    start = None if positions is None else piece_read().start
    sizes = shape
    if positions is not None and start is not None:
        end = start + shape[positions]
        named = zip(axes, shape, strict=True)
        sizes = tuple(end if axis in TEXT_AXES else size for axis, size in named)
    batch = axes.index("batch") if "batch" in axes else -1
    return _Frame(
        point=point,
        axes=axes,
        shape=shape,
        sizes=sizes,
        firsts=tuple(full - size for full, size in zip(sizes, shape, strict=True)),
        positions=positions,
        batch=batch,
        start=start,
    )


def _source_column_of_each(
    frame: _Frame, dim: int, where: Where, source: SourceColumns | None
) -> list[list[int]]:
    """Return a number for each place along one axis: the column of the source that replaces the
    place, or -1 if the place does not change.

    Without `source`, the number is 0 at places that change. The result has one list of numbers for
    each example, or a single list for all examples.

    Args:
        frame: the axes of the activation.
        dim: the index of the axis.
        where: the selection along each axis.
        source: the columns of the source; None if a place and its replacement have the same column.
    """
    axis = frame.axes[dim]
    piece = piece_read()
    # If a block computes its positions in pieces, or a generation reads its prompt in chunks, the
    # text has more columns than this piece.
    size = frame.sizes[dim] + (piece.n_later if axis in TEXT_AXES else 0)
    n_rows = 1 if dim == frame.batch else frame.n_rows
    whole = axis not in TEXT_AXES or frame.start is None
    what = f"{axis} at {frame.point.name}"
    selected = where.get(axis, _ALL)
    if axis in TEXT_AXES:
        piece.require_end(selected, what)
    real = _unpadded(piece.of_run.columns_along(axis, n_rows, size), where, size)
    # Check that negative positions are inside the text. This is not possible for keys: a later
    # piece has more keys, and a negative key may be inside them.
    if dim == frame.positions and not whole:
        selected.require_reached(size, what, real)
    rows = selected.rows(size, what, batch=n_rows, real=real, whole=whole)
    if axis in TEXT_AXES and real is not None and not selected.counts_back:
        _require_same_tokens(selected, rows, what, real)
    began = piece.began if axis in TEXT_AXES else None
    if dim == frame.positions and began is not None and selected.counts_back:
        sizes_so_far = range(began, size + 1)
        rows = _so_far(selected, sizes_so_far, what=what, n_rows=n_rows, real=real)
    sources = [[0]] if source is None else source.rows(n_rows)
    piece_columns = range(frame.firsts[dim], frame.sizes[dim])
    return _source_columns(rows, sources, piece_columns=piece_columns, whole=whole)


def _require_same_tokens(selected: Selection, rows: list[list[int]], what: str, real: Rows) -> None:
    """Check that a selection of columns is the same in a generation as in a run of the texts.

    A generation pads prompts of unequal length on the left, so column 5 of a short prompt is not
    its token 5.

    Args:
        selected: the selection, which does not count from the end.
        rows: the selected columns of each text, or of all texts.
        what: the name of the axis in the error.
        real: the real columns of each text.

    Raises:
        SelectionError: if a column of a prompt with padding is selected.
    """
    n_columns = n_moved_columns()
    is_whole = selected.index in (slice(None), slice(0, None))
    if not n_columns or is_whole:
        return
    for columns, row in zip(real, itertools.cycle(rows)):
        if columns[0] > 0 and any(column < n_columns for column in row):
            raise SelectionError(padding_messages.moved_prompts(what, selected))


def _intersection(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the intersection of two masks. None is a mask that selects everything."""
    if first is None:
        return second
    if second is None:
        return first
    return first & second


def _so_far(
    selected: Selection, sizes: range, what: str, n_rows: int, real: Rows | None
) -> list[list[int]]:
    """Return the places that a selection has selected in a generation when they were new.

    Without a KV cache, each run reads the whole text again. In each earlier run, `pos=-1` was
    another column. This run must change all of these columns, because a KV cache would contain
    their changed values. A run with a KV cache computes only the new column, so `pos=-2` selects a
    column of the prompt, and no column of a later run.

    Args:
        selected: the selection, which counts from the end of the text.
        sizes: the sizes that the text has had. The first is the size of the prompt.
        what: the name of the axis in errors.
        n_rows: the number of texts.
        real: the real columns of each text; None if all are real.
    """
    places: list[set[int]] = [set() for _ in range(n_rows)]
    for size in sizes:
        rows = selected.rows(size, what, batch=n_rows, real=_below(real, size), whole=False)
        # Use a single row for all texts.
        for places_of_text, row in zip(places, itertools.cycle(rows)):
            n_old = 0 if size == sizes[0] else size - 1
            places_of_text.update(place for place in row if place >= n_old)
    return [sorted(places_of_text) for places_of_text in places]


def _below(real: Rows | None, size: int) -> Rows | None:
    """Return the real columns below `size` for each text; None if all columns are real."""
    if not real:
        return real
    columns_below = []
    for columns in real:
        columns_below.append([column for column in columns if column < size])
    return columns_below


def _real_keys(
    frame: _Frame, box: Sequence[slice], firsts: Sequence[int]
) -> Bool[Tensor, "..."] | None:
    """Return a mask of the keys in a box that are not padding; None if there is no padding.

    Args:
        frame: the axes of the activation.
        box: the box.
        firsts: the start of the box along each axis, in the whole text.
    """
    mask: Tensor | None = None
    texts = box[frame.batch] if frame.n_rows > 1 else slice(None)
    for dim, axis in enumerate(frame.axes):
        columns = range(firsts[dim], firsts[dim] + box[dim].stop - box[dim].start)
        keys = _real_columns(axis, frame.n_rows, frame.sizes[dim], columns)
        if keys is not None:
            keys = broadcast(keys[texts], dim, frame.batch, len(frame.axes))
            mask = _intersection(mask, keys)
    return mask


def _real_columns(
    axis: str, n_rows: int, size: int, columns: range
) -> Bool[Tensor, "batch column"] | None:
    """Return a mask of the real columns of an axis of keys.

    The result is None for other axes, or if all columns are real. Virtual tokens come before the
    text. They have negative columns and are not padding.

    Args:
        axis: the name of the axis.
        n_rows: the number of texts.
        size: the number of columns of the whole texts so far.
        columns: the columns of the result.
    """
    piece = piece_read()
    if axis != "key" and axis not in piece.others:
        return None
    real = piece.mask_along(axis, n_rows, size)
    if real is None:
        return None
    n_virtual = min(max(-columns.start, 0), len(columns))
    return pad(real[:, columns.start + n_virtual : columns.stop], [n_virtual, 0], value=True)


def _unpadded(real: Rows | None, where: Where, size: int) -> Rows | None:
    """Return the real columns of texts, but all columns of the texts that `where` does not select.

    A selection of columns is then never outside a text that is not changed.
    """
    if real is None or "batch" not in where:
        return real
    (selected,) = where["batch"].rows(len(real), "batch")
    return [columns if n in selected else range(size) for n, columns in enumerate(real)]


def _source_columns(
    rows: Rows, sources: Rows, piece_columns: range, whole: bool
) -> list[list[int]]:
    """Return the source's column for each column of a piece; -1 if the column does not change.

    Args:
        rows: the columns that change: a list for each text, or a single list for all texts.
        sources: the columns of the source in the same order, or one column for all positions: a
            list for each text, or a single list for all texts.
        piece_columns: the columns of the piece.
        whole: whether the piece is the whole text.
    """
    n_rows = max(len(rows), len(sources))
    source_columns = [[-1] * len(piece_columns) for _ in range(n_rows)]
    for n, source_column_of in enumerate(source_columns):
        row = rows[n % len(rows)]
        source = sources[n % len(sources)]
        # In a piece, there may be more columns of the source than positions, because a slice can
        # continue in the next piece.
        if len(source) not in (1, len(row)) and (whole or len(source) < len(row)):
            rule = f"one column, or one column for each of {len(row)} positions"
            raise SelectionError(f"source_pos must have {rule}; got {len(source)}")
        for m, column in enumerate(row):
            if column in piece_columns:
                source_column_of[column - piece_columns.start] = source[m % len(source)]
    return source_columns


_ALL = Selection(slice(None))
