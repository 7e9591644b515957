"""Hook functions of the user that change only padding in a text: found, collected, and reported.

For example, `value[:, -1] = 0` is a mistake in texts that are padded on the right.

1. `PaddingChanges.note` compares a value before and after the hooks of a point.
2. All points and runs of a `with`, and all jobs of an analysis, are collected (`one_warning`).
3. At the end, `PaddingChanges.report` issues one warning.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hooks.base import (
    Scoped,
    padding_messages,
    piece_read,
    to_device,
    warn,
    without_gradients,
)
from hooks.point import Point
from hooks.receipts import real_places


class PaddingChanges:
    """The changes of padding by hook functions, which are reported as one warning.

    Attributes:
        mask: the `attention_mask` of the run, for a model that reports no padding itself; or None.
    """

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self._points: dict[str, None] = {}
        self._texts: set[int] = set()
        self._columns: set[int | None] = set()

    def begin(self, kwargs: Any) -> None:
        """Store the mask of a run, from the keywords of the call of the model."""
        if not torch.compiler.is_compiling():
            mask = kwargs.get("attention_mask")
            self.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    @without_gradients
    def note(self, point: Point, before: Tensor, after: Tensor) -> None:
        """Compare a value before and after the hooks of a point.

        Nothing is stored if the hooks changed a real token in each text that they changed, or if
        the padding is unknown.

        Args:
            point: the point.
            before: the value before the hooks.
            after: the value after the hooks.
        """
        rows = point.axes.index("batch") if "batch" in point.axes else 0
        real = real_places(point, before.shape) if point.axes else self._real(before.shape)
        if real is None:
            return
        real = to_device(real, before.device)
        # Some kernels return NaN at padding, and NaN is not equal to NaN.
        changed = (after != before) & ~(after.isnan() & before.isnan())
        others = [dim for dim in range(before.ndim) if dim != rows]
        # A piece of a long text may contain only padding of a shorter text.
        has_tokens = real.expand_as(changed).any(others)
        only_padding = (changed & ~real).any(others) & ~(changed & real).any(others) & has_tokens
        if not only_padding.any():
            return
        texts = only_padding.nonzero()[:, 0].tolist()
        self._points[point.name] = None
        self._texts.update(texts)
        self._columns.add(_column(point, changed, rows, texts))

    def _real(self, shape: Sequence[int]) -> Tensor | None:
        """Return a mask of real tokens for the output of a module, which has no names of axes.

        An output is read as [batch, pos, size] if its first two sizes are the sizes of the mask.

        Args:
            shape: the shape of the output.
        """
        if len(shape) != 3:
            return None
        mask = piece_read().mask_of(shape[0], shape[1])
        if mask is None and self.mask is not None and self.mask.shape == shape[:2]:
            mask = self.mask
        return None if mask is None else mask.bool()[..., None]

    def report(self) -> None:
        """Issue one warning about all changes since the last report, if there are any."""
        if not self._points:
            return
        column = self._columns.pop() if len(self._columns) == 1 else None
        points, texts = [*self._points], sorted(self._texts)
        self._points, self._texts, self._columns = {}, set(), set()
        warn(padding_messages.changed_padding(points, texts, column))


_open = Scoped[PaddingChanges | None]("changes of padding", None)


def changes_here() -> PaddingChanges | None:
    """Return the object that collects the changes of this analysis, or None outside of one."""
    return _open.get()


@contextmanager
def one_warning() -> Iterator[None]:
    """Collect the changes of padding inside a `with` statement, and report them at its end."""
    if _open.get() is not None:
        yield
        return
    changes = PaddingChanges()
    with _open.set(changes):
        yield
    changes.report()


def _column(point: Point, changed: Tensor, rows: int, texts: Sequence[int]) -> int | None:
    """Return the only column of the value that changed in some texts; None if there are several.

    Args:
        point: the point of the value.
        changed: a mask of the changed places.
        rows: the axis of texts.
        texts: the numbers of the texts.
    """
    along = next((axis for axis in ("pos", "query", "key") if axis in point.axes), None)
    dim = point.axes.index(along) if along else 1
    in_texts = changed.index_select(rows, torch.tensor(texts, device=changed.device))
    columns = in_texts.any([other for other in range(changed.ndim) if other != dim]).nonzero()
    start = piece_read().start or 0
    return start + int(columns[0]) if len(columns) == 1 else None
