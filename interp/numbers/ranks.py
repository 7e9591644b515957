"""Ranks of numbers and their correlation, the area under the ROC curve, and the rows of the largest
numbers.
"""

import math

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooks.base import require_kind

_HINT = "result.mean() is the tensor of a Result"


def ranks(values: Float[Tensor, " place"]) -> Float[Tensor, " place"]:
    """Return the rank of each value.

    Ranks start at 1, and equal values have the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([0.5, 2.0, 0.5])).tolist()
    [1.5, 3.0, 1.5]
    """
    _, indices, counts = values.unique(return_inverse=True, return_counts=True)
    ranks_of_unique = counts.cumsum(0) - (counts - 1) / 2
    return ranks_of_unique[indices].double()


def rank_correlation(first: Float[Tensor, "*place"], second: Float[Tensor, "*place"]) -> float:
    """Return Spearman's rank correlation of two numbers of each place.

    It is 1 if both numbers order the places alike, and -1 if they order them in reverse. The units
    of the numbers may differ, as for scores of heads and effects of ablating these heads:
    `rank_correlation(scores.mean(), ablated.mean())`.

    Args:
        first, second: the numbers, with the same places.

    Returns:
        The correlation. NaN for a single place, or if all numbers of one side are equal.

    Raises:
        ValueError: if the shapes differ, or a number is NaN.
        TypeError: if one of them is not a tensor.

    >>> import torch
    >>> rank_correlation(torch.tensor([0.1, 0.7, 0.2]), torch.tensor([5.0, 40.0, 3.0]))
    0.5
    """
    for name, numbers in (("first", first), ("second", second)):
        require_kind(name, numbers, Tensor, "a tensor with a number for each place", _HINT)
    if first.shape != second.shape:
        shorter, longer = sorted((first, second), key=lambda numbers: numbers.ndim)
        has_examples = longer.shape[:-1] == shorter.shape
        hint = " (the last axis may be examples: pass result.mean())" if has_examples else ""
        raise ValueError(
            f"both sides must have the same places; got {[*first.shape]} and {[*second.shape]}"
            f"{hint}"
        )
    for numbers in (first, second):
        if n_nan := int(numbers.isnan().sum()):
            raise ValueError(f"numbers must have ranks; got NaN at {n_nan} of {numbers.numel()}")
    if first.numel() < 2:
        return math.nan
    both_ranks = torch.stack([ranks(first.flatten()), ranks(second.flatten())])
    return torch.corrcoef(both_ranks)[0, 1].item()


def area_under_curve(strength: Float[Tensor, " place"], is_in: Bool[Tensor, " place"]) -> float:
    """Return the probability that a place in a set is stronger than a place outside (AUROC).

    Equally strong places count half.

    Args:
        strength: the strength of each place.
        is_in: True for the places in the set.

    >>> import torch
    >>> area_under_curve(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, True, False]))
    0.5
    """
    n_in = int(is_in.sum())
    n_outside = len(is_in) - n_in
    mean_rank = ranks(strength)[is_in].mean()
    # If all places in the set were weaker than all places outside, their mean rank would be
    # (n_in + 1) / 2. Each weaker place outside raises the rank of a place in the set by 1.
    return ((mean_rank - (n_in + 1) / 2) / n_outside).item()


def largest_rows(values: Shaped[Tensor, "row *column"], k: int) -> Int[Tensor, "_k *column"]:
    """Return the indices of the `k` largest values of each column, the largest first.

    Of equal values, the earliest rows are selected. To find the largest values of several pieces,
    call this function once for each piece, on the values selected so far followed by the new piece.

    Args:
        values: the values.
        k: the number of rows to select. If there are fewer rows, all are selected.

    >>> import torch
    >>> largest_rows(torch.tensor([2.0, 3.0, 2.0, 3.0]), 3).tolist()
    [1, 3, 0]
    """
    columns = values.flatten(1) if values.ndim > 1 else values[:, None]
    k = min(k, len(values))
    largest, rows = columns.topk(k, 0)
    # Of equal values, `topk` may have selected later rows. Select again in columns where more than
    # k values are at least as large as the smallest selected value.
    has_ties = (columns >= largest[-1:]).sum(0) > k if k else columns.new_zeros(0)
    for column in has_ties.nonzero()[:, 0].tolist():
        candidates = (columns[:, column] >= largest[-1, column]).nonzero()[:, 0]
        order = columns[candidates, column].argsort(stable=True, descending=True)
        rows[:, column] = candidates[order[:k]]
    rows = rows.sort(0).values
    rows = rows.gather(0, columns.gather(0, rows).argsort(dim=0, stable=True, descending=True))
    return rows.view(k, *values.shape[1:])
