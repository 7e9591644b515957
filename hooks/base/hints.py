"""Hints in errors: how something is called here that other libraries call by another name.

This package knows no other library. Packages that do register their words, and errors of unknown points, attributes
and keywords ask here.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hooks.base.errors import UnknownNameError, unknown_name

NameHint = Callable[[str, Collection[str], str], UnknownNameError | None]
"""From a name, the known ones, and what they name: an error that says more; None if it has nothing to say."""

ARGUMENTS: dict[str, str] = {}
ATTRIBUTES: dict[str, str] = {}
_makers: dict[str, str] = {}
_name_hints: list[NameHint] = []
_watchers: set[str] = set()
_markings: list[str] = []


def register_hints(
    name_hint: NameHint | None = None,
    *,
    arguments: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    makers: Mapping[str, str] | None = None,
    watchers: Collection[str] = (),
    marking: str = "",
) -> None:
    """Add hints to errors.

    Args:
        name_hint: gives errors for unknown names.
        arguments: keywords of other libraries, and what does the same here.
        attributes: methods and attributes of their objects, likewise.
        makers: for the name of a class, the call that makes one of it. `{}` stands for a text that was given.
        watchers: names of modules whose hooks stay on a model, and only look at values.
        marking: how a model without hook points gets some.
    """
    _name_hints.extend([name_hint] if name_hint else [])
    ARGUMENTS.update(arguments or {})
    ATTRIBUTES.update(attributes or {})
    _makers.update(makers or {})
    _watchers.update(watchers)
    _markings.extend([marking] if marking else [])


def unknown_point(name: str, known: Collection[str], what: str) -> UnknownNameError:
    """The error for a `name` that no `what` has, with the first hint there is."""
    errors = (hint(name, known, what) for hint in _name_hints)
    return next(filter(None, errors), None) or unknown_name(name, known, what)


def made_by(kind: str, value: object) -> str:
    """The call that makes an object of a class, of a text where one was given; empty if nobody said."""
    text = f"{value!r:.60}" if isinstance(value, str) else "..."
    return _makers[kind].replace("{}", text) if kind in _makers else ""


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that a name may be a misspelling of, the nearest first. Words may stand in another form or order."""
    plain = {other.lower().replace("_", ""): other for other in known}
    wanted = name.lower().replace("_", "")
    inside = [one for one in plain if len(wanted) > 3 and wanted in one]
    close = difflib.get_close_matches(wanted, plain, n=3, cutoff=0.7)
    return [plain[one] for one in dict.fromkeys([*close, *inside])][:3]


def how_to_mark() -> str:
    """How a model without hook points gets some, in parentheses; empty if nobody said."""
    return f" ({_markings[0]})" if _markings else ""


def is_watcher(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of those that stay on a model and only look."""
    return getattr(hook, "__module__", None) in _watchers


class HintedClass(type):
    """Names our equivalent of a missing attribute of a class, such as another library's `from_pretrained`."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            hint = f"; here it is {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}{hint}")


class HintsAtNames:
    """Names our equivalent of a missing attribute."""

    if not TYPE_CHECKING:  # or any attribute would pass for one

        def __getattr__(self, name: str) -> Any:
            inherited = getattr(super(), "__getattr__", None)  # that of a module finds its parts
            try:
                if inherited is not None:
                    return inherited(name)
            except AttributeError:
                if name not in ATTRIBUTES:
                    raise
            hint = f"; here it is {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            if not hint and not name.startswith("_"):
                close = closest(name, [known for known in dir(type(self)) if known[0] != "_"])
                hint = f"; close matches: {', '.join(close)}" if close else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")
