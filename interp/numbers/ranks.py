"""Ranks of numbers, and what follows from them."""

from jaxtyping import Bool, Float
from torch import Tensor


def ranks(values: Float[Tensor, " place"]) -> Float[Tensor, " place"]:
    """The rank of each value, from 1. Equal values have the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([0.5, 2.0, 0.5])).tolist()
    [1.5, 3.0, 1.5]
    """
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()


def area_under_curve(strength: Float[Tensor, " place"], is_in: Bool[Tensor, " place"]) -> float:
    """The chance that a place of a set is stronger than another place (AUROC); equal ones count half.

    >>> import torch
    >>> area_under_curve(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    0.5
    """
    n_in = int(is_in.sum())
    return ((ranks(strength)[is_in].mean() - (n_in + 1) / 2) / (len(is_in) - n_in)).item()
