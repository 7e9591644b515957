"""Modes and options: the values that a run caches, and how they are stored."""

import dataclasses
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal

import torch
from torch import Tensor

from hooks.base import (
    POSITION_AXES,
    Index,
    Piece,
    Selection,
    names_fields,
    piece_read,
    reading,
    real_columns,
    require_choice,
    require_device,
    require_kind,
    shown,
    taken,
    to_device,
)
from hooks.base.errors import HookError
from hooks.base.memory import Bound
from hooks.base.transfer import Placement, private
from hooks.point import Point


class Mode(StrEnum):
    """A choice of the values that a run caches.

    `none` caches nothing. `svd_targets` caches the attention scores, patterns and values.
    `residual` adds the residual stream. Both need a model with `HookPoint`s. `full` caches every
    point.

    The scores are taken before the mask, so they are not zero above the diagonal.
    `interp.svd_targets` returns QK^T with zeros there, and the other matrices to decompose.

    >>> Mode("residual")
    <Mode.residual: 'residual'>
    """

    @classmethod
    def _missing_(cls, value: object) -> "Mode":
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"mode must be one of {', '.join(cls)}; got {shown(value)}")

    none = "none"
    svd_targets = "svd_targets"
    residual = "residual"
    full = "full"


_TARGETS = frozenset({"scores", "pattern", "v"})

# The last parts of the names of the points that each mode caches. `full` caches all points.
LAST_PARTS: Mapping[Mode, frozenset[str] | None] = {
    Mode.none: frozenset(),
    Mode.svd_targets: _TARGETS,
    Mode.residual: _TARGETS | {"resid_pre", "resid_mid", "resid_post"},
    Mode.full: None,
}


