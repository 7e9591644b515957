"""HookPoint, the identity module that names a value, and Point, a place where hooks can listen."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeGuard

import torch
from torch import Tensor, nn

from hooks._torch import Identity
from hooks.errors import HookError, SelectionError, unknown_name
from hooks.kinds import require_kind
from hooks.nested import tensors_in
from hooks.saying import shown

# The axes over the positions of this call. `key` also covers cached positions.
POSITION_AXES = ("pos", "query")

# The first number among the parts of a name.
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

Index = SupportsIndex | slice | Sequence[SupportsIndex]


@dataclasses.dataclass(frozen=True)
class Point:
    """A place where hooks can listen.

    Attributes:
        name: the module's path, such as `blocks.3.attn.z`.
        axes: names of the value's axes; empty where the module declares none.
        meaning: what the value is, in a few words.
        module: the module whose output is the value.
        layer: the first number among the parts of the name, or None.
        mesh: the processes that the model is split over; see `hooks.processes`.

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
        """See above."""
        return layer_of(self.name)

    def __str__(self) -> str:
        return f"{self.name} [{' '.join(self.axes)}]" if self.axes else self.name


def layer_of(name: str) -> int | None:
    """The first number among the parts of `name`, or None.

    >>> layer_of("blocks.3.attn.q")
    3
    """
    number = LAYER.search(name)
    return int(number.group()) if number else None


Hook = Callable[[Tensor, Point], Tensor | None]
"""`hook(activation, point)` returns the value to continue with. None means `activation` itself. It is
the hook's own copy, so writing into it is an edit too."""


class HookPoint(Identity):
    """Returns its input, and names it by the module's path.

    Args:
        axes: the value's axes, such as `"batch pos head d_head"`; `1` is an axis of size one.
        meaning: what the value is, in a few words, for the generated table of points.

    Raises:
        ValueError: if there is no axis, if one is neither an identifier nor `1`, or is repeated.

    >>> HookPoint("batch pos d_model", "residual stream entering the block")
    HookPoint(batch pos d_model)
    """

    def __init__(self, axes: str, meaning: str = "") -> None:
        super().__init__()
        require_kind("axes", axes, str, "names separated by spaces, as 'batch pos d_model'")
        self.axes = tuple(axes.split())
        self.meaning = meaning
        wrong = [axis for axis in self.axes if not (axis.isidentifier() or axis == "1")]
        if wrong or not self.axes or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes must be distinct identifiers separated by spaces; got {axes!r}")

    def extra_repr(self) -> str:
        """The axes, for the model's printed tree."""
        return " ".join(self.axes)


class HookPoints(nn.Module):
    """Points that fire while another module of the model runs.

    A model that was not written with points can have them beside its own modules, which then pass values
    through them. It has no weights, so the state dict does not change. A subclass may have a method
    `plain(argument)`: what a lazy cache keeps of an argument of the module that is no tensor or number.

    Args:
        module: the module that runs. It is no child.

    Attributes:
        module: see above.

    >>> block = nn.Linear(2, 2)
    >>> points = HookPoints(block)
    >>> points.out = HookPoint("batch d_model")
    >>> [name for name, _ in points.named_modules()], block.hook_points is points
    (['', 'out'], True)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Not as children: a state dict has each module once.
        self.module: nn.Module
        vars(self)["module"] = module
        vars(module)["hook_points"] = self


class OptionalPoints(nn.Module):
    """Points of a part that a run may leave out, as one without an image does.

    A cached run then skips them, unless they were asked for by their exact names.
    """


def carried(module: nn.Module, name: str) -> Any:
    """What a module carries beside its own attributes; None if nothing.

    `hook_points` are points that fire while it runs, `language_parts` what analyses use of an attached model, `shards` how
    a value is divided among processes.
    """
    return vars(module).get(name)


def inside(module: nn.Module) -> set[nn.Module]:
    """Return a module, the modules in it, and its points elsewhere."""
    points: nn.Module | None = carried(module, "hook_points")
    return {*module.modules(), *(points.modules() if points is not None else ())}


def point_at(name: str, module: nn.Module, mesh: Any = None) -> Point:
    """The point of a module with this name. Only a `HookPoint` declares axes."""
    if isinstance(module, HookPoint):
        return Point(name, module.axes, module.meaning, module, mesh)
    return Point(name, (), type(module).__name__, module, mesh)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. Containers such as ModuleList cannot."""
    return type(module).forward is not nn.Module.forward


