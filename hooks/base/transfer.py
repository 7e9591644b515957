"""Copies of tensors, also between the CPU and an accelerator without stopping the host."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hooks.base import _torch
from hooks.base.nested import mapped
from hooks.base.scoped import Scoped


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


_TRUSTED = Scoped("trusted", False)


def trusted() -> AbstractContextManager[None]:
    """Skip checks that read the numbers of tokens and masks; shapes and types are still checked.

    On an accelerator each such check waits for the device. This is for callers whose tokens and masks
    are known to be right: a token outside the vocabulary or a wrong mask gives arbitrary values there.

    >>> from models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4))
    >>> with trusted():
    ...     model(torch.tensor([[3, 0, 6]]), attention_mask=torch.tensor([[0, 1, 1]])).shape
    torch.Size([1, 3, 7])
    """
    return _TRUSTED.set(True)


def is_trusted() -> bool:
    """Return whether this is inside `trusted`."""
    return _TRUSTED.get()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """`value` on a device. From the CPU, the host does not wait for the device."""
    if value.device == device:
        return value
    # Pinned memory is read later, when somebody may have written there.
    return value.to(device, non_blocking=value.is_cpu and not value.is_pinned())


def all_to_device(tree: Any, device: torch.device) -> Any:
    """Nested containers with all their tensors on a device."""
    return mapped(tree, lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf)


def stacked(values: Iterable[Tensor]) -> Tensor:
    """`torch.stack` of values that may be on several devices, on that of the first."""
    first, *others = values
    return torch.stack([first, *(to_device(value, first.device) for value in others)])


def to_host(value: Tensor) -> Tensor:
    """A copy on the CPU. From CUDA it is complete only after `arrival(value)()`."""
    # For CUDA, PyTorch then allocates pinned memory. Other accelerators may need the host to wait.
    return value.to("cpu", non_blocking=value.is_cuda)


def arrival(source: Tensor) -> Callable[[], None]:
    """A function that waits for the copies from the device of `source` that have been started so far."""
    if not source.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event.synchronize


def later(value: Tensor) -> Callable[[], Any]:
    """Start to copy `value` to the host. The function that it returns waits, and gives a list."""
    if not value.is_cuda:
        return value.tolist
    copy, wait = to_host(value.detach()), arrival(value)

    def read() -> Any:
        wait()
        return copy.tolist()

    return read


class Placement:
    """Puts values on a device and in a dtype. The host waits once, at the end.

    Args:
        device, dtype: where to, and as what; None for no change. Integers keep their dtype.
        waits: whether each copy is complete at once. Otherwise it is after `wait()`.
    """

    def __init__(
        self, device: torch.device | str | None, dtype: torch.dtype | None, waits: bool = False
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._waits = waits
        self._sources: dict[torch.device, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """`value`, or a copy of it that may not be complete yet."""
        # The cast comes first, because fewer bytes are copied then.
        if self._dtype is not None and value.is_floating_point():
            value = value.to(self._dtype)
        if self._device is None or value.device == self._device:
            return value
        if self._waits or self._device.type != "cpu":
            return value.to(self._device)
        self._sources.setdefault(value.device, value.new_empty(0))
        return to_host(value)

    def wait(self) -> None:
        """Wait until all copies are complete."""
        for source in self._sources.values():
            arrival(source)()
        self._sources = {}
