"""Further arguments of a model, which have a row, or a tensor of a list, for each text.

Most tensors have one row for each text along the first axis. Positions may have the rows along the
second axis: models with several positions for each token (m-rope) take `position_ids` as [section,
batch, pos]. So the axis is found by name and size (`axis_of_rows`). If the sizes fit two axes,
texts are neither divided nor repeated.
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
    """Return the axis along which an argument has one row for each text, or None without such an
    axis.

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
    """Return the arguments of a model, with a change of each one that belongs to the texts.

    Such an argument is a tensor with a row for each text, or a list with a tensor for each text.

    Args:
        arguments: the arguments by name.
        shape: the shape of the texts, [batch, pos].
        change: a function that is called with each tensor, with the rows along the first axis.
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
    """Return the tensors of a list, one for each text, joined for the model."""
    has_sections = name.endswith("position_ids") and parts[0].ndim == 3
    return torch.cat([*parts], dim=1 if has_sections else 0)


def require_rows(arguments: Mapping[str, Any], shape: Sequence[int]) -> None:
    """Check that texts can be divided or repeated: no argument has numbers for all texts together.

    Args:
        arguments: the arguments of a model by name.
        shape: the shape of the texts, [batch, pos].

    Raises:
        ValueError: if an argument has numbers for all texts together; the error names the argument.
        AmbiguousRowsError: if two axes of an argument fit.
    """
    for name in without_rows(arguments, shape):
        # This raises an error if two axes fit.
        axis_of_rows(name, arguments[name], shape)
        rows = len(arguments[name])
        raise ValueError(
            f"{name} must have a row for each text, because texts are divided or repeated; got "
            f"{rows} for {shape[0]} texts (a list with a tensor for each text is joined when the "
            "model runs)"
        )


def without_rows(arguments: Mapping[str, Any], shape: Sequence[int]) -> Iterator[str]:
    """Yield the names of floating-point arguments with several rows, but not one row for each text.

    These include arguments whose sizes do not determine the axis of the rows.
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
