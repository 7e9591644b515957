"""Edit: a change of an activation at a place, as a value that is also a hook."""

import difflib
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks import ActivationCache, EditError, Point
from hooks.shared import (
    POSITION_AXES,
    TEXT_AXES,
    Index,
    Rows,
    Selection,
    number_of_call,
    piece_read,
    real_columns,
    to_device,
    unknown_name,
)
from interp.edits.places import Region, Where, axes_of, first_column, locate
from interp.protocol import is_of_text


@runtime_checkable
class Vectors(Protocol):
    """A vector for each of some points, such as a `Direction`."""

    def vector_at(self, point: Point) -> Shaped[Tensor, " d"]:
        """The vector of a point."""


Values = Shaped[Tensor, "..."] | ActivationCache | Vectors
"""The source of an edit's values: a cache or a direction, looked up by the point's name, or a tensor with the point's axes.
Axes of size 1 broadcast, except `pos`, `query` and `key` of a cache. A tensor may lack the axes that an
integer selects, and then leading ones."""

Change = Callable[[Tensor, Tensor, Region], Tensor]
"""Computes the new value of a region, or one that broadcasts to it.

Its arguments are the value there, the source's value there (meaningless without a source), and the place."""

Axes = tuple[str, ...]

AXES = ("batch", "pos", "query", "key", "head", "kv_head", "d_head", "d_model", "d_mlp", "vocab")
"""The axes that points usually have."""

CALL = "call"
"""What `where` calls the number of a call, for a module that runs many times; no axis of a value."""


@dataclass(frozen=True, eq=False)
class Source:
    """A source of values.

    Attributes:
        values: what was given.
        whole: the axes along which the change needs all of the source, as a mean does.
        columns: those that go to the selected positions, in order, or one for all; None for the same ones.
    """

    values: Values
    whole: Axes = ()
    columns: Selection | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, (Tensor, ActivationCache, Vectors)):
            raise TypeError(
                f"values must be a tensor, a cache or a direction; got {self.values!r} (torch.tensor makes one number a tensor)"
            )

    def mask(self, name: str) -> Tensor | None:
        """A mask of a cached value's real columns, [batch, pos], on the CPU; None if all are, or nobody knows."""
        values = self.values
        mask = values.real(name=name) if isinstance(values, ActivationCache) else None
        return None if mask is None else mask.cpu()

    def real(self, batch: int, n_pos: int, point: Point) -> Rows | None:
        """The real columns among `n_pos` of a source with its own columns, for a batch; None if all are.

        Raises:
            EditError: if places count from the end of a tensor beside padding, as it has no mask.
        """
        if self.columns is None:
            return None
        if not isinstance(self.values, ActivationCache):
            if self.columns.counts_back and piece_read().columns is not None:
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


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of an activation at a place. The functions of `interp.edits` make them.

    It is a hook: `edit(activation, point)` writes into `activation` and returns it.

    Attributes:
        name: the function that made it.
        change: gives the new value of the region.
        arguments: what it was made with, for the repr; numbers stand for positional ones.
        source: where values come from, if anywhere.
        only_at: the last part of the only points where it can act; empty for all.
        where: the place, by axis; see `at`.

    >>> from interp import edits
    >>> edits.zero(head=3).at(pos=slice(5, None))
    edits.zero(head=3, pos=slice(5, None))
    """

    name: str
    change: Change = field(repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    only_at: str = ""
    where: Where = field(default_factory=dict)

    def at(self, **where: Index) -> "Edit":
        """The same edit at a narrower place.

        Raises:
            ValueError: if the edit already selects along one of these axes.
            UnknownNameError: if an axis is a usual one misspelt. Others may be those of your own points.
            TypeError: if an index has no form that a `Selection` takes.
        """
        for axis in where:
            if axis not in (*AXES, CALL) and difflib.get_close_matches(axis, AXES, cutoff=0.8):
                raise unknown_name(axis, AXES, "axis")
        if again := [axis for axis in where if axis in self.where]:
            raise ValueError(f"{self!r} already selects along {again[0]}; got {where[again[0]]!r}")
        more = {axis: Selection(index) for axis, index in where.items()}
        return replace(self, where={**self.where, **more})

    def first(self, point: Point, n_pos: int) -> int:
        """The first column of a text that this edit may change at a point; 0 if it cannot tell.

        Args:
            point: where it acts.
            n_pos: the number of the text's columns.

        Raises:
            UnknownNameError: if the point lacks an axis.
            EditError: if a column is outside the text.
        """
        self._require_fit(point)
        if CALL in self.where or not is_of_text(point.name):
            return 0
        return first_column(self.where, point, n_pos)

    def _require_fit(self, point: Point) -> None:
        if self.only_at and point.name.rpartition(".")[2] != self.only_at:
            raise EditError(f"{self!r} must be at a point named {self.only_at}; got {point}")

    def _is_at_call(self, point: Point) -> bool:
        """Whether the value is of a selected call.

        Raises:
            EditError: if nobody counts the calls, or they are counted from the last one, which is not known before the end.
        """
        selected, number = self.where[CALL], number_of_call.get()
        if number is None or selected.counts_back:
            what = "calls are counted from 0" if number is not None else "nobody counts calls here"
            raise EditError(
                f"call= needs a run of the whole model, and numbers from 0; {what}, at {point}"
            )
        return number in selected.rows(number + 1, CALL, whole=False)[0]

    def __call__(self, activation: Shaped[Tensor, "..."], point: Point) -> Shaped[Tensor, "..."]:
        """`activation` itself, after the change.

        Raises:
            UnknownNameError: if the point lacks an axis, or a cache the point.
            EditError: if an index or a source does not fit.
        """
        self._require_fit(point)
        if CALL in self.where and not self._is_at_call(point):
            return activation
        where = {axis: at for axis, at in self.where.items() if axis != CALL}
        axes = axes_of(point, activation.ndim)
        left = [axis for axis in axes if axis not in where or not where[axis].is_one]
        value, source_axes, columns, n_columns, real = activation, axes, None, 0, None
        if self.source is not None:
            value, source_axes = self.source.at(
                point, dict(zip(axes, activation.shape, strict=True)), left
            )
            n_source = [
                n for n, axis in zip(value.shape, source_axes, strict=True) if axis in POSITION_AXES
            ]
            columns, n_columns = self.source.columns, max(n_source, default=1)
            real = self.source.real(activation.shape[0], n_columns, point)
        place = locate(activation, point, where, columns, n_columns, real)
        if place is None:
            return activation
        region = activation[place.box]
        if self.source is not None:
            value = place.source_values(
                value, source_axes, activation, self.source.whole, self.source.fixed
            )
        new = self.change(region, value, place)
        if place.mask is not None:
            new = torch.where(to_device(place.mask, region.device), new, region)
        activation[place.box] = new
        return activation

    def __repr__(self) -> str:
        columns = None if self.source is None else self.source.columns
        shown = {**self.arguments, "source_pos": columns, **self.where}
        parts = [
            _shown(value) if key.isdigit() else f"{key}={_shown(value)}"
            for key, value in shown.items()
            if value is not None
        ]
        return f"edits.{self.name}({', '.join(parts)})"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, ActivationCache):
        return f"ActivationCache[{len(value)}]"
    if isinstance(value, Selection):
        return repr(value)
    return reprlib.repr(value)
