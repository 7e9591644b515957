"""Copies of tensors: one for each tensor, however many points show it."""

import weakref
from collections.abc import Callable

from torch import Tensor

from hooks import _torch


def private(value: Tensor) -> Tensor:
    """A copy without a graph. The copy of an expanded tensor is expanded too, so it takes no more memory."""
    if not _torch.has_storage(value) or 0 not in value.stride():
        return value.detach().clone()
    tight = value.detach()[tuple(slice(None if stride else 1) for stride in value.stride())]
    return tight.clone().expand(value.shape)


class Copies:
    """One copy for each tensor, as long as nothing is written into the tensor.

    >>> copies, value = Copies(), Tensor([3.0, 5.0])
    >>> first = copies(value)
    >>> copies(value) is first, copies(value.zero_()) is first
    (True, False)
    """

    def __init__(self) -> None:
        self._made: dict[object, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __call__(
        self, value: Tensor, copied: Callable[[Tensor], Tensor] = private, how: object = None
    ) -> Tensor:
        """Return `copied(value)`: the earlier copy if `how` is the same and nothing was written since."""
        # Writes into these tensors are not counted, or this is a compiler.
        if not _torch.has_storage(value) or value.is_inference():
            return copied(value)
        key = id(value), _torch.version(value), how
        entry = self._made.get(key)
        if entry is None or entry[0]() is not value:
            self._made[key] = entry = weakref.ref(value), copied(value)
        return entry[1]