def index_by_axis(
    axes: tuple[str, ...], where: Mapping[str, Index], what: str
) -> tuple[int | slice | list[int], ...]:
    """The subscript that selects `where` (axis name to index) from a tensor with these axes.

    At most one index may be a list, because PyTorch would broadcast two lists. A list of booleans is a
    mask. Tensors and arrays are lists too. PyTorch checks sizes when the subscript is used.

    Raises:
        UnknownNameError: if `axes`, the axes of `what`, have no such name.
        TypeError: if an index is not an integer, a slice, a list of integers or a mask.
        ValueError: if two indices are lists.

    >>> index_by_axis(("batch", "pos", "d_model"), {"pos": slice(2, None)}, "the stream")
    (slice(None, None, None), slice(2, None, None), slice(None, None, None))
    """
    require_axes(where, axes, what)
    index = tuple(plain_index(where.get(axis, slice(None))) for axis in axes)
    if sum(isinstance(part, list) for part in index) > 1:
        raise ValueError(f"only one axis can take a list of indices; got {dict(where)}")
    return index


def require_axes(where: Iterable[str], axes: tuple[str, ...], what: str) -> None:
    """Refuses names that are not among `axes`, those of `what`.

    Raises:
        UnknownNameError: naming the first.
    """
    for axis in where:
        if axis not in axes:
            declared = " ".join(axes) or "it declares none"
            raise unknown_name(axis, axes, f"axis of {what} ({declared})")


def plain_index(index: Any, ndim: int = 1) -> Any:
    """An index as Python's own int, slice, list of ints or, for a mask, list of booleans.

    With `ndim=2` it may also be a list of such lists.

    Raises:
        TypeError: if it is none of these.
    """
    plain = index.tolist() if hasattr(index, "tolist") else index
    if isinstance(plain, slice) or type(plain) is int:
        return plain
    if ndim and isinstance(plain, Sequence) and not isinstance(plain, str):
        parts = [part.tolist() if hasattr(part, "tolist") else part for part in plain]
        if all(isinstance(part, bool) for part in parts):
            return parts
        parts = [plain_index(part, ndim - 1) for part in parts]
        if len({isinstance(part, list) for part in parts}) == 1 and slice not in map(type, parts):
            return parts
    raise TypeError(
        f"an index must be an integer, slice, list of integers or mask; got {shown(index)}"
    )


def is_mask(index: object) -> TypeGuard[list[bool]]:
    """Whether a result of `plain_index` is a mask."""
    return isinstance(index, list) and index != [] and all(isinstance(i, bool) for i in index)


def places(index: Any, size: int, what: str, whole: bool = True) -> list[int]:
    """The places along an axis, counted from its start, that an index selects.

    Args:
        index: a result of `plain_index`.
        size: the axis has the places 0 to `size - 1`. Negative ones count from its end.
        what: the axis, for errors.
        whole: whether other places are errors; otherwise they stay in the result.

    Raises:
        SelectionError: if a place is outside, a mask has another length, or numbers look like a mask.
    """
    if isinstance(index, slice):
        return list(range(size)[index])
    if is_mask(index):
        if whole and len(index) != size:
            raise SelectionError(f"a mask along {what} must have length {size}; got {len(index)}")
        return [place for place, inside in enumerate(index) if inside]
    listed = [index] if isinstance(index, int) else index
    for place in listed if whole else ():
        if not -size <= place < size:
            raise SelectionError(f"{what} must be from {-size} to {size - 1}; got {place}")
    if whole and len(listed) == size > 2 and {*listed} <= {0, 1}:
        raise SelectionError(
            f"a mask along {what} must have booleans, as .bool() gives them; got {size} numbers 0 and 1, "
            "which would be the places 0 and 1"
        )
    return [place + size if place < 0 else place for place in listed]


def first_tensor(output: Any, point: Point) -> Tensor:
    """`output` itself, or the first tensor of a tuple, list, mapping or dataclass.

    Raises:
        HookError: if there is none.
    """
    for tensor in tensors_in(output):
        return tensor
    raise HookError(f"{point.name} must return a tensor; got {type(output).__name__}")


def as_node(value: Tensor, point: Point) -> Tensor:
    """A copy of `value` as a new graph node, whose gradient is only what flows through `point`.

    A view would lose its hooks when the model writes into it. If nothing before the point needs a gradient
    (frozen weights), the graph begins here.

    Raises:
        HookError: if no gradient can reach the point.
    """
    if not (torch.is_grad_enabled() and value.is_floating_point()):
        needed = "gradients must be on (cached runs have them with grads=True or detach=False), and the value a floating one"
        raise HookError(f"{needed}; got {value.dtype} at {point.name}")
    return (value if value.requires_grad else value.detach().requires_grad_()).clone()
