"""Hooks that live inside one `with`, act in one thread, and are removed by whoever made them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

# PyTorch numbers hooks with an unguarded counter; two threads could be given the same number.
_registry = threading.Lock()
_thread = threading.local()


def _open_sessions() -> list["Session"]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    sessions: list[Session] = _thread.sessions
    return sessions


class Session:
    """The hooks that one `with` statement sets: only its own thread sees them act.

    Args:
        edits: whether its hooks change values, so that running a block again must repeat them.
    """

    def __init__(self, edits: bool = False) -> None:
        self.edits: list[tuple[nn.Module, Callable[[Any], Any]]] | None = [] if edits else None
        self.muted = False
        self._handles: list[RemovableHandle] = []
        self._owner = 0

    def __enter__(self) -> "Session":
        self._owner = threading.get_ident()
        self._opened_among = _open_sessions()
        self._opened_among.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened_among.remove(self)
        with _registry:
            while self._handles:
                self._handles.pop().remove()

    def acts(self) -> bool:
        """Whether this session's hooks act in the running thread, now."""
        # A compiled graph keeps the hooks it was traced with, whatever thread replays it.
        if torch.compiler.is_compiling():
            return True
        return not self.muted and threading.get_ident() == self._owner

    def after(self, module: nn.Module, hook: Callable[[Any], Any]) -> None:
        """Calls `hook(output)` when `module` has run; a result other than None replaces the output."""

        def listener(module: nn.Module, args: Any, output: Any) -> Any:
            return hook(output) if self.acts() else None

        listener.session = self  # type: ignore[attr-defined]  # functions carry attributes
        if self.edits is not None:
            self.edits.append((module, hook))
        with _registry:
            self._handles.append(module.register_forward_hook(listener))

    def before(self, module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        """Calls `hook(args, kwargs)` when `module` is about to run."""

        # Another thread may call a listener it saw just before its removal, then without kwargs.
        def listener(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if self.acts():
                hook(args, kwargs)

        listener.session = self  # type: ignore[attr-defined]  # functions carry attributes
        with _registry:
            self._handles.append(module.register_forward_pre_hook(listener, with_kwargs=True))


@contextmanager
def muted() -> Iterator[None]:
    """Silences every session that the running thread has open."""
    silenced = [session for session in _open_sessions() if not session.muted]
    for session in silenced:
        session.muted = True
    try:
        yield
    finally:
        for session in silenced:
            session.muted = False


def edits_in_force() -> list[tuple[nn.Module, Callable[[Any], Any]]]:
    """Modules and the edits of their outputs that act in the running thread, outermost first."""
    return [edit for s in _open_sessions() if not s.muted for edit in s.edits or ()]


def is_listened_to(module: nn.Module) -> bool:
    """Whether a hook on `module`, this package's or the user's own, acts in the running thread."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    if not any(hooks) and not module._backward_hooks and not module._backward_pre_hooks:
        return False
    listeners = [hook for registered in hooks for hook in list(registered.values())]
    ours = [listener.session for listener in listeners if hasattr(listener, "session")]
    return (
        any(session.acts() for session in ours)
        or len(ours) < len(listeners)
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )
