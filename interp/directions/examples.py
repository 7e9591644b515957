"""Values of examples of two kinds at the points of a site, a batch of texts at a time."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, SelectionError
from hooks.shared import Index, Selection, names_by_layer
from interp.inputs.copies import digests, numbered
from interp.inputs.texts import Text, Texts, batches, text_of, text_of_values
from interp.inputs.wording import named_spans
from interp.numbers.precision import finite, is_rounding
from interp.protocol import runner_of


class Examples(NamedTuple):
    """Values of one batch.

    Attributes:
        label: 1 for texts of the first kind, 0 for those of the second.
        text: which text each row is of, counted over both kinds.
        rank: which of its text's examples it is.
        place: its position in the text without padding.
        values: by the names of points.
        digests: a hash of each text of the batch; see `interp.inputs.copies`.
        is_cached: whether the values come from a cache that was given.
    """

    label: int
    text: Int[Tensor, " row"]
    rank: Int[Tensor, " row"]
    place: Int[Tensor, " row"]
    values: dict[str, Float[Tensor, "row d"]]
    digests: list[str]
    is_cached: bool


def points_of(model: nn.Module, site: str | Sequence[str]) -> list[str]:
    """The points of a site in each layer, or one that is named in full; of several, those of each.

    Raises:
        UnknownNameError: if there is none; it has close matches.
    """
    known, points = runner_of(model).points, dict[str, None]()
    for each in [site] if isinstance(site, str) else site:
        points |= dict.fromkeys([each] if each in known else names_by_layer(each, known).values())
    return [*points]


def examples(
    model: nn.Module,
    yes: Texts | ActivationCache,
    no: Texts | ActivationCache,
    points: list[str],
    pos: Index | str | None,
    batch: int,
) -> Iterator[Examples]:
    """Values at the positions of each text, by a name of spans or an index; None for all its real tokens.

    Lists of each text's own are those of `yes` and then of `no`; or those of `yes`, which `no` shares.
    """
    first, n_texts = 0, 0
    where = Selection([] if isinstance(pos, str) else slice(None) if pos is None else pos)
    for label, kind, texts in ((1, "yes", yes), (0, "no", no)):
        if isinstance(pos, str):
            where = Selection(named_spans(texts, [pos])[pos])
        elif where.is_by_example and first and len(where.parts) != first:
            where = Selection(where.parts[first:])
        n_texts = 0
        for text, cache in _runs(model, texts, points, batch):
            stop = n_texts + len(text.tokens)
            columns = where.read(text.real, f"pos of {kind}", n_texts)
            rows, places, ranks = ([*numbers] for numbers in zip(*_each(columns), strict=True))
            values = {
                name: finite(cache[name][rows, places].flatten(1), f"values at {name}")
                for name in points
            }
            yield Examples(
                label=label,
                text=torch.tensor(rows) + first + n_texts,
                rank=torch.tensor(ranks),
                place=text.real.cpu().cumsum(1)[rows, places] - 1,
                values=values,
                digests=digests(text),
                is_cached=isinstance(texts, ActivationCache),
            )
            n_texts = stop
        first += n_texts
    if where.is_by_example and len(where.parts) != n_texts:
        raise SelectionError(
            f"pos must be given for each of {n_texts} texts of no; got {len(where.parts)}"
        )


def text_numbers(parts: Sequence[Examples]) -> list[int]:
    """Return a number for each text, which its copies share.

    Texts of a cache are copies only if their values agree at all places that both have.
    """
    part_of = {number: part for part in parts for number in part.text.tolist()}

    def agree(one: int, other: int) -> bool:
        both = part_of[one], part_of[other]
        if not any(part.is_cached for part in both):
            return True
        rows, others = (
            {part.place[row].item(): row for row in (part.text == number).nonzero()[:, 0].tolist()}
            for part, number in zip(both, (one, other), strict=True)
        )
        return all(
            is_rounding(
                both[0].values[name][rows[place]], both[1].values[name][others[place]]
            ).all()
            for place in rows.keys() & others.keys()
            for name in both[0].values
        )

    return numbered([digest for part in parts for digest in part.digests], agree)


def _runs(
    model: nn.Module, texts: Texts | ActivationCache, points: list[str], batch: int
) -> Iterator[tuple[Text, ActivationCache]]:
    """Texts and their values: of one run that is given, or of a run for each batch."""
    if isinstance(texts, ActivationCache):
        if text_of(texts) is None:
            raise ValueError("a cache must be of a run that was given tokens; got one without")
        text = text_of_values(texts, texts[points[0]].shape[:2])
        if text is None:
            raise ValueError(
                "a cache must have all texts and positions of its run; got a part, whose tokens are not known"
            )
        yield text, texts
        return
    for _, each in batches(texts, model, batch):
        yield each, runner_of(model).capture(each.tokens, names=points, **each.arguments(model))


def _each(columns: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """The row of each example, its column, and which of its text's examples it is."""
    for row, chosen in enumerate(columns):
        for rank, column in enumerate(chosen):
            yield row, column, rank
