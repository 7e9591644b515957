"""Edit: a change of an activation at a place, as a value that is also a hook."""

import difflib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks import ActivationCache, EditError, Point
from hooks.base import Index, Selection, number_of_call, to_device, unknown_name
from interp.edits.padding import require_real_source
from interp.edits.places import Region, Where, first_column, locate
from interp.edits.sources import ValueSource
from interp.protocol import is_of_text

Change = Callable[[Tensor, Tensor, Region], Tensor]
"""Computes the new value of a region, or one that broadcasts to it.

Its arguments are the value there, the source's value there (meaningless without a source), and the
place.
"""

AXES = ("batch", "pos", "query", "key", "head", "kv_head", "d_head", "d_model", "d_mlp", "vocab")
"""The axes that points usually have."""

CALL = "call"
"""What `where` calls the number of a call, for a module that runs many times; no axis of a value.
"""


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of an activation at a place. The functions of `interp.edits` make them.

    It is a hook: `edit(activation, point)` writes into `activation` and returns it.

    Attributes:
        name: the function that made it.
        change: gives the new value of the region.
        arguments: what it was made with, for the repr; numbers stand for positional ones.
        source: the source of values; None if the change needs none.
        only_at: the last part of the only points where it can act; empty for all.
        where: the place, by axis; see `at`.

    >>> from interp import edits
    >>> edits.zero(head=3).at(pos=slice(5, None))
    edits.zero(head=3, pos=slice(5, None))
    """

    name: str
    change: Change = field(repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: ValueSource | None = None
    only_at: str = ""
    where: Where = field(default_factory=dict)

    def at(self, /, **where: Index) -> "Edit":
        """Return the same edit at a narrower place.

        Raises:
            ValueError: if the edit already selects along one of these axes.
            UnknownNameError: if an axis looks like a misspelt standard axis. Other names may be
                axes of your own points.
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
        """Return the first column of a text that this edit may change at a point; 0 if unknown.

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
            EditError: if nobody counts the calls, or they are counted from the last one, which is
                not known before the end.
        """
        selected, number = self.where[CALL], number_of_call.get()
        if number is None or selected.counts_back:
            what = "calls are counted from 0" if number is not None else "nobody counts calls here"
            raise EditError(
                f"call= needs a run of the whole model, and numbers from 0; {what}, at {point}"
            )
        return number in selected.rows(number + 1, CALL, whole=False)[0]

    def __call__(self, activation: Shaped[Tensor, "..."], point: Point) -> Shaped[Tensor, "..."]:
        """Change the activation, and return it.

        Raises:
            UnknownNameError: if the point lacks an axis, or a cache the point.
            EditError: if an index or a source does not fit.
        """
        self._require_fit(point)
        if CALL in self.where and not self._is_at_call(point):
            return activation
        where = {axis: at for axis, at in self.where.items() if axis != CALL}
        source = None if self.source is None else self.source.at(activation, point, where)
        columns = None if source is None else source.columns
        place = locate(activation, point, where, columns)
        if place is None:
            return activation
        region = activation[place.box]
        value = activation
        if self.source is not None and source is not None:
            require_real_source(self.source, place, where)
            value = place.source_values(source, activation.device)
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
