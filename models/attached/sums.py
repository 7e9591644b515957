"""Comparisons of tensors that modules read and gave."""

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def is_close(value: Tensor, wanted: Tensor, *terms: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in each place, also that of the `terms` of a sum."""
    if value.shape != wanted.shape:
        return False
    sizes = [wanted.abs(), *(term.abs() for term in terms)]
    allowed = 8 * torch.finfo(wanted.dtype).eps * torch.stack(sizes).sum(0)
    return bool(((value.double() - wanted.double()).abs() <= allowed.double()).all())


def agree(one: Tensor | None, other: Tensor | None, tolerance: float = 1e-5) -> bool:
    """Whether two tensors are equal up to this share of the largest number, or up to rounding if that is more."""
    if one is None or other is None or one.shape != other.shape:
        return False
    share = max(tolerance, 16 * torch.finfo(other.dtype).eps)
    return bool((one - other).abs().max() <= share * other.abs().max())


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal in shape, type and every number.

    This asks whether a module read the very tensor that another one gave. No arithmetic stands between, so rounding cannot
    change the answer. Where some does, `is_close` and `agree` compare.
    """
    if one is None or other is None or one.dtype != other.dtype:
        return False
    return torch.equal(one, other)
