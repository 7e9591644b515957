"""Edit: a description of a change of an activation at a place, which is also a hook."""

import difflib
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from hooks import ActivationCache, EditError, Point
from hooks.base import (
    Index,
    Selection,
    argument_hint,
    number_of_call,
    piece_read,
    reading,
    to_device,
    unknown_name,
)
from interp.edits.padding import require_real_source
from interp.edits.places import Region, Where, axes_of, first_column, locate_part, selects_end
from interp.edits.sources import ValueSource, Vectors
from interp.inputs.parts import require_whole
from interp.protocol import is_of_text

Change = Callable[[Tensor, Tensor, Region], Tensor]
"""A function that returns the new value of a region, or a value that broadcasts to the region.

The arguments are the value of the region, the value of the source (meaningless without a source),
and the region.
"""

AXES = ("batch", "pos", "query", "key", "head", "kv_head", "d_head", "d_model", "d_mlp", "vocab")
"""The axes that points usually have."""

CALL = "call"
"""The key in `where` for the number of a call, for a module that runs several times.

The key is not an axis of a value.
"""


SAME_EVERYWHERE = ("zero", "scale", "add", "replace", "project_out")
"""The edits whose change depends only on the old values and the source, not on the place."""


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of some values of an activation. The functions of `interp.edits` make edits.

    An edit is a hook: `edit(activation, point)` changes `activation` in place and returns it.

    Axis names select the part that changes: `edits.zero(head=3, pos=slice(4, None))`. An index is
    an integer, a slice, a list, a mask, or all but some indices, `head=all_but(7, 9)`. With several
    axes, the edit changes only the places that every axis selects. `pos`, `query` and `key` count
    columns from the start of the text, including padding. Negative numbers count from the end of
    the text read so far. A list or tensor [n] selects the same columns in every example, even if n
    is the batch size; [batch, n] selects different columns in each example. Columns outside a text
    raise an error. A run may read only a piece of a text, as in generation (see
    `hooks.position_offset`); columns outside the piece then change nothing. Edits never write to
    padded keys, and never copy padding of the source to a real token.

    Attributes:
        name: the name of the function that made the edit.
        change: a function that returns the new values of the selected part of the activation (the
            region), from the old values, the values of the source, and the `Region`.
        arguments: the arguments of that function, for the repr. Keys that are numbers are
            positional arguments.
        source: the source of values; None if the change needs no source.
        only_at: the last part of the names of the points where the edit is allowed; empty for all
            points.
        where: the selected indices by axis, such as `{"head": 3, "pos": -1}`: the place.
        n_texts: the number of texts, if a run has several rows for each text, such as one row for
            each answer: first a row of each text, then a second row of each text. The edit then
            makes the same change in all rows of a text. None if each row is a text.

    >>> from interp import edits
    >>> edit = edits.scale(0.5, pos=-1)
    >>> edit(torch.ones(1, 3), Point("any", ("batch", "pos")))
    tensor([[1.0000, 1.0000, 0.5000]])
    """

    name: str
    change: Change = field(repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: ValueSource | None = None
    only_at: str = ""
    where: Where = field(default_factory=dict)
    n_texts: int | None = None

    def at(self, /, **where: Index) -> "Edit":
        """Return the same edit, which also selects along other axes and so changes fewer values.

        Args:
            where: the index along each axis: an integer, a slice, a list, a mask or `all_but(...)`.

        Raises:
            ValueError: if the edit already selects along one of these axes.
            UnknownNameError: if an axis looks like a misspelt standard axis. Other names may be
                axes of points that you define.
            TypeError: if an index is not accepted by `Selection`, or if the axis is a usual name
                for an argument of the edit, such as `strength` for `scale`.

        >>> from interp import edits
        >>> edits.zero(head=3).at(pos=-1)
        edits.zero(head=3, pos=-1)
        """
        for axis in where:
            if axis in (*AXES, CALL):
                continue
            if advice := argument_hint(f"{self.name}.{axis}"):
                raise TypeError(f"edits.{self.name} takes no argument {axis}=; {advice}")
            if difflib.get_close_matches(axis, AXES, cutoff=0.8):
                raise unknown_name(axis, AXES, "axis")
        for axis in where:
            if axis in self.where:
                raise ValueError(f"{self!r} already selects along {axis}; got {where[axis]!r}")
        selections = {axis: Selection(index) for axis, index in where.items()}
        return replace(self, where={**self.where, **selections})

    def first(self, point: Point, n_pos: int) -> int:
        """Return the first column of a text that this edit may change at a point; 0 if unknown.

        Args:
            point: the point of the edit.
            n_pos: the number of columns of the text.

        Raises:
            UnknownNameError: if the point lacks an axis.
            EditError: if a column is outside the text.
        """
        self._require_fit(point)
        if CALL in self.where or not is_of_text(point.name):
            return 0
        if self.n_texts is None:
            return first_column(self.where, point, n_pos)
        with reading(piece_read().of_rows(0, self.n_texts)):
            return first_column(self.where, point, n_pos)

    def acts_at_end(self, point: Point, n_pos: int) -> bool | None:
        """Return whether the edit changes the last of `n_pos` columns of the texts.

        None if the change depends on the column, or differs between texts. A compiled graph, which
        is the same for all columns, cannot make it then.

        Args:
            point: the point of the edit.
            n_pos: the number of columns of the texts so far.
        """
        if CALL in self.where:
            return None
        acts = selects_end(self.where, point, n_pos)
        is_same = self.source is None or self.source.is_same_everywhere(point, self.where)
        return acts if acts is False or (is_same and self.name in SAME_EVERYWHERE) else None

    def differs_by_text(self, point: Point) -> bool:
        """Return whether the edit depends on the number of a text in its batch.

        For example, it selects texts, or writes another value into each text.

        Args:
            point: the point of the edit.
        """
        selects_texts = "batch" in self.where
        has_lists = any(selection.is_by_example for selection in self.where.values())
        has_rows = self.source is not None and self.source.has_rows(point, self.where)
        return selects_texts or has_lists or has_rows

    def at_one_position(self) -> "Edit":
        """Return the edit for a value of one position, which the edit selects."""
        where = dict(self.where)
        if "pos" in where:
            where["pos"] = Selection(0 if where["pos"].is_one else slice(None))
        return replace(self, where=where)

    def _require_fit(self, point: Point) -> None:
        """Check that the edit is allowed at a point, and in a part of many examples."""
        if self.only_at and point.name.rpartition(".")[2] != self.only_at:
            raise EditError(f"{self!r} needs a point named {self.only_at}; got {point}")
        if "batch" in self.where:
            require_whole("edits must not select examples", "batch=")

    def _is_at_call(self, point: Point) -> bool:
        """Return True if the edit selects this call of the module.

        A run may call a module several times. `call=` selects some of these calls, counted from 0.

        Raises:
            EditError: if the run does not count calls, or a number is negative: the last call is
                unknown before the end of the run.
        """
        selected = self.where[CALL]
        number = number_of_call.get()
        if number is None or selected.counts_back:
            got = "negative numbers" if number is not None else "a run that does not count calls"
            raise EditError(
                f"call= needs a run of the whole model, and numbers from 0; got {got} at {point}"
            )
        return number in selected.rows(number + 1, CALL, whole=False)[0]

    def __call__(self, activation: Shaped[Tensor, "..."], point: Point) -> Shaped[Tensor, "..."]:
        """Change the activation in place and return it.

        Raises:
            UnknownNameError: if the point lacks an axis, or a cache lacks the point.
            EditError: if an index or a source does not fit.
        """
        # A compiler traces this case, but not the iterator below.
        if self.n_texts is None:
            self._write(activation, point)
            return activation
        for rows in self._rows_of_texts(activation, point):
            self._write(rows, point)
        return activation

    def _write(self, activation: Tensor, point: Point) -> None:
        """Change an activation, each row of which is a text, in place."""
        changed = self._changed(activation, point)
        if changed is not None:
            box, new = changed
            activation[box] = new

    def try_on(self, activation: Shaped[Tensor, "..."], point: Point) -> None:
        """Compute the change without writing it, so that errors are raised early.

        Args:
            activation: a value at the point.
            point: the point.

        Raises:
            UnknownNameError, EditError: as in a call of the edit.
        """
        for rows in self._rows_of_texts(activation, point):
            changed = self._changed(rows, point)
            if changed is not None:
                box, new = changed
                new.expand_as(rows[box])

    def _rows_of_texts(self, activation: Tensor, point: Point) -> Iterator[Tensor]:
        """Yield views of an activation with one row for each text; see `n_texts`."""
        if self.n_texts is None:
            yield activation
            return
        axes = axes_of(point, activation.ndim)
        if "batch" not in axes:
            yield activation
            return
        batch = axes.index("batch")
        for first in range(0, activation.shape[batch], self.n_texts):
            with reading(piece_read().of_rows(first, self.n_texts)):
                yield activation.narrow(batch, first, self.n_texts)

    def _changed(
        self, activation: Tensor, point: Point
    ) -> tuple[tuple[slice, ...], Shaped[Tensor, "..."]] | None:
        """Return the box of the activation that changes, and its new values.

        The result is None if nothing changes. The new values broadcast to the box.
        """
        self._require_fit(point)
        if CALL in self.where and not self._is_at_call(point):
            return None
        where = {axis: selection for axis, selection in self.where.items() if axis != CALL}
        source_value = None if self.source is None else self.source.at(activation, point, where)
        columns = None if source_value is None else source_value.columns
        place = locate_part(activation, point, where, columns)
        if place is None:
            return None
        region = activation[place.box]
        value = activation
        if self.source is not None and source_value is not None:
            require_real_source(self.source, place, where)
            value = place.source_values(source_value, activation.device)
        new = self.change(region, value, place)
        if place.mask is not None:
            new = torch.where(to_device(place.mask, region.device), new, region)
        return place.box, new

    def short(self) -> str:
        """Return the edit as text, with its place and without its other arguments.

        >>> from interp import edits
        >>> edits.scale(0.5, head=3).short()
        'edits.scale(..., head=3)'
        """
        parts = ["..."] if self.arguments else []
        parts += [f"{axis}={_shown(index)}" for axis, index in self.where.items()]
        return f"edits.{self.name}({', '.join(parts)})"

    def __repr__(self) -> str:
        source_pos = None if self.source is None else self.source.columns
        arguments = {**self.arguments, "source_pos": source_pos, **self.where}
        parts = []
        for name, value in arguments.items():
            if value is None:
                continue
            # The keys of positional arguments are numbers, which are not printed.
            parts.append(_shown(value) if name.isdigit() else f"{name}={_shown(value)}")
        return f"edits.{self.name}({', '.join(parts)})"


def _shown(value: Any) -> str:
    """Return an argument as text: no values of tensors, caches and directions."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, ActivationCache):
        return "cache"
    if isinstance(value, Selection):
        return repr(value)
    if isinstance(value, Vectors):
        # The lines of a direction give the lengths of vectors at all points. An edit adds only the
        # vector of its own point, so it prints none of these lengths.
        return repr(value).splitlines()[0].partition(",")[0]
    return reprlib.repr(value)
