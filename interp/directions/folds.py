"""Divide the texts of two kinds into folds, and draw random labels for the texts.

1. Each example is a row, which has the number of its text. All copies of a text have the same
   number (`rows_of_examples`).
2. Each text is in one fold, and each fold has texts of both kinds (`_folds`).
3. For a control, each text gets a random label. Each fold has texts with both labels (`_drawn`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from interp.directions.examples import Examples, text_numbers


class ExampleRows(NamedTuple):
    """Examples of both kinds, as arrays [row] of NumPy.

    Attributes:
        label: 1 for texts of the first kind, 0 for texts of the second.
        text: the number of the text. All copies of a text have the same number.
        rank: the number of the example among the examples of its text.
        place: the position in the text without padding.
    """

    label: Any
    text: Any
    rank: Any
    place: Any

    def at(self, is_used: Any, label: Any) -> "ExampleRows":
        """Return some of the rows, with other labels.

        Args:
            is_used: the rows, as a slice or a mask.
            label: the label of each row of these `ExampleRows`.
        """
        return ExampleRows(
            label=label[is_used],
            text=self.text[is_used],
            rank=self.rank[is_used],
            place=self.place[is_used],
        )


def rows_of_examples(parts: Sequence[Examples]) -> ExampleRows:
    """Return the rows of all batches."""
    return ExampleRows(
        label=torch.cat([torch.full_like(part.text, part.label) for part in parts]).numpy(),
        text=np.array(text_numbers(parts))[torch.cat([part.text for part in parts]).numpy()],
        rank=torch.cat([part.rank for part in parts]).numpy(),
        place=torch.cat([part.place for part in parts]).numpy(),
    )


class Split(NamedTuple):
    """The folds of texts, and labels for all rows.

    Attributes:
        kinds: two arrays: the numbers of the different texts of kind `no`, and of kind `yes`.
        fold_of: the fold of each text.
        labels: several labels of each row: the true labels, and the random labels of each draw.
    """

    kinds: list[Any]
    fold_of: Any
    labels: list[Any]


def split_of(rows: ExampleRows, folds: int, draws: int, seed: int) -> Split:
    """Draw the folds of all texts, and random labels.

    Args:
        rows: the rows.
        folds: the number of folds.
        draws: the number of draws of random labels.
        seed: the seed.

    Raises:
        ValueError: if a fold would have no text of a kind, or fewer than 2 texts.
    """
    kinds = _kinds_of_texts(rows, folds)
    draw = torch.Generator().manual_seed(seed)
    fold_of = _folds(kinds, folds, draw)
    drawn = [_drawn(kinds, fold_of, folds=folds, draw=draw)[rows.text] for _ in range(draws)]
    return Split(kinds, fold_of, [rows.label, *drawn])


def masks_by_position(rows: ExampleRows) -> list[Any]:
    """Return a mask of the rows of each position.

    Raises:
        ValueError: if texts have different numbers of positions.
    """
    masks = [rows.rank == n for n in range(rows.rank.max() + 1)]
    if any(mask.sum() != masks[0].sum() for mask in masks):
        raise ValueError(
            "all texts must have the same number of positions with over='pos'; got "
            f"{masks[0].sum()} texts with "
            f"at least one position, but {masks[-1].sum()} with {len(masks)}"
        )
    return masks


def _kinds_of_texts(rows: ExampleRows, folds: int) -> list[Any]:
    """Return two arrays: the numbers of the different texts of kind `no`, and of kind `yes`.

    Raises:
        ValueError: if there are fewer than 2 folds, or more folds than texts of a kind.
    """
    kinds = [np.unique(rows.text[rows.label == label]) for label in (0, 1)]
    if folds < 2 or min(map(len, kinds)) < folds:
        raise ValueError(
            "folds must be at least 2, and at most the number of different texts of each kind "
            f"({len(kinds[1])} and {len(kinds[0])}); got {folds}"
        )
    return kinds


def _folds(kinds: list[Any], folds: int, draw: torch.Generator) -> Any:
    """Draw a fold for each text, so that each fold has texts of both kinds.

    Texts that are in both kinds are distributed first.
    """
    n_texts = max(kind.max() for kind in kinds) + 1
    fold_of = np.full(n_texts, -1)
    shared = np.intersect1d(*kinds)
    for texts in (shared, *kinds):
        left = texts[fold_of[texts] < 0]
        placed = texts[fold_of[texts] >= 0]
        # Each text goes to the fold with the fewest texts of this kind. If several folds have the
        # same number, and some texts are in both kinds, it goes to the smallest of these folds.
        of_kind = np.bincount(fold_of[placed], minlength=folds)
        of_all = np.bincount(fold_of[fold_of >= 0] if len(shared) else placed[:0], minlength=folds)
        for n in torch.randperm(len(left), generator=draw).tolist():
            fold = np.lexsort((of_all, of_kind))[0]
            fold_of[left[n]] = fold
            of_kind[fold] += 1
            of_all[fold] += 1
    if min(np.bincount(fold_of, minlength=folds)) < 2:
        raise ValueError(
            f"each fold must have at least 2 different texts, to draw labels; got {n_texts} texts "
            f"for {folds} folds, because some texts are in both yes and no: use fewer folds"
        )
    return fold_of


def _drawn(kinds: list[Any], fold_of: Any, folds: int, draw: Any) -> Any:
    """Return a random label for each text. Each fold has texts with both labels."""
    drawn = np.zeros(len(fold_of), int)
    each_once = [kinds[0], np.setdiff1d(kinds[1], kinds[0])]
    for fold in range(folds):
        members = np.concatenate([texts[fold_of[texts] == fold] for texts in each_once])
        drawn[members[torch.randperm(len(members), generator=draw)]] = np.arange(len(members)) % 2
    return drawn
