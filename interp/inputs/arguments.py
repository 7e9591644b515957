"""Other arguments of a model than its texts, which go with these: rows, or tensors of a list."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def each_row(
    arguments: Mapping[str, Any], batch: int, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Arguments of a model, of which those with a row, or a tensor, for each of `batch` texts are changed."""
    changed = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == batch:
            changed[name] = change(value)
        elif is_listed(value, batch):
            changed[name] = [value[row] for row in change(torch.arange(batch)).tolist()]
    return changed


def require_rows(arguments: Mapping[str, Any], batch: int) -> None:
    """Refuses to divide or repeat texts with an argument that has numbers for all of them together.

    Raises:
        ValueError: naming the argument.
    """
    for name in without_rows(arguments, batch):
        rows = len(arguments[name])
        raise ValueError(
            f"{name} must have a row for each text where texts are divided or repeated; got {rows} for {batch} texts "
            "(a list with a tensor for each text is joined when the model runs)"
        )


def without_rows(arguments: Mapping[str, Any], batch: int) -> Iterator[str]:
    """The names of arguments of floating-point numbers with several rows, but not one for each text."""
    for name, value in arguments.items():
        is_numbers = isinstance(value, Tensor) and value.ndim > 1 and value.is_floating_point()
        if is_numbers and len(value) not in (1, batch):
            yield name


def is_listed(value: Any, batch: int) -> bool:
    """Whether a value is a list with a tensor for each text."""
    is_list = isinstance(value, list) and len(value) == batch
    return is_list and all(isinstance(part, Tensor) for part in value)
