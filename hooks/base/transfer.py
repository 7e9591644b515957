"""Copies of tensors: to another device, to the CPU, and copies that no other code writes into.

A copy between the CPU and an accelerator runs in the background where this is safe, so that the
host, which is the Python program, does not wait for it.
"""

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
    """Return a copy without a graph of autograd.

    The copy of an expanded tensor is expanded too, so the copy needs no more memory than the
    tensor.
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
        """Return a copy, or the earlier copy if the tensor has not changed since then.

        Args:
            value: the tensor.
            copied: the function that makes a copy.
            how: a value that identifies the function. Only copies with an equal value are reused.
        """
        # PyTorch does not count the writes into these tensors, so an earlier copy may be out of
        # date. During compilation, `has_storage` is False for all tensors.
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
    """Return a context manager inside which models do not check the numbers in tokens and masks.

    Shapes and types are still checked.

    On an accelerator, each check of numbers waits for the device. Use this only if the tokens and
    masks are known to be right: with a token outside the vocabulary or a wrong mask, the values at
    the points and the logits are arbitrary.

    Returns:
        The context manager. At its end, models check tokens and masks as before.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> tokens = torch.tensor([model.encoded("impor")])
    >>> with skip_token_checks():
    ...     model.to_text(model(tokens)[0, -1].argmax())
    't'
    """
    return _SKIPS_TOKEN_CHECKS.set(True)


def skips_token_checks() -> bool:
    """Return whether `skip_token_checks` is open."""
    return _SKIPS_TOKEN_CHECKS.get()


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """Return `value` on a device. In a copy from the CPU, the host does not wait for the device."""
    if value.device == device:
        return value
    # A copy from pinned memory without a wait reads the memory later, after the caller may have
    # overwritten it.
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
    # For CUDA, PyTorch copies into pinned memory in the background. On other accelerators a copy
    # without a wait may be wrong.
    return value.to("cpu", non_blocking=value.is_cuda)


def arrival(source: Tensor) -> Callable[[], None]:
    """Return a function that waits until all copies from the device of `source` are complete.

    Only the copies that have started before this call are meant.
    """
    if not source.is_cuda:
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(source.device))
    return event.synchronize


def later(value: Tensor) -> Callable[[], Any]:
    """Start to copy `value` to the host, and return a function that returns its numbers as a list.

    The function waits until the copy is complete.
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
    """A callable that moves values to a device and a dtype.

    Copies to the CPU run in the background. The host waits for all of them once, in `wait()`.

    Args:
        device, dtype: the new device and dtype; None for no change. Integers keep their dtype.
        waits: whether each copy is complete when it is returned. Otherwise the copies are complete
            only after `wait()`.
    """

    def __init__(
        self, device: torch.device | str | None, dtype: torch.dtype | None, waits: bool = False
    ) -> None:
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._waits = waits
        self._sources: dict[torch.device, Tensor] = {}

    def __call__(self, value: Tensor) -> Tensor:
        """Return `value` if it needs no change, or else a copy, which `wait()` completes."""
        # The cast comes before the copy, because a copy in half precision has fewer bytes.
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
