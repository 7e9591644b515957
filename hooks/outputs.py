"""The tensor that stands for a module's output, and an output with that tensor replaced."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hooks.errors import HookError
from hooks.point import Point


def first_tensor(output: Any, point: Point) -> Tensor:
    """`output` itself, or the first tensor of a tuple, list, mapping or dataclass.

    Raises:
        HookError: if there is none.
    """
    for tensor in tensors_in(output):
        return tensor
    raise HookError(f"{point.name} returned no tensor but {type(output).__name__}")


def with_first_tensor(output: Any, value: Tensor) -> Any:
    """A copy of `output` in which `value` stands where `first_tensor` found one."""
    if isinstance(output, Tensor):
        return value
    key, field = next((k, f) for k, f in _fields(output) if any(True for _ in tensors_in(f)))
    return _replace(output, key, with_first_tensor(field, value))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, Tensor):
        yield output
        return
    for _, field in _fields(output):
        yield from tensors_in(field)


def _fields(output: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, (tuple, list)):
        return list(enumerate(output))
    if dataclasses.is_dataclass(output):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    return []


def _replace(output: Any, key: Any, field: Any) -> Any:
    if isinstance(output, tuple):
        parts = (*output[:key], field, *output[key + 1 :])
        return output._make(parts) if hasattr(output, "_make") else type(output)(parts)
    changed = copy.copy(output)
    if isinstance(output, (Mapping, list)):
        changed[key] = field
    else:
        # Not dataclasses.replace, which would run the class's own initialisation again.
        object.__setattr__(changed, key, field)
    return changed


def as_node(value: Tensor) -> Tensor:
    """`value` as a node of the graph, so that its gradient counts only what flows through this point.

    Where nothing before the point needs a gradient (frozen weights), the point becomes the leaf.
    """
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
