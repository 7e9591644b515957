"""Precision of numbers: their dtype, their device, and how far rounding may move them."""

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.base import to_device


def at_least_float32(values: Shaped[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Values in float32 if they are integers or in half precision; others do not change."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def finite(values: Shaped[Tensor, "*axes"], name: str) -> Shaped[Tensor, "*axes"]:
    """The values, after a check that none is NaN or infinite.

    Raises:
        ValueError: if one is; the error gives the name, the value and its place.
    """
    wrong = ~values.isfinite()
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite; got {values[tuple(where)].item()} at {where}")
    return values


def like(values: Shaped[Tensor, "*axes"], other: Tensor) -> Shaped[Tensor, "*axes"]:
    """Values on the device and in the dtype of another tensor."""
    return to_device(values, other.device).to(other.dtype)


def divergence(
    expected: Float[Tensor, "*axes vocab"], predicted: Float[Tensor, "*more vocab"]
) -> Float[Tensor, "*more"]:
    """KL(expected ‖ predicted) of log-probabilities, in nats; `predicted` may have more axes in front.

    A token that is never expected adds nothing, even where both are -inf.

    >>> divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()).exp() ** 2
    tensor(1.3333)
    """
    return (expected.exp() * (expected - predicted)).where(expected != -torch.inf, 0).sum(-1)


def rounding(dtype: torch.dtype) -> float:
    """The share of the largest value by which sums of many terms, made in another order, may differ."""
    return min(0.03, 1000 * torch.finfo(dtype).eps)


def is_rounding(
    one: Float[Tensor, "*axes"], other: Float[Tensor, "*axes"], dtype: torch.dtype | None = None
) -> Bool[Tensor, "*axes"]:
    """Whether numbers differ by no more than `rounding` of the largest; NaN and NaN do not differ.

    Args:
        one, other: the numbers.
        dtype: that in which they were made; None for that of `other`.

    >>> other = torch.tensor([1.01, 1001.0, torch.inf, torch.nan])
    >>> is_rounding(torch.tensor([1.0, 1000.0, torch.inf, torch.nan]), other)
    tensor([ True, False,  True,  True])
    """
    other = to_device(other, one.device)
    size = rounding(dtype or other.dtype) * other.nan_to_num(posinf=0, neginf=0).abs().max()
    return ((one - other).abs() <= size) | (one == other) | (one.isnan() & other.isnan())
