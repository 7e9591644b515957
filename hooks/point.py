"""Points: places in the forward pass with a name, where hooks read or change the value.

`HookPoint` is an identity module: a model passes a value through it, and its path in the model is
the name of the point. `Point` describes a place: its name, the axes of its value, and its module.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks.base import (
    FakeTensor,
    HintsAtNames,
    carried,
    is_whole,
    layer_of,
    require_kind,
    tensors_in,
)
from hooks.base._torch import Identity
from hooks.base.errors import HookError


@dataclasses.dataclass(frozen=True)
class Point(HintsAtNames):
    """A place in a model where hooks can be registered.

    Attributes:
        name: the module's path, such as `blocks.3.attn.z`.
        axes: the names of the value's axes; empty if the module declares no axes.
        meaning: the meaning of the value, in a few words.
        module: the module whose output is the value.
        layer: the first number among the parts of the name, or None.
        mesh: the processes over which the model is split; see `hooks.base.processes`.

    >>> point = Point("blocks.3.attn.z", ("batch", "pos", "head", "d_head"))
    >>> print(point)
    blocks.3.attn.z [batch pos head d_head]
    >>> point.layer
    3
    """

    name: str
    axes: tuple[str, ...] = ()
    meaning: str = ""
    module: nn.Module = dataclasses.field(default_factory=Identity, repr=False, compare=False)
    mesh: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def layer(self) -> int | None:
        """The first number among the parts of the name, or None."""
        return layer_of(self.name)

    def __str__(self) -> str:
        return f"{self.name} [{' '.join(self.axes)}]" if self.axes else self.name


Hook = Callable[[Tensor, Point], Tensor | None]
"""`hook(activation, point)` returns the value to continue with.

None means `activation` itself. The activation is a separate copy for the hook, so writing into it
is an edit too. For example, `lambda activation, point: 2 * activation` doubles it.
"""


class HookPoint(Identity):
    """A module that returns its input and names it by the module's path.

    Args:
        axes: the value's axes, such as `"batch pos head d_head"`; `1` is an axis of size one.
        meaning: the meaning of the value, in a few words, for the table of points.

    Raises:
        ValueError: if there is no axis, if an axis is neither an identifier nor `1`, or if an axis
            is repeated.

    >>> HookPoint("batch pos d_model", "residual stream entering the block")
    HookPoint(batch pos d_model)
    """

    axes: tuple[str, ...]
    meaning: str

    def __init__(self, axes: str, meaning: str = "") -> None:
        super().__init__()
        require_kind("axes", axes, str, words="names separated by spaces, as 'batch pos d_model'")
        self.axes = tuple(axes.split())
        self.meaning = meaning
        wrong = [axis for axis in self.axes if not (axis.isidentifier() or axis == "1")]
        if wrong or not self.axes or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes must be distinct identifiers separated by spaces; got {axes!r}")

    def extra_repr(self) -> str:
        """Return the axes for the printed tree of the model."""
        return " ".join(self.axes)


class HookPoints(nn.Module):
    """The points of a module that was written without points, such as a block of another library.

    The forward of the module passes its values through the points in `module.hook_points`. Neither
    is a child of the other, so the names of the module's weights stay the same: its state dict does
    not change.

    A subclass may have a method `plain(argument)`. A lazy cache stores the arguments of the module.
    If an argument is neither a tensor nor a number, the cache stores `plain(argument)` instead.

    Args:
        module: the module whose values the points have.

    Attributes:
        module: this module.

    >>> block = nn.Linear(2, 2)
    >>> points = HookPoints(block)
    >>> points.out = HookPoint("batch d_model")
    >>> [name for name, _ in points.named_modules()], block.hook_points is points
    (['', 'out'], True)
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Do not register them as children, because a state dict must contain each module only once.
        vars(self)["module"] = module
        vars(module)["hook_points"] = self


class OptionalPoints(nn.Module):
    """Points in a part of the model that may not run, for example in a run without an image.

    A cached run then skips the points, unless they were selected by their exact names.
    """


def inside(module: nn.Module) -> set[nn.Module]:
    """Return a module, the modules inside it, and its points outside it."""
    points: nn.Module | None = carried(module, "hook_points")
    return {*module.modules(), *(points.modules() if points is not None else ())}


def point_of(name: str, module: nn.Module, mesh: Any = None) -> Point:
    """Return the point of a module. Only a `HookPoint` declares axes.

    Args:
        name: the name of the point.
        module: the module.
        mesh: the processes over which the model is split; None if it is not split.
    """
    if isinstance(module, HookPoint):
        return Point(name, module.axes, meaning=module.meaning, module=module, mesh=mesh)
    return Point(name, (), meaning=type(module).__name__, module=module, mesh=mesh)


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called. Containers such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def first_tensor(output: Any, point: Point) -> Tensor:
    """Return `output` itself, or the first tensor of a tuple, list, mapping or dataclass.

    Raises:
        HookError: if the output contains no tensor.
    """
    for tensor in tensors_in(output):
        return tensor
    raise HookError(f"{point.name} must return a tensor; got {type(output).__name__}")


def as_node(value: Tensor, point: Point) -> Tensor:
    """Return a copy of `value` that is a new node of the autograd graph.

    The model continues with the copy. So the gradient of the copy contains only what flows back
    through `point`, even if the model also uses `value` itself elsewhere. If nothing before the
    point needs a gradient, as with frozen weights, the graph begins at the copy.

    The result is not a view: autograd hooks of a view are lost if the model writes into it.

    Raises:
        HookError: if no gradient can reach the point.
    """
    if not (torch.is_grad_enabled() and value.is_floating_point()):
        needed = (
            "gradients must be on (for cached runs, use grads=True or detach=False), and the "
            "value must have a floating dtype"
        )
        raise HookError(f"{needed}; got {value.dtype} at {point.name}")
    return (value if value.requires_grad else value.detach().requires_grad_()).clone()


def require_unsplit(value: Shaped[Tensor, "*axes"], point: Point) -> None:
    """Check that a value is whole: no process of a split model has only a part of it.

    Raises:
        HookError: if the value is split; the error names the point.
    """
    # In a plan (`HookedRunner.plan`), values have no numbers to compare between processes.
    if point.mesh is None or (isinstance(value, FakeTensor) and point.axes):
        return
    if isinstance(value, FakeTensor) or not is_whole(value, point.mesh):
        got = "a plan cannot tell" if isinstance(value, FakeTensor) else "each holds a part"
        raise HookError(
            f"{point.name} must be the same in all {point.mesh.size()} processes that the model is "
            f"split over; {got} (models.attach has points that join the parts of heads and neurons)"
        )
