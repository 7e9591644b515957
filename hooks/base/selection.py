"""Selections: the chosen places along an axis, in every form that users write.

For example, the places are positions of texts or heads of a layer.
"""

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
from hooks.base.padding_messages import before_the_text, mask_shape, no_real_token, padding_selected
from hooks.base.saying import shown
from hooks.base.transfer import to_device

TEXT_AXES = ("pos", "query", "key")
"""All axes that count columns of the text. `key` also covers cached positions."""

POSITION_AXES = ("pos", "query")
"""The text axes that have only the positions of this call, without cached positions.

The option `pos=` of a cached run slices these axes. If a text is read in several calls, their
values are joined along them.
"""

KeyMask = Shaped[Tensor, "batch key"]
"""True or 1 at real tokens, False or 0 at padding."""


def real_of(
    mask: Shaped[Tensor, "..."] | None, shape: Sequence[int], name: str = "attention_mask"
) -> Bool[Tensor, "batch pos"]:
    """Return the mask of texts [batch, pos] as booleans.

    Args:
        mask: the mask; None if all tokens are real.
        shape: the shape of the texts, [batch, pos].
        name: the name of the mask, for the error.

    Raises:
        TypeError: if the mask is no tensor.
        ValueError: if the mask has a different shape. Both errors name the mask.
    """
    if mask is None:
        return torch.ones(*shape, dtype=torch.bool)
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor [batch, pos]; got {shown(mask)}")
    if mask.shape != tuple(shape):
        raise ValueError(mask_shape(name, shape, mask.shape))
    return mask.bool()


def real_columns(mask: KeyMask) -> list[list[int]] | None:
    """Return the columns of each text's real tokens, or None if there is no padding.

    In a plan (`HookedRunner.plan`), the mask has no numbers and the result is None.
    """
    if mask.is_meta or isinstance(mask, FakeTensor):
        return None
    columns = true_columns(mask)
    has_padding = any(len(of_text) < mask.shape[1] for of_text in columns)
    return columns if has_padding else None


def true_columns(mask: Shaped[Tensor, "row column"]) -> list[list[int]]:
    """Return the columns at which each row of a mask is True."""
    return [_places_of_true(row) for row in mask.tolist()]


def _places_of_true(mask: Sequence[object]) -> list[int]:
    """Return the places at which a list is True."""
    return [place for place, is_true in enumerate(mask) if is_true]


