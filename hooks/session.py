"""Hooks that live inside one `with` and one thread, and fused kernels for when no hook listens."""

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
"""Modules, each with a function that maps its output to a new one."""

# PyTorch numbers hooks with a counter that is not thread-safe: two hooks could get the same number.
_registry = threading.Lock()
_thread = threading.local()


def _open_sessions() -> list["Session"]:
    if not hasattr(_thread, "sessions"):
        _thread.sessions = []
    sessions: list[Session] = _thread.sessions
    return sessions


class _Gate:
    """When a session's hooks act.

    Attributes:
        owner: the identifier of their thread; 0 before and after the `with`.
        muted: whether they are switched off for now.
    """

    owner = 0
    muted = False


def _acting(gate: _Gate) -> Callable[[], bool]:
    # Without arguments, because a compiler may keep an answer only if all arguments are constants.
    def acts() -> bool:
        return not gate.muted and threading.get_ident() == gate.owner

    return traced_as_constant(acts)


class Session:
    """The hooks of one `with` statement. They act only in its own thread.

    Attributes:
        edits: the hooks that must also act when a block runs again.
        gate: says in which thread the hooks act.
        acts: whether they act now in this thread. A traced graph keeps the answer.
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
        # A copy of the model made inside the `with` keeps these hooks, so they must stop acting.
        self.gate.owner = 0
        with _registry:
            while self._handles:
                self._handles.pop().remove()

    def after(self, module: nn.Module, hook: Callable[[Any], Any], edit: bool = False) -> None:
        """Calls `hook(output)` after `module` has run. A result other than None replaces the output.

        Args:
            module: where to listen.
            hook: what to call.
            edit: whether the hook changes values, and so must also act when a block runs again.
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
        """Calls `hook(args, kwargs)` before `module` runs."""
        acts = self.acts

        # Another thread may call a listener during its removal, and then without kwargs.
        def listener(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if acts():
                hook(args, kwargs)

        listener.session_acts = acts  # type: ignore[attr-defined]  # functions carry attributes
        with _registry:
            # Prepended, to see the arguments before the user's own hooks change them.
            self._handles.append(
                module.register_forward_pre_hook(listener, with_kwargs=True, prepend=True)
            )


@contextmanager
def muted() -> Iterator[None]:
    """Switches off every session that is open in this thread."""
    silenced = [session.gate for session in _open_sessions() if not session.gate.muted]
    for gate in silenced:
        gate.muted = True
    try:
        yield
    finally:
        for gate in silenced:
            gate.muted = False


def edits_in_force() -> Edits:
    """The edits that act in this thread, outermost first."""
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
    """A decorator that runs a fused form of a method while no hook needs its inner values.

    It decorates the explicit form, which passes inner values through hook points. Each call runs `fused`
    instead if no hook at those points acts in this thread. Both must agree up to rounding.

    Args:
        points: names of the hook points that the fused form skips. A child module stands for all
            points inside it.
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
        """A method that chooses between `explicit` and the fused form at each call."""
        points, fused = self.points, self.fused

        @functools.wraps(explicit)
        def choose(module: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for point in points:
                if is_listened_to(getattr(module, point)):
                    return explicit(module, *args, **kwargs)
            return fused(module, *args, **kwargs)  # type: ignore[return-value]  # R too

        return choose
