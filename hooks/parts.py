"""Parts: modules that run directly after some points of a model, inside a `with` statement.

1. `with_parts` registers a hook on each point. The hook calls the part with the value, and replaces
   the value by the result.
2. A part may also read the value of another point. A hook there stores the value for the part in
   the same thread.
3. Points inside a part are points of the model: a part with a point `features` at
   `blocks.1.resid_post` adds the point `blocks.1.resid_post.features`.
4. The end of the `with` removes the hooks and points.

A part is not an edit. A part acts in every run, and also when a lazy cache runs a block again. It
acts before all hooks at the same point. The weights of a part are not in the model's state dict.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import NEVER_FIRED, hooks_of, require_fired, with_first_tensor
from hooks.base._torch import insert_hook, remove_hook
from hooks.base.errors import HookError
from hooks.point import HookPoint, Point, first_tensor
from hooks.session import Wire, keys


class Part(nn.Module):
    """A module that runs directly after a point.

    A subclass has points of the type `PartPoint` and a method `forward(value, read)`.

    Attributes:
        reads: the name of the other point that the part also reads; None for its own point.
        settings: the settings that change its output besides its weights, as text, so that stores
            of two settings differ.
        needs_columns: whether the part must know the columns and the padding of each run.
        counts_back: whether the part counts positions from the end of each text.
        keeps_gradients: whether values and gradients are the same as without the part, as long as
            no hook changes its points.
    """

    reads: str | None = None
    settings: str = ""
    needs_columns: bool = False
    counts_back: bool = False
    keeps_gradients: bool = True


class PartPoint(HookPoint):
    """A point inside a part."""


class _Passing(Wire):
    """A hook that replaces the value of a point by the output of a part."""

    is_part = True

    def __init__(self, point: Point, part: Part) -> None:
        self.point = point
        self.part = part
        # The values are stored by thread, because several threads may run the model at once.
        self.read: dict[int, Tensor] = {}
        self.fired = False
        self.ran = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        value = first_tensor(output, self.point)
        self.fired = True
        if self.part.reads is None:
            return with_first_tensor(output, self.part(value, value))
        read = self.read.pop(_thread(), None)
        if read is None:
            raise HookError(
                f"{self.point.name} must run after {self.part.reads}, which its part reads"
            )
        return with_first_tensor(output, self.part(value, read))


class _Reading(_Passing):
    """A hook that stores the value of a point for a part that runs at another point.

    The hook runs after all edits of the value.
    """

    comes_last = True

    def __init__(self, point: Point, passing: _Passing) -> None:
        super().__init__(point, passing.part)
        self._passing = passing

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._passing.read[_thread()] = first_tensor(output, self.point)


def _thread() -> int:
    """Return the number of this thread; 0 while a compiler traces, which cannot read it."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class _Ran(Wire):
    """A hook that records that the model ran to its end."""

    def __init__(self, hooks: list[_Passing]) -> None:
        self.hooks = hooks

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for hook in self.hooks:
            hook.ran = True


@contextmanager
def with_parts(
    model: nn.Module, points: Mapping[str, Point], parts: Mapping[str, Part]
) -> Iterator[None]:
    """Return a context manager inside which the model has these parts. They act in all threads.

    Args:
        model: the model.
        points: the points after which the parts run, and the points that the parts read, by name.
        parts: the parts, by the names of the points after which they run.

    Raises:
        HookError: if a point already has a part.
        NeverFiredError: at the end of the `with`, if forward passes ran inside and none reached the
            point of a part.
    """
    hooks = [_Passing(points[name], part) for name, part in parts.items()]
    listening: list[tuple[nn.Module, _Passing | _Ran]] = []
    for hook in hooks:
        module = hook.point.module
        reads = hook.part.reads
        present = [name for name, _ in _points_of(hook.part) if hasattr(module, name)]
        if present:
            raise HookError(
                f"{hook.point.name} already has {present[0]}: end the `with` of that part first"
            )
        if reads is not None:
            listening.append((points[reads].module, _Reading(points[reads], hook)))
        listening.append((module, hook))
    listening.append((model, _Ran(hooks)))
    inserted: list[tuple[nn.Module, int]] = []
    try:
        for module, listener in listening:
            key = next(keys)
            inserted.append((module, key))
            insert_hook(module, key, listener, first=not isinstance(listener, _Reading))
        for hook in hooks:
            for name, point in _points_of(hook.part):
                hook.point.module.add_module(name, point.train(model.training))
        yield
    finally:
        for module, key in inserted:
            remove_hook(module, key)
        for hook in hooks:
            for name, point in _points_of(hook.part):
                if getattr(hook.point.module, name, None) is point:
                    delattr(hook.point.module, name)
    require_fired(
        [hook.point.name for hook in hooks if hook.ran],
        {hook.point.name for hook in hooks if hook.fired},
        NEVER_FIRED,
    )


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return the present parts of a model, by the names of the points after which they run."""
    parts = dict[str, Part]()
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, _Passing) and not isinstance(hook, _Reading):
                parts[hook.point.name] = hook.part
    return parts


def _points_of(part: Part) -> list[tuple[str, PartPoint]]:
    """Return the points directly inside a part, by name."""
    return [(name, child) for name, child in part.named_children() if isinstance(child, PartPoint)]
