"""Hooks that act only inside a `with` statement, and fused kernels that run while no hook acts.

1. A `with` opens a `Session`, which registers its hooks on modules and enters a context variable.
2. A hook acts if its session is open and in the context that runs the module: not in other threads.
   A permanent session (`runner.add`) acts in all code of its thread, until `remove()`.
3. A method with `FusedUnlessHooked` checks at each call whether a hook at its points acts
   (`is_listened_to`), and runs its fused form if no hook acts.
4. The end of the `with` closes the session and removes each of its hooks once.
"""

import copy
import dataclasses
import functools
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from torch import nn

from hooks.base import hooks_of, traced_as_constant
from hooks.base._torch import children, has_hooks, insert_hook, remove_hook
from hooks.base.hints import is_watcher
from hooks.base.scoped import Entered, InContext

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")

OutputHook = Callable[[Any], Any]
"""A function that maps a module's output to a new output, or returns None."""

Edits = list[tuple[nn.Module, OutputHook]]
"""Modules, each with a hook that changes its output."""

# The keys are negative, because PyTorch numbers hooks from 0 on. Its counter is not thread-safe,
# and its functions for registration take ten times as long as `insert_hook`.
keys = itertools.count(-1, -1)

# A new thread starts without sessions. An asyncio task starts with the sessions of the code that
# created it.
_sessions: Entered = ContextVar("sessions", default=())


class _Staying(threading.local):
    """The sessions of handles (`runner.add`), which act until the user removes the handle."""

    # They are stored by thread and not in a context variable: the cells of a notebook may run in
    # separate contexts, but a handle must act in all of them.
    sessions: tuple[weakref.ref["Session"], ...] = ()


_staying = _Staying()


