"""Recorder: keeps what the requested points give, as its options say, and nothing more."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from hooks.errors import CacheError, HookError, NeverFiredError
from hooks.outputs import first_tensor, with_first_tensor
from hooks.point import Point, index_by_axis
from hooks.select import RESIDUAL_STREAM

# The axes that count the positions of this call; `key` counts cached positions too.
POSITION_AXES = ("pos", "query")


@dataclasses.dataclass(frozen=True)
class CaptureOptions:
    """How captured values are kept; see `HookedRunner.run_with_cache`."""

    positions: slice | Sequence[int] | None = None
    windows: Bool[Tensor, "batch pos"] | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    grads: bool = False
    inside: tuple[Tensor, ...] = dataclasses.field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        if self.positions is not None and self.windows is not None:
            raise ValueError("positions= and windows= both choose positions: give one of them")
        if self.windows is not None and self.windows.dtype != torch.bool:
            raise ValueError(f"windows are boolean, not {self.windows.dtype}")
        if self.windows is not None:
            # Found here, so that the number of rows is known where tensors are fake.
            object.__setattr__(self, "inside", self.windows.nonzero(as_tuple=True))
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")


class Recorder:
    """Collects the values of `points`, and their gradients if asked, during one run.

    Attributes:
        values: what was captured, by name.
        axes: the axes of each captured value.
        grads: the gradients that a later backward pass brings; they never hold a graph.
    """

    def __init__(
        self,
        points: Mapping[str, Point],
        options: CaptureOptions,
        when_complete: Callable[[], None] | None = None,
    ) -> None:
        self.points = points
        self.values: dict[str, Tensor] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.grads: dict[str, Tensor] = {}
        self.asked_for_grads = options.grads
        self._options = options
        self._fired: set[str] = set()
        self._versions: dict[str, int] = {}
        self._when_complete = when_complete

    def hook(self, point: Point) -> Callable[[Any], Any]:
        """A forward hook that records `point`, and changes no number of its output."""

        def record(output: Any) -> Any:
            value = first_tensor(output, point)
            _check_rank(value, point)
            if point.name in self._fired:
                raise HookError(
                    f"{point.name} fired twice in one run; a cache keeps one value a name"
                )
            self._fired.add(point.name)
            replaced = None
            if self._options.grads:
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
        ordered = [n for point in self.points.values() for n in names_kept(point, self._options)]
        self.values = {name: self.values[name] for name in ordered}
        for name, version in self._versions.items():
            if self.values[name]._version != version:
                raise CacheError(
                    f"the value of {name} was changed in place by the model after it was captured; "
                    "ask for the module that changed it, or switch its in-place option off"
                )

    def _watch(self, value: Tensor, point: Point) -> Tensor:
        if not value.is_floating_point():
            raise HookError(f"{point.name} holds {value.dtype}, which has no gradient")
        value = own_node(value)
        # The hook lives as long as the graph: it must not hold the recorder, which holds values.
        grads, options = self.grads, self._options

        def keep(grad: Tensor) -> None:
            for name, kept, _ in _reduced(grad.detach(), point, options):
                grads[name] = kept

        value.register_hook(keep)
        return value

    def _keep(self, value: Tensor, point: Point) -> None:
        value = value.detach() if self._options.detach else value
        for name, kept, axes in _reduced(value, point, self._options):
            self.values[name], self.axes[name] = kept, axes
            if not kept.is_inference():
                self._versions[name] = kept._version


def own_node(value: Tensor) -> Tensor:
    """`value` as a node of its own, so that its gradient counts only what flows through this point.

    Where nothing before the point needs a gradient (frozen weights), the point becomes the leaf.
    """
    return value.view_as(value) if value.requires_grad else value.detach().requires_grad_()


def _reduced(
    value: Tensor, point: Point, options: CaptureOptions
) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """What the options leave of `value`: name, tensor and axes of each part."""
    axes = point.axes
    if options.windows is not None and _is_windowed(point, options):
        _check_windows(options.windows, value, point)
        parts = [(value[options.inside], ("window", *axes[2:])), (value.norm(dim=-1), axes[:-1])]
    elif options.positions is not None:
        parts = [(take_positions(value, point, options.positions), axes)]
    else:
        parts = [(value, axes)]
    for name, (part, axes) in zip(names_kept(point, options), parts, strict=True):
        yield name, part.to(options.device, options.dtype), axes


def names_kept(point: Point, options: CaptureOptions) -> list[str]:
    """The names under which the options leave the value of `point`."""
    return [point.name, f"{point.name}.norm"] if _is_windowed(point, options) else [point.name]


def _is_windowed(point: Point, options: CaptureOptions) -> bool:
    return options.windows is not None and point.name.rpartition(".")[2] in RESIDUAL_STREAM


def require_fired(points: Mapping[str, Point], fired: set[str], hint: str = "") -> None:
    """Raises NeverFiredError, naming them, if some of `points` are not among the `fired`."""
    missing = [name for name in points if name not in fired]
    if missing:
        rest = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise NeverFiredError(
            f"never reached by this forward pass: {', '.join(missing[:5])}{rest}"
            + (f"; {hint}" if hint else "")
        )


def take_positions(value: Tensor, point: Point, positions: slice | Sequence[int]) -> Tensor:
    """A copy of the given positions of `value`, along the axes that count positions of this call."""
    if not point.axes:
        raise HookError(f"positions= needs named axes, and {point.name} declares none")
    index = positions if isinstance(positions, slice) else list(positions)
    for axis in POSITION_AXES:
        if axis not in point.axes:
            continue
        size = value.shape[point.axes.index(axis)]
        if isinstance(index, list) and not all(-size <= at < size for at in index):
            raise HookError(f"positions {index} do not all lie in the {size} of {point}")
        value = value[index_by_axis(point.axes, {axis: index}, point.name)]
        if value.shape[point.axes.index(axis)] == 0:
            raise HookError(f"positions {positions} select none of the {size} of {point}")
        value = value.clone() if isinstance(index, slice) else value
    return value


def _check_rank(value: Tensor, point: Point) -> None:
    if point.axes and value.ndim != len(point.axes):
        raise HookError(f"{point} carried a value of shape {tuple(value.shape)}")


def _check_windows(windows: Tensor, value: Tensor, point: Point) -> None:
    if windows.shape != value.shape[:2]:
        raise HookError(
            f"windows are [batch, pos], {tuple(value.shape[:2])} at {point.name}, "
            f"not {tuple(windows.shape)}"
        )
