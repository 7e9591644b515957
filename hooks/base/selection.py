"""Selection: which places along an axis, above all which positions of texts, in every form users give."""

import itertools
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeGuard

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from hooks.base._torch import FakeTensor
from hooks.base.errors import SelectionError, unknown_name
from hooks.base.kinds import require_kind
from hooks.base.saying import shown
from hooks.base.transfer import to_device

TEXT_AXES = ("pos", "query", "key")
"""All axes that count columns of the text. `key` also covers cached positions."""

POSITION_AXES = ("pos", "query")
"""The text axes that have only the positions of this call: `positions=` cuts them, and a joined run appends to them."""

KeyMask = Shaped[Tensor, "batch key"]
"""True or 1 at real tokens, False or 0 at padding."""


def real_of(
    mask: Shaped[Tensor, "..."] | None, shape: Sequence[int], name: str = "attention_mask"
) -> Bool[Tensor, "batch pos"]:
    """The mask of texts [batch, pos] as booleans.

    Raises:
        ValueError: if it has another shape; the error gives its name.
    """
    if mask is None:
        return torch.ones(*shape, dtype=torch.bool)
    if mask.shape != tuple(shape):
        raise ValueError(f"{name} must be [batch, pos], {[*shape]}; got {list(mask.shape)}")
    return mask.bool()


def real_columns(mask: KeyMask) -> list[list[int]] | None:
    """The columns of each text's real tokens; None if there is no padding, or in a plan, without numbers."""
    if mask.is_meta or isinstance(mask, FakeTensor):
        return None
    rows = [[n for n, real in enumerate(row) if real] for row in mask.tolist()]
    return None if all(len(row) == mask.shape[1] for row in rows) else rows


@dataclass(frozen=True)
class AllBut:
    """All places along an axis but some, the same in every example; made by `all_but`."""

    places: list[int]

    def __repr__(self) -> str:
        return f"all_but({', '.join(map(str, self.places))})"


Index = SupportsIndex | slice | Sequence[Any] | Tensor | AllBut
"""An integer, slice, list or mask along one axis, or `all_but` some, the same in every example. Along positions also
those of each example's own: a list of lists, or a tensor [batch, n], of integers or booleans."""

Rows = Sequence[Sequence[int]]
"""Places of each example; one row may stand for all."""


def all_but(*places: SupportsIndex) -> AllBut:
    """Select all places along an axis but these, which are counted as in a list of them; never padding.

    Raises:
        TypeError: if a place is no integer.

    >>> from interp import edits
    >>> edits.zero(head=all_but(7, 9))
    edits.zero(head=all_but(7, 9))
    >>> Selection(all_but(1, -1)).rows(5, "head")
    [[0, 2, 3]]
    """
    for place in places:
        require_kind("a place", place, SupportsIndex, "an integer, as in all_but(7, 9)")
    return AllBut([operator.index(place) for place in places])


