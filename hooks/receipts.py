"""Receipts: records of the changes of each hook of a context."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hooks.base import (
    TEXT_AXES,
    FakeTensor,
    broadcast,
    number_of,
    piece_read,
    to_device,
    without_gradients,
)
from hooks.point import Hook, Point


@dataclass
class Receipt:
    """A record of the changes that one hook has made at one point.

    It shows whether an edit took place: a hook that never ran has 0 calls, and an edit that changed
    nothing has 0 rows. Changes at padding do not count. The numbers grow with each run. A lazy
    cache may run blocks again to compute a value; these runs do not count.

    Attributes:
        hook: the hook.
        point: the point of the hook.
        calls: the number of calls of the hook.
        beside: the number of tensors after the first in the output of the module. If the module
            returns a tuple of three tensors, it is 2. A hook reads and changes only the first
            tensor. The other tensors stay the same.

    >>> Receipt(lambda value, point: value * 2, Point("embed"))
    <lambda> at embed: 0 calls changed 0 rows by at most 0
    """

    hook: Hook
    point: Point
    calls: int = 0
    beside: int = 0
    # After the first call, these are tensors on the device of the value. They become Python numbers
    # only when they are read, because the host must then wait for the device.
    _rows: Tensor | int = 0
    _largest: Tensor | float = 0.0

    @property
    def rows(self) -> int:
        """The number of batch rows that the hook changed, summed over calls."""
        return int(self._rows)

    @property
    def largest(self) -> float:
        """The largest absolute change of any number."""
        return float(self._largest)

    def __repr__(self) -> str:
        calls = number_of(self.calls, "call")
        did = f"{calls} changed {number_of(self.rows, 'row')} by at most {self.largest:.4g}"
        beside = f" of the first of {self.beside + 1} tensors" if self.beside else ""
        return f"{getattr(self.hook, '__name__', self.hook)} at {self.point.name}: {did}{beside}"

    def noting(self, activation: Tensor, point: Point) -> Tensor | None:
        """Call the hook, and record its changes.

        Args:
            activation: the value of the point.
            point: the point.
        """
        before = activation.detach().clone()
        new = self.hook(activation, point)
        after = activation if new is None else new
        # In a plan (`HookedRunner.plan`), values have no numbers to compare. Any other result than
        # a tensor of this shape raises an error later, in `EditedPoint.apply`.
        plain = isinstance(after, Tensor) and after.shape == before.shape
        if plain and not (before.is_meta or isinstance(before, FakeTensor)):
            self._add(before, after, real_places(point, before.shape))
        return new

    @without_gradients
    def _add(self, before: Tensor, after: Tensor, real: Tensor | None) -> None:
        """Count a call, its changed rows and its largest change.

        Args:
            before: the value before the call.
            after: the value after the call.
            real: a mask of the places that count; None for all places.
        """
        self.calls += 1
        changed = (after != before) & ~(after.isnan() & before.isnan())
        if real is not None:
            changed &= to_device(real, changed.device)
        dtype = torch.promote_types(before.dtype, torch.float64)
        sizes = torch.where(changed, (after.to(dtype) - before.to(dtype)).abs(), 0.0)
        if changed.numel():
            rows = changed.reshape(len(changed) if changed.ndim else 1, -1).any(1)
            self._rows = rows.sum() + self._rows
            # `clamp` does not replace NaN, so a change to NaN is reported as NaN.
            self._largest = sizes.amax().clamp(min=self._largest)


def real_places(point: Point, shape: Sequence[int]) -> Tensor | None:
    """Return a mask of the places of a value that belong to real tokens.

    It broadcasts to the value. The result is None if the padding is unknown.

    Args:
        point: the point of the value.
        shape: the shape of the value.
    """
    axes = point.axes
    if "batch" not in axes or len(axes) != len(shape):
        return None
    batch = axes.index("batch")
    places = None
    for dim, axis in enumerate(axes):
        mask = piece_read().mask_of(shape[batch], shape[dim]) if axis in TEXT_AXES else None
        if mask is not None:
            along = broadcast(mask.bool(), dim, batch, len(shape))
            places = along if places is None else places & along
    return places


class Receipts(list[Receipt]):
    """The receipts of all hooks of `runner.hooks(..., receipts=True)`: one for each hook and point.

    They are in the order in which the hooks were given. Each receipt is printed on one line.

    >>> once = Receipt(torch.neg_, Point("embed"), calls=1, _rows=4, _largest=2.5)
    >>> Receipts([once, Receipt(torch.exp_, Point("1"))])
    neg_ at embed: 1 call changed 4 rows by at most 2.5
    exp_ at 1: 0 calls changed 0 rows by at most 0
    """

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))
