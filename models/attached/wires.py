"""Forward hooks that pass values of an attached model through its points.

1. A wire is a hook on one of the model's modules. It passes the module's input or output to a
   point, and replaces it by the result of the point (`fire`).
2. If no hook is active at the point, nothing is computed, and the module's own tensor is used.
3. Some modules join rows and positions in one axis. For these, `Forward` (in `forward.py`) stores
   the numbers of rows and positions of a run, so that a point shows two axes.
"""

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookPoint
from hooks.base import Shards, carried, tensors_in, with_first_tensor
from hooks.shared import Wire, is_listened_to
from models.attached.parts import TracedNorm

# Wires are dataclasses and not functions, because `deepcopy` of a model must also copy the points
# in its hooks. Otherwise the copy would use the points of the original.

# The numbers of rows and positions of this run, for modules that join them in one axis.
texts_read: ContextVar[tuple[int, ...]] = ContextVar("texts", default=())


def rows_and_positions(stream: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and positions of a stream.

    If rows and positions share an axis, as for images of different sizes, there is one row.
    """
    return (stream.shape[0], stream.shape[1]) if stream.ndim > 2 else (1, len(stream))


def rows_first(point: HookPoint, stream: Tensor) -> Tensor:
    """Return a stream with the axes of its point.

    Some models have the axis of streams first, [stream, batch, pos, d_model]. Their points have the
    attribute `streams_first`, and show [batch, pos, stream, d_model].
    """
    return stream.movedim(0, 2) if carried(point, "streams_first") else stream


def fire(point: HookPoint, value: Tensor) -> Tensor:
    """Pass a value through a point, and return the result in the layout of the value.

    If rows and positions share an axis of the value, the point sees them as two axes. If the value
    has the axis of streams first, the point sees it third. If a model is split over processes, the
    point sees the heads and neurons of all processes.
    """
    if not is_listened_to(point):
        return point(value) if value.ndim == len(point.axes) else value
    if carried(point, "streams_first"):
        shown = rows_first(point, value)
        new = point(shown)
        return value if new is shown else new.movedim(2, 0)
    texts = texts_read.get()
    apart = value
    if value.ndim != len(point.axes):
        are_joined = len(value) == math.prod(texts)
        apart = value.view(*texts, *(value.shape[1:] if are_joined else (-1,)))
    shards: Shards | None = carried(point, "shards")
    whole = shards.joined(apart) if shards else apart
    new = point(whole)
    # A hook may have run a model, which changes this variable, so restore it.
    texts_read.set(texts)
    if new is whole:
        return value
    return (shards.part(new) if shards else new).view_as(value)


@dataclass(eq=False)
class Output(Wire):
    """Passes a module's output through a point.

    Attributes:
        point: the point.
        factor: the factor by which the model multiplies the output.
        is_overwritten: whether the model later writes into the output.
    """

    point: HookPoint
    factor: float = 1.0
    is_overwritten: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the result of the point; None if it does not change."""
        value = output if isinstance(output, Tensor) else next(tensors_in(output))
        if self.factor == 1 and not self.is_overwritten:
            new = fire(self.point, value)
        elif not is_listened_to(self.point):
            return None
        else:
            scaled = value * self.factor
            new = fire(self.point, scaled)
            new = value if new is scaled else new / self.factor
        return None if new is value else with_first_tensor(output, new)


@dataclass(eq=False)
class Projected(Output):
    """Passes the features of a tower through a point. They are inserted into the stream of a text.

    Their rows and positions are not the text's, so they are read from the features.
    """

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the result of the point; None if it does not change."""
        token = texts_read.set(rows_and_positions(next(tensors_in(output))))
        try:
            return super().__call__(module, args, output)
        finally:
            texts_read.reset(token)


@dataclass(eq=False)
class Input(Wire):
    """Passes the input of a module through a point.

    Attributes:
        point: the point.
        is_shared: whether other modules read the same tensor later, and must see an edit too.
    """

    point: HookPoint
    is_shared: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point.

        The result is None if the arguments stay the same objects. A shared tensor gets the result
        in place.
        """
        value = next(tensors_in((args, kwargs)))
        if not self.is_shared:
            new = fire(self.point, value)
            return None if new is value else with_first_tensor((args, kwargs), new)
        if is_listened_to(self.point):
            # Give hooks a copy. A hook may store the tensor, and the model may later write into the
            # original.
            shown = value.clone()
            new = fire(self.point, shown)
            if new is not shown:
                value.copy_(new)
        return None


@dataclass(eq=False)
class BlockInput(Input):
    """Passes the stream that enters a block through a point."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point; None if they do not change."""
        if not torch.compiler.is_compiling():
            stream = rows_first(self.point, next(tensors_in((args, kwargs))))
            if stream.ndim > 2 or len(stream) != math.prod(texts_read.get()):
                texts_read.set(rows_and_positions(stream))
        return super().__call__(module, args, kwargs)


@dataclass(eq=False)
class Merged(Wire):
    """Passes the argument `inputs_embeds` of a module through a point."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with the result of the point; None if they do not change."""
        value = kwargs.get("inputs_embeds")
        new = value if value is None else fire(self.point, value)
        return None if new is value else (args, {**kwargs, "inputs_embeds": new})


@dataclass(eq=False)
class Scale(Wire):
    """Passes the scale by which a norm divides through a point.

    An edit rescales the norm's output.
    """

    point: HookPoint
    norm: TracedNorm

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Any:
        """Return the output, rescaled if the point changes the scale; None if it does not."""
        if not is_listened_to(self.point):
            return None
        scale = self.norm.scale(next(tensors_in((args, kwargs))))
        new = fire(self.point, scale)
        return None if new is scale else self.norm.rescaled(output, scale, new)


@dataclass(eq=False)
class Computed(Wire):
    """Passes a value that is computed from a module's output through a point.

    Without a hook at the point, the value is not computed. `passed` computes it.
    """

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point; None if nothing changes."""
        return self.passed(module, args, output) if is_listened_to(self.point) else None

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point, for a point with a hook."""
        raise NotImplementedError


@dataclass(eq=False)
class PositionsWire(Computed):
    """Passes position vectors through a point, with a row for each text.

    In the model, all texts may share one row.
    """

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the result of the point."""
        vectors = output.view(-1, *output.shape[-2:]).expand(*texts_read.get(), -1)
        return fire(self.point, vectors)


class Replaced:
    """A callable that replaces a method of a module, for example `forward`, while it is attached.

    Args:
        module: the module.
        name: the name of the method.

    Attributes:
        inner: the method that is replaced.
        replaced: the same method if it was an attribute of this module, and not of its class;
            otherwise None. `restore_methods` sets it again.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.inner = getattr(module, name)
        self.replaced = vars(module).get(name)


def restore_methods(model: nn.Module) -> None:
    """Give the modules of a model the methods that they had before `attach`."""
    for module in model.modules():
        for name in ("forward", "generate", "get_encoder", "get_decoder"):
            method = vars(module).get(name)
            if isinstance(method, Replaced):
                delattr(module, name)
                if method.replaced is not None:
                    setattr(module, name, method.replaced)
