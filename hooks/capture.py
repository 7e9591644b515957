"""Recorder: keeps what the requested points give, as its options say, and nothing more."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from hooks.errors import CacheError, HookError, NeverFiredError
from hooks.join import joined_by_position
from hooks.outputs import first_tensor, with_first_tensor
from hooks.point import POSITION_AXES, Point, index_by_axis, plain_index
from hooks.select import RESIDUAL_STREAM

Positions = slice | Sequence[SupportsIndex]
Part = tuple[int | torch.SymInt, tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclasses.dataclass(frozen=True)
class CaptureOptions:
    """How captured values are kept; see `HookedRunner.run_with_cache`.

    Raises:
        ValueError: if options contradict each other, or gradients are asked for and switched off.
        TypeError: if `positions` is neither a slice nor a list of integers.
    """

    positions: Positions | None = None
    windows: Bool[Tensor, "batch pos"] | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    grads: bool = False
    inside: tuple[Tensor, ...] = dataclasses.field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if self.positions is not None and self.windows is not None:
            raise ValueError("positions= and windows= both choose positions: give one of them")
        if self.positions is not None:
            positions = plain_index(self.positions)
            if isinstance(positions, int):
                raise TypeError(f"positions is a slice or a list of integers, not {positions}")
            object.__setattr__(self, "positions", positions)
        if self.windows is not None:
            if self.windows.dtype != torch.bool:
                raise ValueError(f"windows are boolean, not {self.windows.dtype}")
            # Found here, so that the number of rows is known where tensors are fake.
            object.__setattr__(self, "inside", self.windows.nonzero(as_tuple=True))
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")

    def suited(self, points: dict[str, Point]) -> dict[str, Point]:
        """`points`, if every option acts on some of them.

        Raises:
            ValueError: if there are windows, and no point of the residual stream.
        """
        if self.windows is not None and not any(map(self._has_windows, points.values())):
            raise ValueError(
                "windows= choose positions of the residual stream, and none of its points is asked for "
                f"({', '.join(sorted(RESIDUAL_STREAM))})"
            )
        return points

    def _has_windows(self, point: Point) -> bool:
        return point.name.rpartition(".")[2] in RESIDUAL_STREAM

    def kept_as(self, point: Point) -> dict[str, tuple[str, ...]]:
        """The names under which the value of `point` is kept, each with its axes."""
        if self.windows is None or not self._has_windows(point):
            return {point.name: point.axes}
        return {
            point.name: ("window", *point.axes[2:]),
            f"{point.name}.norm": point.axes[:-1],
        }

    def reduce(self, value: Tensor, point: Point) -> Iterator[tuple[str, Tensor]]:
        """What is left of `value`, under each name of `kept_as`."""
        names = list(self.kept_as(point))
        parts = [value]
        if self.windows is not None and len(names) == 2:
            _check_windows(self.windows, value, point)
            wide = torch.promote_types(value.dtype, torch.float32)
            parts = [value[self.inside], torch.linalg.vector_norm(value, dim=-1, dtype=wide)]
        elif self.positions is not None:
            parts = [take_positions(value, point, self.positions)]
        for name, part in zip(names, parts, strict=True):
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
        options: CaptureOptions,
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

    def finish(self, hint: str = "") -> None:
        """Puts values in the model's order, and makes sure that they are all there and untouched.

        Raises:
            NeverFiredError: names the points that the run did not reach.
            CacheError: names the points whose values a later module overwrote in place.
        """
        require_fired(self.points, self._fired, hint)
        if self._parts is not None:
            self.values = {
                n: joined_by_position(p, n, self.axes[n]) for n, p in self._parts.items()
            }
        self.values = {name: self.values[name] for name in self.axes}
        for name, version in self._versions.items():
            if self.values[name]._version != version:
                raise CacheError(
                    f"the value of {name} was changed in place by the model after it was captured; "
                    "ask for the module that changed it, or switch its in-place option off"
                )
        if self.options.detach:
            self.values = without_neighbours(self.values)

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        if not value.is_floating_point():
            raise HookError(f"{point.name} holds {value.dtype}, which has no gradient")
        value = own_node(value)
        # The hook lives as long as the graph: it must not hold the recorder, which holds values.
        grads, options = self.grads, self.options

        def keep(grad: Tensor) -> None:
            grads.update(options.reduce(grad.detach(), point))

        value.register_hook(keep)
        return value

    def _keep(self, value: Tensor, point: Point) -> None:
        # A weight, or a view of one, would change with the next training step.
        if isinstance(value, nn.Parameter) or isinstance(value._base, nn.Parameter):
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
                self.values[name], self._versions[name] = kept, kept._version


def own_node(value: Tensor) -> Tensor:
    """`value` as a node of its own, so that its gradient counts only what flows through this point.

    Where nothing before the point needs a gradient (frozen weights), the point becomes the leaf.
    """
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


def require_fired(points: Mapping[str, Point], fired: set[str], hint: str = "") -> None:
    """Raises NeverFiredError, naming them, if some of `points` are not among the `fired`."""
    missing = [name for name in points if name not in fired]
    if missing:
        rest = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise NeverFiredError(
            f"never reached by this forward pass: {', '.join(missing[:5])}{rest}"
            + (f"; {hint}" if hint else "")
        )


def take_positions(value: Tensor, point: Point, positions: Positions) -> Tensor:
    """A copy of the given positions of `value`, along the axes that count positions of this call."""
    if not point.axes:
        raise HookError(f"positions= needs named axes, and {point.name} declares none")
    for axis in POSITION_AXES:
        if axis not in point.axes:
            continue
        size = value.shape[point.axes.index(axis)]
        if not isinstance(positions, slice) and not all(-size <= int(p) < size for p in positions):
            raise HookError(f"positions {positions} do not all lie in the {size} of {point}")
        value = value[index_by_axis(point.axes, {axis: positions}, point.name)]
        value = value.clone() if isinstance(positions, slice) else value
        if value.shape[point.axes.index(axis)] == 0:
            raise HookError(f"positions {positions} select none of the {size} of {point}")
    return value


def without_neighbours(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """`values`, copied where they are small parts of memory that nothing else of them uses.

    Queries, for instance, may be a view of what one matrix gave as queries, keys and values.
    """
    parts: dict[int, dict[Part, Tensor]] = {}
    for value in values.values():
        if _has_storage(value):
            parts.setdefault(value.untyped_storage()._cdata, {})[_part(value)] = value
    for held in parts.values():
        first = next(iter(held.values()))
        if sum(value.nbytes for value in held.values()) < first.untyped_storage().nbytes():
            held.update({part: value.clone() for part, value in held.items()})
    return {
        name: parts[value.untyped_storage()._cdata][_part(value)] if _has_storage(value) else value
        for name, value in values.items()
    }


def _part(value: Tensor) -> Part:
    return value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def _has_storage(value: Tensor) -> bool:
    """Tensors inside vmap and grad have none."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def _check_windows(windows: Tensor, value: Tensor, point: Point) -> None:
    if windows.shape != value.shape[:2]:
        raise HookError(
            f"windows are [batch, pos], {tuple(value.shape[:2])} at {point.name}, "
            f"not {tuple(windows.shape)}"
        )
