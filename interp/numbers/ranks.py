"""Ranks of numbers, the area under the ROC curve, and the rows of the largest numbers."""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def ranks(values: Float[Tensor, " place"]) -> Float[Tensor, " place"]:
    """Return the rank of each value.

    Ranks start at 1, and equal values have the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([0.5, 2.0, 0.5])).tolist()
    [1.5, 3.0, 1.5]
    """
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()


def area_under_curve(strength: Float[Tensor, " place"], is_in: Bool[Tensor, " place"]) -> float:
    """Return the probability that a place in a set is stronger than a place outside (AUROC).

    Ties count half.

    >>> import torch
    >>> area_under_curve(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    0.5
    """
    n_in = int(is_in.sum())
    return ((ranks(strength)[is_in].mean() - (n_in + 1) / 2) / (len(is_in) - n_in)).item()


def largest_rows(values: Shaped[Tensor, "row *column"], k: int) -> Int[Tensor, "_k *column"]:
    """Return the rows of the `k` largest values of each column, from the largest on.

    Of equal values, the earliest rows are selected. To find the largest values of several pieces,
    call it once for each piece, on the values selected so far followed by the new piece.

    >>> import torch
    >>> largest_rows(torch.tensor([2.0, 3.0, 2.0, 3.0]), 3).tolist()
    [1, 3, 0]
    """
    columns = values.flatten(1) if values.ndim > 1 else values[:, None]
    least, rows = columns.topk(k := min(k, len(values)), 0)
    for column in ((columns >= least[-1:]).sum(0) > k).nonzero()[:, 0].tolist() if k else ():
        tied = (columns[:, column] >= least[-1, column]).nonzero()[:, 0]
        rows[:, column] = tied[columns[tied, column].argsort(stable=True, descending=True)[:k]]
    rows = rows.sort(0).values
    rows = rows.gather(0, columns.gather(0, rows).argsort(dim=0, stable=True, descending=True))
    return rows.view(k, *values.shape[1:])
