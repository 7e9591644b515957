"""Values of examples of two kinds at the points of a site, a batch of texts at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, SelectionError
from hooks.base import Index, Selection, Text, Texts, is_rounding, named_spans, require_kind
from hooks.shared import names_by_layer
from interp.directions.stored import Labels, StoredTexts, all_of, by_label, rows_of, told_apart
from interp.inputs.cached import text_of, text_of_values
from interp.inputs.copies import digests, numbered
from interp.inputs.texts import batches
from interp.numbers.precision import finite
from interp.protocol import runner_of
from interp.store import Activations

Kind = Texts | ActivationCache | Activations
"""Texts of one kind as a user gives them."""

TextsOfKind = Texts | ActivationCache | StoredTexts
"""Texts of one kind as they are read."""


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
        is_part: whether the values come from a store whose kept tokens may be the same in different texts.
    """

    label: int
    text: Int[Tensor, " row"]
    rank: Int[Tensor, " row"]
    place: Int[Tensor, " row"]
    values: dict[str, Float[Tensor, "row d"]]
    digests: list[str]
    is_cached: bool
    is_part: bool = False


@dataclass(frozen=True, eq=False)
class Contrast:
    """Two kinds of texts, and where their values are read; for the fields see `difference_of_means`."""

    yes: Kind
    no: Kind | None
    site: str | Sequence[str]
    labels: Labels | None
    pos: Index | str | None
    batch: int

    def read(self, model: nn.Module) -> tuple[list[str], Iterator[Examples]]:
        """Return the names of the points, and the values of the examples there, a batch at a time."""
        kinds = _kinds_of(model, self.yes, self.no, self.labels)
        points = _points_of(model, self.site, kinds)
        return points, _examples(model, *kinds, points, self.pos, self.batch)


def _kinds_of(
    model: nn.Module, yes: Kind, no: Kind | None, labels: Labels | None
) -> tuple[TextsOfKind, TextsOfKind]:
    """Return the texts of both kinds. Stores become their texts of a kind.

    Raises:
        ValueError: if a kind is missing, only one is a store, or labels do not fit the store.
        CacheError: if a store is not of this model, or not complete.
    """
    stores = [kind for kind in (yes, no) if isinstance(kind, Activations)]
    for store in stores:
        store.require_weights_of(model)
    if labels is not None:
        if not isinstance(yes, Activations):
            raise ValueError(
                f"labels= are for a store; got a {type(yes).__name__}: give the two kinds as yes and no"
            )
        if no is not None:
            raise ValueError(
                f"with labels= one store has both kinds; got no as well, a {type(no).__name__} "
                "(a site is given as site=)"
            )
        return by_label(yes, labels)
    if no is None:
        raise ValueError("no must be given: the texts of the other kind, or labels= of one store")
    if len(stores) == 1:
        others = no if isinstance(yes, Activations) else yes
        raise ValueError(
            f"yes and no must both be stores, or none; got a store and a {type(others).__name__}"
        )
    if isinstance(yes, Activations) and isinstance(no, Activations):
        return all_of(yes), all_of(no)
    return cast(TextsOfKind, yes), cast(TextsOfKind, no)


def _points_of(
    model: nn.Module, site: str | Sequence[str], sources: Sequence[TextsOfKind] = ()
) -> list[str]:
    """The points of a site in each layer, or one that is named in full; of several, those of each.

    Of stores only points count that all of them have.

    Raises:
        UnknownNameError: if there is none; it has close matches.
    """
    stores = [source.store for source in sources if isinstance(source, StoredTexts)]
    known: Sequence[str] = [
        name
        for name in (stores[0].names if stores else runner_of(model).points)
        if all(name in store.names for store in stores)
    ]
    require_kind("site", site, (str, Sequence), "a name, or several")
    points = dict[str, None]()
    for each in [site] if isinstance(site, str) else site:
        points |= dict.fromkeys([each] if each in known else names_by_layer(each, known).values())
    return [*points]


def _examples(
    model: nn.Module,
    yes: TextsOfKind,
    no: TextsOfKind,
    points: list[str],
    pos: Index | str | None,
    batch: int,
) -> Iterator[Examples]:
    """Values at the positions of each text, by a name of spans or an index; None for all its real tokens.

    Lists of each text's own are those of `yes` and then of `no`; or those of `yes`, which `no` shares. Of one store with
    labels they are those of its texts.
    """
    if isinstance(yes, StoredTexts) and isinstance(no, StoredTexts):
        yield from _stored(yes, no, points, pos, batch)
        return
    first, n_texts = 0, 0
    where = Selection([] if isinstance(pos, str) else slice(None) if pos is None else pos)
    for label, kind, texts in ((1, "yes", yes), (0, "no", no)):
        assert not isinstance(texts, StoredTexts)
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


def _stored(
    yes: StoredTexts, no: StoredTexts, points: list[str], pos: Index | str | None, batch: int
) -> Iterator[Examples]:
    """The same for texts of stores."""
    if isinstance(pos, str):
        raise SelectionError(f"a store has no spans by name; got pos={pos!r}: give positions")
    where = Selection(slice(None) if pos is None else pos)
    of_kinds = _selections(where, yes, no)
    n_texts = 0
    for label, kind, texts, chosen in zip((1, 0), ("yes", "no"), (yes, no), of_kinds, strict=True):
        n_before = n_texts
        for rows in rows_of(texts, points, chosen, f"pos of {kind}", batch):
            yield Examples(
                label=label,
                text=torch.tensor(rows.texts) + n_texts,
                rank=torch.tensor(rows.ranks),
                place=torch.tensor(rows.places),
                values={n: finite(value, f"values at {n}") for n, value in rows.values.items()},
                digests=rows.digests,
                is_cached=False,
                is_part=texts.is_part,
            )
            n_texts += len(rows.digests)
        if n_texts == n_before:
            raise ValueError(f"{kind} must have a text with a row in the store; got none")


def _selections(where: Selection, yes: StoredTexts, no: StoredTexts) -> tuple[Selection, Selection]:
    """Return the positions in the texts of each kind."""
    if not where.is_by_example:
        return where, where
    parts, n_yes, n_no = where.parts, len(yes.numbers), len(no.numbers)
    if yes.store is no.store:
        # Two kinds of one store are texts with labels, or the whole store twice.
        n_texts = len(all_of(yes.store).numbers)
        if len(parts) == n_texts:
            of_yes, of_no = ([parts[n] for n in kind.numbers] for kind in (yes, no))
            return Selection(of_yes), Selection(of_no)
    elif len(parts) == n_yes + n_no:
        return Selection(parts[:n_yes]), Selection(parts[n_yes:])
    elif len(parts) == n_yes == n_no:
        return where, where
    raise SelectionError(
        f"pos must be given for each text of the store, or of both stores ({n_yes} and {n_no}); "
        f"got {len(parts)}"
    )


def text_numbers(parts: Sequence[Examples]) -> list[int]:
    """Return a number for each text, which its copies share.

    Texts of a cache are copies only if their values agree at all places that both have. If a store
    kept a part of each text, the values of their first examples at the last point must agree.
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

    hashes = [digest for part in parts for digest in part.digests]
    if any(part.is_part for part in parts):
        name = [*parts[0].values][-1]
        hashes = told_apart(
            hashes, torch.cat([part.values[name][part.rank == 0] for part in parts])
        )
    return numbered(hashes, agree)


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
