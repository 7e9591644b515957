"""Read a store: the rows of a text, and shuffled batches of rows."""

import bisect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hooks import CacheError
from hooks.base import (
    explains_calls,
    generator,
    number_of,
    require_integer,
    require_module,
    shown,
    unknown_name,
    writer_of,
)
from interp import plots
from interp.json_form import Table, form
from interp.numbers.moments import Moments
from interp.plots.view import told
from interp.reading.maxima import Activation, TopActivations
from interp.store.files import MANIFEST, ROWS, Folder, facts_of_all_jobs, file_of, store_of
from interp.store.rows import FORMAT, identity
from interp.store.shuffling import Shared, shuffled
from interp.store.summary import StatisticsByPoint
from interp.store.tasks import require_shard


class Activations(plots.Shown):
    """Values that `harvest` wrote, with a row for each token.

    Files are mapped into memory and read on demand.

    Args:
        out: the directory of the store, or its address.

    Attributes:
        names: the points, in the order of the model.
        manifest: facts about the model and the settings of the store.

    Raises:
        FileNotFoundError: if the store does not exist.
        CacheError: if its manifest is damaged or has an older format.

    >>> import tempfile
    >>> from interp.store import harvest
    >>> from models import load
    >>> out = tempfile.mkdtemp()
    >>> _ = harvest(load("pydoc-4l"), ["part KV8", "Return the"], "blocks.1.mlp_out", out)
    >>> store = Activations(out)
    >>> store
    Activations of 1 point, 18 rows of 2 texts
    >>> store.names, len(store)
    (['blocks.1.mlp_out'], 18)
    """

    manifest: Mapping[str, Any]
    names: list[str]

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._folder = Folder(out)
        self.manifest = self._folder.manifest()
        if not self.manifest:
            raise FileNotFoundError(
                f"there is no store at {self._folder.name!r}: it has no {MANIFEST}"
            )
        if (written := self.manifest.get("format")) != FORMAT:
            raise CacheError(
                f"a store must have the format {FORMAT}; {self._folder.name!r} has {written!r}"
            )
        self._store = store_of(self.manifest)
        self.names = [*self.manifest["points"]]

    def as_json(self) -> dict[str, Any]:
        """Return the points and the manifest in the JSON form of all results; see
        `interp.json_form`.
        """
        tables = {"point": Table(self.names, "point")}
        with suppress(CacheError):
            tables["n_texts"] = Table(sum(file["texts"] for file in self.files), unit="texts")
            tables["n_rows"] = Table(len(self), unit="rows")
        return form("Activations", tables, self.manifest)

    def view(self) -> plots.View:
        """Return a view of the contents and the manifest of the store."""
        return plots.View("a store", [], says=[repr(self), *self.names, *told(self.manifest)])

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        """The facts of each file: its number of rows, first text, number of texts and checksums.

        Raises:
            CacheError: if jobs have not finished. The error contains the number of missing files.
        """
        manifest = self._folder.manifest()
        files = manifest if "files" in manifest else facts_of_all_jobs(self._folder, self._store)
        return list(files["files"])

    @property
    def checksums(self) -> list[dict[str, int]]:
        """A CRC of each tensor of each file. The checksums of equal stores are equal."""
        return [file["checksums"] for file in self.files]

    def damaged(self) -> list[int]:
        """Return the numbers of the files that are missing or do not have their original checksums.

        `harvest` writes these files again. For an undamaged file of another store or of other
        texts, it raises an error that names the file.
        """
        facts = [self._folder.facts(file_of(number)) for number in range(len(self.files))]
        return [number for number, file in enumerate(self.files) if facts[number] != file]

    def __getitem__(self, index: object) -> None:
        """Raise an error that explains how to read rows.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a store cannot be indexed: read its rows with .rows(text) or .batches(size); got "
            f"{shown(index)}"
        )

    @explains_calls
    def require_weights_of(self, model: nn.Module) -> None:
        """Check that the values of the store are from this model.

        An imported data set (`from_arrow`) does not record its model, so nothing is checked.

        Raises:
            CacheError: if the class, the config, a weight or a part of the model differs.
        """
        require_module(model)
        for what, hashed in identity(model).items():
            if self.manifest[what] not in ("", hashed):
                raise CacheError(
                    f"the store must be from this model; its {what} is "
                    f"{self.manifest[what]!s:.12}, got {hashed!s:.12}"
                )

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(file["rows"] for file in self.files)

    def file(
        self, number: int, names: str | Sequence[str] | None = None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """Return tensors of a file: the values of points, and facts about each row.

        The facts are the token (`tokens`), the number of its text (`text`), its index in this text
        (`offset`), and its index in the piece of text that the model read (`pos`).

        Args:
            number: the number of the file.
            names: points, `tokens`, `text`, `offset` or `pos`, or one of them. Default: all
                tensors.

        Raises:
            UnknownNameError: if a name is unknown. The error contains close matches.
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is truncated or belongs to another store.
        """
        wanted = _listed(names, [*self.names, *ROWS])
        for name in wanted:
            if name not in (*self.names, *ROWS):
                raise unknown_name(name, [*self.names, *ROWS], "point of this store")
        try:
            listed = self.files[number : number + 1]
        except CacheError:
            # Some jobs have not finished, so the manifest has no list of files yet. A file that
            # exists can be read.
            listed = []
        return self._folder.read(number, wanted, store=self._store, listed=listed)

    @explains_calls
    def rows(
        self, text: int, offset: int | None = None, names: str | Sequence[str] | None = None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """Return the rows of one text, or the row of one token of the text.

        Args:
            text: the number of the text.
            offset: the index of the token in the text. Default: all stored tokens.
            names: the tensors to return: points, or the facts `tokens`, `text`, `offset` and `pos`
                of each row, or one of them. Default: all of them.

        Raises:
            IndexError: if the text does not exist, or if there is no row for this place.
            UnknownNameError: if a name is unknown. The error contains close matches.
            CacheError: if the file of the text is truncated or belongs to another store.
        """
        firsts = [file["first"] for file in self.files]
        n_texts = firsts[-1] + self.files[-1]["texts"]
        if type(text) is not int or not 0 <= text < n_texts:
            raise IndexError(f"text must be from 0 to {n_texts - 1}; got {text}")
        wanted = _listed(names, [*self.names, *ROWS])
        columns = self.file(bisect.bisect_right(firsts, text) - 1, [*{*wanted, "text", "offset"}])
        chosen = columns["text"] == text
        if offset is not None:
            chosen &= columns["offset"] == offset
            if not chosen.any():
                raise IndexError(
                    f"offset must be a place with a row; text {text} has no row for offset {offset}"
                )
        return {name: columns[name][chosen] for name in wanted}

    def texts(self) -> Iterator[list[int]]:
        """Yield the stored tokens of each text, in order.

        So a lens or a probe can be fitted on the texts of a store.
        """
        for number, file in enumerate(self.files):
            columns = self.file(number, ["tokens", "text"])
            counts = torch.bincount(columns["text"] - file["first"], minlength=file["texts"])
            yield from (part.tolist() for part in columns["tokens"].split(counts.tolist()))

    @explains_calls
    def batches(
        self,
        size: int,
        seed: int | None = 0,
        names: str | Sequence[str] | None = None,
        *,
        epochs: int | None = 1,
        window: int = 16,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[Shaped[Tensor, "row ..."], ...]]:
        """Yield batches that contain each row once in each epoch. The last batch may be smaller.

        The shuffle is bounded (`shuffling`): the order of the files is random, and the rows of
        `window` files are mixed at a time. Therefore, two rows of one file are in the same batch
        more often than in a full shuffle, by at most the factor (number of files) / `window`.

        Args:
            size: the number of rows in a batch.
            seed: the seed of the random order, which is different in each epoch. None means the
                order of the texts.
            names: points, or `tokens`, `text`, `offset` or `pos`. Default: all points.
            epochs: the number of epochs; None means no end.
            window: the number of files to mix.
            part: the number of this reader, counted from 0, and the number of readers, which share
                the files.

        Yields:
            A tuple with a tensor for each name, in the order of `names`.

        Raises:
            CacheError: if the store is incomplete.
            ValueError: if a size is below 1, if this reader has no row, or if its number is not
                below the number of readers.
            UnknownNameError: if a name is unknown. The error contains close matches.
        """
        require_integer("size", size)
        require_integer("window", window)
        require_integer("epochs", 1 if epochs is None else epochs)
        require_shard(part, "reader, readers", name="part")
        read = partial(self.file, names=self.names if names is None else names)
        epoch = 0
        any_row = False
        while epochs is None or epoch < epochs:
            draw = None if seed is None else generator(seed, epoch)
            for batch in shuffled(
                read, len(self.files), size=size, draw=draw, window=window, part=part
            ):
                any_row = True
                yield tuple(batch.values())
            if epochs is None and not any_row:
                raise ValueError(
                    f"each of {part[1]} readers must have rows; reader {part[0]} has none"
                )
            epoch += 1

    def dataset(
        self,
        size: int,
        seed: int | None = 0,
        names: str | Sequence[str] | None = None,
        window: int = 16,
    ) -> IterableDataset[tuple[Tensor, ...]]:
        """Return the batches as a data set for `DataLoader(dataset, batch_size=None)`.

        The workers of loaders and the ranks of `torch.distributed` share the files, so only one of
        them reads each row. Ranks may get different numbers of batches.

        Args:
            size: the number of rows in a batch.
            seed: the seed of the order of rows; see `batches`.
            names: the points to read, or one point. Default: all points of the store.
            window: the number of files whose rows are shuffled together; see `batches`.
        """
        return Shared(partial(self.batches, size, seed, names, window=window))

    @explains_calls
    def statistics(
        self,
        names: str | Sequence[str] | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        covariance: bool = False,
        top: int = 10,
        sample: int = 1024,
        seed: int = 0,
    ) -> StatisticsByPoint:
        """Return statistics of each column of points, from one pass over the files.

        Args:
            names: the points, or one point. Default: all points.
            part: the number of this reader, counted from 0, and the number of readers, which share
                the files. Add the statistics of all readers with `+`.
            covariance: whether to compute the products of all pairs of columns.
            top: the number of largest values to record.
            sample: the largest number of rows in the random sample, from which quantiles are taken.
            seed: the seed of the sample.

        Raises:
            CacheError: if the store is incomplete.
            UnknownNameError: if a name is unknown. The error contains close matches.
            ValueError: if this reader has no row, or its number is not below the number of readers.
        """
        require_shard(part, "reader, readers", name="part")
        options: dict[str, Any] = {
            "covariance": covariance,
            "top": top,
            "sample": sample,
            "seed": seed,
        }
        wanted = _listed(names, self.names)

        def parts() -> Iterator[StatisticsByPoint]:
            """Yield the statistics of each file of this reader."""
            numbers = range(len(self.files))[part[0] :: part[1]]
            if not numbers:
                raise ValueError(
                    f"each of {part[1]} readers must have a file; reader {part[0]} has none of "
                    f"{number_of(len(self.files), 'file')}"
                )
            for number in numbers:
                columns = self.file(number, [*{*wanted, "text", "offset"}])
                if len(columns["text"]):
                    rows = {name: columns[name] for name in wanted}
                    yield StatisticsByPoint.of(rows, columns["text"], columns["offset"], **options)

        return StatisticsByPoint.together(parts())

    @explains_calls
    def top(
        self, sums: StatisticsByPoint, name: str, column: int, model: nn.Module | None = None
    ) -> TopActivations:
        """Return the places where a column of a point is largest, without a run of the model.

        The result has the same form as the result of `max_activating`.

        Args:
            sums: the result of `statistics` for this store.
            name: the point.
            column: the index of a column, such as a neuron, with the last axes of the point
                flattened.
            model: a model with a tokenizer, to show tokens as text. Default: no text.

        Raises:
            KeyError: if there are no statistics of the point.
            CacheError: if the store is incomplete.
            UnknownNameError: if a name is unknown. The error contains close matches.
        """
        statistics = sums[name]
        write = None if model is None else writer_of(model)
        places = []
        for value, (text, offset) in zip(
            statistics.top_values[:, column].tolist(),
            statistics.top_places[:, column].tolist(),
            strict=True,
        ):
            columns = self.rows(text, names=["tokens", "offset"])
            tokens = columns["tokens"].tolist()
            pieces = None if write is None else tuple(write(tokens))
            pos = columns["offset"].tolist().index(offset)
            places.append(
                Activation(value=value, text=text, pos=pos, tokens=tuple(tokens), pieces=pieces)
            )
        return TopActivations(places)

    def moments(
        self, name: str, labels: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    ) -> Moments:
        """Return the mean and the covariance of a point's values, from one pass over the files.

        With labels, the result includes the covariance of values and labels, which `leace` needs.

        Args:
            name: the point.
            labels: a function from the tensors of a file, such as `tokens`, `text`, `offset` and
                `pos`, to labels [row, label]. Default: no labels.

        Raises:
            CacheError: if the store is incomplete.
            UnknownNameError: if a name is unknown. The error contains close matches.
            ValueError: if there is no row.
        """
        together: Moments | None = None
        for number in range(len(self.files)):
            columns = self.file(number, [name, *ROWS])
            values = columns[name].flatten(1)
            if len(values):
                moments = Moments.of(values, None if labels is None else labels(columns))
                together = moments if together is None else together + moments
        if together is None:
            raise ValueError(f"statistics need at least one row; {self._folder.name} has none")
        return together

    def __repr__(self) -> str:
        points = number_of(len(self.names), "point")
        try:
            n_texts = sum(file["texts"] for file in self.files)
        except CacheError:
            return f"Activations of {points}, not complete"
        rows = number_of(len(self), "row")
        return f"Activations of {points}, {rows} of {number_of(n_texts, 'text')}"


def _listed(names: str | Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return names as a list: one name, several names, or the default for None.

    Raises:
        ValueError: if there is no name.
    """
    if names is None:
        return [*default]
    if not names:
        raise ValueError(f"names must be at least one point, or None for all; got {names!r}")
    return [names] if isinstance(names, str) else [*names]
