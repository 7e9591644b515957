"""Samples of a block's output, which show whether the block still gives what it gave."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hooks import _torch
from hooks.nested import tensors_in


def sampled(output: Any) -> list[Tensor]:
    """Some numbers of each tensor: at least one of each row and of each column."""
    return [_sample(tensor.detach().contiguous()) for tensor in tensors_in(output)]


def _sample(tensor: Tensor) -> Tensor:
    columns = tensor.shape[-1] if tensor.ndim else 1
    # A step below the length of a row skips no row. Without a common divisor it reaches every column.
    step = max(min(tensor.numel() // max(columns, 1), columns - 1), 1)
    while math.gcd(step, columns) > 1:
        step -= 1
    # One operation in place of two views and a copy.
    return torch.as_strided_copy(tensor, (-(-tensor.numel() // step),), (step,))


def agree(ours: list[Tensor], theirs: list[Tensor], precision: float) -> bool:
    """Whether two samples are equal, up to rounding."""
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(_tensors_agree(*pair, precision) for pair in pairs)


def _tensors_agree(ours: Tensor, theirs: Tensor, precision: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    # Without numbers there is nothing more to compare.
    if ours.is_meta or isinstance(ours, _torch.FakeTensor) or not ours.numel():
        return True
    dtype = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    # The median, because in some models a few values are a thousand times larger than the others.
    typical = theirs.abs().nan_to_num(0, 0, 0).median().item()
    return torch.allclose(theirs, ours, rtol=precision, atol=precision * typical, equal_nan=True)


def numerics(tensors: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Two functions: one enters the present autocast again, one gives the relative size of rounding errors."""
    dtype = None
    if _torch.is_any_autocast_enabled() and torch.is_autocast_enabled(
        kind := _autocast_device(tensors)
    ):
        dtype = torch.get_autocast_dtype(kind)

    def precision() -> float:
        kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        return max(1e-5, *(4 * torch.finfo(kind).eps for kind in kinds | {dtype or torch.float32}))

    return lambda: torch.autocast(
        _autocast_device(tensors), dtype, enabled=dtype is not None
    ), precision


def _autocast_device(tensors: list[Tensor]) -> str:
    """The kind of device of the first tensor, if it has autocast."""
    device = tensors[0].device.type if tensors else "cpu"
    return device if torch.amp.is_autocast_available(device) else "cpu"
