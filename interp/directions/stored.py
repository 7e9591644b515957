"""Read the texts of a store as examples.

1. Take the texts of one kind: all texts of a store, or its texts with one label.
2. Read the files one after another, and only the requested rows of each file.
3. Select rows by the place of their token in its text. Some places may be missing in a store.
4. Recognise copies of texts by their stored tokens. If a store contains only some tokens of each
   text, such as the last token, different texts may have the same stored tokens. Then the values of
   copies must be equal too (`told_apart`).
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks import SelectionError
from hooks.base import Selection, Text, generator, require_integer
from interp.inputs.copies import digests
from interp.store import Activations

Labels = Sequence[bool] | Sequence[int] | Shaped[Tensor, " text"] | Shaped[np.ndarray, " text"]
"""A label for each text of a store: True or 1 for `yes`, False or 0 for `no`."""

# Two texts are copies if the mean squared difference of their values, in units of the spread, is
# below this number. Rounding changes values by less than 3 % of their spread, and 0.03² < 1e-3.
_NEAR = 1e-3


class StoredTexts(NamedTuple):
    """Texts of one kind in a store.

    Attributes:
        store: the store.
        numbers: the numbers of the texts in the store, in order.
    """

    store: Activations
    numbers: list[int]

    @property
    def is_part(self) -> bool:
        """True if the store contains only some positions of each text, or pooled values.

        Then copies of a text must have the same values too.

        Packed texts are an exception: their copies are recognised only by tokens.
        """
        facts = self.store.manifest
        # In packed texts, tokens attend to the earlier texts. So copies of a text have different
        # values, and values cannot show which texts are copies.
        return not facts["pack"] and bool(facts["pos"] or facts["pool"])


class StoredRows(NamedTuple):
    """Rows of one batch of texts.

    Attributes:
        texts: for each row, the index of its text in the batch. Texts without rows in the store do
            not get an index.
        numbers: for each text of the batch, its index among all texts of its kind. Texts without
            rows count too.
        ranks: for each row, its index among the selected rows of the same text.
        places: for each row, the place of its token in the text.
        values: the values, by the names of points.
        digests: a hash of each text of the batch.
    """

    texts: list[int]
    numbers: list[int]
    ranks: list[int]
    places: list[int]
    values: dict[str, Float[Tensor, "row d"]]
    digests: list[str]


def all_of(store: Activations) -> StoredTexts:
    """Return all texts of a store."""
    return StoredTexts(store, [*range(sum(file["texts"] for file in store.files))])


def by_label(store: Activations, labels: Labels) -> tuple[StoredTexts, StoredTexts]:
    """Return the texts with label True, and the texts with label False.

    Args:
        store: the store.
        labels: a label for each text.

    Raises:
        ValueError: if labels are not booleans, if there is not one label for each text of the
            store, or if all labels are the same.
    """
    listed = labels.tolist() if hasattr(labels, "tolist") else [*labels]
    if wrong := [label for label in listed if label not in (False, True)]:
        raise ValueError(f"labels must be True or False, or 1 or 0; got {wrong[0]!r}")
    n_texts = len(all_of(store).numbers)
    if len(listed) != n_texts:
        raise ValueError(
            f"labels must be one for each of {n_texts} texts of the store, including texts without "
            f"a row; got {len(listed)}"
        )
    if len({*listed}) < 2:
        raise ValueError(f"labels must be of two kinds; got only {bool(listed[0])}")
    yes = [number for number, label in enumerate(listed) if label]
    no = [number for number, label in enumerate(listed) if not label]
    return StoredTexts(store, yes), StoredTexts(store, no)


def rows_of_store(
    texts: StoredTexts, points: Sequence[str], where: Selection, what: str, batch: int
) -> Iterator[StoredRows]:
    """Yield the selected rows of each batch of texts.

    Args:
        texts: the texts.
        points: the names of points.
        where: the positions in each text. Negative positions count from the last stored token.
        what: the name of the positions, for errors.
        batch: the number of texts in a batch.

    Raises:
        SelectionError: if `where` names positions by number and one of them has no row in the
            store, or if a text has no row at any of the selected positions.
        CacheError: as in `Activations.file`.
    """
    require_integer("batch", batch)
    store = texts.store
    n_before = 0
    for number, file in enumerate(store.files):
        inside = range(file["first"], file["first"] + file["texts"])
        rest = iter(texts.numbers[n_before : n_before + _count(texts.numbers, inside)])
        if not (some := [*itertools.islice(rest, batch)]):
            continue
        columns = store.file(number, [*points, "tokens", "text", "offset"])
        while some:
            rows = _chosen(columns, some, points=points, where=where, what=what, first=n_before)
            if rows.texts:
                yield rows
            n_before += len(some)
            some = [*itertools.islice(rest, batch)]


def told_apart(hashes: Sequence[str], values: Float[Tensor, "text d"]) -> list[str]:
    """Return a new hash of each text, which also depends on the values of the text.

    Two texts have the same new hash if their old hashes are equal, and their values are equal up to
    rounding. The new hash is the old hash, a space, and the index of the first text that gets the
    same new hash.

    A comparison of all pairs would be too slow. Therefore, all columns are scaled to the same
    spread, texts are sorted along a random line, and each text is compared only with its 8
    neighbours on each side.

    Args:
        hashes: the old hash of each text.
        values: one row of values for each text.

    >>> values = torch.tensor([[1.0, 5.0], [3.0, 2.0], [1.0, 5.0], [1.0, 5.0]])
    >>> told_apart(["a", "a", "a", "b"], values)
    ['a 0', 'a 1', 'a 0', 'b 3']
    """
    exact = values.double().cpu()
    spread = exact.std(0, correction=0)
    scaled = (exact - exact.mean(0)) / spread.where(spread > 0, 1.0)
    direction = torch.randn(scaled.shape[1], dtype=torch.float64, generator=generator(0))
    line = (scaled @ direction).tolist()
    order = sorted(range(len(hashes)), key=lambda text: (hashes[text], line[text]))
    first = [*range(len(hashes))]
    for back in range(1, min(9, len(order))):
        ones = order[:-back]
        others = order[back:]
        distances = (scaled[ones] - scaled[others]).square().mean(1).tolist()
        for first_row, second_row, distance in zip(ones, others, distances, strict=True):
            if distance < _NEAR and hashes[first_row] == hashes[second_row]:
                low, high = sorted((_root(first, first_row), _root(first, second_row)))
                first[high] = low
    return [f"{digest} {_root(first, text)}" for text, digest in enumerate(hashes)]


def _root(first: list[int], text: int) -> int:
    """Return the first text of which this text is a copy."""
    while first[text] != text:
        text = first[text]
    return text


def _count(numbers: Sequence[int], inside: range) -> int:
    """Return the number of sorted numbers inside a range."""
    return bisect.bisect_left(numbers, inside.stop) - bisect.bisect_left(numbers, inside.start)


def _chosen(
    columns: dict[str, Tensor],
    numbers: Sequence[int],
    points: Sequence[str],
    where: Selection,
    what: str,
    first: int,
) -> StoredRows:
    """Return the selected rows of some texts of one file.

    Args:
        columns: the tensors of the file.
        numbers: the numbers of the texts in the store.
        points, where, what: see `rows_of_store`.
        first: the index of the first of these texts among the texts of its kind.
    """
    text_of_row = columns["text"].long()
    wanted = torch.tensor(numbers)
    starts = torch.searchsorted(text_of_row, wanted).tolist()
    stops = torch.searchsorted(text_of_row, wanted, right=True).tolist()
    rows: list[int] = []
    texts: list[int] = []
    numbers_of_texts: list[int] = []
    ranks: list[int] = []
    places: list[int] = []
    hashes: list[str] = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True), first):
        if start == stop:
            continue
        offsets = columns["offset"][start:stop]
        row_at = dict(zip(offsets.tolist(), range(start, stop), strict=True))
        chosen = _stored_places(where, row_at, what=what, number=number)
        rows += [row_at[place] for place in chosen]
        places += chosen
        ranks += range(len(chosen))
        texts += [len(hashes)] * len(chosen)
        numbers_of_texts.append(number)
        tokens_of_text = Text(columns["tokens"][start:stop][None], more={"offset": offsets[None]})
        hashes += digests(tokens_of_text)
    values = {name: columns[name][rows].flatten(1) for name in points}
    return StoredRows(
        texts=texts,
        numbers=numbers_of_texts,
        ranks=ranks,
        places=places,
        values=values,
        digests=hashes,
    )


def _stored_places(where: Selection, row_at: dict[int, int], what: str, number: int) -> list[int]:
    """Return the places of one text that are selected and that the store contains.

    Args:
        where, what: see `rows_of_store`.
        row_at: the row in the file, for each place of the text that the store contains.
        number: the number of the text among the texts of its kind.

    Raises:
        SelectionError: if none of the selected places has a row, or if `where` is a number or a
            list of numbers and one of these places has no row.
    """
    real: Bool[Tensor, "1 pos"] = torch.ones(1, max(row_at) + 1, dtype=torch.bool)
    (chosen,) = where.read(real, what, number)
    stored_places = [place for place in chosen if place in row_at]
    part: Any = where.parts[number] if where.is_by_example else where.index
    listed = part if isinstance(part, list) else [part]
    is_listed = all(type(place) is int for place in listed)
    if not stored_places or (is_listed and len(stored_places) < len(chosen)):
        missing = next(place for place in chosen if place not in row_at)
        raise SelectionError(
            f"{what}, text {number}, must be places with a row in the store; got place {missing}, "
            "which has no row"
        )
    return stored_places
