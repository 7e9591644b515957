"""Two answers of several tokens after one text, as the positions of one run.

The text divides into two branches, one for each answer.

1. The model runs a row for each answer: the text, and the tokens of the answer that it reads.
2. In a causal model, both rows have the same values at the positions of the text. These positions
   are joined. The joined run has the positions of the text, then the positions of the first answer,
   then the positions of the second answer.
3. Values are joined along the position axis. Patterns are joined along the query and the key axis,
   with 0 between the two answers.

In the joined run, each query attends only to the text and to its own answer. So effects in the
joined run are the sums of the effects in the two rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooks.base import to_device
from interp.graph.scores import BlockScores, HeadReadings


@dataclass(frozen=True)
class Branches:
    """The rows of a run, one for each answer, and the positions of the joined run.

    Attributes:
        n_shared: the number of positions of the text, which all rows share.
        lengths: the number of further positions of each row.

    >>> branches = Branches(n_shared=3, lengths=(2, 1))
    >>> branches.columns, branches.of_row(1)
    ([0, 1, 2, 3, 4, 3], [0, 1, 2, 5])
    """

    n_shared: int
    lengths: tuple[int, ...] = (0,)

    @property
    def is_single(self) -> bool:
        """True if there is one row, so that there is nothing to join."""
        return len(self.lengths) == 1

    @cached_property
    def rows(self) -> list[int]:
        """The row of each position. The positions of the text belong to the first row."""
        rows = [0] * self.n_shared
        for row, length in enumerate(self.lengths):
            rows += [row] * length
        return rows

    @cached_property
    def columns(self) -> list[int]:
        """The column of each position in its row."""
        columns = [*range(self.n_shared)]
        for length in self.lengths:
            columns += range(self.n_shared, self.n_shared + length)
        return columns

    def of_row(self, row: int) -> list[int]:
        """Return the positions of a row, in the order of its columns."""
        return [
            pos
            for pos, row_of_pos in enumerate(self.rows)
            if pos < self.n_shared or row_of_pos == row
        ]

    def places(self, pos: int) -> list[tuple[int, int]]:
        """Return the rows and columns of a position. A position of the text is in all rows."""
        if pos < self.n_shared:
            return [(row, pos) for row in range(len(self.lengths))]
        return [(self.rows[pos], self.columns[pos])]

    def joined(self, value: Shaped[Tensor, "_row column *size"]) -> Shaped[Tensor, "pos *size"]:
        """Return values of rows as values of positions."""
        if self.is_single:
            return value[0]
        rows, columns = self._indices(value)
        return value.expand(len(self.lengths), *value.shape[1:])[rows, columns]

    def joined_pattern(
        self, value: Float[Tensor, "row head column column"]
    ) -> Float[Tensor, "head pos pos"]:
        """Return attention patterns of rows, or other values of queries and keys, as values of
        positions.

        The values between the two answers are 0.
        """
        if self.is_single:
            return value[0]
        rows, columns = self._indices(value)
        chosen = value.movedim(1, -1)[rows[:, None], columns[:, None], columns]
        return chosen.movedim(-1, 0).masked_fill(~self._meets(value), 0)

    def summed(
        self, gradient: Float[Tensor, "target row column *size"]
    ) -> Float[Tensor, "target pos *size"]:
        """Return gradients at rows as gradients at positions: sums over the rows of a position."""
        total = gradient.new_zeros(len(gradient), len(self.rows), *gradient.shape[3:])
        for row in range(len(self.lengths)):
            positions = self.of_row(row)
            total[:, positions] += gradient[:, row, : len(positions)]
        return total

    def divided_pattern(
        self, gradient: Float[Tensor, "target head pos pos"], n_columns: int
    ) -> Float[Tensor, "target row head column column"]:
        """Return gradients at a joined pattern as gradients at the patterns of rows.

        The gradients at the queries of the text belong to the first row.

        Args:
            gradient: the gradients.
            n_columns: the number of columns of a row.
        """
        rows, columns = self._indices(gradient)
        n_targets, n_heads = gradient.shape[:2]
        divided = gradient.new_zeros(len(self.lengths), n_columns, n_columns, n_targets, n_heads)
        by_place = gradient.masked_fill(~self._meets(gradient), 0).permute(2, 3, 0, 1)
        index = (rows[:, None].expand(-1, len(rows)), columns[:, None], columns)
        divided.index_put_(index, by_place, accumulate=True)
        return divided.permute(3, 0, 4, 1, 2)

    def _indices(self, like: Tensor) -> tuple[Int[Tensor, " pos"], Int[Tensor, " pos"]]:
        """Return the row and the column of each position, on the device of a tensor."""
        rows, columns = to_device(torch.tensor([self.rows, self.columns]), like.device)
        return rows, columns

    def _meets(self, like: Tensor) -> Bool[Tensor, "pos pos"]:
        """Return True for each query and key that are in one row, on the device of a tensor."""
        rows, _ = self._indices(like)
        is_shared = torch.arange(len(rows), device=rows.device) < self.n_shared
        return (rows[:, None] == rows) | is_shared


class JoinedScores(BlockScores):
    """The queries, keys, values, scores and pattern of a block, with joined rows.

    The attributes have a batch axis of size 1.

    Args:
        scores: the scores of the rows.
        branches: the rows.
    """

    def __init__(self, scores: BlockScores, branches: Branches) -> None:
        self._scores = scores
        self._branches = branches
        self.v = branches.joined(scores.v)[None]
        self.scores = branches.joined_pattern(scores.scores)[None]
        self.pattern = branches.joined_pattern(scores.pattern)[None]
        self.q = self._joined(scores.q)
        self.k = self._joined(scores.k)

    @property
    def scale(self) -> float:
        """The factor of `q · k` in scores."""
        return self._scores.scale

    def _joined(self, readings: HeadReadings) -> HeadReadings:
        """Return the queries or keys of the rows as queries or keys of positions."""
        names = ("value", "map", "bias", "rest")
        return readings._replace(
            **{name: self._branches.joined(getattr(readings, name))[None] for name in names}
        )

    def moved_by(
        self, change: Float[Tensor, "target batch head query key"]
    ) -> tuple[
        Float[Tensor, "target batch head query key"],
        Float[Tensor, "target batch pos head d_head"],
        Float[Tensor, "target batch pos kv_head d_head"],
    ]:
        """Propagate gradients at the pattern; see `BlockScores.moved_by`."""
        n_columns = self._scores.pattern.shape[-1]
        of_rows = self._branches.divided_pattern(change[:, 0], n_columns)
        at_scores, *at_sides = self._scores.moved_by(of_rows)
        joined = torch.stack([self._branches.joined_pattern(part) for part in at_scores])
        at_q, at_k = (self._branches.summed(part)[:, None] for part in at_sides)
        return joined[:, None], at_q, at_k


def common_start(answers: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens with which all answers begin.

    >>> common_start([(5, 3, 2), (5, 3, 7, 1)])
    2
    """
    n = 0
    for tokens in zip(*answers, strict=False):
        if len({*tokens}) > 1:
            break
        n += 1
    return n
