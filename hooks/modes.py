"""Modes and options: what a run keeps, and how."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from hooks.errors import HookError
from hooks.point import POSITION_AXES, Point, places, plain_index
from hooks.transfer import Placement, to_device

Positions = slice | Sequence[SupportsIndex]


class Mode(StrEnum):
    """A choice of the values of a run to keep.

    `none` keeps nothing. `svd_targets` keeps the attention scores, patterns and values. `residual`
    adds the residual stream. Both need a model with `HookPoint`s. `full` keeps every point.

    Scores are those before the mask, so they are not zero above the diagonal. `interp.svd_targets`
    gives QK^T with zeros there, and the other matrices to decompose.

    >>> Mode("residual")
    <Mode.residual: 'residual'>
    """

    @classmethod
    def _missing_(cls, value: object) -> "Mode":
        raise ValueError(f"mode must be one of {', '.join(cls)}; got {value!r}")

    none = "none"
    svd_targets = "svd_targets"
    residual = "residual"
    full = "full"


_TARGETS = frozenset({"scores", "pattern", "v"})

# The one place that maps a mode to the last part of a name; `full` asks for every last part.
LAST_PARTS: Mapping[Mode, frozenset[str] | None] = {
    Mode.none: frozenset(),
    Mode.svd_targets: _TARGETS,
    Mode.residual: _TARGETS | {"resid_pre", "resid_mid", "resid_post"},
    Mode.full: None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options for keeping values: keyword arguments of every method that makes or plans a cache.

    Attributes:
        positions: keep only these positions of the axes `pos` and `query`. Booleans are a mask.
        device, dtype: the device and floating dtype of kept values; integers keep their dtype. From
            CUDA to the CPU they are copied while the model runs, into pinned memory.
        placement: puts values on that device and in that dtype.
        detach: whether kept values are detached from the autograd graph.
        grads: whether `cache.grads` holds the gradients of the caller's last `backward()`.

    Raises:
        ValueError: if options contradict each other, if `dtype` is not a floating one, or if
            `grads=True` while gradients are off.
        TypeError: if `positions` is not a slice, a list of integers or a mask.

    >>> Options(positions=range(2)).positions
    [0, 1]
    """

    positions: Positions | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    detach: bool = True
    grads: bool = False
    placement: Placement = dataclasses.field(init=False, repr=False, compare=False)
    # Chosen positions, by the sizes of axes and the devices that they were moved to.
    _indices: dict[object, Tensor] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.positions is not None:
            positions = plain_index(self.positions)
            if isinstance(positions, int):
                raise TypeError(f"positions must be a slice, list or mask; got {positions}")
            object.__setattr__(self, "positions", positions)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"the dtype of kept values must be a floating one; got {self.dtype}")
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")
        # Gradients are placed during the caller's backward pass, and nothing waits at its end.
        placement = Placement(self.device, self.dtype, waits=self.grads)
        object.__setattr__(self, "placement", placement)

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """Splits keyword arguments into options and the model's own arguments."""
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        chosen = {name: value for name, value in kwargs.items() if name in names}
        return cls(**chosen), {name: kwargs[name] for name in kwargs if name not in names}

    def kept(self, value: Tensor, point: Point) -> Tensor:
        """Return `value` at the chosen positions of its axes `pos` and `query`, on the device and in the dtype.

        It is `value` itself or a new tensor, never a view.

        Raises:
            HookError: if it has no named axes, or the positions select nothing.
            SelectionError: if it does not have them.
        """
        if self.positions is None:
            return self.placement(value)
        if not point.axes:
            raise HookError(f"positions= needs named axes, and {point.name} declares none")
        for axis, size in enumerate(value.shape):
            if point.axes[axis] not in POSITION_AXES:
                continue
            key = size, value.device
            if key not in self._indices:
                chosen = places(self.positions, size, f"positions= of {point}")
                index = torch.tensor(chosen, dtype=torch.int64)
                self._indices[key] = to_device(index, value.device)
            value = value.index_select(axis, self._indices[key])
            if value.shape[axis] == 0:
                rule = f"select some of the {size} of {point}"
                raise HookError(f"positions must {rule}; got {self.positions}")
        return self.placement(value)