@dataclass(frozen=True)
class Selection:
    """Places along an axis. Negative ones count from its end: along positions from a text's last real token.

    From 0 on positions count columns, padding included, and one that is padding is an error. A slice with a
    negative end has the real tokens between its ends. Whoever reads takes real tokens only, of any slice.

    Attributes:
        index: the places, in Python's own integers, slices and lists.

    Raises:
        TypeError: if the index has none of the forms.

    >>> Selection(torch.tensor([2, 0])), Selection([[True, False, True], [-1]]).rows(3, "pos", 2)
    ([2, 0], [[0, 2], [2]])
    >>> Selection(-1).rows(5, "pos", 2, real=[[0, 1, 2], [2, 3, 4]])
    [[2], [4]]
    """

    index: Any

    def __init__(self, index: "Index | Selection") -> None:
        plain = index.index if isinstance(index, Selection) else index
        plain = plain if isinstance(plain, AllBut) else plain_index(plain, 2)
        object.__setattr__(self, "index", plain)

    @classmethod
    def one_each(cls, index: Index) -> "Selection":
        """One place for all examples or, in a list, one for each.

        Raises:
            TypeError: if it is something else.
        """
        chosen = cls(index)
        listed = chosen.index if isinstance(chosen.index, list) else [chosen.index]
        if not listed or not all(type(place) is int for place in listed):
            raise TypeError(
                f"pos must be an integer, or a list of one for each example; got {shown(index)}"
            )
        return chosen if chosen.is_one else cls([[place] for place in listed])

    @property
    def is_one(self) -> bool:
        """Return whether it is one place, by an integer."""
        return isinstance(self.index, int)

    @property
    def is_by_example(self) -> bool:
        """Return whether each example has an index of its own."""
        return isinstance(self.index, list) and any(isinstance(part, list) for part in self.index)

    @property
    def parts(self) -> list[Any]:
        """The index of each example, or one for all."""
        return self.index if self.is_by_example else [self.index]

    def rows(
        self,
        size: int,
        what: str,
        batch: int | None = None,
        real: Rows | None = None,
        whole: bool = True,
    ) -> list[list[int]]:
        """The places of each example, counted from the start of the axis; one row if all have the same.

        Args:
            size: the axis has the places 0 to `size - 1`.
            what: the axis, for errors.
            batch: the number of examples, if it is known.
            real: the real columns of each text; None if there is no padding.
            whole: whether places outside are errors; otherwise they stay in the rows.

        Raises:
            SelectionError: if there are rows for another number of examples, a place is outside or padding, a
                mask has another length or no booleans, or nothing is selected.
        """
        parts, batch = self.parts, len(real) if real is not None else batch
        if batch is not None and len(parts) not in (1, batch):
            raise SelectionError(
                f"{what} must be given for each of {batch} examples, or for all; got {len(parts)}"
            )
        if real is None:
            rows = [_places(part, size, what, whole) for part in parts]
        else:
            each = enumerate(zip(itertools.cycle(parts), real))  # parts may be one for all
            rows = [
                _real(part, size, f"{what} of example {n}", columns, whole)
                for n, (part, columns) in each
            ]
            rows = rows[:1] if all(row == rows[0] for row in rows) else rows
        if whole and not any(rows):
            raise SelectionError(f"{what} must be some of {size} places; got nothing")
        return rows

    def is_plain(self, real: KeyMask | None) -> bool:
        """Return whether these are the same columns of each text, whatever its padding: a subscript of PyTorch selects them."""
        if isinstance(self.index, AllBut) or self.is_by_example:
            return False
        if real is None or real_columns(real) is None:
            return True
        return isinstance(self.index, slice) and not self.counts_back

    @property
    def counts_back(self) -> bool:
        """Return whether it counts places from the end."""
        ends = [self.index.start, self.index.stop] if isinstance(self.index, slice) else []
        return any(place < 0 for place in [*filter(None, ends), *self._listed])

    @property
    def _listed(self) -> list[int]:
        """The places that are named one by one; of a slice none."""
        if isinstance(self.index, slice):
            return []
        parts = [part.places if isinstance(part, AllBut) else part for part in self.parts]
        return [place for part in parts for place in (part if isinstance(part, list) else [part])]

    def require_reached(self, size: int, what: str, real: Rows | None = None) -> None:
        """Refuse negative places before the start of every text, which no later column of the texts reaches.

        Args:
            size: the number of columns so far.
            what: the axis, for errors.
            real: the real columns of each text; None if there is no padding.

        Raises:
            SelectionError: naming the place and the length of the longest text.
        """
        length = size if real is None else max(map(len, real))
        ends = [self.index.stop] if isinstance(self.index, slice) else []
        # A slice that ends at the start of a text, or before it, selects nothing of it.
        lasts = [end - 1 for end in ends if end is not None and end < 0]
        if any(place < -length for place in [*lasts, *self._listed]):
            raise SelectionError(
                f"{what} must be from {-length} on in a text of {length} tokens; got {self!r}"
            )

    def columns(
        self, size: int, what: str, batch: int | None = None, real: KeyMask | None = None
    ) -> Int[Tensor, "_batch n"]:
        """The places of `rows`, of which each example must have as many. One row stands for all.

        Raises:
            SelectionError: as for `rows`, or if examples have other numbers of places.
        """
        rows = self.rows(size, what, batch, None if real is None else real_columns(real))
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise SelectionError(
                f"{what} must be as many in each text; {self!r} selects {lengths[0]} to {lengths[-1]}"
            )
        return torch.tensor(rows, dtype=torch.int64)

    def read(self, real: Bool[Tensor, "batch pos"], what: str, first: int = 0) -> list[list[int]]:
        """The columns that are read of each text of a batch: real tokens, at least one.

        Args:
            real: True at real tokens.
            what: the positions, for errors.
            first: the number of the first text among all. An index of each text's own is taken by number, and a mask
                need not be longer than its text.

        Raises:
            SelectionError: as for `rows`; if there is no index for a text, or it selects nothing.
        """
        read = []
        for number, row in enumerate(real, first):
            columns, name = row.nonzero()[:, 0].tolist(), f"{what}, text {number}"
            if self.is_by_example and number >= len(self.parts):
                raise SelectionError(f"{what} must be given for each text; got {len(self.parts)}")
            part = self.parts[number] if self.is_by_example else self.index
            if is_mask(part):
                if columns and len(part) <= columns[-1]:
                    raise SelectionError(
                        f"{name} must be a mask of {columns[-1] + 1}; got {len(part)}"
                    )
                part = [column for column, inside in enumerate(part) if inside]
            kept = {*columns}
            read.append([n for n in _real(part, len(row), name, columns, True) if n in kept])
            if not read[-1]:
                raise SelectionError(f"{name} must be at least one real token; got none")
        return read

    def inside(self, real: Bool[Tensor, "batch pos"], what: str) -> Bool[Tensor, "batch pos"]:
        """A mask of the places in texts whose real tokens are True in `real`, without padding. For errors see `rows`."""
        rows = self.rows(real.shape[1], what, len(real), real_columns(real))
        chosen = torch.zeros_like(real)
        for row, columns in zip(chosen, itertools.cycle(rows)):  # one row may be for all
            row[columns] = True
        return chosen & real

    def __repr__(self) -> str:
        if isinstance(self.index, slice):
            ends = [self.index.start, self.index.stop, self.index.step]
            return f"slice({', '.join(map(str, ends[: 2 + (ends[2] is not None)]))})"
        many = len(self.parts) > 1 or self.parts[0] is not self.index
        return (
            f"Tensor[{len(self.parts)}, {len(self.parts[0])}]" if many else reprlib.repr(self.index)
        )


