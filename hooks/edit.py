"""Edits: hook functions checked against the point that they act on."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hooks.capture import own_node
from hooks.errors import EditError, HookError
from hooks.outputs import first_tensor, with_first_tensor
from hooks.point import Point
from hooks.select import Selector, resolve
from hooks.session import muted

Hook = Callable[[Tensor, Point], Tensor | None]
"""`hook(activation, point)` returns the value to go on with; None goes on with `activation`, as it is
then. It is the hook's own copy, so that writing into it is an edit too."""


def places(
    selector: Selector,
    hook: Hook,
    points: Mapping[str, Point],
    known: Mapping[str, Point],
    modules: Mapping[str, nn.Module],
) -> list[Point]:
    """Where a hook acts: a module that goes by two names is one place, under the first.

    Raises:
        TypeError: if the hook is no function.
        UnknownNameError: if the selector matches nothing.
    """
    if not callable(hook):
        raise TypeError(f"the hook at {selector!r} is a function, not {hook!r}")
    once: dict[nn.Module, Point] = {}
    for name, point in resolve(selector, points, known).items():
        once.setdefault(modules[name], point)
    return list(once.values())


def forward_edit(hook: Hook, point: Point, fired: set[str]) -> Callable[[Any], Any]:
    """A forward hook that lets `hook` replace the value at `point`.

    Raises:
        EditError: from the returned function, if `hook` returns what `point` cannot carry.
    """

    def edit(output: Any) -> Any:
        fired.add(point.name)
        return with_first_tensor(output, _run(hook, first_tensor(output, point), point))

    return edit


def backward_edit(hook: Hook, point: Point, fired: set[str]) -> Callable[[Any], Any]:
    """A forward hook that calls `hook` with the gradient at `point` when a backward pass brings it.

    Raises:
        HookError: from the returned function, if no gradient will ever reach the point.
        EditError: in the backward pass, if `hook` returns what the gradient cannot be.
    """

    def watch(output: Any) -> Any:
        value = first_tensor(output, point)
        fired.add(point.name)
        if not (torch.is_grad_enabled() and value.is_floating_point()):
            raise HookError(f"a backward hook at {point.name} needs gradients, and none flow here")
        value = own_node(value)
        value.register_hook(lambda grad: _run(hook, grad, point))
        return with_first_tensor(output, value)

    return watch


def _run(hook: Hook, value: Tensor, point: Point) -> Tensor:
    # The hook is given a copy, so that it may write into it: a residual stream is one tensor at two
    # points, and writing into the original would change what a cache of the other already holds.
    copy = value.clone()
    # A model that the hook runs is run as if no hooks were set; tracing has no threads to ask.
    with nullcontext() if torch.compiler.is_compiling() else muted():
        new = hook(copy, point)
    if new is None:
        return copy
    if not isinstance(new, Tensor):
        raise EditError(f"a hook at {point} returns a tensor or None, not {type(new).__name__}")
    for what in ("shape", "dtype", "device"):
        given, expected = getattr(new, what), getattr(value, what)
        if given != expected:
            given, expected = _plain(given), _plain(expected)
            raise EditError(f"a hook at {point} must keep the {what} {expected}, not give {given}")
    return new


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value
