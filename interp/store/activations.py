"""Reading of a store: its rows by text, and shuffled batches of them."""

import bisect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hooks import CacheError
from hooks.base import generator, require_integer, require_module, shown, unknown_name, writer_of
from interp import pictures
from interp.numbers.moments import Moments
from interp.pictures.view import told
from interp.reading.maxima import Activation, TopActivations
from interp.store.files import MANIFEST, ROWS, Folder, file_of, gathered, store_of
from interp.store.rows import FORMAT, identity
from interp.store.shuffling import Shared, shuffled
from interp.store.summary import StatisticsByPoint, require_options


class Activations(pictures.Shown):
    """Values that `harvest` wrote, a row for each token. Files are mapped into memory, and read when they are asked for.

    Args:
        out: the directory, or its address.

    Attributes:
        names: the points, in the order of the model.
        manifest: of what model they are, and how they were made.

    Raises:
        FileNotFoundError: if there is no store.
        CacheError: if its manifest is damaged, or of an older form.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._folder = Folder(out)
        self.manifest: Mapping[str, Any] = self._folder.manifest()
        if not self.manifest:
            raise FileNotFoundError(f"no store is at {self._folder.name!r}: it has no {MANIFEST}")
        if (form := self.manifest.get("format")) != FORMAT:
            raise CacheError(
                f"a store must have the format {FORMAT}; {self._folder.name!r} has {form!r}"
            )
        self._store = store_of(self.manifest)
        self.names: list[str] = [*self.manifest["points"]]

    def view(self) -> pictures.View:
        """What it holds, and how that was made."""
        return pictures.View("a store", [], says=[repr(self), *self.names, *told(self.manifest)])

    @cached_property
    def files(self) -> list[dict[str, Any]]:
        """The facts of each file: its rows, its first text and how many it has, its checksums.

        Raises:
            CacheError: if jobs are not done; it says how many files are missing.
        """
        manifest = self._folder.manifest()
        files = manifest if "files" in manifest else gathered(self._folder, self._store)
        return list(files["files"])

    @property
    def checksums(self) -> list[dict[str, int]]:
        """A CRC of each tensor of each file: equal for equal stores, whoever wrote them."""
        return [file["checksums"] for file in self.files]

    def damaged(self) -> list[int]:
        """The numbers of files that are missing or not as they were written, by their checksums.

        `harvest` mends them, but refuses by name a whole file that is of another store or of other texts.
        """
        facts = [self._folder.facts(file_of(number)) for number in range(len(self.files))]
        return [number for number, file in enumerate(self.files) if facts[number] != file]

    def __getitem__(self, index: object) -> None:
        """Refuse an index, and say how rows are read.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a store has no items: .rows(text) and .batches(size) read its rows; got {shown(index)}"
        )

    def require_weights_of(self, model: nn.Module) -> None:
        """Refuse a model that the values are not of.

        Raises:
            CacheError: if its config, a weight or a part differs. What a data set of others did not say is not known.
        """
        require_module(model)
        for what, hashed in identity(model).items():
            if self.manifest[what] not in ("", hashed):
                raise CacheError(
                    f"the store must be of this model; its {what} is {self.manifest[what]!s:.12}, got {hashed!s:.12}"
                )

    def __len__(self) -> int:
        """The number of rows."""
        return sum(file["rows"] for file in self.files)

    def file(
        self, number: int, names: Sequence[str] | None = None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """The tensors of a file: values of points, and `tokens`, `text`, `offset` and `pos` of each row.

        Raises:
            UnknownNameError: if there is no such point; it has close matches.
            FileNotFoundError: if the file is gone.
            CacheError: if it is torn, or of another store.
        """
        for name in names or ():
            if name not in (*self.names, *ROWS):
                raise unknown_name(name, [*self.names, *ROWS], "point of this store")
        try:
            listed = self.files[number : number + 1]
        except CacheError:  # jobs are not done
            listed = []
        return self._folder.read(number, names or [*self.names, *ROWS], self._store, listed)

    def rows(
        self, text: int, offset: int | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """The rows of one text, or of one place in it.

        Args:
            text: its number.
            offset: the token of the text, from its start; None for all that were kept.
            names: see `file`.

        Raises:
            IndexError: if there is no such text, or no row of that place.
            CacheError, UnknownNameError: as for `file`.
        """
        firsts = [file["first"] for file in self.files]
        n_texts = firsts[-1] + self.files[-1]["texts"]
        if type(text) is not int or not 0 <= text < n_texts:
            raise IndexError(f"text must be from 0 to {n_texts - 1}; got {text}")
        wanted = [*(names or (*self.names, *ROWS))]
        held = self.file(bisect.bisect_right(firsts, text) - 1, [*{*wanted, "text", "offset"}])
        chosen = held["text"] == text
        if offset is not None:
            chosen &= held["offset"] == offset
            if not chosen.any():
                raise IndexError(f"text {text} has no row of its token {offset}")
        return {name: held[name][chosen] for name in wanted}

    def texts(self) -> Iterator[list[int]]:
        """The tokens of each text that were kept, in order; what is fitted to texts takes them."""
        for number, file in enumerate(self.files):
            held = self.file(number, ["tokens", "text"])
            counts = torch.bincount(held["text"] - file["first"], minlength=file["texts"])
            yield from (part.tolist() for part in held["tokens"].split(counts.tolist()))

    def batches(
        self,
        size: int,
        seed: int | None = 0,
        names: Sequence[str] | None = None,
        *,
        epochs: int | None = 1,
        window: int = 16,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[Shaped[Tensor, "row ..."], ...]]:
        """Each row once in each epoch, in batches; the last of an epoch may be smaller.

        The shuffle is bounded (`shuffling`): files are drawn in any order, and the rows of `window` files are mixed at a time.
        So two rows of one file are in one batch more often than in a full shuffle, at most by the factor of files to `window`.

        Args:
            size: how many rows a batch has.
            seed: of the order, which is another in each epoch; None for the order of the texts.
            names: which points, `tokens`, `text`, `offset` or `pos`; None for all points.
            epochs: how often; None without end.
            window: how many files are mixed.
            part: of how many readers this is which one; they share the files.

        Yields:
            A tensor for each name, in their order.

        Raises:
            CacheError: if the store is not complete.
            ValueError: if a size is below 1, or this reader has no row.
            UnknownNameError: as for `file`.
        """
        require_integer("size", size)
        require_integer("window", window)
        require_integer("epochs", 1 if epochs is None else epochs)
        read, epoch, any_row = partial(self.file, names=names or self.names), 0, False
        while epochs is None or epoch < epochs:
            draw = None if seed is None else generator(seed, epoch)
            for batch in shuffled(read, len(self.files), size, draw, window, part):
                any_row = True
                yield tuple(batch.values())
            if epochs is None and not any_row:
                raise ValueError(
                    f"each of {part[1]} readers must have rows; reader {part[0]} has none"
                )
            epoch += 1

    def dataset(
        self, size: int, seed: int | None = 0, names: Sequence[str] | None = None, window: int = 16
    ) -> IterableDataset[tuple[Tensor, ...]]:
        """The batches for a `DataLoader(dataset, batch_size=None)`; for arguments see `batches`.

        The workers of loaders and the ranks of `torch.distributed` share the files, so each row comes once in all. Ranks may
        get different numbers of batches.
        """
        return Shared(partial(self.batches, size, seed, names, window=window))

    def statistics(
        self, names: Sequence[str] | None = None, *, part: tuple[int, int] = (0, 1), **options: Any
    ) -> StatisticsByPoint:
        """Sums and samples of each column of points, from one pass over the files.

        Args:
            names: which points; None for all.
            part: of how many readers this is which one. What they find is put together with `+`.
            options: `covariance`, `top`, `sample` and `seed`, see `Statistics.of`.

        Raises:
            CacheError, UnknownNameError: as for `batches`.
            ValueError: if there is no row.
        """
        require_options(options)
        wanted = [*(names or self.names)]

        def parts() -> Iterator[StatisticsByPoint]:
            for number in range(len(self.files))[part[0] :: part[1]]:
                held = self.file(number, [*{*wanted, "text", "offset"}])
                if len(held["text"]):
                    rows = {name: held[name] for name in wanted}
                    yield StatisticsByPoint.of(rows, held["text"], held["offset"], **options)

        return StatisticsByPoint.together(parts())

    def top(
        self, sums: StatisticsByPoint, name: str, column: int, model: nn.Module | None = None
    ) -> TopActivations:
        """The places where a column of a point is largest, as `max_activating` shows them, without a run.

        Args:
            sums: from `statistics` of this store.
            name: the point.
            column: of the point's last axes in a row, such as a neuron.
            model: with a tokenizer, for words.

        Raises:
            KeyError: if there are no statistics of the point.
            CacheError, UnknownNameError: as for `batches`.
        """
        one = sums[name]
        write = None if model is None else writer_of(model)
        places = []
        for value, (text, offset) in zip(
            one.top_values[:, column].tolist(), one.top_places[:, column].tolist(), strict=True
        ):
            held = self.rows(text, names=["tokens", "offset"])
            tokens = held["tokens"].tolist()
            pieces = None if write is None else tuple(write(tokens))
            pos = held["offset"].tolist().index(offset)
            places.append(Activation(value, text, pos, tuple(tokens), pieces))
        return TopActivations(places)

    def moments(
        self, name: str, labels: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    ) -> Moments:
        """The mean and the covariance of a point's values, and those with labels, which `leace` takes, from one pass.

        Args:
            name: the point.
            labels: a function from the `tokens`, `text`, `offset` and `pos` of rows to their labels [row, label]; None for
                no labels.

        Raises:
            CacheError, UnknownNameError: as for `batches`.
            ValueError: if there is no row.
        """
        together: Moments | None = None
        for number in range(len(self.files)):
            held = self.file(number, [name, *ROWS])
            values = held[name].flatten(1)
            if len(values):
                one = Moments.of(values, None if labels is None else labels(held))
                together = one if together is None else together + one
        if together is None:
            raise ValueError(f"statistics need at least one row; {self._folder.name} has none")
        return together

    def __repr__(self) -> str:
        try:
            n_texts = sum(file["texts"] for file in self.files)
        except CacheError:
            return f"Activations of {len(self.names)} points, not complete"
        return f"Activations of {len(self.names)} points, {len(self):,} rows of {n_texts:,} texts"
