"""Hooks that live inside one `with` and act in one thread; fused kernels for where nobody listens."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from hooks._torch import children, has_hooks, hooks_of, traced_as_constant

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")

Edits = list[tuple[nn.Module, Callable[[Any], Any]]]
"""Modules, each with a function from its output to the one that takes its place."""

# PyTorch numbers hooks with an unguarded counter; two threads could be given the same number.
_registry = threading.Lock()
_thread = threading.local()


def _open_sessions() -> list["Session"]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    sessions: list[Session] = _thread.sessions
    return sessions


class _Gate:
    """Which thread a session's hooks act in, 0 before and after its `with`; and whether they are silent."""

    owner = 0
    muted = False


def _acting(gate: _Gate) -> Callable[[], bool]:
    # Without arguments: older compilers keep the answers of functions of constants only.
    def acts() -> bool:
        return not gate.muted and threading.get_ident() == gate.owner

    return traced_as_constant(acts)


class Session:
    """The hooks that one `with` statement sets: only its own thread sees them act.

    Attributes:
        edits: those of the hooks that running a block again must repeat.
        gate: opens the hooks to a thread.
        acts: whether they act in the running thread, now. A traced graph keeps the answer.
    """

    def __init__(self) -> None:
        self.edits: Edits = []
        self.gate = _Gate()
        self.acts = _acting(self.gate)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Session":
        self.gate.owner = threading.get_ident()
        self._opened_among = _open_sessions()
        self._opened_among.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened_among.remove(self)
        # A copy of the model, made inside the `with`, carries these hooks for ever.
        self.gate.owner = 0
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
        acts = self.acts

        def listener(module: nn.Module, args: Any, output: Any) -> Any:
            return hook(output) if acts() else None

        listener.session_acts = acts  # type: ignore[attr-defined]  # functions carry attributes
        if edit:
            self.edits.append((module, hook))
        with _registry:
            self._handles.append(module.register_forward_hook(listener))

    def before(self, module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        """Calls `hook(args, kwargs)` when `module` is about to run."""
        acts = self.acts

        # Another thread may call a listener it saw just before its removal, then without kwargs.
        def listener(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if acts():
                hook(args, kwargs)

        listener.session_acts = acts  # type: ignore[attr-defined]  # functions carry attributes
        with _registry:
            # First of all, so that the arguments are seen before the user's own hooks change them.
            self._handles.append(
                module.register_forward_pre_hook(listener, with_kwargs=True, prepend=True)
            )


@contextmanager
def muted() -> Iterator[None]:
    """Silences every session that the running thread has open."""
    silenced = [session.gate for session in _open_sessions() if not session.gate.muted]
    for gate in silenced:
        gate.muted = True
    try:
        yield
    finally:
        for gate in silenced:
            gate.muted = False


def edits_in_force() -> Edits:
    """The edits that act in the running thread, outermost first."""
    return [edit for session in _open_sessions() if session.acts() for edit in session.edits]


def is_listened_to(module: nn.Module) -> bool:
    """Whether a hook on `module` or inside it, this package's or the user's, acts in this thread."""
    if has_hooks(module) and any(map(_is_awake, hooks_of(module))):
        return True
    for child in children(module):  # noqa: SIM110  # a generator costs more than the rest
        if is_listened_to(child):
            return True
    return False


def _is_awake(hook: Callable[..., Any]) -> bool:
    acts: Callable[[], bool] | None = getattr(hook, "session_acts", None)
    return acts is None or acts()


class FusedUnlessHooked:
    """Decorates the explicit form of a method, which passes its inner values through hook points.

    Each call runs `fused` in its place while nothing listens at those points in the calling thread.
    The two must be the same function up to rounding.

    Args:
        points: names of what the fused form skips: the module's own hook points, or its children,
            which stand for whatever is inside them.
        fused: the fused method, with the arguments of the explicit one.

    >>> import torch
    >>> from hooks import HookedRunner, HookPoint
    >>> class Norm(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = HookPoint("batch 1")
    ...     def _fused(self, x):
    ...         return torch.nn.functional.normalize(x)
    ...     @FusedUnlessHooked("scale", fused=_fused)
    ...     def forward(self, x):
    ...         return x / self.scale(x.norm(dim=-1, keepdim=True))
    >>> x, runner = torch.tensor([[3.0, 4.0]]), HookedRunner(Norm())
    >>> runner.model(x)
    tensor([[0.6000, 0.8000]])
    >>> runner.run_with_hooks(x, hooks={"scale": lambda scale, point: scale * 2})
    tensor([[0.3000, 0.4000]])
    """

    def __init__(self, *points: str, fused: Callable[..., object]) -> None:
        self.points = points
        self.fused = fused

    def __call__(self, explicit: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        """The method that chooses between `explicit` and the fused one at each call."""
        points, fused = self.points, self.fused

        @functools.wraps(explicit)
        def choose(module: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for point in points:
                if is_listened_to(getattr(module, point)):
                    return explicit(module, *args, **kwargs)
            return fused(module, *args, **kwargs)  # type: ignore[return-value]  # R too

        return choose
