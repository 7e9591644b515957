"""Write a store of values that another program has computed."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from interp.store.activations import Activations
from interp.store.files import Folder, described, require_same, store_of
from interp.store.harvesting import existing_facts, finish_job, write_values
from interp.store.rows import FORMAT, HarvestConfig


class TextValues(NamedTuple):
    """The values of one text.

    Attributes:
        tokens: the tokens [pos].
        values: the values [pos, ...] of each point.
    """

    tokens: Tensor
    values: Mapping[str, Tensor]


def imported(
    contexts: Iterable[TextValues],
    out: str | os.PathLike[str],
    axes: Mapping[str, Sequence[str]],
    config: HarvestConfig,
) -> Activations:
    """Write a store, and return it.

    A repeated call writes only the files that are missing or damaged.

    Args:
        contexts: the values of each text.
        out: a directory, or an address of `fsspec`, such as `s3://bucket/store`.
        axes: the axes of each point besides the first, which has one row for each token.
        config: the number of texts in a file, and the number of tokens of each text if all are
            equal.

    Raises:
        ValueError: if the directory contains another store, or a store of other texts.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "points": {name: [*axes_of_point] for name, axes_of_point in axes.items()},
        **dict.fromkeys(("model", "config", "weights", "parts"), ""),
        **config.described(),
    }
    folder = Folder(out)
    store = store_of(manifest)
    require_same(manifest, folder)
    files: dict[str, dict[str, Any]] = {}
    n_texts = 0
    for number, batch in enumerate(_batches(contexts, config.per_file)):
        tensors = _rows(batch, n_texts)
        facts = {"store": store, "first": n_texts, "texts": len(batch), **described(tensors)}
        facts_of_file = existing_facts(manifest, folder, number=number, facts=facts)
        if not facts_of_file:
            facts_of_file = write_values(
                manifest, folder, number=number, facts=facts, tensors=tensors
            )
        files[str(number)] = facts_of_file
        n_texts += len(batch)
    end = {"of": len(files), "texts": n_texts, "files": files}
    finish_job(manifest, folder, shard=(0, 1), end=end)
    return Activations(out)


def _batches(contexts: Iterable[TextValues], size: int) -> Iterator[list[TextValues]]:
    """Yield `size` contexts at a time; fewer in the last batch."""
    remaining = iter(contexts)
    while batch := [*itertools.islice(remaining, size)]:
        yield batch


def _rows(contexts: Sequence[TextValues], first: int) -> dict[str, Tensor]:
    """Return the tensors of a file: a row for each token.

    Args:
        contexts: the texts of the file.
        first: the number of the first text.
    """
    lengths = [len(context.tokens) for context in contexts]
    places = torch.cat([torch.arange(length) for length in lengths]).int()
    numbers = torch.arange(first, first + len(contexts))
    tensors = {}
    for name in contexts[0].values:
        tensors[name] = torch.cat([context.values[name] for context in contexts])
    return tensors | {
        "tokens": torch.cat([context.tokens for context in contexts]).int(),
        "text": numbers.repeat_interleave(torch.tensor(lengths)).int(),
        "offset": places,
        "pos": places,
    }
