"""Hints in errors: our name for an object of another library.

This package knows no other library. The packages `models` and `interp` may have a module `hints`
with a value `HINTS`.

1. An error about an unknown point, attribute or keyword looks up hints (`unknown_point`,
   `attribute_hint`, `argument_hint`).
2. The modules named `hints` are imported at this moment, and not earlier. This concerns every
   package that the program has imported (`_imported`). For an unknown name, a program that has
   imported only `models` also gets the hints of `interp` (`_for_names`).
"""

import difflib
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hooks.base._torch import traced_as_constant
from hooks.base.errors import UnknownNameError, unknown_name

NameHint = Callable[[str, Collection[str], str], UnknownNameError | None]
"""A function of an unknown name, the known names, and the kind of thing that they name.

It returns an error with a hint, or None if it has no hint for the name.
"""

_ROOT = Path(__file__).parents[2]
_FIRST_FILES = {name: str(_ROOT / name / "__init__.py") for name in ("models", "interp")}
"""The other packages that may have hints, and their first files."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The names from other libraries that a package knows.

    Attributes:
        names: functions that return the error for an unknown name; see `NameHint`.
        arguments: the advice for a keyword that a function does not have. The key is a keyword of
            another library, or a function with the keyword, such as `load_sae.release`. The advice
            of `measure.*` is for a call with too many positional arguments.
        attributes: methods and attributes of their objects, each with our equivalent; or an
            attribute that one of our classes does not have, such as `Result.dims`.
        makers: the call that makes an object of a class, by the name of the class. If the user
            passed a text instead of the object, the text replaces `{}` in the call.
        watchers: names of modules and functions whose permanent hooks change no value.
        marking: the call that adds hook points to a model.

    >>> Hints(arguments={"stop_at_layer": "capture(names=...)"}).arguments["stop_at_layer"]
    'capture(names=...)'
    """

    names: tuple[NameHint, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    makers: Mapping[str, str] = field(default_factory=dict)
    watchers: tuple[str, ...] = ()
    marking: str = ""


def _imported() -> list[Hints]:
    """Return the hints of the other packages that are imported."""
    hints = []
    for package, file in _FIRST_FILES.items():
        # A program may have its own module with this name.
        if getattr(sys.modules.get(package), "__file__", None) == file:
            hints.append(importlib.import_module(f"{package}.hints").HINTS)
    return hints


def _for_names() -> list[Hints]:
    """Return the hints for an unknown name: also of `interp`, if only `models` is imported."""
    hints = _imported()
    if hints and "interp" not in sys.modules:
        found = importlib.util.find_spec("interp")
        # The program may have its own module with this name.
        if found is not None and found.origin == _FIRST_FILES["interp"]:
            hints.append(importlib.import_module("interp.hints").HINTS)
    return hints


def unknown_point(name: str, known: Collection[str], what: str) -> UnknownNameError:
    """Return the error for an unknown name, with the first hint that a package has for the name.

    Args:
        name: the unknown name.
        known: the known names.
        what: the kind of thing that has the name, such as `hook point`, for the error.
    """
    for hints in _for_names():
        for name_hint in hints.names:
            if error := name_hint(name, known, what):
                return error
    return unknown_name(name, known, what)


def attribute_hint(name: str, kinds: Iterable[str] = ()) -> str:
    """Return our equivalent of a missing attribute, for the end of an error, or an empty text.

    Args:
        name: the name of the attribute.
        kinds: the names of the object's classes. A hint for one of them is preferred.
    """
    known = [hints.attributes for hints in _imported()]
    for key in (*(f"{kind}.{name}" for kind in kinds), name):
        for attributes in known:
            if key in attributes:
                return f"; here it is {attributes[key]}"
    return ""


def argument_hint(name: str) -> str:
    """Return our equivalent of a keyword of another library, or an empty text.

    Args:
        name: the keyword, or a function and one of its keywords, such as `load_sae.release`.
    """
    for hints in _imported():
        if name in hints.arguments:
            return hints.arguments[name]
    return ""


def made_by(kind: str, value: object) -> str:
    """Return the call that makes an object of a class, or an empty text without a hint.

    Args:
        kind: the name of the class.
        value: the value that the user passed instead of the object. If the value is a text, it
            becomes the argument in the call.
    """
    text = f"{value!r:.60}" if isinstance(value, str) else "..."
    for hints in _imported():
        if kind in hints.makers:
            return hints.makers[kind].replace("{}", text)
    return ""


def how_to_mark() -> str:
    """Return the call that adds hook points to a model, in parentheses, or an empty text."""
    markings = [hints.marking for hints in _imported() if hints.marking]
    return f" ({markings[0]})" if markings else ""


# The function has no arguments, because a compiler can treat a result as a constant only if all
# arguments are constants.
@traced_as_constant
def _watchers() -> tuple[str, ...]:
    """Return the names of modules and functions whose permanent hooks change no value."""
    return tuple(itertools.chain.from_iterable(hints.watchers for hints in _imported()))


def is_watcher(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is permanent and changes no value."""
    where = getattr(hook, "__module__", None)
    return not {where, f"{where}.{getattr(hook, '__name__', None)}"}.isdisjoint(_watchers())


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that are similar to a misspelt name, the closest first.

    Capitals and underscores are ignored. A known name that contains the misspelt name is similar.
    """
    # The keys are the known names in small letters and without underscores.
    by_spelling = {known_name.lower().replace("_", ""): known_name for known_name in known}
    wanted = name.lower().replace("_", "")
    containing = [spelling for spelling in by_spelling if len(wanted) > 3 and wanted in spelling]
    close = difflib.get_close_matches(wanted, by_spelling, n=3, cutoff=0.7)
    spellings = dict.fromkeys([*close, *containing])
    return [by_spelling[spelling] for spelling in spellings][:3]


class HintedClass(type):
    """A class whose error for a missing attribute names our equivalent.

    The attribute may be a method of another library, such as `from_pretrained`.
    """

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            hint = attribute_hint(name, [cls.__name__])
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}{hint}")


def _hint_for(kind: type, name: str) -> str:
    """Return our equivalent of an attribute that a class does not have, or an empty text."""
    # Python and notebooks look up private names in every object.
    if name.startswith("_"):
        return ""
    return attribute_hint(name, [base.__name__ for base in kind.__mro__])


class HintsAtNames:
    """A class whose objects name our equivalent in the error for a missing attribute."""

    # A type checker that sees `__getattr__` accepts every attribute, so the method is hidden.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # If this class is combined with nn.Module, the module's own method must find the
            # children and weights. Other classes have no method.
            try:
                return super().__getattr__(name)
            except AttributeError:
                # The class has the name, so code of the attribute raised an AttributeError, which
                # Python discards. Run the code again for its message.
                if hasattr(type(self), name):
                    return self._read_again(name)
                hint = _hint_for(type(self), name)
                if not hint and hasattr(super(), "__getattr__"):
                    raise
            if not hint and not name.startswith("_"):
                declared = [getattr(kind, "__annotations__", ()) for kind in type(self).__mro__]
                known = [*dir(type(self)), *itertools.chain.from_iterable(declared)]
                close = closest(name, [other for other in known if other[0] != "_"])
                hint = f"; close matches: {', '.join(close)}" if close else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

        def _read_again(self, name: str) -> Any:
            try:
                return object.__getattribute__(self, name)
            except AttributeError as error:
                kind = type(self).__name__
                raise AttributeError(f"{name!r} of {kind} cannot be read: {error}") from error
