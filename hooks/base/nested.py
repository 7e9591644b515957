"""Tensors inside nested values: tuples, lists, mappings and dataclasses.

For example, the output of a module is such a value.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor


def with_first_tensor(output: Any, value: Tensor) -> Any:
    """Return a copy of `output` with `value` instead of its first tensor."""
    if isinstance(output, Tensor):
        return value
    fields = _fields(output) or ()
    key, field = next((key, field) for key, field in fields if _has_tensor(field))
    return _with_fields(output, {key: with_first_tensor(field, value)})


def _has_tensor(field: Any) -> bool:
    """Return whether a value contains a tensor."""
    return any(True for _ in tensors_in(field))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in order."""
    if isinstance(output, Tensor):
        yield output
        return
    # Most leaves have one of these types, and a check for mappings is slow.
    if output is None or isinstance(output, (int, str)):
        return
    for _, field in _fields(output) or ():
        yield from tensors_in(field)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested containers, with `change(leaf)` for each leaf.

    The containers are tuples, lists, mappings and dataclasses. None is not changed.
    """
    # Most containers and leaves have one of these types, and a check for mappings is slow.
    if isinstance(value, tuple):
        parts = [part if part is None else mapped(part, change) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if type(value) is dict:
        return {key: mapped(field, change) for key, field in value.items()}
    if value is None:
        return None
    if isinstance(value, (int, str, Tensor)) or (fields := _fields(value)) is None:
        return change(value)
    return _with_fields(value, {key: mapped(field, change) for key, field in fields})


def _fields(output: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container by key, or None if the value is not a container."""
    if isinstance(output, (tuple, list)):
        return enumerate(output)
    if isinstance(output, Mapping):
        return output.items()
    if dataclasses.is_dataclass(output):
        return [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
    return None


def _with_fields(output: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a container with changed items, by key."""
    if isinstance(output, tuple):
        parts = [changed.get(n, part) for n, part in enumerate(output)]
        return output._make(parts) if hasattr(output, "_make") else type(output)(parts)
    copied = copy.copy(output)
    for key, field in changed.items():
        if isinstance(output, (Mapping, list)):
            copied[key] = field
        else:
            # dataclasses.replace would run the initialisation of the class again.
            object.__setattr__(copied, key, field)
    return copied
