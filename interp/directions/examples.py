"""Read the values of examples of two kinds of texts at the points of a site, in batches."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, SelectionError
from hooks.base import (
    Index,
    Selection,
    Text,
    Texts,
    is_rounding,
    named_spans,
    require_kind,
)
from hooks.shared import names_by_layer
from interp.directions.contrast import Contrast, TextsOfKind
from interp.directions.stored import StoredTexts, all_of, rows_of_store, told_apart
from interp.inputs.cached import text_of, text_of_values
from interp.inputs.copies import digests, numbered
from interp.inputs.texts import batches
from interp.numbers.precision import finite
from interp.protocol import runner_of


class Examples(NamedTuple):
    """Values of one batch.

    Attributes:
        label: 1 for texts of the first kind, 0 for texts of the second kind.
        text: for each row, the number of its text. The texts of the first kind are numbered first,
            and the texts of the second kind follow.
        number: for each text of the batch, its index among all texts of its kind. In a store, texts
            without a row count too.
        rank: for each row, its index among the rows of the same text.
        place: for each row, its position in the text, not counting padding.
        values: the values, by the names of points.
        digests: a hash of each text of the batch; see `interp.inputs.copies`.
        is_cached: whether the values come from a cache.
        is_part: see `StoredTexts.is_part`. Default: False.
    """

    label: int
    text: Int[Tensor, " row"]
    number: list[int]
    rank: Int[Tensor, " row"]
    place: Int[Tensor, " row"]
    values: dict[str, Float[Tensor, "row d"]]
    digests: list[str]
    is_cached: bool
    is_part: bool = False


def labelled_examples(
    model: nn.Module,
    contrast: Contrast,
    site: str | Sequence[str],
) -> tuple[list[str], Iterator[Examples]]:
    """Return the names of the points of a site, and an iterator over batches of examples.

    For the arguments and errors, see `difference_of_means`.
    """
    kinds = contrast.kinds(model)
    points = _points_of(model, site, kinds)
    return points, _examples(model, *kinds, points, contrast.pos, contrast.batch)


def _points_of(
    model: nn.Module, site: str | Sequence[str], sources: Sequence[TextsOfKind] = ()
) -> list[str]:
    """Return the names of the points of a site.

    A site is the last part of a name, such as `resid_post`, and stands for the points of all
    layers. It can also be the full name of one point. For several sites, return the points of all
    of them. If the texts come from stores, only points that all stores contain count.

    Raises:
        UnknownNameError: if no point matches. The error contains close matches.
    """
    stores = [source.store for source in sources if isinstance(source, StoredTexts)]
    known: list[str] = []
    for name in stores[0].names if stores else runner_of(model).points:
        if all(name in store.names for store in stores):
            known.append(name)
    require_kind("site", site, kind=(str, Sequence), words="a name, or several")
    points = dict[str, None]()
    for name in [site] if isinstance(site, str) else site:
        points |= dict.fromkeys([name] if name in known else names_by_layer(name, known).values())
    return [*points]


def _examples(
    model: nn.Module,
    yes: TextsOfKind,
    no: TextsOfKind,
    points: list[str],
    pos: Index | str | None,
    batch: int,
) -> Iterator[Examples]:
    """Yield the values at the selected positions of each text, in batches.

    `pos` is an index, the name of a span, or None for all real tokens. It can also contain a list
    of positions for each text; see `Contrast`.
    """
    if isinstance(yes, StoredTexts) and isinstance(no, StoredTexts):
        yield from _stored(yes, no, points=points, pos=pos, batch=batch)
        return
    # `first` is the number of texts of the kinds that are finished. `n_texts` is the number of
    # texts of the current kind that have been read.
    first, n_texts = 0, 0
    where = Selection([])
    if not isinstance(pos, str):
        where = Selection(slice(None) if pos is None else pos)
    for label, kind, texts in ((1, "yes", yes), (0, "no", no)):
        assert not isinstance(texts, StoredTexts)
        if isinstance(pos, str):
            where = Selection(named_spans(texts, [pos])[pos])
        elif where.is_by_example and first and len(where.parts) != first:
            where = Selection(where.parts[first:])
        n_texts = 0
        for text, cache in _runs(model, texts, points=points, batch=batch):
            stop = n_texts + len(text.tokens)
            columns = where.read(text.real, f"pos of {kind}", n_texts)
            rows, places, ranks = _listed(columns)
            values = {
                name: finite(cache[name][rows, places].flatten(1), f"values at {name}")
                for name in points
            }
            yield Examples(
                label=label,
                text=torch.tensor(rows) + first + n_texts,
                number=[*range(n_texts, stop)],
                rank=torch.tensor(ranks),
                place=text.positions.cpu()[rows, places],
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
    """Yield the values at the selected positions of each text from stores, in batches."""
    if isinstance(pos, str):
        raise SelectionError(
            f"pos must be positions, because a store has no named spans; got pos={pos!r}"
        )
    where = Selection(slice(None) if pos is None else pos)
    of_kinds = _selections(where, yes, no)
    n_texts = 0
    kinds = ((1, "yes", yes), (0, "no", no))
    for (label, kind, texts), chosen in zip(kinds, of_kinds, strict=True):
        n_before = n_texts
        for rows in rows_of_store(texts, points, where=chosen, what=f"pos of {kind}", batch=batch):
            yield Examples(
                label=label,
                text=torch.tensor(rows.texts) + n_texts,
                number=rows.numbers,
                rank=torch.tensor(rows.ranks),
                place=torch.tensor(rows.places),
                values={
                    name: finite(value, f"values at {name}") for name, value in rows.values.items()
                },
                digests=rows.digests,
                is_cached=False,
                is_part=texts.is_part,
            )
            n_texts += len(rows.digests)
        if n_texts == n_before:
            raise ValueError(f"{kind} must have a text with a row in the store; got none")


def _selections(where: Selection, yes: StoredTexts, no: StoredTexts) -> tuple[Selection, Selection]:
    """Return the selected positions in the texts of each kind, yes and no.

    With a separate index for each text, the selection is divided between the two kinds. Its entries
    belong to all texts of the store, if both kinds come from one store. Otherwise they belong to
    the texts of `yes` followed by the texts of `no`; or, if both kinds have the same number of
    texts and the selection has this number of entries, to the texts of each kind.

    Args:
        where: the selection.
        yes, no: the texts of each kind.

    Raises:
        SelectionError: if the number of entries fits none of these cases.
    """
    if not where.is_by_example:
        return where, where
    parts = where.parts
    n_yes = len(yes.numbers)
    n_no = len(no.numbers)
    if yes.store is no.store:
        # Both kinds come from one store, so `pos` has one entry for each text of this store. The
        # kinds are chosen by labels, or the caller passed the same store twice.
        n_texts = len(all_of(yes.store).numbers)
        if len(parts) == n_texts:
            of_yes = [parts[number] for number in yes.numbers]
            of_no = [parts[number] for number in no.numbers]
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
    """Return a number for each text. All copies of a text have the same number.

    Copies have the same hash of their tokens. This is not enough in two cases:

    - If one of the texts comes from a cache, the values of both texts must also agree at all places
      that both contain.
    - If a store contains only a part of each text (`is_part`), the values of the first example of
      each text must also agree, at the last point.
    """
    part_of: dict[int, Examples] = {}
    hashes: list[str] = []
    for part in parts:
        part_of |= dict.fromkeys(part.text.tolist(), part)
        hashes += part.digests

    def are_copies(first: int, second: int) -> bool:
        """Return True unless values of a cache show that two texts with one hash are different."""
        return _have_same_values(part_of[first], first, part_of[second], second)

    if any(part.is_part for part in parts):
        name = [*parts[0].values][-1]
        first_examples = torch.cat([part.values[name][part.rank == 0] for part in parts])
        hashes = told_apart(hashes, first_examples)
    return numbered(hashes, are_copies)


def _have_same_values(part: Examples, text: int, other: Examples, other_text: int) -> bool:
    """Return False if values of a cache show that two texts are different.

    The values of both texts are compared at the places that both texts contain, up to rounding.

    If neither text comes from a cache, no values are compared, and the result is True.
    """
    if not part.is_cached and not other.is_cached:
        return True
    row_at = _rows_by_place(part, text)
    other_row_at = _rows_by_place(other, other_text)
    for place in row_at.keys() & other_row_at.keys():
        for name, values in part.values.items():
            value = other.values[name][other_row_at[place]]
            if not is_rounding(values[row_at[place]], value).all():
                return False
    return True


def _rows_by_place(part: Examples, text: int) -> dict[int, int]:
    """Return a mapping from each position of a text to the row of its example."""
    rows = (part.text == text).nonzero()[:, 0].tolist()
    return {int(part.place[row]): row for row in rows}


def _runs(
    model: nn.Module, texts: Texts | ActivationCache, points: list[str], batch: int
) -> Iterator[tuple[Text, ActivationCache]]:
    """Yield texts and their values, from a cache or from a run on each batch."""
    if isinstance(texts, ActivationCache):
        if text_of(texts) is None:
            raise ValueError("a cache must be from a run on tokens; got a cache without tokens")
        text = text_of_values(texts, texts[points[0]].shape[:2])
        if text is None:
            raise ValueError(
                "a cache must contain all texts and positions of its run; got a part, whose "
                "tokens are unknown"
            )
        yield text, texts
        return
    for _, text in batches(texts, model, batch):
        yield text, runner_of(model).capture(text.tokens, names=points, **text.arguments(model))


def _listed(columns: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """List the selected positions of all texts of a batch one after another.

    Args:
        columns: the selected positions of each text.

    Returns:
        Three lists with an entry for each selected position. They contain the index of the text in
        the batch, the position, and the index of the position among the selected positions of the
        text.
    """
    rows: list[int] = []
    places: list[int] = []
    ranks: list[int] = []
    for row, chosen in enumerate(columns):
        rows += [row] * len(chosen)
        places += chosen
        ranks += range(len(chosen))
    return rows, places, ranks