def _places(part: Any, size: int, what: str, whole: bool) -> list[int]:
    """The places along an axis without padding."""
    if isinstance(part, AllBut):
        left_out = places(part.places, size, what, whole)
        return [place for place in range(size) if place not in left_out]
    return places(part, size, what, whole)


def _real(part: Any, size: int, what: str, real: Sequence[int], whole: bool) -> list[int]:
    """The places of one text with padding."""
    if isinstance(part, AllBut):
        left_out = _real(part.places, size, what, real, whole)
        return [column for column in real if column not in left_out]
    if isinstance(part, slice):
        return _between(part, size, real)
    chosen = places(part, size, what, whole)
    asked = [part] if isinstance(part, int) else chosen if is_mask(part) else part
    for n, number in enumerate(asked):
        if number < -len(real) and whole:
            raise SelectionError(f"{what} has {len(real)} real tokens; got {number}")
        if number < 0:
            chosen[n] = real[number] if number >= -len(real) else -1
        elif number < size and number not in real:
            raise SelectionError(f"{what} must be a column of a real token; got {number}, padding")
    return chosen


def _between(part: slice, size: int, real: Sequence[int]) -> list[int]:
    """The columns of a slice: only real ones if an end counts from the last of them."""
    ends = part.start, part.stop
    if all(end is None or end >= 0 for end in ends):
        return list(range(size)[part])
    start, stop = (
        end if end is None or end >= 0 else real[end] if end >= -len(real) else 0 for end in ends
    )
    return [n for n in range(size)[slice(start, stop, part.step)] if n in real]


def columns_of_last(
    last: int, n_pos: int, batch: int, attention_mask: Shaped[Tensor, "batch pos"] | None = None
) -> Int[Tensor, "batch last"]:
    """The columns of the last real positions of each example, in order.

    Args:
        last: how many, at least 1.
        n_pos, batch: the shape of the texts.
        attention_mask: True or 1 at real tokens; None if all are.

    Raises:
        ValueError: if the mask has another shape, or an example has fewer real tokens.

    >>> columns_of_last(2, 4, 2, torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    tensor([[2, 3],
            [0, 1]])
    """
    real = real_of(attention_mask, (batch, n_pos))
    columns = Selection([*range(-last, 0)]).columns(n_pos, "a metric's pos", batch, real)
    return columns.expand(batch, -1)


def taken(
    value: Shaped[Tensor, "..."], columns: Int[Tensor, "_batch n"], at: int, batch: int | None
) -> Shaped[Tensor, "..."]:
    """The part of a value at some columns of one axis, which may be others in each example: a new tensor.

    Args:
        value: the value.
        columns: a row for all examples, or one for each.
        at, batch: the number of the axis, and that of the axis of examples.

    Raises:
        SelectionError: if the value has no axis of examples, and they have other columns.
    """
    columns = to_device(columns, value.device)
    if len(columns) == 1:
        return value.index_select(at, columns[0])
    if batch is None:
        raise SelectionError("positions of each text's own need an axis batch; this value has none")
    return torch.take_along_dim(value, broadcast(columns, at, batch, value.ndim), at)


