"""Recorder: keeps what the requested points give, as its options say, and nothing more."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from hooks._torch import has_storage, is_of_parameter, memory_of, version
from hooks.errors import NEVER_FIRED, CacheError, HookError, require_fired
from hooks.modes import RESIDUAL_STREAM, Windows
from hooks.point import (
    POSITION_AXES,
    Point,
    as_node,
    first_tensor,
    index_by_axis,
    plain_index,
    with_first_tensor,
)

Positions = slice | Sequence[SupportsIndex]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a run keeps values: keyword arguments of every method that makes or plans a cache.

    Attributes:
        positions: keep only these positions of the axes `pos` and `query`; nothing else is kept.
        windows: of the residual stream keep the vectors where this boolean [batch, pos] is True, under
            the point's name as [window, d_model], and the L2 norms of all, under `NAME.norm` as
            [batch, pos]. The order of the windows is by row, then by position.
        device, dtype: where and as what to keep values; integers keep their type.
        detach: whether kept values are cut from the autograd graph.
        grads: whether `cache.grads` holds the gradients of the caller's last `backward()`.

    Raises:
        ValueError: if options contradict each other, or gradients are asked for and switched off.
        TypeError: if `positions` is neither a slice nor a list of integers.

    >>> Options(positions=range(2)).positions
    [0, 1]
    """

    positions: Positions | None = None
    windows: Windows | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    grads: bool = False

    def __post_init__(self) -> None:
        if self.positions is not None and self.windows is not None:
            raise ValueError("positions= and windows= both choose positions: give one of them")
        if self.positions is not None:
            positions = plain_index(self.positions)
            if isinstance(positions, int):
                raise TypeError(f"positions must be a slice or a list of integers; got {positions}")
            object.__setattr__(self, "positions", positions)
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """The options among keyword arguments, and the rest, which are the model's."""
        names = {field.name for field in dataclasses.fields(cls)}
        given = {name: value for name, value in kwargs.items() if name in names}
        if given.get("windows") is not None:
            given["windows"] = Windows(given["windows"])
        return cls(**given), {name: kwargs[name] for name in kwargs if name not in names}

    def suited(self, points: dict[str, Point]) -> dict[str, Point]:
        """`points`, if every option acts on some of them.

        Raises:
            ValueError: if there are windows, and no point of the residual stream.
        """
        if self.windows is not None and not any(map(self.windows.apply_to, points.values())):
            raise ValueError(
                "windows= needs a point of the residual stream, "
                f"{', '.join(sorted(RESIDUAL_STREAM))}; got none"
            )
        return points

    def kept_as(self, point: Point) -> dict[str, tuple[str, ...]]:
        """The names under which the value of `point` is kept, each with its axes."""
        if self.windows is None or not self.windows.apply_to(point):
            return {point.name: point.axes}
        return {point.name: ("window", *point.axes[2:]), f"{point.name}.norm": point.axes[:-1]}

    def reduce(self, value: Tensor, point: Point) -> Iterator[tuple[str, Tensor]]:
        """What is left of `value`, under each name of `kept_as`."""
        parts = [value]
        if self.windows is not None and self.windows.apply_to(point):
            parts = self.windows.reduce(value, point)
        elif self.positions is not None:
            parts = [_take_positions(value, point, self.positions)]
        for name, part in zip(self.kept_as(point), parts, strict=True):
            # Integers, token ids for instance, would be rounded.
            yield name, part.to(self.device, self.dtype if part.is_floating_point() else None)


