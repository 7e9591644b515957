"""The positions at which edges are scored: all together, each apart, or by named spans."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.sites import Text, are_aligned


class Positions(NamedTuple):
    """Where writers change.

    Attributes:
        here: columns of the text that is edited.
        there: the columns of the other text whose values come there.
        group: the place of each column in the result. A column that comes again has the last, which is dropped.
        labels: the places of the result; None for the sum of all columns.
    """

    here: Int[Tensor, "batch n"]
    there: Int[Tensor, "batch n"]
    group: Int[Tensor, "batch n"]
    labels: list[int | str] | None

    def change(self, whole: Tensor, by: Float[Tensor, "batch n d_model"]) -> Tensor:
        """A copy of `whole` with something added at the columns."""
        row, column = (self.group < self.groups).nonzero(as_tuple=True)
        index = row, self.here[row, column]
        return whole.index_put(index, by[row, column].to(whole.dtype), accumulate=True)

    @property
    def groups(self) -> int:
        """How many places there are."""
        return 1 if self.labels is None else len(self.labels)


def positions(over: str | None, edited: Text, source: Text) -> Positions:
    """The positions of one of the ways to sum; see `edge_attribution`.

    Raises:
        ValueError: if there is no such way, or the texts do not fit it.
    """
    if over not in (None, "pos", "span"):
        raise ValueError(f"over must be None, 'pos' or 'span'; got {over!r}")
    batch, n = edited.tokens.shape
    if over != "span":
        if not are_aligned(edited, source):
            raise ValueError(f"over must be 'span' where positions do not correspond; got {over!r}")
        columns = torch.arange(n, device=edited.tokens.device).expand(batch, n)
        if over is None:
            return Positions(columns, columns, torch.zeros_like(columns), None)
        return Positions(columns, columns, columns, [*range(n)])
    if not edited.spans:
        raise ValueError("over='span' needs Pairs with spans; got none")
    here, there, group = [], [], []
    for place, (name, columns) in enumerate(edited.spans.items()):
        again = (columns[:, :, None] == columns[:, None]).triu(1).any(2)
        here.append(columns)
        there.append(source.spans[name])
        group.append(torch.full_like(columns, place).masked_fill(again, len(edited.spans)))
    joined = [torch.cat(part, 1) for part in (here, there, group)]
    return Positions(joined[0], joined[1], joined[2], [*edited.spans])
