"""Check arguments: fields of configs, and tokens."""

import dataclasses
import math
import numbers
from typing import Any, Literal, TypeVar, get_args, get_origin

import torch
from torch import Tensor

from hooks.base import FakeTensor, require_choice, shown, skips_token_checks

T = TypeVar("T")
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_types(config: Any, prefix: str = "") -> None:
    """Check that values have the types of their fields. An int is valid for a float.

    NumPy numbers become Python numbers, which JSON can store.

    Args:
        config: a dataclass.
        prefix: text before the field names in errors.

    Raises:
        ValueError: naming the first wrong field, its type and its value.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        kind = field.type
        called = prefix + field.name
        if isinstance(value, numbers.Number) and hasattr(value, "item"):
            value = value.item()
            object.__setattr__(config, field.name, value)
        if get_origin(kind) is Literal:
            require_choice(called, value, get_args(kind))
        elif not _is(value, kind):
            name = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{called} must be of type {name}; got {shown(value)}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{called} must be finite; got {value}")


def require(config: Any, name: str, holds: object, rule: str, prefix: str = "") -> None:
    """Check that the rule of a field holds.

    Args:
        config: the config.
        name: the field.
        holds: the result of the check.
        rule: the rule in words, for the error.
        prefix: text before the name of the field in the error.

    Raises:
        ValueError: naming the field, the rule and its value.
    """
    if not holds:
        raise ValueError(f"{prefix}{name} must be {rule}; got {getattr(config, name)!r}")


def check_tokens(tokens: object) -> None:
    """Check that tokens are a matrix of integers.

    Raises:
        TypeError: if they are no tensor of integers.
        ValueError: if they are no matrix. Both errors give the rule and the wrong value.
    """
    are_integers = isinstance(tokens, Tensor) and tokens.dtype in INTEGERS
    if isinstance(tokens, Tensor) and are_integers and tokens.ndim == 2:
        return
    error = ValueError if are_integers else TypeError
    raise error(
        f"tokens must be integers of shape [batch, pos]; got {shown(tokens)} (to_tokens "
        "converts texts)"
    )


def can_be_read(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor can be read now.

    During compilation, they cannot be read. The tensors of a plan (`HookedRunner.plan`) have no
    numbers.
    """
    absent = tensor.is_meta or isinstance(tensor, FakeTensor)
    return not absent and not torch.compiler.is_compiling()


def should_read(tensor: Tensor) -> bool:
    """Return whether to check the numbers of a tensor.

    They are checked if they can be read, and the caller has not promised that they are right.
    """
    return can_be_read(tensor) and not skips_token_checks()


def _is(value: object, kind: Any) -> bool:
    """Return whether a value has the type of a field."""
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, tuple):
            return False
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return len(value) == len(kinds) and all(map(_is, value, kinds))
    # In Python, a bool is also an int.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
