"""Values of examples of two kinds at the points of a site, a batch of texts at a time."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.names import layers
from interp.inputs.positions import Index, Selection
from interp.inputs.texts import Texts, batches
from interp.protocol import runner_of


class Examples(NamedTuple):
    """Values of one batch.

    Attributes:
        label: 1 for texts of the first kind, 0 for those of the second.
        text: which text each row is of, counted over both kinds.
        values: by the names of points.
    """

    label: int
    text: Int[Tensor, " row"]
    values: dict[str, Float[Tensor, "row d"]]


def points_of(model: nn.Module, site: str) -> list[str]:
    """The points of a site in each layer, or one that is named in full.

    Raises:
        UnknownNameError: if there is none; it has close matches.
    """
    known = runner_of(model).points
    if site in known:
        return [site]
    return [*layers(site, known).values()]


def examples(
    model: nn.Module, yes: Texts, no: Texts, points: list[str], pos: Index | None, batch: int
) -> Iterator[Examples]:
    """Values at the positions of each text; None for all its real tokens."""
    runner, n_texts = runner_of(model), 0
    for label, texts in ((1, yes), (0, no)):
        first = n_texts
        for start, text in batches(texts, model, batch):
            cache = runner.capture(text.tokens, names=points, **text.arguments(model))
            columns = [row.nonzero()[:, 0].tolist() for row in text.real]
            if pos is not None:
                shape = text.tokens.shape
                columns = Selection(pos).rows(shape[1], "pos", len(columns), columns)
                columns = columns * len(text.tokens) if len(columns) == 1 else columns
            rows = torch.tensor([row for row, chosen in enumerate(columns) for _ in chosen])
            places = torch.tensor([column for chosen in columns for column in chosen])
            n_texts = first + start + len(text.tokens)
            yield Examples(
                label,
                rows + first + start,
                {name: cache[name][rows, places].flatten(1) for name in points},
            )
