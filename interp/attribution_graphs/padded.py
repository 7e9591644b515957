"""The active features of a layer, padded so that all positions of a group have equally many.

1. Divide the positions into groups, so that the numbers of features in a group differ by less than
   a factor of two.
2. Give each position of a group as many slots as the largest number in the group, and fill the
   slots that are left with the first feature of the position.
3. Note the slot of each feature, so that the results for the other slots are never read.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Int
from torch import Tensor


class PaddedFeatures(NamedTuple):
    """The active features of a layer, in groups of positions with similar numbers of features.

    Attributes:
        first: the index of the first feature of the layer among the active features.
        groups: for each group, its positions, and the features in the slots of each position.
        slot: the place of each active feature among the slots of all groups.
    """

    first: int
    groups: list[tuple[slice | Int[Tensor, " pos"], Int[Tensor, "pos slot"]]]
    slot: Int[Tensor, " active"]


class Group(NamedTuple):
    """Positions with similar numbers of features.

    Attributes:
        positions: the positions.
        features: for each position, the index of the feature in each slot. The features are
            counted from the first feature of the layer.
    """

    positions: list[int]
    features: list[list[int]]


def grouped(counts: Sequence[int]) -> tuple[list[Group], list[int]]:
    """Return groups of positions, and the slot of each feature.

    Args:
        counts: the number of features at each position. Features are sorted by position.

    >>> groups, slot = grouped([3, 0, 1, 2])
    >>> for group in groups:
    ...     print(group)
    Group(positions=[0, 3], features=[[0, 1, 2], [4, 5, 4]])
    Group(positions=[2], features=[[3]])
    >>> slot
    [0, 1, 2, 6, 3, 4]
    """
    begins = [0]
    for count in counts:
        begins.append(begins[-1] + count)
    by_size: dict[int, list[int]] = {}
    for pos, count in enumerate(counts):
        if count:
            by_size.setdefault(count.bit_length(), []).append(pos)
    slot = [0] * begins[-1]
    groups = []
    n_slots = 0
    for positions in by_size.values():
        most = max(counts[pos] for pos in positions)
        features = []
        for pos in positions:
            begin, end = begins[pos], begins[pos + 1]
            features.append([*range(begin, end), *[begin] * (most - counts[pos])])
            slot[begin:end] = range(n_slots, n_slots + counts[pos])
            n_slots += most
        groups.append(Group(positions, features))
    return groups, slot
