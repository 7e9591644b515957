"""Scoped: values that hold inside a `with`, and that an interrupt cannot leave behind."""

import weakref
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """A value that is another inside a `with`, in the context (see `contextvars`) that entered it.

    If an interrupt comes while the `with` begins or ends, the value dies with it: nothing else keeps it alive.

    >>> start = Scoped("start", 0)
    >>> with start.set(5):
    ...     start.get()
    5
    >>> start.get()
    0
    """

    def __init__(self, name: str, default: T) -> None:
        self._default = default
        self.held: ContextVar[tuple[weakref.ref[_Held[T]], ...]] = ContextVar(name, default=())

    def get(self) -> T:
        """The value of the innermost `with` that is open, or the default."""
        for ref in reversed(self.held.get()):
            if (held := ref()) is not None and held.is_open:
                return held.value
        return self._default

    def set(self, value: T) -> "_Held[T]":
        """A `with` in which the value is this one."""
        return _Held(self, value)


class _Held(Generic[T]):
    def __init__(self, scoped: Scoped[T], value: T) -> None:
        self.value, self.is_open = value, True
        self._held, self._ref = scoped.held, weakref.ref(self)

    def __enter__(self) -> None:
        self._held.set((*(ref for ref in self._held.get() if ref()), self._ref))

    def __exit__(self, *error: object) -> None:
        self.is_open = False
        self._held.set(tuple(ref for ref in self._held.get() if ref is not self._ref))
