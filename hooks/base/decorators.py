"""Decorators of public functions: errors that explain a wrong call, and gradients off.

1. An argument that is a `ModelHandle`, such as the result of `attach`, becomes its model.
2. A decorated function runs as it is written.
3. If Python finds that the arguments do not fit, the error names the missing or unknown argument,
   the right call and, where one is known, the change that the call needs (`refuse_unbound`).
"""

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from hooks.base._torch import set_gradients
from hooks.base.accessor import without_handle
from hooks.base.errors import HookError, SelectionError, UnknownNameError
from hooks.base.hints import argument_hint
from hooks.base.saying import shown
from hooks.base.words import Words, refuse

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def explains_calls(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose error for unknown or missing arguments explains how to call it.

    >>> explains_calls(lambda x, *, scale=1.0: x)(3, scales=2.0)
    Traceback (most recent call last):
    TypeError: <lambda> takes no argument scales=; close matches: scale
    """

    n_owners = _n_owners(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = _without_handles(args, kwargs, n_owners)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            refuse_unbound(function, args, kwargs=kwargs, error=error)
            raise
        except (SelectionError, UnknownNameError) as error:
            _remove_frames(error)
            raise

    return run


_LIBRARIES = {"hooks", "models", "interp", "torch", "transformers", "contextlib", "functools"}


def _remove_frames(error: HookError) -> None:
    """Remove the traceback of an error, if the traceback contains no code of the user.

    The message of these errors names the wrong argument. The traceback would contain each module of
    the model around the point.

    Args:
        error: the error.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    if packages <= _LIBRARIES:
        error.__traceback__ = None


def _without_handles(args: Any, kwargs: Any, n_kept: int) -> Any:
    """Return the arguments of a call with the model of each `ModelHandle` in its place.

    Args:
        args, kwargs: the arguments.
        n_kept: the number of first arguments that do not change: see `_n_owners`.
    """
    named = {name: without_handle(value) for name, value in kwargs.items()}
    return (*args[:n_kept], *map(without_handle, args[n_kept:])), named


def _n_owners(function: Callable[..., Any]) -> int:
    """Return 1 for a method, whose first argument is its object or its class; otherwise 0.

    >>> _n_owners(torch.nn.Module.eval), _n_owners(len)
    (1, 0)
    """
    # A model has no signature that can be read fast, and needs none.
    if not inspect.isfunction(function):
        return 0
    code = inspect.unwrap(function).__code__
    return int(code.co_varnames[:1] in (("self",), ("cls",)))


def names_fields(kind: type[T]) -> type[T]:
    """Decorate a dataclass so that errors for unknown or missing fields name close matches."""
    make: Any = kind.__init__
    required = {
        field.name
        for field in dataclasses.fields(cast(Any, kind))
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    }

    @functools.wraps(make)
    def __init__(self: T, *args: Any, **fields: Any) -> None:
        refuse(fields, make, kind.__name__)
        if not args and (missing := required - fields.keys()):
            listed = ", ".join(f"{name}=" for name in sorted(missing))
            raise TypeError(f"{kind.__name__} needs {listed}; got none")
        make(self, *args, **fields)

    setattr(kind, "__init__", __init__)  # noqa: B010  # mypy does not allow a plain assignment
    return kind


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs with gradients off, as under `torch.no_grad()`.

    A keyboard interrupt at any moment cannot leave gradients off: they are switched off inside a
    `try` whose `finally` restores them. `with torch.no_grad()` runs Python code before its `try`
    begins, and PyTorch has no public function that switches gradients in one atomic step.
    """

    n_owners = _n_owners(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = _without_handles(args, kwargs, n_owners)
        before = torch.is_grad_enabled()
        try:
            set_gradients(False)
            return function(*args, **kwargs)
        except TypeError as error:
            refuse_unbound(function, args, kwargs=kwargs, error=error)
            raise
        finally:
            set_gradients(before)

    return run


def require_gradients() -> None:
    """Check that PyTorch's inference mode is off, because it allows no gradients.

    Raises:
        ValueError: if it is on.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "gradients must be enabled; got PyTorch's inference mode: call this function outside "
            "of torch.inference_mode()"
        )


def refuse_unbound(function: Callable[..., Any], args: Any, kwargs: Any, error: TypeError) -> None:
    """Raise an error that names the missing or unknown argument of a call.

    If the arguments fit, the TypeError was raised inside the function, and nothing is done.

    Args:
        function: the function that was called.
        args, kwargs: the arguments of the call.
        error: the error of the call.

    Raises:
        TypeError: if the arguments do not fit the function; the error names the argument.
    """
    signature = inspect.signature(function)
    name = getattr(function, "__name__", "the function")
    called = getattr(function, "__qualname__", name).rpartition("<locals>.")[2]
    called = called.removesuffix(".__init__")
    # The message of Python begins with `name()`, or `Class.name()`, if the arguments do not fit.
    if not str(error).partition(" ")[0].endswith(f"{name}()"):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as reason:
        Words(function).require(kwargs, (), called)
        takes = ", ".join(_as_written(signature))
        advice = _advice(called, signature, args, str(reason))
        rule = f"{called} must be called as {called}({takes})"
        raise TypeError(f"{rule}: {reason}{advice}") from None


def _advice(name: str, signature: inspect.Signature, args: Any, reason: str) -> str:
    """Return the change that a wrong call of a function needs, for the end of an error.

    Args:
        name: the name of the function.
        signature: the signature of the function.
        args: the positional arguments of the call.
        reason: the reason why the arguments do not fit.
    """
    if "missing a required" in reason:
        missing = reason.rpartition("'")[0].rpartition("'")[2]
        advice = argument_hint(f"{name}.{missing}")
        return f"; {advice}" if advice else ""
    parameters = [*signature.parameters.values()]
    named = [other for other in parameters if other.kind is other.KEYWORD_ONLY]
    n_unnamed = sum(other.kind is other.POSITIONAL_OR_KEYWORD for other in parameters)
    if "too many positional" not in reason:
        return ""
    if advice := argument_hint(f"{name}.*"):
        return f"; {advice}"
    if any(other.name == "where" for other in parameters):
        return "; a place needs the name of its axis, such as head=3 or pos=-1"
    if not named:
        return ""
    given = shown(args[n_unnamed])
    return f"; {given} needs the name of its argument, such as {named[0].name}="


def _as_written(signature: inspect.Signature) -> list[str]:
    """Return parameters as a call or a signature shows them.

    `*` is before the first keyword-only parameter. An optional parameter has its default, or `...`
    if the default is not a number, a text or None.

    >>> _as_written(inspect.signature(lambda x, head=3, *, scales=(1.0, 2.0): x))
    ['x', 'head=3', '*', 'scales=...']
    """
    written = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        is_open = parameter.kind is parameter.VAR_KEYWORD
        name = f"**{parameter.name}" if is_open else parameter.name
        default = parameter.default
        if default is not parameter.empty:
            is_short = type(default) in (bool, int, float, str, type(None))
            name += f"={default!r}" if is_short else "=..."
        written.append(name)
    return written
