"""Recorder: keeps the values of the requested points. Options: how it keeps them."""

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks._torch import has_storage, is_of_parameter, memory_of, version
from hooks.errors import NEVER_FIRED, CacheError, HookError, NeverFiredError, require_fired
from hooks.modes import RESIDUAL_STREAM, Positions, Windows, take_positions
from hooks.point import (
    POSITION_AXES,
    Point,
    as_node,
    first_tensor,
    plain_index,
    with_first_tensor,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a run keeps values: keyword arguments of every method that makes or plans a cache.

    Attributes:
        positions: keep only these positions of the axes `pos` and `query`. Booleans are a mask.
        windows: a boolean mask [batch, pos] for the residual stream. Vectors where it is True are kept
            under the point's name as [window, d_model], ordered by row, then by position. The L2
            norms of all vectors are kept under `NAME.norm` as [batch, pos].
        device, dtype: the device and floating dtype of kept values; integers keep their dtype.
        detach: whether kept values are detached from the autograd graph.
        grads: whether `cache.grads` holds the gradients of the caller's last `backward()`.
        divided: what `windows` keep; not an argument.

    Raises:
        ValueError: if options contradict each other, if `dtype` is not a floating one, or if
            `grads=True` while gradients are off.
        TypeError: if `positions` is not a slice, a list of integers or a mask.

    >>> Options(positions=range(2)).positions
    [0, 1]
    """

    positions: Positions | None = None
    windows: Bool[Tensor, "batch pos"] | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    grads: bool = False
    divided: Windows | None = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.positions is not None and self.windows is not None:
            raise ValueError("positions= and windows= both choose positions: give one of them")
        if self.positions is not None:
            positions = plain_index(self.positions)
            if isinstance(positions, int):
                raise TypeError(f"positions must be a slice or a list of integers; got {positions}")
            object.__setattr__(self, "positions", positions)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"the dtype of kept values must be a floating one; got {self.dtype}")
        if self.windows is not None:
            object.__setattr__(self, "divided", Windows(self.windows))
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """Splits keyword arguments into options and the model's own arguments."""
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        given = {name: value for name, value in kwargs.items() if name in names}
        return cls(**given), {name: kwargs[name] for name in kwargs if name not in names}

    def suited(self, points: dict[str, Point]) -> dict[str, Point]:
        """Returns `points` if the windows, where there are any, apply to one of them.

        Raises:
            ValueError: if there are windows but no point of the residual stream.
        """
        if self.divided is not None and not any(map(self.divided.applies_to, points.values())):
            raise ValueError(
                "windows= needs a point of the residual stream, "
                f"{', '.join(sorted(RESIDUAL_STREAM))}; got none"
            )
        return points

    def kept_as(self, point: Point) -> dict[str, tuple[str, ...]]:
        """The names that the value of `point` is kept under, each with its axes."""
        if self.divided is None or not self.divided.applies_to(point):
            return {point.name: point.axes}
        return {point.name: ("window", *point.axes[2:]), f"{point.name}.norm": point.axes[:-1]}

    def reduce(self, value: Tensor, point: Point) -> Iterator[tuple[str, Tensor]]:
        """The part of `value` to keep under each name of `kept_as`."""
        parts = [value]
        if self.divided is not None and self.divided.applies_to(point):
            parts = self.divided.reduce(value, point)
        elif self.positions is not None:
            parts = [take_positions(value, point, self.positions)]
        for name, part in zip(self.kept_as(point), parts, strict=True):
            yield name, self.place(part)

    def place(self, value: Tensor) -> Tensor:
        """`value` on the device and in the dtype of these options."""
        # A floating dtype would round integers such as token ids.
        return value.to(self.device, self.dtype if value.is_floating_point() else None)


class Recorder:
    """Collects the values of `points`, and their gradients if asked, during one run.

    Args:
        points: what to listen at.
        options: how to keep values.
        when_complete: called once every point has fired.
        joined: a point may fire many times. Its values are joined along the position axis.
        unkept: names of points whose values are not kept. It is only noted that they fired.

    Attributes:
        values: the captured values by name, in the model's order.
        axes: the axes of each value.
        fired: the names of the points that the run reached.
        skipped: why optional points have no value, by name.
        grads: the gradients from a later backward pass, without their graph.
        options: how values are kept.
    """

    def __init__(
        self,
        points: Mapping[str, Point],
        options: Options,
        when_complete: Callable[[], None] | None = None,
        joined: bool = False,
        unkept: Container[str] = (),
    ) -> None:
        self.points = points
        self.options = options
        self.axes = {n: a for p in points.values() for n, a in options.kept_as(p).items()}
        self.values: dict[str, Tensor] = {}
        self.skipped: dict[str, str] = {}
        self.grads: dict[str, Tensor] = {}
        self.fired: set[str] = set()
        self._versions: dict[str, int] = {}
        self._when_complete = when_complete
        self._unkept = unkept
        self._parts: dict[str, list[Tensor]] | None = {} if joined else None

    def hook(self, point: Point) -> Callable[[Any], Any]:
        """A forward hook that records `point` and leaves its value unchanged."""

        def record(output: Any) -> Any:
            replaced = None
            try:
                value = first_tensor(output, point)
                if point.axes and value.ndim != len(point.axes):
                    raise HookError(f"{point} must have these axes; got shape {tuple(value.shape)}")
                if point.name in self.fired and self._parts is None:
                    raise HookError(
                        f"{point.name} fired twice in one run, and a cache keeps one value per name"
                    )
                if self.options.grads:
                    node = self._watch(value, point)
                    replaced = with_first_tensor(output, node)
                    # The model may write into the node. Without a graph the value itself does as well.
                    value = value if self.options.detach else node
                if point.name not in self._unkept:
                    self._keep(value, point)
            except HookError as error:
                self.skip(point, error)
            self.fired.add(point.name)
            if self._when_complete and len(self.fired) == len(self.points):
                self._when_complete()
            return replaced

        return record

    def skip(self, point: Point, error: HookError) -> None:
        """Leaves an optional point out, and says why in `skipped`. Raises `error` for any other."""
        if not point.optional:
            raise error
        self.skipped[point.name] = str(error)

    def finish(self, reason: str = NEVER_FIRED) -> None:
        """Puts values in the model's order. Checks that all are present and none was overwritten.

        Raises:
            NeverFiredError: if the run did not reach a point that is not optional, or if all were
                skipped; the message includes `reason`.
            CacheError: if a later module overwrote a value in place.
        """
        if self._parts is not None:
            self.values = {n: join(p, n, self.axes[n]) for n, p in self._parts.items()}
        for name, before in self._versions.items():
            if version(self.values[name]) != before:
                changed = (
                    f"the model changed the value of {name} in place after its capture; "
                    "select the module that changed it, or switch its in-place option off"
                )
                self.skip(self.points[name], CacheError(changed))
        missed = [p.name for p in self.points.values() if p.optional and p.name not in self.fired]
        self.skipped |= {name: f"{name} did not run: {reason}" for name in missed}
        require_fired(self.points, self.fired | self.skipped.keys(), reason)
        kept = [point for name, point in self.points.items() if name not in self.skipped]
        if self.points and not kept:
            raise NeverFiredError(f"no point has a value: {next(iter(self.skipped.values()))}")
        self.axes = {n: axes for p in kept for n, axes in self.options.kept_as(p).items()}
        self.values = {name: self.values[name] for name in self.axes if name in self.values}
        if self.options.detach:
            self.values = _compacted(self.values)

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        if not value.is_floating_point():
            raise HookError(f"grads=True needs floating values; got {value.dtype} at {point.name}")
        value = as_node(value)
        # The hook lives as long as the graph, so it must not hold the recorder and its values.
        grads, options = self.grads, self.options

        def keep(grad: Tensor) -> None:
            grads.update(options.reduce(grad.detach(), point))

        value.register_hook(keep)
        return value

    def _keep(self, value: Tensor, point: Point) -> None:
        # A weight, or a view of one, would change with the next training step.
        if is_of_parameter(value):
            value = value.clone()
        value = value.detach() if self.options.detach else value
        for name, kept in self.options.reduce(value, point):
            if self._parts is not None:
                # A later run may overwrite this memory, a key/value cache for instance.
                self._parts.setdefault(name, []).append(kept.clone())
            elif torch.compiler.is_compiling():
                self.values[name] = kept
            elif kept.is_inference():
                # Inference tensors do not record in-place writes.
                self.values[name] = kept.clone()
            else:
                self.values[name], self._versions[name] = kept, version(kept)


def join(parts: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """Joins the values of several runs (a generation's steps) as if one run covered all positions.

    Along `key` each part ends at its own last position, and later keys are zero.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        has = f"has the axes {' '.join(axes)}" if axes else "declares no axes"
        raise HookError(
            f"joining the values of several runs needs one axis of positions; {name} {has}"
        )
    at = axes.index(along[0])
    if "key" in axes:
        key = axes.index("key")
        before = parts[0].shape[key] - parts[0].shape[at]
        ends = [before + end for end in accumulate(part.shape[at] for part in parts)]
        parts = [_padded(part, key, end, ends[-1]) for part, end in zip(parts, ends, strict=True)]
    return torch.cat(list(parts), at)


def _padded(part: Tensor, axis: int, end: int, size: int) -> Tensor:
    """`part` in a tensor of zeros with this size of `axis`, ending before `end`."""
    shape = [*part.shape[:axis], size, *part.shape[axis + 1 :]]
    whole = part.new_zeros(shape)
    whole.narrow(axis, end - part.shape[axis], part.shape[axis]).copy_(part)
    return whole


def _compacted(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies values that use only a part of their memory, so the rest can be freed.

    Queries, for instance, may be a view of one tensor that holds queries, keys and values.
    """
    parts: dict[int, dict[object, Tensor]] = {}
    for value in filter(has_storage, values.values()):
        parts.setdefault(memory_of(value), {})[_extent(value)] = value
    for held in parts.values():
        whole = next(iter(held.values())).untyped_storage().nbytes()
        if sum(value.nbytes for value in held.values()) < whole:
            held.update({place: value.clone() for place, value in held.items()})
    return {
        name: parts[memory_of(value)][_extent(value)] if has_storage(value) else value
        for name, value in values.items()
    }


def _extent(value: Tensor) -> object:
    return value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
