"""What can go wrong at a hook, as a tree.

HookError
├── UnknownNameError   a name or selector that matches nothing (also a KeyError)
├── NeverFiredError    a requested point that the forward pass did not reach
├── EditError          a hook that returned something the point cannot carry
├── ModeError          an extraction that the model's state forbids
├── ContextError       a hook context used twice
└── CacheError         a cache, or a file of one, that cannot answer
"""

import difflib
from collections.abc import Iterable


class HookError(Exception):
    """Any error of this package."""


class UnknownNameError(HookError, KeyError):
    """A name or selector that matches nothing.

    Attributes:
        close_matches: the known names nearest to the one asked for, best first.
    """

    def __init__(self, message: str, close_matches: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.close_matches = close_matches

    # KeyError prints the repr of its argument, which would quote the message.
    __str__ = Exception.__str__


class NeverFiredError(HookError):
    """A requested point that the forward pass did not reach."""


class EditError(HookError):
    """A hook that returned something the point cannot carry."""


class ModeError(HookError):
    """An extraction that the model's state forbids."""


class ContextError(HookError):
    """A hook context used twice."""


class CacheError(HookError):
    """A cache, or a file of one, that cannot answer."""


def close_matches(name: str, known: Iterable[str], most: int = 5) -> tuple[str, ...]:
    """The known names nearest to `name`: those that end in it first, then by spelling."""
    known = [other for other in known if other != name]
    endings = [other for other in known if other.endswith("." + name)]
    similar = difflib.get_close_matches(name, known, n=most, cutoff=0.5)
    return tuple(dict.fromkeys(endings[:most] + similar))[:most]


def unknown_name(name: str, known: Iterable[str], what: str) -> UnknownNameError:
    """The error for `name`, which no `what` has, with its close matches in the message."""
    matches = close_matches(name, known)
    hint = f"; close matches: {', '.join(matches)}" if matches else ""
    return UnknownNameError(f"no {what} is named {name!r}{hint}", matches)
