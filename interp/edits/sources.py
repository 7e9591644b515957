"""Sources of an edit's values: caches, tensors and directions, and the columns that are used.

`edits.replace(cache, pos=-1)` changes the last real token of each text. The new value is
the value of the last real token of each text of the source, whose texts may have other lengths:

1. `ValueSource.at` returns the value of the point in the source, with its axes (`_value`).
2. It also returns the columns of the source (`_selected_columns`): the columns of `source_pos`, or
   the selected positions counted from the end of the source's texts, or the same columns as in the
   edited texts.
3. `places.locate` reorders these columns to the selected positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from hooks import ActivationCache, EditError, Point
from hooks.base import (
    POSITION_AXES,
    TEXT_AXES,
    Index,
    Rows,
    Selection,
    is_rounding,
    padding_messages,
    piece_read,
    real_columns,
    shown,
    taken,
    to_device,
    unknown_name,
)
from interp.edits.places import (
    SourceColumns,
    SourceValue,
    Where,
    axes_of,
    by_row,
    columns_axis,
)
from interp.inputs.cached import text_of
from interp.inputs.copies import digests, numbered

Axes = tuple[str, ...]


@runtime_checkable
class Vectors(Protocol):
    """Vectors of some points, such as a `Direction`."""

    def vector_at(self, point: Point) -> Shaped[Tensor, " d"]:
        """Return the vector of a point."""


Values = Shaped[Tensor, "..."] | ActivationCache | Vectors
"""The source of an edit's values.

