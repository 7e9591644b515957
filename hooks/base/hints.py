"""Hints in errors: the name that a thing of another library has here.

This package knows no other library. The packages beside it may have a module `hints` with a value `HINTS`.

1. An error of an unknown point, attribute or keyword asks for hints (`unknown_point`, `attribute_hint`, `argument_hint`).
2. Only then are the modules read, of the packages that the program has imported (`_imported`).
"""

import difflib
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hooks.base._torch import traced_as_constant
from hooks.base.errors import UnknownNameError, unknown_name

NameHint = Callable[[str, Collection[str], str], UnknownNameError | None]
"""From a name, the known names, and their noun: an error that says more; None if there is nothing to say."""

_ROOT = Path(__file__).parents[2]
_FIRST_FILES = {name: str(_ROOT / name / "__init__.py") for name in ("models", "interp")}
"""The packages beside this one that may have hints, and their first files."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """The words of other libraries that a package knows.

    Attributes:
        names: functions that give errors for unknown names.
        arguments: keywords of other libraries, and what does the same here.
        attributes: methods and attributes of their objects, likewise.
        makers: for the name of a class, the call that makes an object of it. `{}` stands for a text that was given.
        watchers: names of modules whose hooks stay on a model, and only look at values.
        marking: the call that gives a model hook points.

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
    """The hints of the packages beside this one that are imported."""
    hints = []
    for package, file in _FIRST_FILES.items():
        # A program may have a module of its own with that name.
        if getattr(sys.modules.get(package), "__file__", None) == file:
            hints.append(importlib.import_module(f"{package}.hints").HINTS)
    return hints


def unknown_point(name: str, known: Collection[str], what: str) -> UnknownNameError:
    """The error for a `name` that no `what` has, with the first hint there is."""
    for hints in _imported():
        for name_hint in hints.names:
            if error := name_hint(name, known, what):
                return error
    return unknown_name(name, known, what)


def attribute_hint(name: str) -> str:
    """Return what a missing attribute is here, for the end of an error; empty if nothing is known."""
    for hints in _imported():
        if name in hints.attributes:
            return f"; here it is {hints.attributes[name]}"
    return ""


def argument_hint(name: str) -> str:
    """Return what a keyword of another library is here; empty if nothing is known."""
    for hints in _imported():
        if name in hints.arguments:
            return hints.arguments[name]
    return ""


def made_by(kind: str, value: object) -> str:
    """The call that makes an object of a class, of a text where one was given; empty if nothing is known."""
    text = f"{value!r:.60}" if isinstance(value, str) else "..."
    for hints in _imported():
        if kind in hints.makers:
            return hints.makers[kind].replace("{}", text)
    return ""


def how_to_mark() -> str:
    """The call that gives a model hook points, in parentheses; empty if nothing is known."""
    markings = [hints.marking for hints in _imported() if hints.marking]
    return f" ({markings[0]})" if markings else ""


# Without arguments, because a compiler may keep an answer only if all arguments are constants.
@traced_as_constant
def _watchers() -> tuple[str, ...]:
    return tuple(module for hints in _imported() for module in hints.watchers)


def is_watcher(hook: Callable[..., Any]) -> bool:
    """Return whether a hook stays on a model and only looks at values."""
    return getattr(hook, "__module__", None) in _watchers()


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that a name may be a misspelling of, the nearest first. Words may stand in another form or order."""
    plain = {other.lower().replace("_", ""): other for other in known}
    wanted = name.lower().replace("_", "")
    inside = [one for one in plain if len(wanted) > 3 and wanted in one]
    close = difflib.get_close_matches(wanted, plain, n=3, cutoff=0.7)
    return [plain[one] for one in dict.fromkeys([*close, *inside])][:3]


class HintedClass(type):
    """Names our equivalent of a missing attribute of a class, such as another library's `from_pretrained`."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            hint = attribute_hint(name)
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}{hint}")


class HintsAtNames:
    """Names our equivalent of a missing attribute."""

    # Hidden from type checkers, for which any attribute would exist otherwise.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # The method of a module finds its parts.
            inherited = getattr(super(), "__getattr__", None)
            try:
                if inherited is not None:
                    return inherited(name)
            except AttributeError:
                if not attribute_hint(name):
                    raise
            hint = attribute_hint(name)
            if not hint and not name.startswith("_"):
                close = closest(name, [known for known in dir(type(self)) if known[0] != "_"])
                hint = f"; close matches: {', '.join(close)}" if close else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")
