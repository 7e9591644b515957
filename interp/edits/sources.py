"""Sources of an edit's values: caches, tensors and directions, and which of their columns an edit takes.

`edits.replace(cache, pos=-1)` changes the last real token of each text. The value comes from the last
real token of each text of the source, whose texts may have other lengths:

1. `Source.at` gives the value of the point in the source, with its axes.
2. `Source.columns_at` says which of its columns are taken: the columns of `source_pos`, or the selected
   positions counted from the end of the source's own texts, or the same columns as in the edited texts.
3. `places.locate` puts them in the order of the selected positions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

from hooks import ActivationCache, EditError, Point
from hooks.base import (
    TEXT_AXES,
    Index,
    Rows,
    Selection,
    piece_read,
    real_columns,
    shown,
    taken,
    to_device,
    unknown_name,
)
from hooks.shared import POSITION_AXES
from interp.edits.places import Where
from interp.inputs.copies import digests, numbered
from interp.inputs.texts import text_of
from interp.numbers.precision import is_rounding

Axes = tuple[str, ...]


@runtime_checkable
class Vectors(Protocol):
    """A vector for each of some points, such as a `Direction`."""

    def vector_at(self, point: Point) -> Shaped[Tensor, " d"]:
        """The vector of a point."""


Values = Shaped[Tensor, "..."] | ActivationCache | Vectors
"""The source of an edit's values: a cache or a direction, looked up by the point's name, or a tensor with the point's axes.
Axes of size 1 broadcast, except `pos`, `query` and `key` of a cache. A tensor may lack the axes that an
integer selects, and then leading ones."""


@dataclass(frozen=True, eq=False)
class SourceColumns:
    """The columns of a source that an edit takes.

    Attributes:
        value: the value of the source; of a mean from the end of texts, the selected columns alone.
        selected: the columns of `value` that go to the selected positions, in order, or one column
            for all; None for the same columns.
        n_columns: the number of columns of `value`.
        real: the real columns of each text; None if all are real, or `selected` is None.
        whole: the axes along which the change needs all of `value`.
    """

    value: Shaped[Tensor, "..."]
    selected: Selection | None
    n_columns: int
    real: Rows | None
    whole: Axes


@dataclass(frozen=True, eq=False)
class Source:
    """A source of values.

    Attributes:
        values: the values, as the user gave them.
        whole: the axes along which the change needs all of the source, as a mean does.
        columns: the columns that go to the selected positions, in order, or one column for all.
            None: the same columns or, where the edit counts positions from the end of a text, the
            same positions counted from the end of the source's own text.
        attention_mask: True at real tokens of the source, [batch, pos]. A cache knows its own.
        rows: the rows of the source that a row of the activation takes values from: the `same` row,
            `all` rows, as a mean does, or a `donor`, another row.
    """

    values: Values
    whole: Axes = ()
    columns: Selection | None = None
    attention_mask: Tensor | None = None
    rows: Literal["same", "all", "donor"] = "same"

    def __post_init__(self) -> None:
        if not isinstance(self.values, (Tensor, ActivationCache, Vectors)):
            raise TypeError(
                f"values must be a tensor, a cache or a direction; got {shown(self.values)} (torch.as_tensor makes a tensor of a number, a list or an array)"
            )

    def mask(self, name: str, axis: str = "pos") -> Tensor | None:
        """Return the mask of a value's real columns, [batch, column], on the CPU.

        None if all are real, or if that is not known.
        """
        values = self.values
        if self.attention_mask is not None:
            return self.attention_mask if axis in POSITION_AXES else None
        mask = values.real(axis, name) if isinstance(values, ActivationCache) else None
        return None if mask is None else mask.cpu()

    @cached_property
    def _digests(self) -> list[str] | None:
        """A hash of the text of each row; None if the texts are not known."""
        if not isinstance(self.values, ActivationCache) or self.values.is_part:
            return None
        text = text_of(self.values)
        return None if text is None else digests(text)

    def copies(self, value: Shaped[Tensor, "..."], axes: Axes, name: str) -> list[int] | None:
        """Return the number of each row's text, where some are copies of one text.

        A cache does not keep all inputs of its run, such as images. So rows are copies only if their
        values agree too.

        Args:
            value: the value of the source.
            axes: its axes.
            name: the point.

        Returns:
            The numbers; None if there are no copies, or if the texts are not known.
        """
        if self._digests is None or len({*self._digests}) == len(self._digests):
            return None
        batch = axes.index("batch")
        if len(self._digests) != value.shape[batch]:
            return None
        along = next((at for at, axis in enumerate(axes) if axis in POSITION_AXES), None)
        rows = [value.select(batch, row) for row in range(len(self._digests))]
        mask = self.mask(name)
        if along is not None and mask is not None:  # padding may hold anything
            at = along - (along > batch)
            rows = [
                part.index_select(at, to_device(real.nonzero()[:, 0], part.device))
                for part, real in zip(rows, mask.expand(len(rows), -1), strict=True)
            ]

        def agree(one: int, other: int) -> bool:
            return rows[one].shape == rows[other].shape and bool(
                is_rounding(rows[one], rows[other]).all()
            )

        return numbered(self._digests, agree)

    @property
    def knows_its_padding(self) -> bool:
        """Whether the source knows which of its columns are padding. A tensor does not."""
        return isinstance(self.values, ActivationCache) or self.attention_mask is not None

    def columns_at(
        self,
        *,
        point: Point,
        value: Shaped[Tensor, "..."],
        axes: Axes,
        where: Where,
        batch: int,
    ) -> "SourceColumns":
        """Return the value of the source, and which of its columns go to the selected positions.

        Args:
            point: where the edit acts.
            value: the value of the source there.
            axes: the axes of that value.
            where: the places that the edit selects.
            batch: the number of texts that the edit changes.

        Raises:
            EditError: see `real` and `columns_for`.
            SelectionError: if texts of a mean have other numbers of the selected positions.
        """
        along = next((axis for axis in axes if axis in POSITION_AXES), None)
        if along is None:
            real = None if self.columns is None else self.real(batch, 1, point)
            return SourceColumns(value, self.columns, 1, real, self.whole)
        at = axes.index(along)
        n_columns = value.shape[at]
        selected = self.columns_for(where.get(along), along, point)
        if self.rows != "all" or selected is None:
            real = None if selected is None else self.real(batch, n_columns, point)
            return SourceColumns(value, selected, n_columns, real, self.whole)
        # A mean has texts of its own. Take its positions from each, in the order of the selection.
        rows = axes.index("batch")
        mask = self.mask(point.name)
        fits = mask is not None and mask.shape == (value.shape[rows], n_columns)
        columns = selected.columns(
            size=n_columns,
            what=f"{along} of the source at {point.name}",
            batch=value.shape[rows],
            real=mask if fits else None,
        )
        return SourceColumns(
            value=taken(value, columns, at, rows),
            selected=Selection(slice(None)),
            n_columns=columns.shape[1],
            real=None,
            whole=(*self.whole, along),
        )

    def columns_for(self, selected: Selection | None, axis: str, point: Point) -> Selection | None:
        """Return the columns of the source that go to the positions that an edit selects.

        Args:
            selected: the positions that the edit selects; None for all.
            axis: their axis.
            point: where the edit acts.

        Raises:
            EditError: if a mean is asked for other positions of each text.
        """
        if self.columns is not None:
            return self.columns
        if selected is None or not selected.counts_back or not self.knows_its_padding:
            return None
        if axis in self.whole or self.rows == "donor":
            return None
        if self.rows == "all" and selected.is_by_example:
            if self.mask(point.name) is None and piece_read().columns is None:
                return None  # without padding the columns are the same in all texts
            raise EditError(
                f"a mean at {point} must have one {axis} for all texts if {axis} counts from the end; "
                f"got {selected!r}"
            )
        return selected

    def real(self, batch: int, n_pos: int, point: Point) -> Rows | None:
        """The real columns among `n_pos` of a source with its own columns, for a batch; None if all are.

        Raises:
            EditError: if places count from the end of a tensor beside padding, as it has no mask.
        """
        if not isinstance(self.values, ActivationCache):
            counts_back = self.columns is not None and self.columns.counts_back
            if counts_back and piece_read().columns is not None:
                raise EditError(
                    f"source_pos must not count from the end of a tensor beside padding, as its padding is not known; "
                    f"got {self.columns!r} at {point} (a cache knows its own)"
                )
            return None
        mask = self.mask(point.name)
        fits = mask is not None and mask.shape[1] == n_pos and len(mask) in (1, batch)
        rows = real_columns(mask) if mask is not None and fits else None
        return rows and [*rows] * (batch // len(rows))

    def at(self, point: Point, sizes: Mapping[str, int], left: list[str]) -> tuple[Tensor, Axes]:
        """The value for a point, and its axes.

        Args:
            point: where it goes.
            sizes: the sizes of all axes there.
            left: those that no integer selects.

        Raises:
            UnknownNameError: if a cache lacks the point, or the value an axis of `whole`.
            EditError: if a tensor has too many axes, or its first may be the batch or the positions.
        """
        axes = tuple(sizes)
        if not isinstance(self.values, ActivationCache):
            held = self.values
            value = held if isinstance(held, Tensor) else held.vector_at(point)
            if held is not value and value.ndim == 1 and len(value) != sizes[axes[-1]]:
                # A direction has the axes after `pos` in a row.
                inner = [sizes[axis] for axis in axes if axis not in ("batch", *TEXT_AXES)]
                value = value.unflatten(0, inner) if len(value) == math.prod(inner) else value
            n = value.ndim
            if n > len(left) and n != len(axes):
                raise EditError(f"a source at {point} must have its axes; got {list(value.shape)}")
            # A vector has all of the point's last axes; a tensor may lack those that an integer selects.
            kept = left if held is value and n < len(axes) else axes
            source_axes = tuple(kept[len(kept) - n :])
            lacks_batch = (
                n > 0 and "batch" in {*left} - {*source_axes} and source_axes[0] in TEXT_AXES
            )
            if lacks_batch and len(value) == sizes["batch"] == sizes[source_axes[0]] > 1:
                raise EditError(
                    f"a source at {point} must say whether it has rows or columns: values[:, None] for rows "
                    f"of the batch, values[None] for columns along {source_axes[0]}; got {list(value.shape)}"
                )
        else:
            value = self.values[point.name]
            source_axes = self.values.axes(point.name) or axes
        for axis in self.whole:
            if axis not in source_axes:
                raise unknown_name(axis, source_axes, f"axis of the source at {point}")
        return value, source_axes

    @property
    def fixed(self) -> Axes:
        """The axes along which a size of 1 does not broadcast: a cached run has columns of its own."""
        return TEXT_AXES if isinstance(self.values, ActivationCache) else ()


def source_of(values: Values, columns: Index | None) -> Source:
    """A source, and its columns that go to the selected positions."""
    return Source(values, columns=None if columns is None else Selection(columns))
