"""Hooks that live inside one `with`, act in one thread, and are removed by whoever made them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    Attributes:
        edits: modules, and those of the hooks on them that running a block again must repeat.
        owner: the thread; 0 before and after the `with`.
        muted: whether the hooks keep silent for now.
    """

    def __init__(self) -> None:
        self.edits: list[tuple[nn.Module, Callable[[Any], Any]]] = []
        self.owner = 0
        self.muted = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Session":
        self.owner = threading.get_ident()
        self._opened_among = _open_sessions()
        self._opened_among.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened_among.remove(self)
        # A copy of the model, made inside the `with`, carries these hooks for ever.
        self.owner = 0
        with _registry:
            while self._handles:
                self._handles.pop().remove()

    def after(self, module: nn.Module, hook: Callable[[Any], Any], edit: bool = False) -> None:
        """Calls `hook(output)` when `module` has run; a result other than None replaces the output.

        Args:
            module: where to listen.
            hook: what to call.
            edit: whether the hook changes values, so that running a block again must repeat it.
        """

        def listener(module: nn.Module, args: Any, output: Any) -> Any:
            return hook(output) if acts(self) else None

        listener.session = self  # type: ignore[attr-defined]  # functions carry attributes
        if edit:
            self.edits.append((module, hook))
        with _registry:
            self._handles.append(module.register_forward_hook(listener))

    def before(self, module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        """Calls `hook(args, kwargs)` when `module` is about to run."""

        # Another thread may call a listener it saw just before its removal, then without kwargs.
        def listener(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if acts(self):
                hook(args, kwargs)

        listener.session = self  # type: ignore[attr-defined]  # functions carry attributes
        with _registry:
            # First of all, so that the arguments are seen before the user's own hooks change them.
            self._handles.append(
                module.register_forward_pre_hook(listener, with_kwargs=True, prepend=True)
            )


def acts(session: Session) -> bool:
    """Whether a session's hooks act in the running thread, now."""
    return not session.muted and threading.get_ident() == session.owner


# What torch.compiler.assume_constant_result sets: a graph is traced with the hooks that act then and
# there. The function itself would import the compiler, which takes longer than all else here.
acts._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    return [edit for session in _open_sessions() if acts(session) for edit in session.edits]


def is_ours(hook: Callable[..., Any]) -> bool:
    """Whether a hook registered on a module is a session's."""
    return hasattr(hook, "session")


def is_listened_to(module: nn.Module) -> bool:
    """Whether a hook on `module` or inside it, this package's or the user's, acts in this thread."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ) and _a_hook_acts(module):
        return True
    for child in module._modules.values():  # noqa: SIM110  # a generator costs more than the rest
        if child is not None and is_listened_to(child):
            return True
    return False


def _a_hook_acts(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    listeners = [hook for registered in hooks for hook in list(registered.values())]
    ours: list[Session] = [getattr(hook, "session") for hook in listeners if is_ours(hook)]  # noqa: B009
    return (
        any(acts(session) for session in ours)
        or len(ours) < len(listeners)
        or bool(module._backward_hooks or module._backward_pre_hooks)
    )
