"""Edits: hook functions, checks of what they return, and the `with` in which they act."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hooks._torch import has_storage, is_checkpointed, is_shared
from hooks.errors import NEVER_FIRED, ContextError, EditError, HookError, require_fired
from hooks.names import Selector, resolve
from hooks.point import Point, as_node, first_tensor, with_first_tensor
from hooks.session import Session, muted

ELSEWHERE = (
    "the model ran only in other threads; hooks act in the thread that enters the `with`, and in asyncio "
    "tasks that start inside it: enter it in the thread that runs the model"
)
Hook = Callable[[Tensor, Point], Tensor | None]
"""`hook(activation, point)` returns the value to continue with. None means `activation` itself. It is
the hook's own copy, so writing into it is an edit too."""

Hooks = Mapping[Any, Hook]
"""A hook function for each `Selector`."""


Listener = tuple[Point, Callable[[Any], Any], bool]
"""A place, the forward hook there, and whether running a block again must repeat it."""


class HookContext:
    """Edits that act inside one `with` statement, made by `HookedRunner.hooks`.

    Raises:
        ContextError: on entering a second time.
        NeverFiredError: on leaving, if forward passes ran inside and all missed an edited point.

    >>> from hooks import HookedRunner
    >>> model = nn.Sequential(nn.ReLU())
    >>> with HookedRunner(model).hooks({"0": lambda value, point: value * 3}):
    ...     model(torch.tensor([2.0, 5.0]))
    tensor([ 6., 15.])
    """

    def __init__(self, model: nn.Module, listeners: list[Listener], fired: set[str]) -> None:
        self._model = model
        self._listeners = listeners
        self._fired = fired
        self._session: Session | None = None
        # For each forward pass that began inside the `with`, whether the hooks act there.
        self._acted: set[bool] = set()
        self._completed: set[bool] = set()

    def __enter__(self) -> None:
        if self._session is not None:
            raise ContextError("a hook context can be entered once: call hooks() again for another")
        self._session = Session()
        self._session.__enter__()
        # Not a method: a listener must not keep this context and its session alive.
        completed = self._completed
        try:
            for point, listener, is_edit in self._listeners:
                self._session.after(point.module, listener, is_edit)
            self._session.note(self._model, self._acted)
            self._session.after(self._model, lambda output: completed.add(True))
        except BaseException:
            self._session.__exit__()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        assert self._session is not None
        self._session.__exit__(kind, error, traceback)
        elsewhere = self._acted == {False} and not self._fired
        if kind is None and (self._completed or elsewhere):
            reason = ELSEWHERE if elsewhere else NEVER_FIRED
            require_fired([point.name for point, _, _ in self._listeners], self._fired, reason)


def edited_points(
    selector: Selector, hook: Hook, known: Mapping[str, Point], points: Mapping[str, Point]
) -> list[Point]:
    """The points where a hook acts. A module with two names is one point, under its first name.

    Raises:
        TypeError: if the hook is not callable.
        UnknownNameError: if the selector matches nothing.
    """
    if not callable(hook):
        raise TypeError(f"the hook at {selector!r} must be a function; got {hook!r}")
    once: dict[nn.Module, Point] = {}
    for point in resolve(selector, known, points).values():
        once.setdefault(point.module, point)
    return list(once.values())


def edit_at(point: Point, hook: Hook, fired: set[str], backward: bool) -> Callable[[Any], Any]:
    """A forward hook that lets `hook` replace the value at `point`, or its gradient in the backward pass.

    Raises:
        HookError: from the returned function, if no gradient can reach the point.
        EditError: from there or in the backward pass, if `hook` changes the shape, dtype or device.
    """

    def edit(output: Any) -> Any:
        _require_one_forward(point)
        value = first_tensor(output, point)
        fired.add(point.name)
        if not backward:
            return with_first_tensor(output, _run(hook, value, point))
        value = as_node(value, point)
        value.register_hook(lambda grad: _run(hook, grad, point))
        return with_first_tensor(output, value)

    return edit


def _require_one_forward(point: Point) -> None:
    if not torch.compiler.is_compiling() and is_checkpointed():
        raise HookError(
            f"{point.name} is inside activation checkpointing, which runs it again in backward(), where "
            "its hooks may no longer act: switch checkpointing off"
        )


def _run(hook: Hook, value: Tensor, point: Point) -> Tensor:
    # The hook may write into its copy. Two points of the residual stream can share one tensor, and
    # writing into the original would change what a cache already holds for the other point.
    copy = value.clone()
    # If the hook itself runs a model, no hooks act there. torch.compile goes without this.
    with nullcontext() if torch.compiler.is_compiling() else muted():
        new = hook(copy, point)
    # A hook that returns nothing may have reshaped its copy in place.
    new = copy if new is None else new
    del copy  # it would count as a reference below
    if not isinstance(new, Tensor):
        raise EditError(f"a hook at {point} must return a tensor or None; got {new!r}")
    ours = tuple(new.shape), new.dtype, new.device
    theirs = tuple(value.shape), value.dtype, value.device
    for what, given, expected in zip(("shape", "dtype", "device"), ours, theirs, strict=True):
        if given != expected:
            raise EditError(f"a hook at {point} must keep the {what} {expected}; got {given}")
    # The model may write into the value, so nobody else may hold it: the hook may have it in a list.
    if not torch.compiler.is_compiling() and (
        sys.getrefcount(new) > _ALONE or (has_storage(new) and is_shared(new))
    ):
        return new.clone()
    return new


def _count_alone() -> int:
    alone = object()
    return sys.getrefcount(alone)


# The count for an object that only one variable holds: 2, and 1 from Python 3.14 on.
_ALONE = _count_alone()
