"""What is checked of arguments: the fields of configs, whole numbers, tokens; and a model's mode."""

import dataclasses
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from hooks._torch import FakeTensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_types(config: Any, prefix: str = "") -> None:
    """Refuses values that are not of their fields' types; an int passes for a float.

    Numbers of numpy become Python's, which files can hold.

    Args:
        config: a dataclass.
        prefix: what stands before the names of its fields in errors.

    Raises:
        ValueError: naming the first such field, its type and its value.
    """
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), field.type
        called = prefix + field.name
        if isinstance(value, numbers.Number) and hasattr(value, "item"):
            value = value.item()
            object.__setattr__(config, field.name, value)
        if get_origin(kind) is Literal:
            _check_choice(called, value, get_args(kind))
        elif not _is(value, kind):
            name = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{called} must be of type {name}; got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{called} must be finite; got {value}")


def require(config: Any, name: str, holds: object, rule: str, prefix: str = "") -> None:
    """Refuses a field whose rule does not hold.

    Raises:
        ValueError: naming the field, the rule and its value.
    """
    if not holds:
        raise ValueError(f"{prefix}{name} must be {rule}; got {getattr(config, name)!r}")


def check_whole(name: str, value: object, least: float = 1) -> None:
    """Refuses what is not a whole number, or is too small.

    Raises:
        ValueError: naming the argument, its least value and the one given.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        bound = "" if math.isinf(least) else f" of at least {least}"
        raise ValueError(f"{name} must be a whole number{bound}; got {value!r}")


def check_tokens(tokens: object, rule: str) -> None:
    """Refuses what is not a matrix of whole numbers.

    Raises:
        ValueError: `rule`, and what was given.
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{rule}; got a {type(tokens).__name__}")
    if tokens.ndim != 2 or tokens.dtype not in INTEGERS:
        raise ValueError(f"{rule}; got {tokens.dtype} of shape {tuple(tokens.shape)}")


def can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be looked at now: not while a graph or a plan is made."""
    absent = tensor.is_meta or isinstance(tensor, FakeTensor)
    return not absent and not torch.compiler.is_compiling()


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode; each module gets its own back."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, tuple):
            return False
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return len(value) == len(kinds) and all(map(_is, value, kinds))
    if isinstance(value, bool):  # which Python takes for an int
        return kind is bool
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{hint}")
