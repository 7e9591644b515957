"""Directions that tell two kinds of texts apart: differences of means, and erasers of what they differ in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks import EditError
from hooks.base import Index, shows_progress, without_gradients
from interp.directions.direction import Direction
from interp.directions.erasing import Eraser, leace
from interp.directions.examples import Contrast, Kind
from interp.directions.stored import Labels
from interp.edits.edit import Edit
from interp.edits.places import Region
from interp.numbers.moments import Moments


@shows_progress
@without_gradients
def difference_of_means(
    model: nn.Module,
    yes: Kind,
    no: Kind | None = None,
    site: str | Sequence[str] = "resid_post",
    *,
    labels: Labels | None = None,
    pos: Index | str | None = -1,
    batch: int = 16,
    progress: bool = True,
) -> Direction:
    """The difference between the mean values of two kinds of texts, at a site in every layer (Marks & Tegmark 2023).

    The offset puts 0 halfway between the two means.

    Args:
        model: any model in evaluation mode with hook points.
        yes, no: the texts, read once, so they may stream; or a cache of a run of them; or a store of them (`interp.store`),
            which is read a batch at a time. One store may hold both kinds: then `no` is left out.
        site: the last part of points of all layers, or the name of one point; or several of these. Axes after `pos` are put in a row.
        labels: for one store with both kinds, True for each text of kind yes and False for the others.
        pos: the positions of each text that count as examples, never padding; None for all its tokens. Lists of each text's
            own are those of `yes`, then of `no`, or of `yes` for both; of one store with labels, those of its texts. Of chats
            (`models.chat`) also the name of a span. In a store they are places in a text, and negative ones count from the
            last token that was kept. None and slices take the rows that are there. Texts without a row are left out.
        batch: how many texts are read together.
        progress: whether to show a bar after two seconds.

    Returns:
        A direction that points from `no` to `yes`, in the units of the values.

    Raises:
        UnknownNameError: if there is no such point or span; it has close matches.
        ValueError: if a kind has no text, a text no such position, a value is not finite, a cache's run was given no
            tokens, or labels are not one for each text of a store.
        CacheError: if a store is of another model.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> v = difference_of_means(load("pydoc-4l"), ["part KV8", "part QX3"], ["def f(", "return x"])
    >>> v[2].shape
    torch.Size([128])
    """
    moments = _moments(model, Contrast(yes, no, site, labels, pos, batch))
    vectors, offsets = {}, {}
    for name, each in moments.items():
        share = float(each.mean[-1])
        # Σ (x - mean)(z - mean z) is n · share · (1 - share) times the difference of the means.
        vector = each.products[:-1, -1] / (each.n * share * (1 - share))
        middle = each.mean[:-1] + (0.5 - share) * vector
        vectors[name], offsets[name] = vector.float(), -float(middle @ vector)
    return Direction(
        vectors, offsets, {"by": "difference of means", "site": site, **_counts(moments)}
    )


@dataclass(frozen=True, eq=False)
class Erasure:
    """Erasers of what tells two kinds of texts apart, one for each point; made by `erasure`.

    Attributes:
        erasers: by the names of points.
        about: how they were found.
    """

    erasers: Mapping[str, Eraser]
    about: Mapping[str, Any]

    def edit(self, **where: Index) -> Edit:
        """An edit that erases at each point that it acts on, at the positions given; at all by default."""

        def erased(region: Tensor, value: Tensor, place: Region) -> Tensor:
            eraser = self.erasers.get(place.point.name)
            if eraser is None:
                raise EditError(
                    f"nothing is erased at {place.point.name}; only at {', '.join(self.erasers)}"
                )
            # Axes after `pos` in a row, as it was fitted.
            values, size = region.flatten(2), len(eraser.mean)
            if values.shape[-1] != size:
                raise EditError(
                    f"an eraser at {place.point} takes all {size} numbers of a position; {values.shape[-1]} were selected"
                )
            return eraser(values).view_as(region)

        return Edit("erase", erased, {"0": self}).at(**where)


@shows_progress
@without_gradients
def erasure(
    model: nn.Module,
    yes: Kind,
    no: Kind | None = None,
    site: str | Sequence[str] = "resid_post",
    *,
    labels: Labels | None = None,
    pos: Index | str | None = -1,
    batch: int = 16,
    progress: bool = True,
) -> Erasure:
    """Find the least change after which no linear reading tells two kinds of texts apart (LEACE; see `erasing`).

    For arguments and errors see `difference_of_means`. It holds on the rows that it was fitted on.
    """
    moments = _moments(model, Contrast(yes, no, site, labels, pos, batch))
    erasers = {name: leace(each) for name, each in moments.items()}
    return Erasure(erasers, {"by": "LEACE", "site": site, **_counts(moments)})


def _moments(model: nn.Module, contrast: Contrast) -> dict[str, Moments]:
    """Moments of the values at each point, with the label of each row as a last column."""
    moments: dict[str, Moments] = {}
    _, parts = contrast.read(model)
    for part in parts:
        for name, values in part.values.items():
            labels = torch.full((len(values), 1), float(part.label), device=values.device)
            new = Moments.of(values, labels)
            moments[name] = moments[name] + new if name in moments else new
    return moments


def _counts(moments: Mapping[str, Moments]) -> dict[str, int]:
    first = next(iter(moments.values()))
    return {"rows": first.n, "yes": round(first.n * float(first.mean[-1]))}