def broadcast(
    columns: Int[Tensor, "_batch n"] | Bool[Tensor, "_batch n"], at: int, batch: int, ndim: int
) -> Shaped[Tensor, "..."]:
    """Columns along one axis, or a mask of them, and of each example along the batch, with `ndim` axes."""
    shape = [columns.shape[1] if axis == at else 1 for axis in range(ndim)]
    if len(columns) > 1:
        shape[batch] = len(columns)
    # Where the batch comes after the positions, so do the rows of its columns.
    return (columns.T if len(columns) > 1 and batch > at else columns).reshape(shape)


def index_by_axis(
    axes: tuple[str, ...], where: Mapping[str, Index], what: str
) -> tuple[int | slice | list[int], ...]:
    """The subscript that selects `where` (axis name to index) from a tensor with these axes.

    At most one index may be a list, because PyTorch would broadcast two lists. A list of booleans is a
    mask. Tensors and arrays are lists too. PyTorch checks sizes when the subscript is used.

    Raises:
        UnknownNameError: if `axes`, the axes of `what`, have no such name.
        TypeError: if an index is not an integer, a slice, a list of integers or a mask.
        ValueError: if two indices are lists.

    >>> index_by_axis(("batch", "pos", "d_model"), {"pos": slice(2, None)}, "the stream")
    (slice(None, None, None), slice(2, None, None), slice(None, None, None))
    """
    require_axes(where, axes, what)
    index = tuple(plain_index(where.get(axis, slice(None))) for axis in axes)
    if sum(isinstance(part, list) for part in index) > 1:
        raise ValueError(f"only one axis can take a list of indices; got {dict(where)}")
    return index


def require_axes(where: Iterable[str], axes: tuple[str, ...], what: str) -> None:
    """Refuse names that are not among `axes`, those of `what`.

    Raises:
        UnknownNameError: naming the first.
    """
    for axis in where:
        if axis not in axes:
            declared = " ".join(axes) or "it declares none"
            raise unknown_name(axis, axes, f"axis of {what} ({declared})")


def plain_index(index: Any, ndim: int = 1) -> Any:
    """An index as Python's own int, slice, list of ints or, for a mask, list of booleans.

    With `ndim=2` it may also be a list of such lists.

    Raises:
        TypeError: if it is none of these.
    """
    plain = index.tolist() if hasattr(index, "tolist") else index
    if isinstance(plain, slice) or type(plain) is int:
        return plain
    if ndim and isinstance(plain, Sequence) and not isinstance(plain, str):
        parts = [part.tolist() if hasattr(part, "tolist") else part for part in plain]
        if all(isinstance(part, bool) for part in parts):
            return parts
        parts = [plain_index(part, ndim - 1) for part in parts]
        if len({isinstance(part, list) for part in parts}) == 1 and slice not in map(type, parts):
            return parts
    raise TypeError(
        f"an index must be an integer, slice, list of integers or mask; got {shown(index)}"
    )


def is_mask(index: object) -> TypeGuard[list[bool]]:
    """Return whether a result of `plain_index` is a mask."""
    return isinstance(index, list) and index != [] and all(isinstance(i, bool) for i in index)


def places(index: Any, size: int, what: str, whole: bool = True) -> list[int]:
    """The places along an axis, counted from its start, that an index selects.

    Args:
        index: a result of `plain_index`.
        size: the axis has the places 0 to `size - 1`. Negative ones count from its end.
        what: the axis, for errors.
        whole: whether other places are errors; otherwise they stay in the result.

    Raises:
        SelectionError: if a place is outside, a mask has another length, or numbers look like a mask.
    """
    if isinstance(index, slice):
        return list(range(size)[index])
    if is_mask(index):
        if whole and len(index) != size:
            raise SelectionError(f"a mask along {what} must have length {size}; got {len(index)}")
        return [place for place, inside in enumerate(index) if inside]
    listed = [index] if isinstance(index, int) else index
    for place in listed if whole else ():
        if not -size <= place < size:
            raise SelectionError(f"{what} must be from {-size} to {size - 1}; got {place}")
    if whole and len(listed) == size > 2 and {*listed} <= {0, 1}:
        raise SelectionError(
            f"a mask along {what} must have booleans, as .bool() gives them; got {size} numbers 0 and 1, "
            "which would be the places 0 and 1"
        )
    return [place + size if place < 0 else place for place in listed]