class Session(InContext):
    """The hooks of one `with` statement, or of one handle.

    The hooks act in the context (see `contextvars`) of the `with` statement and in copies of the
    context, until the statement ends. Only the `with` keeps a session alive, so the hooks also stop
    if an interrupt prevents its end from running.

    Args:
        owner: a handle, if the hooks act until the handle is removed. They act in the thread that
            made the handle, and the hooked modules keep the session alive.

    Attributes:
        edits: the hooks that must also act when a block runs again.
        acts: a function that returns whether the hooks act now, in the present context. If a
            compiler traces the call, the result of this moment becomes a constant.
    """

    def __init__(self, owner: object = None) -> None:
        self._registered: list[tuple[nn.Module, int]] = []
        super().__init__(_sessions)
        self.edits: Edits = []
        self.owner = owner
        ref = self.ref
        kept_alive = self if owner is not None else None

        # The function has no arguments, because a compiler can treat a result as a constant only if
        # all arguments are constants.
        def acts() -> bool:
            session = kept_alive or ref()
            return session is not None and session.is_open and ref in _in_force()

        self.acts = traced_as_constant(acts)

    def __enter__(self) -> "Session":
        if self.owner is None:
            super().__enter__()
        else:
            # A handle may be removed in another thread, which cannot change the variable of this
            # thread. So its closed session is left out here.
            alive = [session.ref for session in _alive(_staying.sessions)]
            _staying.sessions = (*alive, self.ref)
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, traceback: object = None
    ) -> None:
        # Close the session before its hooks are removed. A deep copy of the model still has these
        # hooks, and they act only while the session is open.
        super().__exit__()
        self._remove()
        # PyTorch iterates over a module's hooks while an error propagates. If another thread adds
        # or removes a hook at this time, PyTorch raises this RuntimeError instead of the original
        # error.
        original = error
        while isinstance(original, RuntimeError) and "mutated during iteration" in str(original):
            original = original.__context__
        if original is not None and original is not error:
            raise original from None

    def __del__(self) -> None:
        self._remove()

    def _remove(self) -> None:
        """Remove the hooks of this session from their modules."""
        for module, key in self._registered:
            remove_hook(module, key)
        self._registered.clear()

    def after(
        self,
        module: nn.Module,
        hook: OutputHook,
        again: OutputHook | None = None,
        first: bool = False,
        applies: Any = None,
    ) -> None:
        """Call `hook(output)` after `module` has run. A result other than None replaces the output.

        Args:
            module: the module.
            hook: the function to call.
            again: the function to call in place of `hook` when a lazy cache runs a block again.
                None if the hook does not change values.
            first: whether to call the hook before all other hooks.
            applies: the `EditedPoint` that the hook applies, for `acting_edits`; None for a hook
                that does something else.
        """
        if again is not None:
            self.edits.append((module, again))
        # A deep copy of the model copies its hooks, but not the variables of a function. So the
        # copy does not copy the edits, which may contain caches.
        applied = None if applies is None else lambda: applies
        self._register(module, _After(hook, self.acts, applied), first)

    def before(self, module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        """Call `hook(args, kwargs)` before `module` runs."""
        self._register(module, _Before(hook, self.acts))

    def count(self, module: nn.Module, hook: Callable[[Any, Any], None]) -> None:
        """Call `hook(args, kwargs)` before `module` runs. The hook reads no values."""
        self._register(module, _Count(hook, self.acts))

    def note(self, module: nn.Module, acted: set[bool]) -> None:
        """Add to `acted`, after each run of `module`, whether these hooks acted in the run.

        If only the hooks of another session acted in a run, nothing is added after this run,
        because the user wants only those hooks there.
        """
        acts = self.acts

        def counts() -> bool:
            return acts() or all(ref is _DISABLED for ref in _sessions.get())

        noted = _Note(lambda output: acted.add(acts()), traced_as_constant(counts))
        self._register(module, noted)

    def look(self, module: nn.Module, hook: Callable[[Any], None]) -> None:
        """Call `hook(output)` after each run of `module`.

        The hook changes no values, so fused kernels may run.
        """
        self._register(module, _Note(hook, self.acts))

    def _register(
        self, module: nn.Module, listener: "_After | _Before", first: bool = False
    ) -> None:
        """Insert a hook, and store its key for `_remove`."""
        key = next(keys)
        # Record the key before the insertion. If an interrupt comes between the two, `_remove`
        # finds no hook under the key, which is harmless.
        self._registered.append((module, key))
        insert_hook(module, key, hook=listener, before=isinstance(listener, _Before), first=first)


@dataclasses.dataclass(eq=False)
class _Listener:
    """A function that PyTorch calls around the forward of a module, and that calls `hook`.

    Attributes:
        hook: the function to call.
        acts: returns whether the hook acts in this run.
        applies: returns the edit that the hook applies, an `EditedPoint`. None if the hook does
            something else.
    """

    # A class needs fewer objects than a closure. Thousands of closures for the hooks of a run would
    # trigger Python's garbage collector.
    hook: Callable[..., Any]
    acts: Callable[[], bool]
    applies: Callable[[], Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> Any:
        """Raise an error, because a pickled model has no `with` that would remove its hooks.

        Raises:
            PicklingError: always.
        """
        raise pickle.PicklingError(
            "a model with active hooks cannot be pickled: leave the `with` first, or remove the "
            "handle of runner.add; or save the weights, torch.save(model.state_dict(), path)"
        )


class _After(_Listener):
    """Calls `hook(output)` after the forward of a module."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.hook(output) if self.acts() else None


class Wire:
    """A hook of this project that needs no value itself, so fused kernels may run in spite of it.

    For example, a wire passes the values of an attached model through points.

    Attributes:
        is_part: whether the hook is a part of the model (`hooks.parts`). A part needs the value of
            its point, so fused kernels that skip this point may not run.
    """

    is_part = False


class _Note(_After, Wire):
    """A hook that notes that a module ran. It reads no values, so fused kernels may run."""


class _Before(_Listener):
    """Calls `hook(args, kwargs)` before the forward of a module."""

    # PyTorch calls this hook without kwargs if another thread is just removing it.
    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if self.acts():
            self.hook(args, kwargs)


class _Count(_Before, Wire):
    """A hook that counts the runs of a module before it runs.

    Fused kernels return no values of the points inside them. This hook reads no values, so it does
    not prevent a fused kernel, as a hook of the user would.
    """


def is_of_package(hook: Any) -> bool:
    """Return whether this package registered a hook, and not the user or another library."""
    return isinstance(hook, _Listener | Wire)


_no_session = Session()
_DISABLED = weakref.ref(_no_session)
"""A marker among the sessions of a context, which `hooks_disabled` sets.

In this context, only sessions that begin after the marker act, and no handles.
"""


def _in_force() -> tuple[weakref.ref[Session], ...]:
    """Return the sessions whose hooks may act in this context, outermost first."""
    sessions = _sessions.get()
    return sessions if _DISABLED in sessions else (*_staying.sessions, *sessions)


def _alive(sessions: Iterable[weakref.ref[Session]]) -> list[Session]:
    """Return the sessions that still exist and are open."""
    return [session for ref in sessions if (session := ref()) and session.is_open]


def is_open(session: Session | None) -> bool:
    """Return whether a session has started and not ended."""
    return session is not None and session.is_open


def owners(modules: Container[nn.Module]) -> list[Any]:
    """Return the handles of this thread that have hooks on some of `modules`."""
    handles = []
    for session in _alive(_staying.sessions):
        if any(module in modules for module, _ in session._registered):
            handles.append(session.owner)
    return handles


def hooks_disabled(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of `call`, which runs without the hooks of this thread and context."""
    before = _sessions.get()
    # A `with` is not used here, because an interrupt while it begins or ends could leave the hooks
    # disabled.
    try:
        _sessions.set((_DISABLED,))
        return call(*args, **kwargs)
    finally:
        _sessions.set(before)


def edits_in_force() -> Edits:
    """Return the edits that act in this context, outermost first."""
    edits: Edits = []
    for session in _alive(_in_force()):
        edits += session.edits
    return edits


def call_with(session: Session, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of `call`, which runs with the hooks of one session only."""
    before = _sessions.get()
    try:
        _sessions.set((_DISABLED, session.ref))
        return call(*args, **kwargs)
    finally:
        _sessions.set(before)


def acting_edits(module: nn.Module) -> list[Any] | None:
    """Return the edits that act in this context on a module and the modules inside it.

    Returns:
        An `EditedPoint` for each context and point, in the order in which they act at a point. None
        if hooks of another kind act too, such as the hooks of a cache or of the user.
    """
    edits: list[Any] = []
    for hook in hooks_of(module) if has_hooks(module) else ():
        if not _is_awake(hook, parts=True):
            continue
        applies: Callable[[], Any] | None = getattr(hook, "applies", None)
        if applies is None:
            return None
        edits.append(applies())
    for child in children(module):
        inner = acting_edits(child)
        if inner is None:
            return None
        edits += inner
    return edits


def is_listened_to(module: nn.Module, parts: bool = True) -> bool:
    """Return whether a hook acts in this context on a module, or on a module inside it.

    Hooks that the user registered with PyTorch count too.

    Args:
        module: the module.
        parts: whether parts of the model (`hooks.parts`) count as hooks.
    """
    if has_hooks(module) and any(_is_awake(hook, parts) for hook in hooks_of(module)):
        return True
    # A call of `any` with a generator takes longer than this loop.
    for child in children(module):  # noqa: SIM110
        if is_listened_to(child, parts):
            return True
    return False


def _is_awake(hook: Callable[..., Any], parts: bool) -> bool:
    """Return whether one hook acts in this context. A part acts if `parts` is True."""
    if isinstance(hook, Wire):
        return parts and hook.is_part
    return hook.acts() if isinstance(hook, _Listener) else not is_watcher(hook)


def is_foreign(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is not from this project and may change values."""
    return not (isinstance(hook, Wire | _Listener) or is_watcher(hook))


class FusedUnlessHooked:
    """A decorator that runs a fused form of a method while no hook needs its inner values.

    The decorated method is the explicit form, which passes inner values through hook points. Each
    call runs `fused` instead if no hook at these points acts in this context. Both forms must agree
    up to rounding.

    Args:
        points: names of the hook points that the fused form skips. The name of a child module means
            all points inside the module.
        fused: the fused method, with the same arguments as the explicit method.

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

    points: tuple[str, ...]
    fused: Callable[..., object]

    def __init__(self, *points: str, fused: Callable[..., object]) -> None:
        self.points = points
        self.fused = fused

    def __call__(self, explicit: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        """Return a method that chooses between `explicit` and the fused form at each call."""
        points = self.points
        fused = self.fused

        @functools.wraps(explicit)
        def choose(module: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
            for point in points:
                if is_listened_to(getattr(module, point)):
                    return explicit(module, *args, **kwargs)
            # The fused method returns the same type R.
            return fused(module, *args, **kwargs)  # type: ignore[return-value]

        return choose