The source is a cache or a direction, which are read by the name of the point, or a tensor with the
axes of the point. Axes of size 1 broadcast, except `pos`, `query` and `key` of a cache. A tensor
may lack the axes that an integer selects, and also leading axes.
"""


@dataclass(frozen=True, eq=False)
class ValueSource:
    """The source of the values that an edit writes to a place.

    Attributes:
        values: the values that the user passed.
        whole: the axes along which the change needs the whole source, such as a mean.
        columns: the columns for the selected positions, in order, or one column for all positions.
            None means the same columns or, if the edit counts positions from the end of a text, the
            same positions counted from the end of the source's text.
        attention_mask: True for real tokens of the source, [batch, pos]. A cache contains its mask.
        rows: the rows of the source for a row of the activation: the `same` row, `all` rows (for a
            mean), or a `donor`, another row.
    """

    values: Values
    whole: Axes = ()
    columns: Selection | None = None
    attention_mask: Tensor | None = None
    rows: Literal["same", "all", "donor"] = "same"

    def __post_init__(self) -> None:
        if not isinstance(self.values, (Tensor, ActivationCache, Vectors)):
            texts = [self.values] if isinstance(self.values, str) else self.values
            are_texts = isinstance(texts, list | tuple) and all(
                isinstance(text, str) for text in texts
            )
            hint = "torch.as_tensor converts a number, a list or an array"
            if are_texts:
                hint = "HookedRunner(model).run_with_cache(texts)[1] gives the cache of texts"
            raise TypeError(
                "values must be a tensor, a cache or a direction; "
                f"got {shown(self.values)} ({hint})"
            )

    def mask(self, name: str, axis: str = "pos") -> Tensor | None:
        """Return the mask of a value's real columns, [batch, column], on the CPU.

        The result is None if all columns are real, or if the padding is unknown.

        Args:
            name: the name of the point.
            axis: the axis of the columns.
        """
        values = self.values
        if self.attention_mask is not None:
            return self.attention_mask if axis in POSITION_AXES else None
        mask = values.real(axis, name) if isinstance(values, ActivationCache) else None
        return None if mask is None else mask.cpu()

    def mask_of_columns(self, name: str, axes: Axes) -> Tensor | None:
        """Return the mask of the real columns of a value's texts, [batch, column], on the CPU.

        The result is None if all columns are real, or if the padding is unknown.

        Args:
            name: the name of the point.
            axes: the axes of the value; see `columns_axis`.
        """
        if self.attention_mask is not None:
            return self.attention_mask
        return self.mask(name, columns_axis(axes) or "pos")

    @cached_property
    def _digests(self) -> list[str] | None:
        """The hash of the text of each row; None if the texts are unknown."""
        if not isinstance(self.values, ActivationCache) or self.values.is_part:
            return None
        text = text_of(self.values)
        return None if text is None else digests(text)

    def copies(
        self, value: Shaped[Tensor, "..."], axes: Axes, name: str, first: int = 0
    ) -> list[int] | None:
        """Return the number of each row's text, if some rows are copies of one text.

        A cache does not contain all inputs of its run, such as images. So rows are copies only if
        their values are also equal, up to rounding.

        Args:
            value: the value of the source.
            axes: the axes of the value.
            name: the name of the point.
            first: the first column of the value. Default: 0.

        Returns:
            The numbers; None if there are no copies, or if the texts are unknown.
        """
        if self._digests is None or len({*self._digests}) == len(self._digests):
            return None
        batch = axes.index("batch")
        if len(self._digests) != value.shape[batch]:
            return None
        axis_of_columns = columns_axis(axes)
        positions = None if axis_of_columns is None else axes.index(axis_of_columns)
        rows = [value.select(batch, row) for row in range(len(self._digests))]
        mask = self.mask_of_columns(name, axes)
        # Compare only real columns, because the values of padding may be anything.
        if positions is not None and mask is not None:
            # The rows no longer have the axis of the batch.
            dim = positions - (positions > batch)
            mask_of_columns = mask[:, first : first + value.shape[positions]]
            rows = [
                row.index_select(dim, to_device(is_real.nonzero()[:, 0], row.device))
                for row, is_real in zip(rows, mask_of_columns.expand(len(rows), -1), strict=True)
            ]

        def are_equal(one: int, other: int) -> bool:
            have_same_shape = rows[one].shape == rows[other].shape
            return have_same_shape and bool(is_rounding(rows[one], rows[other]).all())

        return numbered(self._digests, are_equal)

    def has_rows(self, point: Point, where: Where) -> bool:
        """Return whether the source has a value for each of several texts at a point.

        Args:
            point: the point.
            where: the places that the edit selects. A tensor may lack an axis along which one index
                is selected.
        """
        if "batch" in self.whole or "batch" not in point.axes:
            return False
        if isinstance(self.values, ActivationCache):
            text = text_of(self.values)
            return text is None or len(text.tokens) > 1
        if not isinstance(self.values, Tensor):
            return False
        n_axes = sum(1 for axis in point.axes if axis not in where or not where[axis].is_one)
        return self.values.ndim >= n_axes and len(self.values) > 1

    def is_same_everywhere(self, point: Point, where: Where) -> bool:
        """Return whether the source is a vector, with the same values at each position and text.

        Args:
            point: the point of the edit.
            where: the places that the edit selects.
        """
        if self.columns is not None or self.whole or "pos" not in point.axes:
            return False
        if not isinstance(self.values, Tensor):
            return isinstance(self.values, Vectors)
        after = point.axes[point.axes.index("pos") + 1 :]
        n_missing = sum(axis in where and where[axis].is_one for axis in after)
        return self.values.ndim <= len(after) - n_missing

    @property
    def knows_its_padding(self) -> bool:
        """True if the padding of the source is known. The padding of a tensor is unknown."""
        return isinstance(self.values, ActivationCache) or self.attention_mask is not None

    def at(self, activation: Shaped[Tensor, "..."], point: Point, where: Where) -> SourceValue:
        """Return the value of the source at a point, with the columns for the selected positions.

        Args:
            activation: the value that an edit changes.
            point: the point of the activation.
            where: the places that the edit selects.

        Raises:
            UnknownNameError: if a cache lacks the point, or the value lacks an axis of `whole`.
            EditError: if a tensor has too many axes, if it is unclear whether its first axis is the
                batch or the positions, or for the reasons of `_real_rows` and `_selected_columns`.
            SelectionError: if the number of selected positions differs between the texts of a mean.
        """
        point_axes = axes_of(point, activation.ndim)
        sizes = dict(zip(point_axes, activation.shape, strict=True))
        value, axes = self._value(point, sizes, where)
        for axis in self.whole:
            if axis not in axes:
                error = unknown_name(axis, axes, f"axis of the source at {point}")
                rule = "edits.replace writes values that are already averaged"
                error.args = (f"{error.args[0]}; got a value {[*value.shape]} ({rule})",)
                raise error
        pos_axis = columns_axis(axes)
        n_columns = 1 if pos_axis is None else value.shape[axes.index(pos_axis)]
        selected = self.columns
        if pos_axis is not None:
            selected = self._selected_columns(where.get(pos_axis), pos_axis, point)
        # A cached run of one token must not be repeated along the positions of a longer text.
        is_of_texts = isinstance(self.values, ActivationCache)
        fixed = (*TEXT_AXES, "encoder_pos") if is_of_texts else ()
        source = SourceValue(value, axes, whole=self.whole, fixed=fixed)
        if selected is None:
            return source
        if pos_axis is not None and self.rows == "all":
            return self._averaged_columns(source, selected, pos_axis, point)
        real = self._real_rows(len(activation), n_columns, point, axes)
        return replace(source, columns=SourceColumns(selected, n_columns, real))

    def with_all_axes(
        self, activation: Shaped[Tensor, "..."], point: Point, where: Where
    ) -> "ValueSource":
        """Return the source with a tensor that has all axes of a point.

        Args:
            activation: a value at the point.
            point: the point.
            where: the places for which the source is made. The tensor may lack an axis along which
                one index is selected.
        """
        if not isinstance(self.values, Tensor):
            return self
        sizes = dict(zip(axes_of(point, activation.ndim), activation.shape, strict=True))
        value, axes = self._value(point, sizes, where)
        for dim, axis in enumerate(sizes):
            if axis not in axes:
                value = value.unsqueeze(dim)
        return replace(self, values=value)

    def _averaged_columns(
        self, source: SourceValue, selected: Selection, pos_axis: str, point: Point
    ) -> SourceValue:
        """Return the source of a mean with only the selected columns of each text, in the order of
        the selection.

        Args:
            source: the value of the source.
            selected: the positions that the edit selects.
            pos_axis: the axis of the positions.
            point: the point of the edit.
        """
        positions = source.axes.index(pos_axis)
        batch = source.axes.index("batch")
        n_rows = source.value.shape[batch]
        n_columns = source.value.shape[positions]
        mask = self.mask_of_columns(point.name, source.axes)
        fits = mask is not None and mask.shape == (n_rows, n_columns)
        columns = selected.columns(
            size=n_columns,
            what=f"{pos_axis} of the source at {point.name}",
            batch=n_rows,
            real=mask if fits else None,
        )
        return replace(
            source,
            value=taken(source.value, columns, positions, batch),
            columns=SourceColumns(Selection(slice(None)), columns.shape[1], None),
            whole=(*self.whole, pos_axis),
        )

    def selecting(self, selected: Selection, axis: str) -> "ValueSource":
        """Return the source with its columns for the selected positions.

        Use this before the positions of the edit are replaced by columns of the edited text, whose
        length may be another.

        Args:
            selected: the positions that the edit selects. If they count from the end, the columns
                count from the end of the source's own text.
            axis: the axis of the positions.
        """
        is_same = axis in self.whole or self.rows == "donor" or not self.knows_its_padding
        # A mean over texts skips their padding, unless it has columns of its own.
        is_mean = self.rows == "all" and not selected.counts_back
        if is_same or is_mean or self.columns is not None:
            return self
        return replace(self, columns=selected)

    def _selected_columns(
        self, selected: Selection | None, axis: str, point: Point
    ) -> Selection | None:
        """Return the columns of the source for the selected positions; None for the same columns.

        Args:
            selected: the positions that the edit selects; None for all.
            axis: the axis of the positions.
            point: the point of the edit.

        Raises:
            EditError: if the edit writes the mean over all texts, and the selected positions are in
                different columns in different texts, so that there is no common column to average.
        """
        if self.columns is not None:
            return self.columns
        if selected is None or not selected.counts_back or not self.knows_its_padding:
            return None
        if axis in self.whole or self.rows == "donor":
            return None
        if self.rows == "all" and selected.is_by_example:
            if self.mask_of_columns(point.name, (axis,)) is None and not _run_has_padding(axis):
                # Without padding, the columns are the same in all texts.
                return None
            raise EditError(
                f"a mean at {point} must have one {axis} for all texts if {axis} counts from the "
                "end; "
                f"got {selected!r}"
            )
        return selected

    def _real_rows(self, batch: int, n_pos: int, point: Point, axes: Axes) -> Rows | None:
        """Return the columns of real tokens in each text of the source.

        The result is None if the source has no padding, or if its mask is unknown.

        Args:
            batch: the number of rows that the edit changes.
            n_pos: the number of columns of the source.
            point: the point of the edit.
            axes: the axes of the value.

        Raises:
            EditError: if positions are counted from the end of a tensor in a run with padding,
                because the tensor has no mask.
        """
        if not isinstance(self.values, ActivationCache):
            counts_back = self.columns is not None and self.columns.counts_back
            if counts_back and piece_read().columns is not None:
                what = f"source_pos={self.columns!r} at {point}, counted from the end of texts,"
                given = "a tensor without a mask (pass a cache instead)"
                raise EditError(padding_messages.mask_unknown(what, given))
            return None
        mask = self.mask_of_columns(point.name, axes)
        if mask is not None:
            mask = by_row(mask, 0, n_rows=batch)
        fits = mask is not None and mask.shape[1] == n_pos and len(mask) in (1, batch)
        rows = real_columns(mask) if mask is not None and fits else None
        return rows and [*rows] * (batch // len(rows))

    def _value(self, point: Point, sizes: Mapping[str, int], where: Where) -> tuple[Tensor, Axes]:
        """Return the value for a point, and its axes.

        Args:
            point: the point of the edit.
            sizes: the sizes of all axes of the activation.
            where: the places that the edit selects.
        """
        axes = tuple(sizes)
        if isinstance(self.values, ActivationCache):
            return self.values[point.name], self.values.axes(point.name) or axes
        axes_with_size = tuple(axis for axis in axes if axis not in where or not where[axis].is_one)
        if isinstance(self.values, Tensor):
            value = self.values
            # If the edit selects one index along an axis, as in `head=3`, the tensor may lack this
            # axis.
            candidates = axes_with_size if value.ndim < len(axes) else axes
        else:
            value = _unflattened(self.values.vector_at(point), sizes)
            # The vector of a direction always has the last axes of the point, also an axis that the
            # edit selects by one index.
            candidates = axes
        n = value.ndim
        if n > len(axes_with_size) and n != len(axes):
            raise EditError(f"a source at {point} must have its axes; got {list(value.shape)}")
        # A value with fewer axes than the point has the last axes of the point.
        source_axes = candidates[len(candidates) - n :]
        is_batch_missing = "batch" in {*axes_with_size} - {*source_axes}
        lacks_batch = n > 0 and is_batch_missing and source_axes[0] in TEXT_AXES
        if lacks_batch and len(value) == sizes["batch"] == sizes[source_axes[0]] > 1:
            raise EditError(
                f"a source at {point} must have both axes if sizes are equal: values[:, None] for "
                "rows "
                f"of the batch, values[None] for columns along {source_axes[0]}; got "
                f"{list(value.shape)}"
            )
        return value, source_axes


def _run_has_padding(axis: str) -> bool:
    """Return whether the texts of the run have padding along an axis."""
    piece = piece_read()
    if axis not in piece.others:
        return axis in TEXT_AXES and piece.columns is not None
    mask = piece.others[axis]
    return piece.columns_along(axis, len(mask), mask.shape[1]) is not None


def _unflattened(vector: Shaped[Tensor, "..."], sizes: Mapping[str, int]) -> Shaped[Tensor, "..."]:
    """Return a flat vector with the axes of its point after `pos`, such as [head, d_head].

    A vector of another length is returned unchanged.
    """
    *_, last_axis = sizes
    if vector.ndim != 1 or len(vector) == sizes[last_axis]:
        return vector
    inner_sizes = [size for axis, size in sizes.items() if axis not in ("batch", *TEXT_AXES)]
    return vector.unflatten(0, inner_sizes) if len(vector) == math.prod(inner_sizes) else vector


def source_of(values: Values, columns: Index | None) -> ValueSource:
    """Return a source of values for an edit.

    Args:
        values: the values.
        columns: the columns for the selected positions; see `ValueSource`.
    """
    return ValueSource(values, columns=None if columns is None else Selection(columns))
