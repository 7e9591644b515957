"""The largest of many numbers, and where they are."""

from jaxtyping import Int, Shaped
from torch import Tensor


def largest_rows(values: Shaped[Tensor, "row *column"], k: int) -> Int[Tensor, "_k *column"]:
    """The rows of the `k` largest values of each column, in order; of equal values the earliest rows.

    Keeping the largest of several pieces is one call for each: on those that were kept, with a new piece below them.

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
