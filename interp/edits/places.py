"""Places: which part of an activation an edit changes, and which part of its source goes there.

`edits.replace(source, head=1, pos=-1)` at `attn.z`, [2, 5, head, d_head], of two texts, the first with 2 columns of padding on
the right, so that its last token is in column 2 and that of the second in column 4:

1. `where` is `{"head": 1, "pos": -1}`. Along `pos` the selection is read on the real columns: `[[2], [4]]`.
2. `box` bounds what is selected by a slice of each axis: all texts, columns 2 to 4, head 1, all of `d_head`.
3. The texts differ inside it, so a `mask` says which columns of the box change: `[[True, False, False], [False, False, True]]`.
4. With `source_pos`, `source_columns` has the source's column for each column of the box.
5. With `pos=1`, in a generation whose activation is [2, 1, head, d_head] and starts at column 5, there is nothing to change:
   `locate` gives None.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor
from torch.nn.functional import pad

from hooks import EditError, Point, SelectionError, start_of_piece
from hooks.base import TEXT_AXES, Rows, Selection, broadcast, piece_read, require_axes, to_device

Where = Mapping[str, Selection]
"""The selection along each axis."""


def axes_of(point: Point, ndim: int) -> tuple[str, ...]:
    """The axes of a value. Where a point declares none, the first is `batch` and the others have numbers."""
    return point.axes or ("batch", *map(str, range(1, ndim)))[:ndim]


def first_column(where: Where, point: Point, n_pos: int) -> int:
    """The first of a text's `n_pos` columns that is selected at a point; 0 if that is not known.

    Raises:
        UnknownNameError: if the point lacks an axis.
        SelectionError: if a column is outside the text.
    """
    require_axes(where, point.axes, point.name)
    real = _unpadded(piece_read().columns, where, n_pos)
    firsts = {
        axis: min(itertools.chain(*where[axis].rows(n_pos, f"{axis} at {point.name}", real=real)))
        for axis in TEXT_AXES
        if axis in where
    }
    return firsts.get("pos", firsts.get("query", 0))


@dataclass(frozen=True)
class Region:
    """The part of one activation that an edit changes.

    Attributes:
        point: where the activation is.
        axes: its axes; numbers if the point declares none.
        sizes: the size of each axis; those of `TEXT_AXES` in the whole text so far.
        box: a slice of the activation along each axis.
        firsts: where the box begins along each axis; along `TEXT_AXES` in the whole text.
        positions: which axis is the one of this call's positions, if any.
        mask: what changes inside the box: boolean, broadcast over it. None: all of it. Padded keys
            never change.
        source_columns: the source's column for each position of the box, with as many axes as the box.
            None: the same columns.
    """

    point: Point
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    box: tuple[slice, ...]
    firsts: tuple[int, ...]
    positions: int | None
    mask: Tensor | None
    source_columns: Tensor | None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sizes of the box."""
        return tuple(part.stop - part.start for part in self.box)

    def source_values(
        self,
        value: Shaped[Tensor, "..."],
        axes: tuple[str, ...],
        like: Tensor,
        whole: tuple[str, ...] = (),
        fixed: tuple[str, ...] = (),
        what: str = "source",
    ) -> Shaped[Tensor, "..."]:
        """The part of a source that goes into the box: all axes of the box, where some have size 1.

        Args:
            value: the source, of whole texts.
            axes: its axes, some of the box's in that order. The others broadcast, as sizes of 1 do.
            like: gives the device.
            whole: the axes along which all of it is taken, whatever its size.
            fixed: the axes along which a size of 1 does not broadcast.
            what: the source, for errors.

        Raises:
            EditError: if a size does not fit.
        """
        if [axis for axis in self.axes if axis in axes] != list(axes):
            raise EditError(f"the {what} at {self.point} must have its axes; got {' '.join(axes)}")
        for at, axis in enumerate(self.axes):
            if axis not in axes:
                value = value.unsqueeze(at)
                continue
            size, full, first = value.shape[at], self.sizes[at], self.firsts[at]
            if axis in whole or (size == 1 and axis not in fixed):
                continue
            if at == self.positions and self.source_columns is not None:
                value = self.in_order(value)
                continue
            grows = axis in TEXT_AXES and start_of_piece() is not None
            if size != full and not (grows and size >= first + self.lengths[at]):
                least = f"at least {first + self.lengths[at]} columns (or pos select fewer)"
                rule = least if grows else f"size {full}"
                is_mean = axis in TEXT_AXES and "batch" in whole
                hint = f" (edits.mean has over={(*whole, axis)})" if is_mean else ""
                if axis in TEXT_AXES and not is_mean:
                    hint = " (of a text of another length: pos= and source_pos= say which columns)"
                raise EditError(
                    f"the {what} at {self.point} must have {rule} along {axis}; got {size}{hint}"
                )
            value = value.narrow(at, first, self.lengths[at])
        return to_device(value, like.device)

    def in_order(self, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """Return the columns of a source in the order of the box's positions."""
        if self.source_columns is None or self.positions is None:
            return value
        columns = to_device(self.source_columns, value.device)
        return torch.take_along_dim(value, columns, self.positions)


def locate(
    activation: Shaped[Tensor, "..."],
    point: Point,
    where: Where,
    source_pos: Selection | None = None,
    n_source: int = 0,
    source_real: Rows | None = None,
) -> Region | None:
    """The part of an activation that `where` selects; None if this piece of the text has nothing of it.

    Args:
        activation: the value at `point`.
        point: its axes say what the names in `where` mean.
        where: what is selected.
        source_pos: which of the source's `n_source` columns go to the selected positions, in order, or
            one for all; None for the same columns.
        source_real: the source's real columns, if it has padding.

    Raises:
        UnknownNameError: if the point lacks an axis.
        SelectionError: if an index is outside its axis, outside the text of a run that is no piece, or
            before the start of every text.
        EditError: if the axes do not fit.
    """
    require_axes(where, point.axes, point.name)
    axes, held, piece = axes_of(point, activation.ndim), tuple(activation.shape), piece_read()
    along = _axis_of_positions(point, axes, held, source_pos)
    start = None if along is None else piece.start
    sizes = _sizes(axes, held, along, start)
    # Keys that a window has dropped come before the first.
    firsts = [full - n for full, n in zip(sizes, held, strict=True)]
    batch = axes.index("batch") if "batch" in axes else -1
    box, mask, taken = [slice(0, n) for n in held], None, None
    # The batch first: what is selected in each example is then that of the rows that are left.
    for at in sorted(range(len(axes)), key=lambda n: n != batch):
        axis, source = axes[at], source_pos if at == along else None
        if axis not in where and source is None:
            continue
        n_rows = held[batch] if batch not in (-1, at) else 1
        whole = axis not in TEXT_AXES or start is None
        real = _unpadded(_real_along(axis, n_rows, sizes[at]), where, sizes[at])
        selected, what = where.get(axis, _ALL), f"{axis} at {point.name}"
        if at == along and not whole:  # a later piece has more keys
            selected.require_reached(sizes[at], what, real)
        rows = selected.rows(sizes[at], what, n_rows, real, whole)
        if at == along and piece.began is not None and selected.counts_back:
            rows = _so_far(selected, range(piece.began, sizes[at] + 1), what, n_rows, real)
        sources = source.rows(n_source, "source_pos", n_rows, source_real) if source else [[0]]
        chosen = _source_columns(rows, sources, range(firsts[at], sizes[at]), whole)
        chosen = chosen[box[batch]] if len(chosen) > 1 else chosen
        inside = [n for n in range(held[at]) if any(row[n] >= 0 for row in chosen)]
        if not inside:
            return None
        box[at] = slice(inside[0], inside[-1] + 1)
        firsts[at] += inside[0]
        if len(chosen) > 1 or source is not None or len(inside) < inside[-1] + 1 - inside[0]:
            columns = broadcast(
                torch.tensor([row[box[at]] for row in chosen]), at, batch, len(axes)
            )
            taken = taken if source is None else columns.clamp(min=0)
            mask = columns >= 0 if mask is None else mask & (columns >= 0)
    n_rows = held[batch] if batch != -1 else 1
    texts = box[batch] if n_rows > 1 else slice(None)
    for at, axis in enumerate(axes):
        places = range(firsts[at], firsts[at] + box[at].stop - box[at].start)
        keys = _real_keys(axis, n_rows, sizes[at], places)
        if keys is not None:
            keys = broadcast(keys[texts], at, batch, len(axes))
            mask = keys if mask is None else mask & keys
    return Region(point, axes, tuple(sizes), tuple(box), tuple(firsts), along, mask, taken)


def _so_far(
    selected: Selection, sizes: range, what: str, n_rows: int, real: Rows | None
) -> list[list[int]]:
    """The places that were selected of a text at any of its sizes so far, as with a cache of keys."""
    places: list[set[int]] = [set() for _ in range(n_rows)]
    for size in sizes:
        inside = real and [[column for column in columns if column < size] for columns in real]
        rows = selected.rows(size, what, n_rows, inside, whole=False)
        for row, more in zip(places, itertools.cycle(rows)):  # one row may be for all
            row.update(more)
    return [sorted(row) for row in places]


def _axis_of_positions(
    point: Point, axes: Sequence[str], held: Sequence[int], source_pos: Selection | None
) -> int | None:
    if len(axes) != len(held):
        raise EditError(f"{point} must have these axes; got shape {held}")
    along = next((at for at, axis in enumerate(axes) if axis in ("pos", "query")), None)
    if source_pos is not None and along is None:
        raise EditError(f"source_pos needs an axis of positions; got {point}")
    return along


def _sizes(
    axes: Sequence[str], held: Sequence[int], along: int | None, start: int | None
) -> list[int]:
    """The size of each axis; those of `TEXT_AXES` in the whole text so far."""
    if along is None or start is None:
        return list(held)
    end = start + held[along]
    return [end if axis in TEXT_AXES else n for axis, n in zip(axes, held, strict=True)]


def _real_keys(
    axis: str, n_rows: int, size: int, columns: range
) -> Bool[Tensor, "batch column"] | None:
    """Which columns of an axis of keys are not padding; None for other axes, or if all are.

    Virtual tokens, which come before the text, have negative columns, and are not padding.
    """
    piece = piece_read()
    if axis != "key" and axis not in piece.others:
        return None
    real = piece.mask_along(axis, n_rows, size)
    if real is None:
        return None
    n_virtual = min(max(-columns.start, 0), len(columns))
    return pad(real[:, columns.start + n_virtual : columns.stop], [n_virtual, 0], value=True)


def _real_along(axis: str, n_rows: int, size: int) -> Rows | None:
    """The real columns of each text along an axis of a value; None if there is no padding."""
    piece = piece_read()
    is_counted = axis in TEXT_AXES or axis in piece.others
    return piece.columns_along(axis, n_rows, size) if is_counted else None


def _unpadded(real: Rows | None, where: Where, size: int) -> Rows | None:
    """The real columns of texts. Those that `where` leaves out may have any."""
    if real is None or "batch" not in where:
        return real
    (rows,) = where["batch"].rows(len(real), "batch")
    return [columns if n in rows else range(size) for n, columns in enumerate(real)]


def _source_columns(rows: Rows, sources: Rows, held: range, whole: bool) -> list[list[int]]:
    """The source's column for each place of an axis that an activation holds; -1 where nothing changes.

    One row for all examples, or one for each.
    """
    chosen = [[-1] * len(held) for _ in range(max(len(rows), len(sources)))]
    for copy, its in enumerate(chosen):
        row, source = rows[copy % len(rows)], sources[copy % len(sources)]
        # A slice may go on in the next piece.
        if len(source) not in (1, len(row)) and (whole or len(source) < len(row)):
            rule = f"one column, or one for each of {len(row)} positions"
            raise SelectionError(f"source_pos must have {rule}; got {len(source)}")
        for m, column in enumerate(row):
            if column in held:
                its[column - held.start] = source[m % len(source)]
    return chosen


_ALL = Selection(slice(None))