@names_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options for cached values: keyword arguments of every method that makes or plans a cache.

    Attributes:
        pos: cache only these positions of the axes `pos` and `query`, in any form of a
            `Selection`, including different positions in each text. In texts with padding, negative
            positions count real tokens.
        device, dtype: the device and floating dtype of cached values; integers keep their dtype.
            Copies from CUDA to the CPU run in the background, into pinned memory, while the model
            continues.
        placement: the function that moves values to this device and dtype.
        calls: `one` caches one value of a point and raises an error at a second value. `all` caches
            the values of all calls, for modules that run many times in one run. They are stacked
            along a first axis `call`, even if there is only one call.
        detach: whether cached values are detached from the autograd graph.
        grads: whether `cache.grads` contains the gradients of the caller's last `backward()`.
        max_bytes: the memory limit of values and gradients. Default: 0.9 of the free memory. A run
            that would exceed the limit raises a MemoryLimitError early, when the values of one
            layer are stored and the sizes of all others can be estimated.

    Raises:
        ValueError: if options contradict each other, if `dtype` is not a floating dtype, or if
            `grads=True` while gradients are off.
        TypeError: if `pos` is not a form of a `Selection`, or is a single integer.

    >>> Options(pos=range(2)).pos
    [0, 1]
    """

    pos: Index | Selection | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    calls: Literal["one", "all"] = "one"
    detach: bool = True
    grads: bool = False
    max_bytes: int | None = None
    placement: Placement = dataclasses.field(init=False, repr=False, compare=False)
    # The results of `_chosen`, by its arguments and the present piece, because most points of a run
    # need the same result.
    _columns: dict[object, Tensor] = dataclasses.field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.pos is not None:
            pos = Selection(self.pos)
            if pos.is_one:
                raise TypeError(
                    f"pos must be a slice, list or mask, because a cache keeps the axis pos; got "
                    f"{pos} (write pos=[{pos}] for one position)"
                )
            object.__setattr__(self, "pos", pos)
        kinds = (torch.dtype, type(None))
        require_kind("dtype", self.dtype, kinds, words="a dtype of PyTorch, such as torch.float16")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype= of cached values must be a floating dtype; got {self.dtype}")
        require_choice("calls", self.calls, ("one", "all"))
        if self.grads and self.keeps_calls:
            raise ValueError("calls='all' keeps no gradients: leave out grads=True")
        if self.grads and not torch.is_grad_enabled():
            raise ValueError("grads=True needs gradients, and they are switched off here (no_grad)")
        # Gradients arrive in the caller's backward pass, and no code of ours runs at its end to
        # wait for their copies. So each copy must be complete at once.
        placement = Placement(require_device(self.device), self.dtype, waits=self.grads)
        object.__setattr__(self, "placement", placement)

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options."""
        return {field.name for field in dataclasses.fields(cls) if field.init}

    @classmethod
    def taken_from(cls, kwargs: dict[str, Any]) -> tuple["Options", dict[str, Any]]:
        """Split keyword arguments into options and the model's own arguments."""
        names = cls.names()
        chosen = {name: value for name, value in kwargs.items() if name in names}
        return cls(**chosen), {name: kwargs[name] for name in kwargs if name not in names}

    @property
    def keeps_calls(self) -> bool:
        """True if the values of all calls of a point are cached."""
        return self.calls == "all"

    def memory_bound(self, names: Iterable[str], otherwise: str | None = None) -> Bound:
        """Return an object that counts the bytes of a run's cached values.

        It raises a MemoryLimitError if the values, and their gradients with `grads=True`, exceed
        `max_bytes`.

        Args:
            names: the names of the values that the run will cache.
            otherwise: the end of the error, which says what to do instead. Default: the advice for
                an eager run, such as to use `lazy=True`.
        """
        return Bound([*names], self.max_bytes, otherwise=otherwise, times=2 if self.grads else 1)

    def apply(self, value: Tensor, point: Point) -> Tensor:
        """Return a value at the chosen positions, on the chosen device and in the chosen dtype.

        Positions are chosen along the axes `pos` and `query`. The padding is taken from
        `hooks.position_offset`. The result is `value` itself or a new tensor, never a view.

        Args:
            value: the value of the point.
            point: the point, whose axes are named.

        Raises:
            HookError: if the value has no named axes.
            SelectionError: if the value does not have these positions, or their number differs
                between texts.
        """
        if self.pos is None:
            return self.placement(value)
        if not point.axes:
            raise HookError(f"pos= needs named axes, and {point.name} declares none")
        batch = point.axes.index("batch") if "batch" in point.axes else None
        for at, axis in enumerate(point.axes):
            if axis in POSITION_AXES:
                n_texts = None if batch is None else value.shape[batch]
                columns = self._chosen(
                    value.shape[at], n_texts, device=value.device, what=str(point)
                )
                value = taken(value, columns, at=at, batch=batch)
        return self.placement(value)

    def _chosen(self, size: int, batch: int | None, device: torch.device, what: str) -> Tensor:
        """Return the chosen positions, [1 or batch, n].

        Args:
            size: the number of positions of the value.
            batch: the number of texts; None if the value has no axis of texts.
            device: the device of the result.
            what: the name of the value, for errors.
        """
        assert isinstance(self.pos, Selection)
        piece = piece_read()
        key = size, batch, device, piece
        if key not in self._columns:
            real = piece.mask_of(batch or 0, size)
            columns = self.pos.columns(size, f"pos= of {what}", batch, real)
            self._columns[key] = to_device(columns, device)
        return self._columns[key]

    def kept_masks(self, piece: Piece) -> dict[str, Tensor]:
        """Return the masks [batch, column] of cached values by axis.

        Masks along `pos` and `query` have only the chosen positions. The result is empty if the
        texts have no padding.

        Args:
            piece: the piece of the texts that the values belong to.
        """
        masks = {
            axis: private(mask.bool())
            for axis, mask in piece.others.items()
            if real_columns(mask) is not None
        }
        real = piece.real
        if real is None or real_columns(real) is None:
            return masks
        read = private(real[:, piece.start or 0 :].bool())
        if self.pos is not None:
            with reading(piece):
                chosen = self._chosen(
                    read.shape[1], len(read), device=read.device, what="the texts"
                )
            read = taken(read, chosen, at=1, batch=0)
        return {**masks, **dict.fromkeys(POSITION_AXES, read), "key": private(real.bool())}
