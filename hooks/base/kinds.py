"""Checks of the classes of arguments.

An error names the given value, the needed class, and the call that makes an object of this class.

1. `require_kind` checks the class of a value. The hints of a package contain the call that makes an
   object of the class.
2. `logits_in` returns the logits in an output of a model, so that functions of logits also accept
   the output.
3. `require_callable` checks that a user's function takes the right number of arguments.
4. `require_device` checks that a device is available.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from hooks.base.hints import attribute_hint, closest, made_by
from hooks.base.renamed import Renamed, warn_of_old_name
from hooks.base.saying import shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Output = TypeVarWithDefault("Output", default=Any)
else:
    # Python 3.11 and 3.12 have no defaults of type variables, which only type checkers need.
    Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)


class Returns(Protocol[Output_co]):
    """A model, by the type of its output, for type checkers.

    They know that a `Transformer` returns a tensor. For other modules of PyTorch, the type is Any.
    """

    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Output_co:
        """Return the output of the model."""


def require_kind(
    name: str, value: object, kind: type | tuple[type, ...], words: str, call: str = ""
) -> None:
    """Check the class of a value.

    Args:
        name: the name of the argument.
        value: the given value.
        kind: the class, or several classes.
        words: the class in words, such as `an ActivationCache`.
        call: the call that makes an object of the class. Default: the hint for the first class.

    Raises:
        TypeError: naming the argument, the needed class, the given value, and the call.

    >>> require_kind("seed", "a", int, "an integer")
    Traceback (most recent call last):
    TypeError: seed must be an integer; got 'a'
    """
    if isinstance(value, kind):
        return
    classes = kind if isinstance(kind, tuple) else (kind,)
    call = call or made_by(classes[0].__name__, value)
    hint = f"; {call}" if call else ""
    raise TypeError(f"{name} must be {words}; got {shown(value)}{hint}")


@runtime_checkable
class HasLogits(Protocol):
    """The output of a model of `transformers`, which contains the logits."""

    logits: Any


def logits_in(output: Any) -> Any:
    """Return the logits in the output of a model of `transformers`; any other value unchanged.

    Args:
        output: the output of a model, or its logits.

    >>> logits_in("a")
    'a'
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else output


def require_callable(
    name: str, function: object, parameters: tuple[str, ...], example: str = ""
) -> None:
    """Check that a user's function can be called with a number of positional arguments.

    Only the number is checked, not the names. A callable object whose signature Python does not
    know, such as a function that is written in C, is accepted.

    Args:
        name: the name of the argument.
        function: the given value.
        parameters: the names of the arguments that the function receives.
        example: an example of the function. Default: none.

    Raises:
        TypeError: if the value is not a function with this number of arguments.

    >>> require_callable("reading", lambda model: 0, ("model", "cache"))
    Traceback (most recent call last):
    TypeError: reading must be a function of (model, cache); its arguments are (model)
    """
    hint = f"; {example}" if example else ""
    rule = f"{name} must be a function of ({', '.join(parameters)})"
    if not callable(function):
        raise TypeError(f"{rule}; got {shown(function)}{hint}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise TypeError(f"{rule}; its arguments are {signature}{hint}") from None


def require_module(model: object) -> None:
    """Check that a model is a module, and not a runner, an attachment, a cache or a name.

    Raises:
        TypeError: if the model is not a module.

    >>> from hooks import HookedRunner
    >>> require_module(HookedRunner(nn.ReLU()))
    Traceback (most recent call last):
    TypeError: model must be a torch.nn.Module; got a HookedRunner; give the HookedRunner's .model
    """
    kind = type(model).__name__
    hint = f"give the {kind}'s .model" if hasattr(model, "model") else ""
    hint = hint or ("a cache comes after the model" if kind == "ActivationCache" else "")
    require_kind("model", model, nn.Module, words="a torch.nn.Module", call=hint)


def require_device(device: Any) -> torch.device | None:
    """Return a device after a check that it is available. None is returned unchanged.

    Raises:
        ValueError: if no device with this name is available; the error is one line.
        TypeError: if the value is not the name of a device.

    >>> require_device("cpu")
    device(type='cpu')
    >>> require_device("cudaa")
    Traceback (most recent call last):
    ValueError: device must be one that is here, such as 'cpu'; got 'cudaa'
    """
    if device is None:
        return None
    try:
        available = torch.device(device)
        if available.type != "meta":
            # This raises an error if the device is not available.
            torch.empty(0, device=available)
    except TypeError:
        rule = "device must be a name, such as 'cpu', or a torch.device"
        raise TypeError(f"{rule}; got {shown(device)}, a {type(device).__name__}") from None
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        is_cuda = str(device).partition(":")[0] == "cuda"
        missing = is_cuda and not torch.cuda.is_available()
        reason = ": torch.cuda.is_available() is False here" if missing else ""
        raise ValueError(
            f"device must be one that is here, such as 'cpu'; got {device!r}{reason}"
        ) from error
    return available


def missing_name(
    module: str,
    known: list[str],
    moved: Mapping[str, str | Renamed] | None = None,
    elsewhere: Sequence[str] = (),
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package. Its error for an unknown name lists close matches.

    `package.name` raises an AttributeError. `from package import name` raises an ImportError,
    because Python would replace the message of an AttributeError with its own.

    Args:
        module: the name of the package.
        known: the names in the package.
        moved: former names, each with its new name or place. A name that still works has a
            `Renamed` instead of a text: its value is returned, with a DeprecationWarning.
        elsewhere: modules whose `__all__` may contain the name. They are imported for the error.
    """

    def __getattr__(name: str) -> Any:
        former = (moved or {}).get(name)
        if isinstance(former, Renamed):
            # `from package import name` looks up the name twice, first with `hasattr`.
            if _caller_of_lookup(sys._getframe(1)).f_code.co_name != "_handle_fromlist":
                warn_of_old_name(f"{module}.{name}", former.place, former.until)
            return former.value()
        # `from package import module` looks up the attribute `module` first. Python imports the
        # module only after an AttributeError.
        is_module = former is None and find_spec(f"{module}.{name}") is not None
        if name.startswith("_") or is_module:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        places = [place for place in elsewhere if name in import_module(place).__all__]
        if former is not None:
            hint = f"; it is now {former}"
        elif places:
            hint = f"; it is {places[0]}.{name}"
        else:
            hint = attribute_hint(name, [module.rpartition(".")[2]])
        close = [] if hint else closest(name, known)
        matches = f"; close matches: {', '.join(close)}" if close else ""
        words = f"module {module!r} has no attribute {name!r}{hint}{matches}"
        raise ImportError(words) if _imports_a_name(sys._getframe(1)) else AttributeError(words)

    return __getattr__


def _caller_of_lookup(frame: FrameType) -> FrameType:
    """Return the first frame outside of a `__getattr__`."""
    while frame.f_code.co_name == "__getattr__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _imports_a_name(frame: FrameType) -> bool:
    """Return whether the first frame outside of a `__getattr__` runs `from package import name`."""
    frame = _caller_of_lookup(frame)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"
