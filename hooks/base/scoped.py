"""Scoped: values that hold inside a `with`, and that an interrupt cannot leave behind."""

import weakref
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Entered = ContextVar[tuple[weakref.ref[Any], ...]]
"""What the open `with` statements of a context hold, outermost first."""


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
        self.entered: Entered = ContextVar(name, default=())

    def get(self) -> T:
        """The value of the innermost `with` that is open, or the default."""
        for ref in reversed(self.entered.get()):
            if (held := ref()) is not None and held.is_open:
                return held.value
        return self._default

    def set(self, value: T) -> "_Held[T]":
        """A `with` in which the value is this one."""
        return _Held(self, value)


class InContext:
    """A state that holds while its `with` is open, in the context that entered it. Nothing but the `with` keeps it alive.

    Attributes:
        is_open: whether the `with` has not ended. A copy of the context may still have it.
        ref: how the context knows it.
    """

    def __init__(self, entered: Entered) -> None:
        self.is_open = True
        self.ref: weakref.ref[Any] = weakref.ref(self)
        self._entered = entered

    def __enter__(self) -> Any:
        self._entered.set((*(ref for ref in self._entered.get() if ref()), self.ref))
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, traceback: object = None
    ) -> None:
        self.is_open = False
        self._entered.set(tuple(ref for ref in self._entered.get() if ref is not self.ref))


class _Held(InContext, Generic[T]):
    def __init__(self, scoped: Scoped[T], value: T) -> None:
        super().__init__(scoped.entered)
        self.value = value
