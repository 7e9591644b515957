"""Numbers that must be finite, or of the dtype and on the device of others; and how far apart distributions are."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hooks.base import to_device


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
