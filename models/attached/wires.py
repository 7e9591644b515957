"""Forward hooks that pass values of an attached model through its points.

1. A wire is a hook on one of the model's modules. It hands the module's input or output to a point,
   and puts what the point gives in its place (`fire`).
2. While nobody listens at the point nothing is computed, and the module's own tensor goes on.
3. `Forward` (in `forward.py`) says which texts a run reads, for modules that see rows and positions
   as one axis.
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

# Dataclasses, because a copy of the model must have hooks that know the copy's points.

# The rows and positions of this run, for modules that see them as one axis.
texts_read: ContextVar[tuple[int, ...]] = ContextVar("texts", default=())


def rows_of(stream: Tensor) -> tuple[int, int]:
    """The rows and positions of a stream.

    One row where both share an axis, as those of images of any sizes do.
    """
    return (stream.shape[0], stream.shape[1]) if stream.ndim > 2 else (1, len(stream))


def fire(point: HookPoint, value: Tensor) -> Tensor:
    """Return what the point makes of a value.

    Where rows and positions share an axis, it sees them apart.

    It sees heads and neurons of all processes that the model is split over.
    """
    if not is_listened_to(point):
        return point(value) if value.ndim == len(point.axes) else value
    texts = texts_read.get()
    apart = value
    if value.ndim != len(point.axes):
        are_joined = len(value) == math.prod(texts)
        apart = value.view(*texts, *(value.shape[1:] if are_joined else (-1,)))
    shards: Shards | None = carried(point, "shards")
    whole = shards.joined(apart) if shards else apart
    new = point(whole)
    texts_read.set(texts)  # a hook may have run a model
    if new is whole:
        return value
    return (shards.part(new) if shards else new).view_as(value)


@dataclass(eq=False)
class Output(Wire):
    """Passes a module's output through a point.

    Attributes:
        point: the point.
        factor: what the model multiplies the output with.
        is_overwritten: whether the model writes into it later.
    """

    point: HookPoint
    factor: float = 1.0
    is_overwritten: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output with what the point gives."""
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
    """Passes the features that a tower gives for the stream of a text through a point."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output with what the point gives."""
        token = texts_read.set(rows_of(next(tensors_in(output))))
        try:
            return super().__call__(module, args, output)
        finally:
            texts_read.reset(token)


@dataclass(eq=False)
class Input(Wire):
    """Passes what a module reads through a point.

    Attributes:
        point: the point.
        is_shared: whether others read the same tensor later, and must see an edit too.
    """

    point: HookPoint
    is_shared: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with what the point gives."""
        value = next(tensors_in((args, kwargs)))
        if not self.is_shared:
            new = fire(self.point, value)
            return None if new is value else with_first_tensor((args, kwargs), new)
        if is_listened_to(self.point):
            shown = value.clone()  # a cache may keep it
            new = fire(self.point, shown)
            if new is not shown:
                value.copy_(new)
        return None


@dataclass(eq=False)
class BlockInput(Input):
    """Passes the stream that enters a block through a point."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with what the point gives."""
        if not torch.compiler.is_compiling():
            stream = next(tensors_in((args, kwargs)))
            if stream.ndim > 2 or len(stream) != math.prod(texts_read.get()):
                texts_read.set(rows_of(stream))
        return super().__call__(module, args, kwargs)


@dataclass(eq=False)
class Merged(Wire):
    """Passes the embeddings that a model of text is given, instead of tokens, through a point."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with what the point gives."""
        value = kwargs.get("inputs_embeds")
        new = value if value is None else fire(self.point, value)
        return None if new is value else (args, {**kwargs, "inputs_embeds": new})


@dataclass(eq=False)
class Scale(Wire):
    """Passes what a norm divides by through a point. An edit rescales the norm's output."""

    point: HookPoint
    norm: TracedNorm

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Any:
        """The output, rescaled if the point changes the scale."""
        if not is_listened_to(self.point):
            return None
        scale = self.norm.scale(next(tensors_in((args, kwargs))))
        new = fire(self.point, scale)
        return None if new is scale else self.norm.rescaled(output, scale, new)


@dataclass(eq=False)
class Computed(Wire):
    """Passes something that is computed from an output through a point, if somebody listens there."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """The output with what the point changes; None if it changes nothing."""
        return self.passed(module, args, output) if is_listened_to(self.point) else None

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point, for a point with a hook."""
        raise NotImplementedError


@dataclass(eq=False)
class PositionsWire(Computed):
    """Passes the vectors of positions, which rows may share, through a point with a row for each text."""

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return what the point gives."""
        vectors = output.view(-1, *output.shape[-2:]).expand(*texts_read.get(), -1)
        return fire(self.point, vectors)


class Replaced:
    """A method that stands in for a module's own, such as `forward`, while the model is attached.

    Args:
        module: the module.
        name: the name of the method.

    Attributes:
        inner: the method.
        replaced: the method that stood in its place before attach, if any.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.inner = getattr(module, name)
        self.replaced = vars(module).get(name)


def restore_methods(model: nn.Module) -> None:
    """Give the modules in a model the methods back that they had before attach."""
    for module in model.modules():
        for name in ("forward", "generate", "get_encoder", "get_decoder"):
            method = vars(module).get(name)
            if isinstance(method, Replaced):
                delattr(module, name)
                if method.replaced is not None:
                    setattr(module, name, method.replaced)
