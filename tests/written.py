"""Types and default values as short text, which is equal in all versions of Python.

1. `value_text` writes numbers, texts and collections as Python does, types, functions and members
   of enums by name, and objects of dataclasses with their fields.
2. `type_text` writes a type with the last parts of the names of its classes. The members of a union
   are sorted, because Python may change their order.
"""

import dataclasses
import enum
import inspect
import types
import typing

import torch

SCALARS = (bool, int, float, complex, str, bytes, type(None))


def value_text(value):
    """Return a value as text.

    Raises:
        TypeError: if an object has no text that is equal in each run.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is ...:
        return "..."
    if isinstance(value, (*SCALARS, torch.dtype, torch.device, range, slice)):
        return repr(value)
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__qualname__
    if isinstance(value, (dict, types.MappingProxyType)):
        items = (f"{value_text(key)}: {value_text(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(value_text, value)))})"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, tuple):
        items = ", ".join(map(value_text, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        items = (f"{name}={value_text(item)}" for name, item in fields.items())
        return f"{type(value).__name__}({', '.join(items)})"
    raise TypeError(f"a default must be a value whose text is known; got {value!r}")


def type_text(kind, named=None):
    """Return a type as text.

    Args:
        kind: the type, as an annotation states it.
        named: the texts of the members of some types, by the names of these types. A name takes
            the place of these members; see `members_of`.
    """
    members = members_of(kind, named)
    for name, texts in (named or {}).items():
        if texts <= members:
            members = members - texts | {name}
    return " | ".join(sorted(members, key=lambda member: (member == "None", member)))


def members_of(kind, named=None):
    """Return the texts of the members of a union, or the text of another type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return frozenset(type_text(part, named) for part in typing.get_args(kind))
    return frozenset([one_type_text(kind, named)])


def one_type_text(kind, named):
    """Return a type as text, if it is no union."""
    if kind is None or kind is type(None):
        return "None"
    if kind is ...:
        return "..."
    if isinstance(kind, str):
        return kind
    if isinstance(kind, typing.ForwardRef):
        return kind.__forward_arg__
    # The classes of jaxtyping, such as Float[Tensor, "batch pos"].
    if hasattr(kind, "dim_str"):
        return f'{kind.dtype.__name__}[{type_text(kind.array_type, named)}, "{kind.dim_str}"]'
    parts = kind if isinstance(kind, list) else typing.get_args(kind)
    origin = typing.get_origin(kind)
    is_literal = origin is typing.Literal
    texts = [value_text(part) if is_literal else type_text(part, named) for part in parts]
    if isinstance(kind, list):
        return f"[{', '.join(texts)}]"
    name = getattr(origin or kind, "__name__", None) or (origin or kind)._name
    return f"{name}[{', '.join(texts)}]" if texts else name
