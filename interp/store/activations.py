"""Reading of a store: its rows, and shuffled batches of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from safetensors import safe_open
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

from hooks import CacheError, storage
from hooks.errors import unknown_name
from interp.directions.erasing import Moments
from interp.store.files import MANIFEST, ROWS, path_of, read_json


class Activations:
    """Values that `harvest` wrote, a row for each token. Files are mapped into memory, and read when they are asked for.

    Args:
        out: the directory.

    Attributes:
        names: the points, in the order of the model.
        manifest: of what model they are, and how they were made.

    Raises:
        FileNotFoundError: if there is no store.
        CacheError: if its manifest is damaged.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.manifest: Mapping[str, Any] = read_json(self.out / MANIFEST)
        self.names: list[str] = [name for name, *_ in self.manifest["points"]]

    @cached_property
    def counts(self) -> list[int]:
        """The number of rows of each file.

        Raises:
            CacheError: if jobs are not done, or files are missing; it says which.
        """
        ends = [read_json(path) for path in sorted(self.out.glob("done-*.json"))]
        if not ends:
            raise CacheError(f"a store must be complete to be read; no job of {self.out} is done")
        sizes = {end["files"] for end in ends}
        if len(sizes) > 1:
            raise CacheError(
                f"jobs of {self.out} must have had the same texts; they have {sizes} files"
            )
        missing = [n for n in range(*sizes) if not path_of(self.out, n).exists()]
        if missing:
            raise CacheError(
                f"a store must be complete to be read; {self.out} lacks {len(missing)} of {max(sizes)} files, "
                f"the first {path_of(self.out, missing[0]).name}: run its job again"
            )
        counts = []
        for n in range(*sizes):
            with safe_open(path_of(self.out, n), framework="pt") as file:
                counts.append(file.get_slice("tokens").get_shape()[0])
        return counts

    @property
    def checksums(self) -> list[str]:
        """What stands for the values, rows and texts of each file: equal for equal stores, whoever wrote them."""
        found = []
        for n in range(len(self.counts)):
            with safe_open(path_of(self.out, n), framework="pt") as file:
                found.append(file.metadata()[storage.CHECKSUMS])
        return found

    def __len__(self) -> int:
        """The number of rows."""
        return sum(self.counts)

    def file(
        self, number: int, names: Sequence[str] | None = None
    ) -> dict[str, Shaped[Tensor, "row ..."]]:
        """The tensors of a file: values of points, and the token, text and position of each row.

        Raises:
            UnknownNameError: if there is no such point; it has close matches.
        """
        for name in names or ():
            if name not in (*self.names, *ROWS):
                raise unknown_name(name, [*self.names, *ROWS], "point of this store")
        with safe_open(path_of(self.out, number), framework="pt") as file:
            return {name: file.get_tensor(name) for name in names or (*self.names, *ROWS)}

    def batches(
        self,
        size: int,
        seed: int | None = 0,
        names: Sequence[str] | None = None,
        *,
        window: int = 16,
        part: tuple[int, int] = (0, 1),
    ) -> Iterator[tuple[Shaped[Tensor, "row ..."], ...]]:
        """Each row once, in batches; the last may be smaller.

        The shuffle is bounded: files are drawn in any order, and the rows of `window` files are mixed at a time. So two
        rows of one text are in one batch more often than in a full shuffle, at most by the factor of files to `window`.

        Args:
            size: how many rows a batch has.
            seed: of the order; None for the order of the texts. Another epoch takes another seed.
            names: which points, `tokens`, `text` or `pos`; None for all points.
            window: how many files are in memory.
            part: of how many readers this is which one; they share the files.

        Yields:
            A tensor for each name, in their order.

        Raises:
            CacheError: if the store is not complete.
            ValueError: if a size is below 1.
            UnknownNameError: as for `file`.
        """
        if min(size, window) < 1:
            raise ValueError(f"size and window must be at least 1; got {size} and {window}")
        wanted, draw = [*(names or self.names)], np.random.default_rng(seed)
        order = np.arange(len(self.counts)) if seed is None else draw.permutation(len(self.counts))
        order = order[part[0] :: part[1]]
        rest: list[Tensor] | None = None
        for start in range(0, len(order), window):
            files = [self.file(n, wanted) for n in order[start : start + window].tolist()]
            rows = [torch.cat([file[name] for file in files]) for name in wanted]
            if seed is not None:
                mixed = torch.from_numpy(draw.permutation(len(rows[0])))
                rows = [each[mixed] for each in rows]
            if rest is not None:
                rows = [torch.cat(pair) for pair in zip(rest, rows, strict=True)]
            whole = len(rows[0]) // size * size
            for at in range(0, whole, size):
                yield tuple(each[at : at + size] for each in rows)
            rest = [each[whole:] for each in rows]
        if rest is not None and len(rest[0]):
            yield tuple(rest)

    def dataset(
        self, size: int, seed: int | None = 0, names: Sequence[str] | None = None, window: int = 16
    ) -> IterableDataset[tuple[Tensor, ...]]:
        """The batches for a `DataLoader(dataset, batch_size=None)`; for arguments see `batches`.

        The workers of loaders and the ranks of `torch.distributed` share the files, so each row comes once in all.
        """
        return _Dataset(self, (size, seed, names), window)

    def moments(self, name: str) -> Moments:
        """The mean and the covariance of a point's values, in float64, from one pass over the files.

        Raises:
            CacheError, UnknownNameError: as for `batches`.
        """
        together: Moments | None = None
        for n in range(len(self.counts)):
            values = self.file(n, [name])[name].flatten(1)
            one = Moments.of(values, values.new_zeros(len(values), 0))
            together = one if together is None else together + one
        assert together is not None  # a store has a file
        return together

    def __repr__(self) -> str:
        try:
            n = len(self)
        except CacheError:
            return f"Activations of {len(self.names)} points, not complete"
        texts = int(self.file(len(self.counts) - 1, ["text"])["text"][-1]) + 1
        return f"Activations of {len(self.names)} points, {n:,} rows of {texts:,} texts"


class _Dataset(IterableDataset[tuple[Tensor, ...]]):
    """Batches of a store, of which each worker of each rank reads its own files."""

    def __init__(
        self, store: Activations, order: tuple[int, int | None, Sequence[str] | None], window: int
    ) -> None:
        self._store, self._order, self._window = store, order, window

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rank, ranks = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            rank, ranks = distributed.get_rank(), distributed.get_world_size()
        worker = get_worker_info()
        here, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        part = rank * workers + here, ranks * workers
        return self._store.batches(*self._order, window=self._window, part=part)
