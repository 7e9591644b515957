"""Copies of tensors, also between the CPU and an accelerator without a wait of the host."""

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
    """Return a copy without a graph.

    The copy of an expanded tensor is expanded too, so it needs no more memory.
    """
    if not _torch.has_storage(value) or 0 not in value.stride():
        return value.detach().clone()
    tight = value.detach()[tuple(slice(None if stride else 1) for stride in value.stride())]
    return tight.clone().expand(value.shape)


class Copies:
    """One copy of each tensor, which is reused until the tensor is written to.

    >>> copies, value = Copies(), Tensor([3.0, 5.0])
    >>> first = copies(value)
    >>> copies(value) is first, copies(value.zero_()) is first
    (True, False)
    """

    def __init__(self) -> None:
        self._copies: dict[object, tuple[weakref.ref[Tensor], Tensor]] = {}

    def __call__(
        self, value: Tensor, copied: Callable[[Tensor], Tensor] = private, how: object = None
    ) -> Tensor:
        """Return a copy, or the earlier copy if the tensor was not written to since.

        Args:
            value: the tensor.
            copied: the function that makes a copy.
            how: a value that identifies the function. Only copies with an equal value are reused.
        """
        # Writes into these tensors are not counted, or a compiler is tracing.
        if not _torch.has_storage(value) or value.is_inference():
            return copied(value)
        key = id(value), _torch.version(value), how
        entry = self._copies.get(key)
        if entry is None or entry[0]() is not value:
            entry = weakref.ref(value), copied(value)
            self._copies[key] = entry
        return entry[1]


_SKIPS_TOKEN_CHECKS = Scoped("skip_token_checks", False)


def skip_token_checks() -> AbstractContextManager[None]:
    """Return a context manager without the checks that read the numbers of tokens and masks.

    Shapes and types are still checked.

    On an accelerator each of these checks waits for the device. Use this only if the tokens and
    masks are known to be right: a token outside the vocabulary or a wrong mask leads to arbitrary
    values there.

    >>> from models import Transformer, TransformerConfig
    >>> sizes = dict(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
    >>> model = Transformer(TransformerConfig(**sizes))
    >>> with skip_token_checks():
    ...     model(torch.tensor([[3, 0, 6]]), attention_mask=torch.tensor([[0, 1, 1]])).shape
    torch.Size([1, 3, 7])
    """
    return _SKIPS_TOKEN_CHECKS.set(True)


def skips_token_checks() -> bool:
    """Return whether this is inside `skip_token_checks`."""
    return _SKIPS_TOKEN_CHECKS.get()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return `value` on a device. In a copy from the CPU, the host does not wait for the device."""
    if value.device == device:
        return value
    # Pinned memory is read later, and may have been overwritten by then.
    return value.to(device, non_blocking=value.is_cpu and not value.is_pinned())


def all_to_device(tree: Any, device: torch.device) -> Any:
    """Return nested containers with all their tensors on a device."""
    return mapped(tree, lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf)


def stacked(values: Iterable[Tensor]) -> Tensor:
    """Return `torch.stack` of values on any devices, on the device of the first value."""
    first, *others = values
    return torch.stack([first, *(to_device(value, first.device) for value in others)])


def to_host(value: Tensor) -> Tensor:
    """Return a copy on the CPU. A copy from CUDA is complete only after `arrival(value)()`."""
    # For CUDA, PyTorch then allocates pinned memory. Other accelerators may need the host to wait.
    return value.to("cpu", non_blocking=value.is_cuda)


def arrival(source: Tensor) -> Callable[[], None]:
    """Return a function that waits for all started copies from the device of `source`."""
    if not source.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event.synchronize


def later(value: Tensor) -> Callable[[], Any]:
    """Start to copy `value` to the host.

    Return a function that waits for the copy and returns a list.
    """
    if not value.is_cuda:
        return value.tolist
    copy = to_host(value.detach())
    wait = arrival(value)

    def read() -> Any:
        wait()
        return copy.tolist()

    return read


class Placement:
    """A callable that moves values to a device and a dtype. The host waits once, at the end.

    Args:
        device, dtype: the new device and dtype; None for no change. Integers keep their dtype.
        waits: whether each copy is complete when it is returned. Otherwise all copies are complete
            after `wait()`.
    """

    def __init__(
        self, device: torch.device | str | None, dtype: torch.dtype | None, waits: bool = False
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._waits = waits
        self._sources: dict[torch.device, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """Return `value`, or a copy that may not be complete yet."""
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
