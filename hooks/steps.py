"""Hooks of one step of a generation, as a compiled graph needs them.

A compiled graph has the same operations in each step, but an edit with `pos=3` acts in one step
only:

1. `edits_of_step` finds the edits that act on the column of a step, and leaves out the others.
2. Two steps with equal edits can run the same graph. Its hooks are registered by `StepHooks`, and
   act while the graph is traced.
3. The result of `edits_of_step` is None if no graph can do the work of the hooks: if an edit writes
   another value in each column, if a value has an axis of keys (its size grows), or if hooks do
   something else than edit. Such a step must run without a graph.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch import nn

from hooks.base.pieces import position_offset
from hooks.base.selection import KeyMask
from hooks.edit import EditedPoint, edit_at
from hooks.point import Hook, HookPoint, Point
from hooks.session import Session, acting_edits, call_with

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class Positioned(Protocol):
    """A hook that may act at some positions only, such as an edit of `interp.edits`."""

    def acts_at_end(self, point: Point, n_pos: int) -> bool | None:
        """Return whether the hook changes the last of `n_pos` columns.

        None if the change depends on the column, or differs between texts.
        """

    def at_one_position(self) -> Hook:
        """Return the hook that makes the same change at a value of one position."""


StepEdit = tuple[EditedPoint, tuple[Hook, ...]]
"""A point with its hooks, and the hooks that act in a step, which may be none of them."""


def edits_of_step(model: nn.Module, column: int, real: KeyMask | None) -> list[StepEdit] | None:
    """Return the hooks that act in a step that reads one column; None if no graph can apply them.

    The result is empty only if the model has no hooks.

    Args:
        model: the model.
        column: the column of the step, counted from the start of the text, with padding.
        real: True at the columns up to this one that are not padding, on the CPU; None if there is
            no padding.
    """
    edits = acting_edits(model)
    if not edits:
        return edits
    acting: list[StepEdit] = []
    with position_offset(column, real):
        for edited in edits:
            hooks = _acting(edited, column + 1)
            if hooks is None:
                return None
            acting.append((edited, hooks))
    return acting


def _acting(edited: EditedPoint, n_pos: int) -> tuple[Hook, ...] | None:
    """Return the hooks of a point that act at the last of `n_pos` columns; see `edits_of_step`."""
    point = edited.point
    if not isinstance(point.module, HookPoint) or "key" in point.axes:
        return None
    acting = []
    for hook in edited.hooks:
        acts = hook.acts_at_end(point, n_pos) if isinstance(hook, Positioned) else True
        if acts is None:
            return None
        if acts:
            acting.append(hook)
    return tuple(acting)


class StepHooks:
    """The hooks of a graph. They run only inside `call`, and no other hooks run inside it.

    Args:
        edits: the hooks, from `edits_of_step`.
    """

    def __init__(self, edits: list[StepEdit]) -> None:
        self._session = Session()
        for edited, hooks in edits:
            if not hooks:
                continue
            simple = [
                hook.at_one_position() if isinstance(hook, Positioned) else hook for hook in hooks
            ]
            # The hook adds the name of its point to this set. A change of the set would make
            # PyTorch trace the graph again.
            fired = {edited.point.name}
            hook = edit_at(EditedPoint(edited.point, tuple(simple)), fired)
            self._session.after(edited.point.module, hook)

    def call(self, function: Callable[P, R], *args: Any, **kwargs: Any) -> R:
        """Return the result of `function`, which runs with these hooks only."""
        return call_with(self._session, function, *args, **kwargs)

    def close(self) -> None:
        """Remove the hooks."""
        self._session.__exit__()
