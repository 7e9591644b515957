"""Arguments of a model besides tokens and mask, such as `token_type_ids` or images.

If a batch of texts is divided or repeated, these arguments must be divided or repeated too. An
argument belongs to the texts if it is a tensor with one row for each text, or a list with one
tensor for each text.

The rows of most tensors lie along the first axis. The rows of `position_ids` may lie along the
second axis: models with several positions for each token (m-rope) take [section, batch, pos]. So
the axis is found by name and size (`axis_of_rows`). If the sizes fit two axes, texts are neither
divided nor repeated (`AmbiguousRowsError`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WITHOUT_ROWS = ("cache_position",)
"""Arguments that are the same for all texts.

Their length may equal the number of texts by chance.
"""


class AmbiguousRowsError(ValueError):
    """The sizes of an argument do not determine the axis with a row for each text."""


def axis_of_rows(name: str, value: Tensor, shape: Sequence[int]) -> int | None:
    """Return the axis along which an argument has one row for each text.

    The result is None if the argument has no such axis.

    Args:
        name: the name of the argument.
        value: the argument.
        shape: the shape of the texts, [batch, pos].

    Raises:
        AmbiguousRowsError: if two axes fit.

    >>> axis_of_rows("token_type_ids", torch.zeros(3, 7), (3, 7))
    0
    >>> axis_of_rows("position_ids", torch.zeros(3, 3, 7), (3, 7))
    1
    >>> axis_of_rows("query_key_mask", torch.ones(3, 3), (3, 3)) is None
    True
    """
    batch, n_pos = shape
    if name in WITHOUT_ROWS or (name == "query_key_mask" and value.ndim == 2):
        return None
    axes = [0]
    if name.endswith("position_ids") and value.ndim == 3:
        has_sections = value.shape[1] in (1, batch) and value.shape[2] == n_pos
        is_by_text = value.shape[0] in (1, batch) and value.shape[1] == n_pos
        axes = [0] * (is_by_text or not has_sections) + [1] * has_sections
    fitting = [axis for axis in axes if value.ndim and value.shape[axis] == batch]
    if len(fitting) > 1:
        raise AmbiguousRowsError(
            f"{name} must have one axis of the size of the batch, {batch}; got {[*value.shape]}, "
            "where two axes fit: use a different number of texts"
        )
    return fitting[0] if fitting else None


def each_row(
    arguments: Mapping[str, Any], shape: Sequence[int], change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Return the arguments of a model after the same change of rows in each of them.

    The change applies to tensors with a row for each text and to lists with a tensor for each text.
    Other arguments are returned unchanged.

    Args:
        arguments: the arguments by name.
        shape: the shape of the texts, [batch, pos].
        change: the function that selects or repeats rows, such as `lambda rows: rows[:2]`. It
            receives each tensor with its rows along the first axis. For a list it receives the
            numbers of the texts, [batch].
    """
    changed = dict(arguments)
    batch = shape[0]
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if (axis := axis_of_rows(name, value, shape)) is not None:
                changed[name] = change(value.movedim(axis, 0)).movedim(0, axis)
        elif is_listed(value, batch):
            changed[name] = [value[number] for number in change(torch.arange(batch)).tolist()]
    return changed


def joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Return one tensor that contains the tensors of a list, one for each text, in order.

    The tensors are joined along their first axis, but `position_ids` [section, batch, pos] along
    their second axis.

    Args:
        name: the name of the argument.
        parts: the tensors of the list.
    """
    has_sections = name.endswith("position_ids") and parts[0].ndim == 3
    return torch.cat([*parts], dim=1 if has_sections else 0)


def require_rows(arguments: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Check that a batch of texts can be divided or repeated.

    This is not possible if an argument has floating-point rows that belong to no single text, such
    as the patches of all images of a batch in one tensor.

    Args:
        arguments: the arguments of a model by name.
        shape: the shape of the texts, [batch, pos].

    Raises:
        ValueError: if an argument has such rows; the error names the argument.
        AmbiguousRowsError: if two axes of an argument have the size of the batch.
    """
    for name in without_rows(arguments, shape):
        # If two axes fit, this call raises its own error, which says so.
        axis_of_rows(name, arguments[name], shape)
        rows = len(arguments[name])
        raise ValueError(
            f"{name} must have a row for each text, because texts are divided or repeated; got "
            f"{rows} for {shape[0]} texts (a list with a tensor for each text is joined when the "
            "model runs)"
        )


def without_rows(arguments: Mapping[str, Any], shape: Sequence[int]) -> Iterator[str]:
    """Yield the names of the arguments that cannot be divided or repeated with the texts.

    These are floating-point tensors with at least two axes and several rows, but not one row for
    each text, and tensors in which two axes fit the number of texts.
    """
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        try:
            axis = axis_of_rows(name, value, shape)
        except AmbiguousRowsError:
            yield name
            continue
        is_numbers = value.ndim > 1 and value.is_floating_point()
        if is_numbers and axis is None and len(value) != 1:
            yield name


def is_listed(value: Any, batch: int) -> bool:
    """Return whether a value is a list with a tensor for each text."""
    is_list = isinstance(value, list) and len(value) == batch
    return is_list and all(isinstance(part, Tensor) for part in value)
