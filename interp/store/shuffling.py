"""A bounded shuffle: draw batches of rows from a window of files that are mapped into memory.

1. Draw an order of the files.
2. Map the next `window` files into memory, and draw an order of all their rows.
3. Gather each batch from the files of its rows. If the last rows of a window do not fill a batch,
   the batch is filled from the next window.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, distributed
from torch.utils.data import IterableDataset, get_worker_info

RowsOfFile = Mapping[str, Tensor]


def shuffled(
    read: Callable[[int], RowsOfFile],
    n_files: int,
    size: int,
    draw: torch.Generator | None,
    window: int,
    part: tuple[int, int],
) -> Iterator[dict[str, Shaped[Tensor, "row ..."]]]:
    """Yield each row of a part of the files once, in batches.

    Args:
        read: a function from the number of a file to its tensors.
        n_files: the number of files.
        size: the number of rows in a batch. The last batch may be smaller.
        draw: the generator of the order; None means the order of the files.
        window: the number of files that are mapped at a time.
        part: the number of this reader and the number of readers.
    """

    def ordered(n: int) -> Int[Tensor, " _n"]:
        """Return the numbers below n in the drawn order."""
        return torch.arange(n) if draw is None else torch.randperm(n, generator=draw)

    order = ordered(n_files)[part[0] :: part[1]]
    rest: dict[str, Tensor] = {}
    for start in range(0, len(order), window):
        files = [read(number) for number in order[start : start + window].tolist()]
        ends = torch.tensor([_length(file) for file in files]).cumsum(0)
        count = int(ends[-1])
        rows = ordered(count)
        first = size - _length(rest) if rest else 0
        for chunk in filter(len, [rows[:first], *rows[first:].split(size)]):
            batch = _gathered(files, ends, chunk)
            if rest:
                batch = {name: torch.cat([rest[name], value]) for name, value in batch.items()}
            rest = batch if _length(batch) < size else {}
            if not rest:
                yield batch
    if rest:
        yield rest


def _length(rows: RowsOfFile) -> int:
    """Return the number of rows."""
    return len(next(iter(rows.values())))


def _gathered(
    files: Sequence[RowsOfFile], ends: Int[Tensor, " file"], rows: Int[Tensor, " row"]
) -> dict[str, Shaped[Tensor, "row ..."]]:
    """Return some rows of several files. File i contains rows `ends[i - 1]` to `ends[i]`."""
    numbers = torch.bucketize(rows, ends, right=True)
    batch = {name: value.new_empty(len(rows), *value.shape[1:]) for name, value in files[0].items()}
    for number in numbers.unique().tolist():
        places = (numbers == number).nonzero()[:, 0]
        inside = rows[places] - (int(ends[number - 1]) if number else 0)
        for name, value in files[number].items():
            batch[name].index_copy_(0, places, value.index_select(0, inside))
    return batch


class Shared(IterableDataset[tuple[Tensor, ...]]):
    """Batches that are shared by the workers of loaders and the ranks of `torch.distributed`.

    Args:
        batches: a function from `part` to an iterator over batches; see `shuffled`.
    """

    def __init__(self, batches: Callable[..., Iterator[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rank, n_ranks = 0, 1
        if distributed.is_available() and distributed.is_initialized():
            rank, n_ranks = distributed.get_rank(), distributed.get_world_size()
        worker = get_worker_info()
        number, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self._batches(part=(rank * n_workers + number, n_ranks * n_workers))
