"""Slice: a selection of rows, positions or heads, which is applied to every value of a run.

1. Along most axes a subscript of PyTorch selects the part.
2. Along positions of texts with padding, places count real tokens, which are in different columns
   in each text.
3. The masks of the texts are sliced like the values, so that the padding of the part is known.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hooks.base.errors import CacheError, SelectionError
from hooks.base.masks import TextMasks
from hooks.base.selection import TEXT_AXES, Index, Selection, index_by_axis, taken


class Slice:
    """Indices by axis, with methods that apply them to the values of a run.

    Args:
        where: the index along each axis.
        masks: the masks of the run's texts.

    Attributes:
        where: the index along each axis.
    """

    def __init__(self, where: Mapping[str, Index], masks: TextMasks) -> None:
        self.where = where
        self._masks = masks.of_texts(where.get("batch", slice(None)))
        self._axes_of_integers = {axis for axis, index in where.items() if Selection(index).is_one}
        # An index in `_subscripts` selects the same columns in each text, so a subscript of PyTorch
        # applies it. An index in `_columns_by_axis` counts real tokens, so it selects different
        # columns in texts with different padding.
        self._subscripts: dict[str, Index] = {}
        self._columns_by_axis: dict[str, Selection] = {}
        for axis, index in where.items():
            if self._counts_real_tokens(axis, index):
                self._columns_by_axis[axis] = Selection(index)
            else:
                self._subscripts[axis] = index

    def _counts_real_tokens(self, axis: str, index: Index) -> bool:
        """Return whether an index must be applied to each text separately.

        This is so if it may select different columns in different texts, or columns at padding.
        """
        masks = self._masks.all_along(axis)
        if axis not in TEXT_AXES and not masks:
            return False
        selection = Selection(index)
        return not all(selection.is_plain(mask) for mask in (None, *masks))

    def axes_left(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes that a value still has after slicing. An integer index drops its axis.

        Args:
            axes: the axes of the value before slicing.
        """
        return tuple(axis for axis in axes if axis not in self._axes_of_integers)

    def part(self, value: Tensor, axes: tuple[str, ...], name: str) -> Tensor:
        """Return the part of a value.

        Raises:
            CacheError: if nothing is selected.
            SelectionError: if a place is outside or at padding, or if the number of places differs
                between texts.
        """
        subscripts = {axis: index for axis, index in self._subscripts.items() if axis in axes}
        _require_inside(value, axes, where=subscripts, name=name)
        part: Tensor = value[index_by_axis(axes, subscripts, name)]
        # `part` has no axes for the integers in the subscripts, but still all axes of texts.
        axes = tuple(
            axis
            for axis in axes
            if axis in self._columns_by_axis or axis not in self._axes_of_integers
        )
        for axis, selection in self._columns_by_axis.items():
            if axis in axes:
                mask = self._masks.along(axis, name)
                part = _columns_of(part, axes, axis=axis, selection=selection, mask=mask, what=name)
                axes = _without(axes, axis) if selection.is_one else axes
        if value.numel() and not part.numel():
            raise CacheError(f"{dict(self.where)} selects nothing from {name} {list(value.shape)}")
        return part

    def masks_left(self) -> TextMasks:
        """Return the masks of the part. An axis that an integer drops has no mask."""
        batches = tuple(self._masks_left(masks) for masks in self._masks.batches)
        return TextMasks(batches, self._masks.numbers)

    def _masks_left(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masks of the part, by axis, from the masks of one batch of texts."""
        sliced: dict[str, Tensor] = {}
        for axis, mask in masks.items():
            if axis not in self.where:
                sliced[axis] = mask
            elif axis not in self._axes_of_integers:
                sliced[axis] = _columns_of(
                    mask,
                    ("batch", axis),
                    axis=axis,
                    selection=Selection(self.where[axis]),
                    mask=mask,
                    what="the texts",
                )
        return sliced


def _require_inside(
    value: Tensor, axes: tuple[str, ...], where: Mapping[str, Any], name: str
) -> None:
    """Check that an integer index, such as the number of a row or a head, is inside a value."""
    # If the module declares no axes, `axes` is empty and nothing is checked.
    for axis, size in zip(axes, value.shape, strict=False):
        index = where.get(axis)
        if isinstance(index, int) and not -size <= index < size:
            raise SelectionError(
                f"{axis} at {name} must be from {-size} to {size - 1}; got {index}"
            )


def _columns_of(
    value: Tensor,
    axes: tuple[str, ...],
    axis: str,
    selection: Selection,
    mask: Tensor | None,
    what: str,
) -> Tensor:
    """Return a value at selected columns of an axis. A single place drops the axis.

    Args:
        value: the value.
        axes: the axes of the value.
        axis: the axis of the columns.
        selection: the columns.
        mask: the mask of the texts, [batch, column]. It may contain earlier columns too. A mask of
            different texts is ignored.
        what: the name of the value, for errors.
    """
    at = axes.index(axis)
    batch = axes.index("batch") if "batch" in axes else None
    size = value.shape[at]
    n_texts = 1 if batch is None else value.shape[batch]
    fits = mask is not None and len(mask) == n_texts and mask.shape[1] >= size
    real = mask[:, -size:] if mask is not None and fits else None
    columns = selection.columns(size, f"{axis} of {what}", batch=n_texts, real=real)
    part = taken(value, columns, at=at, batch=batch)
    return part.squeeze(at) if selection.is_one else part


def _without(axes: tuple[str, ...], dropped: str) -> tuple[str, ...]:
    """Return the axes without the axis `dropped`."""
    return tuple(axis for axis in axes if axis != dropped)
