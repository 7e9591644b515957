"""What is checked of arguments: the fields of configs, whole numbers, tokens; and a model's mode."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType, UnionType
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
        ValueError: naming the first such field, its value and its type.
    """
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), field.type
        name = prefix + field.name
        if isinstance(value, numbers.Number) and hasattr(value, "item"):
            value = value.item()
            object.__setattr__(config, field.name, value)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise _not_one_of(name, value, get_args(kind))
        elif not _is(value, kind):
            raise ValueError(f"{name} is {_described(kind)}, not {value!r}")


def require(config: Any, name: str, holds: object, rule: str, prefix: str = "") -> None:
    """Refuses a field whose rule does not hold.

    Raises:
        ValueError: naming the field, the rule and its value.
    """
    if not holds:
        raise ValueError(f"{prefix}{name} is {rule}, not {getattr(config, name)!r}")


def require_default(config: Any, names: str, used: object, reason: str, prefix: str = "") -> None:
    """Refuses fields that were set where another one leaves them without effect.

    Args:
        config: a dataclass.
        names: the fields, with spaces between them.
        used: whether they have an effect.
        reason: when they have one.
        prefix: as for `check_types`.

    Raises:
        ValueError: naming the first such field, its default and its value.
    """
    for name in () if used else names.split():
        default = config.__dataclass_fields__[name].default
        require(
            config, name, getattr(config, name) == default, f"{default!r} unless {reason}", prefix
        )


def check_whole(name: str, value: object, least: float = 1) -> None:
    """Refuses what is not a whole number, or is too small.

    Raises:
        ValueError: naming the argument, its least value and the one given.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        bound = "" if math.isinf(least) else f" of at least {least}"
        raise ValueError(f"{name} is a whole number{bound}, not {value!r}")


def check_tokens(tokens: object, rule: str) -> None:
    """Refuses what is not a matrix of whole numbers.

    Raises:
        ValueError: `rule`, and what was given.
    """
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{rule}, not a {type(tokens).__name__}")
    if tokens.ndim != 2 or tokens.dtype not in INTEGERS:
        raise ValueError(f"{rule}, not {tokens.dtype} of shape {tuple(tokens.shape)}")


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
    if get_origin(kind) is UnionType:
        return any(_is(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, tuple):
            return False
        if kinds[-1] is not ...:
            return len(value) == len(kinds) and all(map(_is, value, kinds))
        return all(_is(one, kinds[0]) for one in value)
    if kind is float:
        return type(value) is not bool and isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, kind) and (kind is bool or type(value) is not bool)


def _described(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(map(_described, get_args(kind)))
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        many = "" if kinds[-1] is ... else f"{len(kinds)} "
        return f"a tuple of {many}{kinds[0].__name__}s"
    if kind is NoneType:
        return "None"
    if kind is float:
        return "a finite float"
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _not_one_of(name: str, value: object, allowed: tuple[str, ...]) -> ValueError:
    close = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}{hint}")