def real_positions(real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return the position of each column: the number of real tokens before it in its text.

    A column of padding has the position of the last real token before it, or 0 without one.

    Args:
        real: True at real tokens, False at padding.

    >>> real_positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool())
    tensor([[0, 0, 0, 1],
            [0, 1, 2, 2]])
    """
    return (real.cumsum(1) - 1).clamp(min=0)


def sides_of_padding(mask: Shaped[Tensor, "batch pos"]) -> tuple[bool, bool]:
    """Return whether any text has padding on the left, and whether any has padding on the right.

    Padding on the left comes before a real token, and padding on the right comes after one.

    Args:
        mask: True or 1 at real tokens, False or 0 at padding.

    >>> sides_of_padding(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    (True, False)
    """
    real = mask.bool()
    is_start = real[:, 1:] & ~real[:, :-1]
    is_end = real[:, :-1] & ~real[:, 1:]
    # Read both together, so that the host waits only once for a device.
    has_left, has_right = torch.stack([is_start.any(), is_end.any()]).tolist()
    return has_left, has_right


@dataclass(frozen=True)
class AllBut:
    """All places along an axis except `places`, in every example; see `all_but`."""

    places: list[int]

    def __repr__(self) -> str:
        return f"all_but({', '.join(map(str, self.places))})"


Index = SupportsIndex | slice | Sequence[Any] | Tensor | AllBut
"""An integer, slice, list or mask along one axis, or the result of `all_but`; it is the same in
every example. Along positions, each example can have a different index: a list of lists, or a
tensor [batch, n], of integers or booleans."""

Rows = Sequence[Sequence[int]]
"""One list of places for each example. A single list holds for all examples."""


def all_but(*places: SupportsIndex) -> AllBut:
    """Select all places along an axis, except some places.

    Padding is never selected. Negative numbers count from the end, as in a list of places.

    Returns:
        The index of one axis, for edits and for every argument that selects places along an axis.

    Raises:
        TypeError: if a place is not an integer.

    >>> from interp import edits
    >>> edits.zero(head=all_but(7, 9))
    edits.zero(head=all_but(7, 9))
    >>> Selection(all_but(1, -1)).rows(5, "head")
    [[0, 2, 3]]
    """
    for place in places:
        require_kind("a place", place, SupportsIndex, words="an integer, as in all_but(7, 9)")
    return AllBut([operator.index(place) for place in places])


@dataclass(frozen=True)
class Selection:
    """Places along an axis.

    Along most axes, an index means the same as in Python: -1 is the last place. Along positions of
    texts with padding, these rules hold:

    - A number from 0 on is a column of the padded batch. It raises an error if the text has padding
      in this column. (`Text.at` differs: there 0 is the first real token of each text.)
    - A negative number counts from the last real token of each text.
    - A slice with a negative end, such as `slice(-3, None)`, selects only real tokens.
    - A slice without a negative end, such as `slice(0, 4)`, selects all its columns, also columns
      with padding. The methods `read` and `inside` then leave out the columns with padding.

    Attributes:
        index: the places, as Python integers, slices and lists.

    Raises:
        TypeError: if the index has none of these forms.

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
        """Return a selection of one place in each example.

        An integer is the place in all examples. A list contains one place for each example.

        Raises:
            TypeError: if the index has a different form.
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
        """True if the index is one integer."""
        return isinstance(self.index, int)

    @property
    def is_by_example(self) -> bool:
        """True if each example has a separate index."""
        return isinstance(self.index, list) and any(isinstance(part, list) for part in self.index)

    @property
    def parts(self) -> list[Any]:
        """The places along the axis in each example, as a list with one entry for each example.

        An entry is an integer, a slice, a list or an `all_but`. If all examples have the same
        places, the list has only one entry.
        """
        return self.index if self.is_by_example else [self.index]

    def rows(
        self,
        size: int,
        what: str,
        batch: int | None = None,
        real: Rows | None = None,
        whole: bool = True,
    ) -> list[list[int]]:
        """Return one list of places for each example, counted from the start of the axis.

        If all examples have the same places, the result contains only one list.

        Args:
            size: the axis has the places 0 to `size - 1`.
            what: the name of the axis, for errors.
            batch: the number of examples, if known.
            real: the real columns of each text; None if there is no padding.
            whole: True if places outside the axis raise an error. False for a piece of a text:
                places outside the axis may lie in another piece, and the result contains them.

        Raises:
            SelectionError: if the index has entries for another number of examples, a place is
                outside or at padding, a mask has the wrong length or contains 0 and 1 instead of
                booleans, or nothing is selected.
        """
        parts = self.parts
        batch = len(real) if real is not None else batch
        if batch is not None and len(parts) not in (1, batch):
            raise SelectionError(
                f"{what} must have one entry for each of {batch} examples, or one entry for all; "
                f"got {len(parts)}"
            )
        if real is None:
            rows = [_all_columns(part, size, what=what, whole=whole) for part in parts]
        else:
            rows = []
            # The parts are repeated, because a single part holds for all examples.
            for n, (part, columns) in enumerate(zip(itertools.cycle(parts), real)):
                name = f"{what} of example {n}"
                rows.append(_real_columns(part, size, what=name, real=columns, whole=whole))
            if all(places == rows[0] for places in rows):
                rows = rows[:1]
        if whole and not any(rows):
            raise SelectionError(f"{what} must select at least one of {size} places; got nothing")
        return rows

    def is_plain(self, real: KeyMask | None) -> bool:
        """Return whether `index` selects the right columns of all texts as a PyTorch subscript.

        This is false for `all_but` and for a separate index in each example. With padding, it is
        true only for slices without a negative end: other places count real tokens, or may be at
        padding and raise an error.
        """
        if isinstance(self.index, AllBut) or self.is_by_example:
            return False
        if real is None or real_columns(real) is None:
            return True
        return isinstance(self.index, slice) and not self.counts_back

    @property
    def counts_back(self) -> bool:
        """True if places are counted from the end."""
        ends = [self.index.start, self.index.stop] if isinstance(self.index, slice) else []
        return any(place < 0 for place in [*filter(None, ends), *self._listed])

    @property
    def _listed(self) -> list[int]:
        """The places that are listed explicitly; a slice lists no places."""
        if isinstance(self.index, slice):
            return []
        listed: list[int] = []
        for part in self.parts:
            indices = part.places if isinstance(part, AllBut) else part
            listed += indices if isinstance(indices, list) else [indices]
        return listed

    def require_reached(self, size: int, what: str, real: Rows | None = None) -> None:
        """Check that no negative place lies before the start of every text.

        For example, place -5 does not exist if the longest text has 4 tokens.

        Use this when a long text runs piece by piece, and not the stricter checks for whole texts:
        a place outside this piece is no error, because another piece may contain it.

        Args:
            size: the number of columns from the start of the text to the end of the piece.
            what: the name of the axis, for errors.
            real: the real columns of each text; None if there is no padding.

        Raises:
            SelectionError: if a place is too early; the error names the selection and the length of
                the longest text.
        """
        length = size if real is None else max(map(len, real))
        ends = [self.index.stop] if isinstance(self.index, slice) else []
        # The last place of a slice must lie inside the text. Its first place may lie before the
        # text, as in Python.
        lasts = [end - 1 for end in ends if end is not None and end < 0]
        if any(place < -length for place in [*lasts, *self._listed]):
            raise SelectionError(before_the_text(what, length, self))

    def columns(
        self, size: int, what: str, batch: int | None = None, real: KeyMask | None = None
    ) -> Int[Tensor, "_batch n"]:
        """Return the selected places of each example as a tensor [batch, n].

        The places are counted from the start of the axis, and each example must have the same
        number of places. If all examples have the same places, the tensor has one row, [1, n].

        Args:
            size: the axis has the places 0 to `size - 1`.
            what: the name of the axis, for errors.
            batch: the number of examples, if known.
            real: the mask of real columns, [batch, key]; None if there is no padding.

        Raises:
            SelectionError: for the reasons of the method `rows`, or if examples have different
                numbers of places.
        """
        rows = self.rows(size, what, batch=batch, real=None if real is None else real_columns(real))
        lengths = sorted({len(places) for places in rows})
        if len(lengths) > 1:
            raise SelectionError(
                f"{what} must select the same number in each text; {self!r} selects {lengths[0]} "
                f"to {lengths[-1]}"
            )
        return torch.tensor(rows, dtype=torch.int64)

    def read(self, real: Bool[Tensor, "batch pos"], what: str, first: int = 0) -> list[list[int]]:
        """Return the selected real columns of each text of a batch, at least one in each text.

        If the selection has a separate index for each text, it may contain the indices of more
        texts than this batch. A mask in it must reach only to the last real token of its text.

        Args:
            real: True at real tokens.
            what: the name of the positions, for errors.
            first: the number of the batch's first text among all texts, which is the number of its
                index.

        Raises:
            SelectionError: for the reasons of `rows`; if a text has no index, or if its index
                selects no column.
        """
        read = []
        for number, columns in enumerate(true_columns(real), first):
            name = f"{what}, text {number}"
            if self.is_by_example and number >= len(self.parts):
                raise SelectionError(f"{what} must be given for each text; got {len(self.parts)}")
            part = self.parts[number] if self.is_by_example else self.index
            if is_mask(part):
                if columns and len(part) <= columns[-1]:
                    raise SelectionError(
                        f"{name} must be a mask of {columns[-1] + 1}; got {len(part)}"
                    )
                part = _places_of_true(part)
            selected = _real_columns(part, real.shape[1], what=name, real=columns, whole=True)
            real_columns_of_text = {*columns}
            real_selected = [column for column in selected if column in real_columns_of_text]
            if not real_selected:
                raise SelectionError(no_real_token(name))
            read.append(real_selected)
        return read

    def inside(self, real: Bool[Tensor, "batch pos"], what: str) -> Bool[Tensor, "batch pos"]:
        """Return a mask that is True at the selected real tokens.

        Args:
            real: True at real tokens.
            what: the name of the positions, for errors.

        Raises:
            SelectionError: for the reasons of `rows`.
        """
        rows = self.rows(real.shape[1], what, batch=len(real), real=real_columns(real))
        chosen = torch.zeros_like(real)
        # The rows are repeated, because a single row holds for all examples.
        for chosen_in_text, columns in zip(chosen, itertools.cycle(rows)):
            chosen_in_text[columns] = True
        return chosen & real

    def __repr__(self) -> str:
        if isinstance(self.index, slice):
            ends = [self.index.start, self.index.stop, self.index.step]
            return f"slice({', '.join(map(str, ends[: 2 + (ends[2] is not None)]))})"
        if len(self.parts) > 1 or self.parts[0] is not self.index:
            return f"Tensor[{len(self.parts)}, {len(self.parts[0])}]"
        return reprlib.repr(self.index)


def _all_columns(part: Any, size: int, what: str, whole: bool) -> list[int]:
    """Return the columns that the index of one text selects. The text has no padding.

    Args:
        part: the index of the text: a number, a slice, a list, a mask, or all but some places.
        size: the number of columns.
        what: the name of the axis, for errors.
        whole: whether the columns are a whole text. In a piece of a text, a place outside the piece
            is no error.
    """
    if isinstance(part, AllBut):
        left_out = places_at(part.places, size, what=what, whole=whole)
        return [place for place in range(size) if place not in left_out]
    return places_at(part, size, what=what, whole=whole)


def _real_columns(part: Any, size: int, what: str, real: Sequence[int], whole: bool) -> list[int]:
    """Return the columns that the index of one text selects. The text has padding.

    Args:
        part, size, what, whole: see `_all_columns`.
        real: the columns of the real tokens.
    """
    if isinstance(part, AllBut):
        left_out = _real_columns(part.places, size, what=what, real=real, whole=whole)
        return [column for column in real if column not in left_out]
    if isinstance(part, slice):
        return _between(part, size, real)
    chosen = places_at(part, size, what=what, whole=whole)
    numbers = chosen if is_mask(part) else part
    if isinstance(part, int):
        numbers = [part]
    for n, number in enumerate(numbers):
        if number < -len(real) and whole:
            raise SelectionError(before_the_text(what, len(real), number))
        if number < 0:
            chosen[n] = real[number] if number >= -len(real) else -1
        elif number < size and number not in real:
            raise SelectionError(padding_selected(what, f"column {number}"))
    return chosen


def _between(part: slice, size: int, real: Sequence[int]) -> list[int]:
    """Return the columns that a slice selects in a text with padding.

    If an end is negative, it counts from the last real column, and only real columns are selected.
    """
    if all(end is None or end >= 0 for end in (part.start, part.stop)):
        return list(range(size)[part])
    start = _end_as_column(part.start, real)
    stop = _end_as_column(part.stop, real)
    return [column for column in range(size)[start : stop : part.step] if column in real]


def _end_as_column(end: int | None, real: Sequence[int]) -> int | None:
    """Return an end of a slice as a column. A negative end counts from the last real column."""
    if end is None or end >= 0:
        return end
    return real[end] if end >= -len(real) else 0


def columns_of_last(
    last: int, n_pos: int, batch: int, attention_mask: Shaped[Tensor, "batch pos"] | None = None
) -> Int[Tensor, "batch last"]:
    """Return the columns of the last real positions of each example, in order.

    Args:
        last: the number of positions, at least 1.
        n_pos, batch: the shape of the texts.
        attention_mask: True or 1 at real tokens; None if all tokens are real.

    Raises:
        ValueError: if the mask has a different shape, or an example has fewer real tokens than
            `last`.

    >>> columns_of_last(2, 4, 2, torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    tensor([[2, 3],
            [0, 1]])
    """
    real = real_of(attention_mask, (batch, n_pos))
    selection = Selection([*range(-last, 0)])
    columns = selection.columns(n_pos, "a metric's pos", batch=batch, real=real)
    return columns.expand(batch, -1)


def taken(
    value: Shaped[Tensor, "..."], columns: Int[Tensor, "_batch n"], at: int, batch: int | None
) -> Shaped[Tensor, "..."]:
    """Return a new tensor: the value at some columns of one axis.

    The columns may differ between examples.

    Args:
        value: the value.
        columns: one row for all examples, or one row for each.
        at, batch: the numbers of the sliced axis and of the axis of examples.

    Raises:
        SelectionError: if the columns differ between examples and the value has no axis of
            examples.
    """
    columns = to_device(columns, value.device)
    if len(columns) == 1:
        return value.index_select(at, columns[0])
    if batch is None:
        raise SelectionError(
            "different positions in each text need an axis batch; this value has none"
        )
    return torch.take_along_dim(value, broadcast(columns, at, batch=batch, ndim=value.ndim), at)


def broadcast(
    columns: Int[Tensor, "_batch n"] | Bool[Tensor, "_batch n"], at: int, batch: int, ndim: int
) -> Shaped[Tensor, "..."]:
    """Return columns as a tensor with `ndim` axes, for use as an index of a value.

    The axis `at` has the columns. If the columns differ between examples, the axis `batch` has the
    examples. All other axes have the size 1.

    Args:
        columns: columns, or a mask of columns: one row for all examples, or one row for each.
        at: the axis along which the columns are placed.
        batch: the axis along which the rows of examples are placed.
        ndim: the number of axes.
    """
    shape = [columns.shape[1] if axis == at else 1 for axis in range(ndim)]
    if len(columns) > 1:
        shape[batch] = len(columns)
    # `columns` is [batch, n]. If the axis `batch` comes after the axis `at`, it must be [n, batch].
    return (columns.T if len(columns) > 1 and batch > at else columns).reshape(shape)


def index_by_axis(
    axes: tuple[str, ...], where: Mapping[str, Index], what: str
) -> tuple[int | slice | list[int], ...]:
    """Return the subscript that selects a part of a tensor by the names of its axes.

    At most one index may be a list, because PyTorch would broadcast two lists. A list of booleans
    is a mask. Tensors and arrays count as lists. PyTorch checks sizes when the subscript is used.

    Args:
        axes: the names of the tensor's axes.
        where: the index along each axis that is sliced.
        what: the name of the tensor, for errors.

    Returns:
        One index for each axis of the tensor, in the order of `axes`. Axes that are not in `where`
        get a full slice.

    Raises:
        UnknownNameError: if an axis of `where` is not one of `axes`.
        TypeError: if `axes` is not a tuple of names, if `where` is not a mapping, or if an index is
            not an integer, a slice, a list of integers or a mask.
        ValueError: if two indices are lists.

    >>> index_by_axis(("batch", "pos", "d_model"), {"pos": slice(2, None)}, "the stream")
    (slice(None, None, None), slice(2, None, None), slice(None, None, None))
    """
    require_kind(
        "axes", axes, tuple, words="a tuple of names", call="for example: ('batch', 'pos')"
    )
    require_kind(
        "where",
        where,
        Mapping,
        words="a mapping from axes to indices",
        call="for example: {'pos': 0}",
    )
    require_axes(where, axes, what)
    index = tuple(plain_index(where.get(axis, slice(None))) for axis in axes)
    if sum(isinstance(part, list) for part in index) > 1:
        raise ValueError(f"only one axis can take a list of indices; got {dict(where)}")
    return index


def require_axes(where: Iterable[str], axes: tuple[str, ...], what: str) -> None:
    """Check that a value has all named axes.

    Args:
        where: the names.
        axes: the axes of the value.
        what: the name of the value, for the error.

    Raises:
        UnknownNameError: if the value has no axis with one of the names; the error contains the
            first such name.
    """
    for axis in where:
        if axis not in axes:
            declared = " ".join(axes) or "it declares none"
            error = unknown_name(axis, axes, f"axis of {what} ({declared})")
            if axis in ("layer", "layers"):
                error.args = (f"{error.args[0]}: the name of a point contains its layer",)
            raise error


def plain_index(index: Any, ndim: int = 1) -> Any:
    """Return an index as a Python int, slice, list of ints or, for a mask, list of booleans.

    With `ndim=2` the index may also be a list of lists.

    Raises:
        TypeError: if the index has a different form.
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
        + (" (-1 is the last place)" if isinstance(index, str) else "")
    )


def is_mask(index: object) -> TypeGuard[list[bool]]:
    """Return whether a result of `plain_index` is a mask."""
    return isinstance(index, list) and index != [] and all(isinstance(i, bool) for i in index)


def places_at(index: Any, size: int, what: str, whole: bool = True) -> list[int]:
    """Return the places that an index selects, counted from the start of the axis.

    Args:
        index: a result of `plain_index`.
        size: the axis has the places 0 to `size - 1`. Negative places count from the end.
        what: the name of the axis, for errors.
        whole: True if places outside the axis raise an error. False if the result may contain them.

    Raises:
        SelectionError: if a place is outside, a mask has the wrong length, or a list as long as the
            axis contains only the numbers 0 and 1, like a mask without booleans.
    """
    if isinstance(index, slice):
        return list(range(size)[index])
    if is_mask(index):
        if whole and len(index) != size:
            raise SelectionError(f"a mask along {what} must have length {size}; got {len(index)}")
        return _places_of_true(index)
    listed = [index] if isinstance(index, int) else index
    for place in listed if whole else ():
        if not -size <= place < size:
            raise SelectionError(f"{what} must be from {-size} to {size - 1}; got {place}")
    if whole and len(listed) == size > 2 and {*listed} <= {0, 1}:
        raise SelectionError(
            f"a mask along {what} must contain booleans: call .bool(); got {size} numbers 0 and 1, "
            "which would select the places 0 and 1"
        )
    return [place + size if place < 0 else place for place in listed]
