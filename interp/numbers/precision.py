"""Check that numbers are finite, convert tensors, and compute the divergence of distributions."""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hooks.base import require_kind, to_device


def finite(values: Shaped[Tensor, "*axes"], name: str) -> Shaped[Tensor, "*axes"]:
    """Return the values if none of them is NaN or infinite.

    Args:
        values: the values.
        name: the name of the values in the error.

    Raises:
        TypeError: if the values are no tensor, such as an array or a module.
        ValueError: if a value is NaN or infinite. The error contains the name, the value and its
            index.
    """
    call = "torch.as_tensor converts an array or a list"
    require_kind(name, values, kind=Tensor, words="a tensor", call=call)
    wrong = ~values.isfinite()
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite; got {values[tuple(where)].item()} at {where}")
    return values


def all_finite(tensors: Mapping[str, Shaped[Tensor, "..."]]) -> None:
    """Raise an error if a value of any tensor is NaN or infinite.

    The CPU waits for the GPU only once if all values are finite, and not once for each tensor.

    Args:
        tensors: tensors on one device, by the names in the error.

    Raises:
        ValueError: if a value is NaN or infinite. The error contains the name of the first such
            tensor, the value and its index.
    """
    # A sum is finite only if all its terms are. The sum of large values may be infinite, so it is
    # no error.
    sums = [values.sum() for values in tensors.values()]
    if sums and not torch.stack(sums).isfinite().all():
        for name, values in tensors.items():
            finite(values, name)


def has_nan(values: Shaped[Tensor, "*axes"]) -> bool:
    """Return True if a value is NaN.

    >>> has_nan(torch.tensor([torch.inf, torch.nan])), has_nan(torch.tensor([torch.inf, 1.0]))
    (True, False)
    """
    # The largest of several values is NaN if one of them is. It takes one operation, and
    # `values.isnan().any()` takes two.
    return values.numel() > 0 and math.isnan(values.detach().amax())


def like(values: Shaped[Tensor, "*axes"], other: Tensor) -> Shaped[Tensor, "*axes"]:
    """Return the values on the device and in the dtype of another tensor.

    Args:
        values: the values.
        other: the other tensor.
    """
    return to_device(values, other.device).to(other.dtype)


def divergence(
    expected: Float[Tensor, "*axes vocab"], predicted: Float[Tensor, "*more vocab"]
) -> Float[Tensor, "*more"]:
    """Return the divergence KL(expected ‖ predicted) over the last axis, in nats.

    A token with an expected probability of 0 adds 0, even if both log-probabilities are -inf.

    Args:
        expected: log-probabilities.
        predicted: log-probabilities, which may have more leading axes.

    >>> divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log())
    tensor(0.1438)
    """
    return (expected.exp() * (expected - predicted)).where(expected != -torch.inf, 0).sum(-1)
