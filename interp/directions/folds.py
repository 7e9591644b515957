"""Divide the texts of two kinds into folds, and draw random labels for the texts.

1. Each example is a row, which has the number of its text. All copies of a text have the same
   number (`rows_of_examples`).
2. Texts of one group, and copies of these texts, have one number too, the number of their group
   (`_groups`). Without groups, each text is a group.
3. Each group is in one fold, and each fold has texts of both kinds (`_folds`).
4. For a control, each text gets a random label. Each fold has texts with both labels (`_drawn`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hooks.base import require_integer, seeded
from interp.directions.contrast import Contrast
from interp.directions.examples import Examples, text_numbers


class ExampleRows(NamedTuple):
    """Examples of both kinds, as arrays [row] of NumPy.

    Attributes:
        label: 1 for texts of the first kind, 0 for texts of the second.
        text: the number of the text. All copies of a text have the same number.
        group: the number of the group of the text.
        rank: the number of the example among the examples of its text.
        place: the position in the text without padding.
    """

    label: Any
    text: Any
    group: Any
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
            group=self.group[is_used],
            rank=self.rank[is_used],
            place=self.place[is_used],
        )


def rows_of_examples(parts: Sequence[Examples], contrast: Contrast) -> ExampleRows:
    """Return the rows of all batches.

    Args:
        parts: the batches.
        contrast: the two kinds of texts, with their groups.

    Raises:
        ValueError: as in `Contrast.groups_of_kinds`.
    """
    numbers = np.array(text_numbers(parts))
    groups = _groups(numbers, _names_of_groups(parts, contrast))
    text = numbers[torch.cat([part.text for part in parts]).numpy()]
    return ExampleRows(
        label=torch.cat([torch.full_like(part.text, part.label) for part in parts]).numpy(),
        text=text,
        group=groups[text],
        rank=torch.cat([part.rank for part in parts]).numpy(),
        place=torch.cat([part.place for part in parts]).numpy(),
    )


def _names_of_groups(parts: Sequence[Examples], contrast: Contrast) -> list[Any] | None:
    """Return the name of the group of each text; None without groups."""
    n_read = [0, 0]
    for part in parts:
        n_read[part.label] += len(part.number)
    groups = contrast.groups_of_kinds((n_read[1], n_read[0]))
    if groups is None:
        return None
    of_yes, of_no = groups
    names = []
    for part in parts:
        of_kind = of_yes if part.label else of_no
        names += [of_kind[number] for number in part.number]
    return names


def _groups(texts: Any, names: list[Any] | None) -> Any:
    """Return the number of the group of each text number.

    Groups that share a text, because a copy of it is in each of them, are one group.

    Args:
        texts: the number of each text. Copies of a text have the same number.
        names: the name of the group of each text, or None if each text is a group.
    """
    groups = np.arange(texts.max() + 1)
    if names is None:
        return groups
    index_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
    indices = np.array([index_of[name] for name in names])
    while True:
        # The number of a group is the smallest number of its texts.
        smallest = np.full(len(index_of), len(groups))
        np.minimum.at(smallest, indices, groups[texts])
        before = groups.copy()
        np.minimum.at(groups, texts, smallest[indices])
        if (groups == before).all():
            return np.unique(groups, return_inverse=True)[1]


class Split(NamedTuple):
    """The folds of texts, and labels for all rows.

    Attributes:
        kinds: two arrays: the numbers of the groups that have texts of kind `no`, and of the groups
            that have texts of kind `yes`.
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
        TypeError: if a number is not a whole number.
        ValueError: if a fold would have no text of a kind, or fewer than 2 texts.
    """
    require_integer("folds", folds, least=2)
    require_integer("draws", draws, least=0)
    kinds = [np.unique(rows.group[rows.label == label]) for label in (0, 1)]
    _require_groups(kinds, folds)
    draw = seeded(seed)
    fold_of_group = _folds(kinds, folds, draw)
    fold_of = np.zeros(rows.text.max() + 1, int)
    fold_of[rows.text] = fold_of_group[rows.group]
    _require_two_texts(fold_of, folds)
    texts = [np.unique(rows.text[rows.label == label]) for label in (0, 1)]
    drawn = [_drawn(texts, fold_of, folds=folds, draw=draw)[rows.text] for _ in range(draws)]
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


def _require_groups(kinds: list[Any], folds: int) -> None:
    """Check that each fold can have texts of both kinds.

    Args:
        kinds: see `Split.kinds`.
        folds: the number of folds.

    Raises:
        ValueError: if there are more folds than groups of a kind.
    """
    if min(map(len, kinds)) < folds:
        raise ValueError(
            "folds must be at least 2, and at most the number of different texts, or groups of "
            f"texts, of each kind ({len(kinds[1])} and {len(kinds[0])}); got {folds}"
        )


def _require_two_texts(fold_of: Any, folds: int) -> None:
    """Check that each fold has two texts, which get different random labels.

    Raises:
        ValueError: if a fold has fewer than two texts.
    """
    if min(np.bincount(fold_of, minlength=folds)) < 2:
        raise ValueError(
            f"each fold must have at least 2 different texts, to draw labels; got {len(fold_of)} "
            f"texts for {folds} folds, because some texts are in both yes and no: use fewer folds"
        )


def _folds(kinds: list[Any], folds: int, draw: torch.Generator) -> Any:
    """Draw a fold for each group, so that each fold has texts of both kinds.

    Groups that have texts of both kinds are distributed first.
    """
    n_groups = max(kind.max() for kind in kinds) + 1
    fold_of = np.full(n_groups, -1)
    shared = np.intersect1d(*kinds)
    for groups in (shared, *kinds):
        left = groups[fold_of[groups] < 0]
        placed = groups[fold_of[groups] >= 0]
        # Each group goes to the fold with the fewest groups of this kind. If several folds have the
        # same number, and some groups have both kinds, it goes to the smallest of these folds.
        of_kind = np.bincount(fold_of[placed], minlength=folds)
        of_all = np.bincount(fold_of[fold_of >= 0] if len(shared) else placed[:0], minlength=folds)
        for n in torch.randperm(len(left), generator=draw).tolist():
            fold = np.lexsort((of_all, of_kind))[0]
            fold_of[left[n]] = fold
            of_kind[fold] += 1
            of_all[fold] += 1
    return fold_of


def _drawn(kinds: list[Any], fold_of: Any, folds: int, draw: Any) -> Any:
    """Return a random label for each text. Each fold has texts with both labels."""
    drawn = np.zeros(len(fold_of), int)
    each_once = [kinds[0], np.setdiff1d(kinds[1], kinds[0])]
    for fold in range(folds):
        members = np.concatenate([texts[fold_of[texts] == fold] for texts in each_once])
        drawn[members[torch.randperm(len(members), generator=draw)]] = np.arange(len(members)) % 2
    return drawn
