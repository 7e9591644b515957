"""Warnings of forms that a later minor version changes or removes.

1. A name of a package: `moved={"stream": Renamed("models.generate_steps", "0.3")}` in the call of
   `missing_name`.
2. A keyword of a function: `@renamed_keywords("0.3", positions="pos")`.
3. A method or an attribute: keep the old one, and call `warn_of_old_name` in it.
4. A default or a type that changes: call `warn_of_change` where the old form is used.

Each gives one DeprecationWarning at the line of the user. It contains the new form, and the version
that makes the change.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, TypeVar

from hooks.base.warning import warn

P = ParamSpec("P")
R = TypeVar("R")


def warn_of_old_name(old: str, new: str, until: str) -> None:
    """Issue the warning that a name is old.

    Args:
        old: the old name, such as `models.stream` or `positions= of capture`.
        new: the new name, such as `models.generate_steps` or `pos=`.
        until: the version in which the old name stops working, such as `0.3`.
    """
    message = f"{old} is now {new}; the old name stops working in version {until}"
    warn(message, DeprecationWarning)


def warn_of_change(now: str, later: str, version: str) -> None:
    """Issue the warning that a form has another meaning in a later version.

    Args:
        now: the form and its meaning now, such as `batches() has size=8`.
        later: the meaning later, such as `size=16`.
        version: the version that makes the change, such as `0.3`.
    """
    warn(f"{now}; from version {version} on: {later}", DeprecationWarning)


class Renamed(NamedTuple):
    """The new place of a name that a package had before.

    Attributes:
        place: the module and the new name, such as `models.generate_steps`.
        until: the version in which the old name stops working.
    """

    place: str
    until: str

    def value(self) -> Any:
        """Return the value at the new place."""
        module, _, name = self.place.rpartition(".")
        return getattr(import_module(module), name)


def renamed_keywords(until: str, **names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a function whose keywords have new names.

    The signature of the function has the new names only.

    Args:
        until: the version in which the old keywords stop working.
        names: the old keywords, each with the new one.

    >>> import warnings
    >>> @renamed_keywords("0.3", positions="pos")
    ... def last(tokens, pos=-1):
    ...     return tokens[pos]
    >>> with warnings.catch_warnings(action="ignore"):
    ...     last([3, 5], positions=0)
    3
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type):
            # The result would be a function, and `isinstance` of the class would fail.
            raise TypeError(
                f"renamed_keywords needs a function; decorate {function.__name__}.__init__"
            )
        called = getattr(function, "__qualname__", "the function").rpartition("<locals>.")[2]

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in names.items():
                if old in kwargs and new in kwargs:
                    raise TypeError(f"{called} takes {new}= or its old name {old}=; got both")
                if old in kwargs:
                    warn_of_old_name(f"{old}= of {called}", f"{new}=", until)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return run

    return decorate
