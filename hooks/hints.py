"""Hints in errors: how something is called here that other libraries call by another name.

This package knows no other library. Packages that do register their words, and errors of unknown points, attributes
and keywords ask here.
"""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from hooks.errors import UnknownNameError, unknown_name

NameHint = Callable[[str, Collection[str], str], UnknownNameError | None]
"""From a name, the known ones, and what they name: an error that says more; None if it has nothing to say."""

ARGUMENTS: dict[str, str] = {}
ATTRIBUTES: dict[str, str] = {}
_name_hints: list[NameHint] = []
_watchers: set[str] = set()
_markings: list[str] = []


def register_hints(
    name_hint: NameHint | None = None,
    *,
    arguments: Mapping[str, str] | None = None,
    attributes: Mapping[str, str] | None = None,
    watchers: Collection[str] = (),
    marking: str = "",
) -> None:
    """Add hints to errors.

    Args:
        name_hint: gives errors for unknown names.
        arguments: keywords of other libraries, and what does the same here.
        attributes: methods and attributes of their objects, likewise.
        watchers: names of modules whose hooks stay on a model, and only look at values.
        marking: how a model without hook points gets some.
    """
    _name_hints.extend([name_hint] if name_hint else [])
    ARGUMENTS.update(arguments or {})
    ATTRIBUTES.update(attributes or {})
    _watchers.update(watchers)
    _markings.extend([marking] if marking else [])


def unknown_point(name: str, known: Collection[str], what: str) -> UnknownNameError:
    """The error for a `name` that no `what` has, with the first hint there is."""
    errors = (hint(name, known, what) for hint in _name_hints)
    return next(filter(None, errors), None) or unknown_name(name, known, what)


def how_to_mark() -> str:
    """How a model without hook points gets some, in parentheses; empty if nobody said."""
    return f" ({_markings[0]})" if _markings else ""


def is_watcher(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of those that stay on a model and only look."""
    return getattr(hook, "__module__", None) in _watchers


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
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