class Recorder:
    """Collects the values of `points`, and their gradients if asked, during one run.

    With `joined`, a point may fire many times, and its values are put together by position.

    Attributes:
        values: what was captured, by name, in the model's order.
        axes: the axes of each value.
        grads: the gradients that a later backward pass brings; they never hold a graph.
        options: how values are kept.
    """

    def __init__(
        self,
        points: Mapping[str, Point],
        options: Options,
        when_complete: Callable[[], None] | None = None,
        joined: bool = False,
    ) -> None:
        self.points = points
        self.options = options
        self.axes = {n: a for p in points.values() for n, a in options.kept_as(p).items()}
        self.values: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self._fired: set[str] = set()
        self._versions: dict[str, int] = {}
        self._when_complete = when_complete
        self._parts: dict[str, list[Tensor]] | None = {} if joined else None

    def hook(self, point: Point) -> Callable[[Any], Any]:
        """A forward hook that records `point`, and changes no number of its output."""

        def record(output: Any) -> Any:
            value = first_tensor(output, point)
            if point.axes and value.ndim != len(point.axes):
                raise HookError(f"{point} carried a value of shape {tuple(value.shape)}")
            if point.name in self._fired and self._parts is None:
                raise HookError(
                    f"{point.name} fired twice in one run, and a cache keeps one value a name: "
                    "leave it out of the selector"
                )
            self._fired.add(point.name)
            replaced = None
            if self.options.grads:
                value = self._watch(value, point)
                replaced = with_first_tensor(output, value)
            self._keep(value, point)
            if self._when_complete and len(self._fired) == len(self.points):
                self._when_complete()
            return replaced

        return record

    def finish(self, reason: str = NEVER_FIRED) -> None:
        """Puts values in the model's order, and makes sure that they are all there and untouched.

        Raises:
            NeverFiredError: names the points that the run did not reach, with `reason`.
            CacheError: names the points whose values a later module overwrote in place.
        """
        require_fired(self.points, self._fired, reason)
        if self._parts is not None:
            self.values = {n: join(p, n, self.axes[n]) for n, p in self._parts.items()}
        self.values = {name: self.values[name] for name in self.axes}
        for name, before in self._versions.items():
            if version(self.values[name]) != before:
                raise CacheError(
                    f"the value of {name} was changed in place by the model after it was captured; "
                    "ask for the module that changed it, or switch its in-place option off"
                )
        if self.options.detach:
            self.values = _compacted(self.values)

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        if not value.is_floating_point():
            raise HookError(f"{point.name} holds {value.dtype}, which has no gradient")
        value = as_node(value)
        # The hook lives as long as the graph: it must not hold the recorder, which holds values.
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
                # A later run may write where this one did, into a cache of keys for instance.
                self._parts.setdefault(name, []).append(kept.clone())
            elif torch.compiler.is_compiling():
                self.values[name] = kept
            elif kept.is_inference():
                # Inference tensors do not tell when they are overwritten.
                self.values[name] = kept.clone()
            else:
                self.values[name], self._versions[name] = kept, version(kept)


def join(parts: Sequence[Tensor], name: str, axes: tuple[str, ...]) -> Tensor:
    """The values of several runs, a generation's for instance, as those of one run over all positions.

    Along `key` each part ends at its own last position; where a part has no key, there is zero.
    """
    along = [axis for axis in axes if axis in POSITION_AXES]
    if len(along) != 1:
        has = f"has the axes {' '.join(axes)}" if axes else "declares no axes"
        raise HookError(
            f"the values of several runs are joined along one axis of positions, and {name} {has}"
        )
    at = axes.index(along[0])
    if "key" in axes:
        key = axes.index("key")
        before = parts[0].shape[key] - parts[0].shape[at]
        ends = [before + end for end in accumulate(part.shape[at] for part in parts)]
        parts = [_padded(part, key, end, ends[-1]) for part, end in zip(parts, ends, strict=True)]
    return torch.cat(list(parts), at)


def _padded(part: Tensor, axis: int, end: int, size: int) -> Tensor:
    """`part` in a tensor of zeros whose `axis` has this size, so that it ends before `end`."""
    shape = [*part.shape[:axis], size, *part.shape[axis + 1 :]]
    whole = part.new_zeros(shape)
    whole.narrow(axis, end - part.shape[axis], part.shape[axis]).copy_(part)
    return whole


def _take_positions(value: Tensor, point: Point, positions: Positions) -> Tensor:
    """A copy of the given positions of `value`, along the axes that count positions of this call."""
    if not point.axes:
        raise HookError(f"positions= needs named axes, and {point.name} declares none")
    for axis in POSITION_AXES:
        if axis not in point.axes:
            continue
        size = value.shape[point.axes.index(axis)]
        if not isinstance(positions, slice) and not all(-size <= int(p) < size for p in positions):
            raise HookError(f"positions must lie in the {size} of {point}; got {positions}")
        value = value[index_by_axis(point.axes, {axis: positions}, point.name)]
        value = value.clone() if isinstance(positions, slice) else value
        if value.shape[point.axes.index(axis)] == 0:
            raise HookError(f"positions {positions} select none of the {size} of {point}")
    return value


def _compacted(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """`values`, copied where they are small parts of memory that nothing else of them uses.

    Queries, for instance, may be a view of what one matrix gave as queries, keys and values.
    """
    parts: dict[int, dict[object, Tensor]] = {}
    for value in filter(has_storage, values.values()):
        parts.setdefault(memory_of(value), {})[_place(value)] = value
    for held in parts.values():
        whole = next(iter(held.values())).untyped_storage().nbytes()
        if sum(value.nbytes for value in held.values()) < whole:
            held.update({place: value.clone() for place, value in held.items()})
    return {
        name: parts[memory_of(value)][_place(value)] if has_storage(value) else value
        for name, value in values.items()
    }


def _place(value: Tensor) -> object:
    return value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
