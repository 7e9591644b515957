"""Scoped: values that are set inside a `with` statement, and that an interrupt cannot leave set."""

import weakref
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Entered = ContextVar[tuple[weakref.ref[Any], ...]]
"""A context variable with weak references to the states of open `with` statements, outermost
first."""


class Scoped(Generic[T]):
    """A value that can be changed inside a `with` statement.

    Only the context (see `contextvars`) that entered the `with` sees the new value; other threads
    do not.

    A keyboard interrupt while the `with` begins or ends cannot leave the new value set. The context
    holds only a weak reference to it, so the new value disappears with the `with` statement.

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
        """Return the value of the innermost open `with`, or the default."""
        for ref in reversed(self.entered.get()):
            if (entered := ref()) is not None and entered.is_open:
                return entered.value
        return self._default

    def set(self, value: T) -> "_SetValue[T]":
        """Return a context manager inside which the value is `value`."""
        return _SetValue(self, value)


class InContext:
    """A state that is active while its `with` is open, in the context that entered the `with`.

    The context holds only a weak reference to the state. So the state disappears together with the
    `with` statement, even if Ctrl-C stops the code that ends the `with`.

    Attributes:
        is_open: whether the `with` is open. A copy of the context, as in an asynchronous task, may
            still contain the state after the `with` has ended.
        ref: the weak reference that the context holds.
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


class _SetValue(InContext, Generic[T]):
    """A value that is set while its `with` is open."""

    def __init__(self, scoped: Scoped[T], value: T) -> None:
        super().__init__(scoped.entered)
        self.value = value
