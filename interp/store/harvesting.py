"""Harvesting: values of points over many texts, written to disk.

1. Cut the texts into runs of `per_file`, by their order alone. Run n is file n, and belongs to job n mod the number of jobs.
2. Leave out files that are there and complete, with the same texts. Read the others in batches, stop each forward pass at the
   last point, and keep the values at real tokens.
3. Write each file whole, with its checksums. At the end write how many files there are.

So a job may be killed at any moment and started again, and any number of jobs write the same files.
"""

import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hooks import Selector, storage
from hooks._torch import without_gradients
from hooks.names import resolve
from interp.inputs.texts import Texts, each_text, padded
from interp.protocol import runner_of
from interp.store.activations import Activations
from interp.store.files import KIND, digest_of, end_of, path_of, require_same, write_json


class Planned(NamedTuple):
    """The size of a harvest, before it is made.

    Attributes:
        texts, tokens: how many there are.
        bytes: what the files take, but for some kilobytes each.
        seconds: how long it takes here at the rate of its first batch.
        free: the bytes that the disk has.
    """

    texts: int
    tokens: int
    bytes: int
    seconds: float
    free: int

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it."""
        return self.bytes < self.free

    def __repr__(self) -> str:
        room = "fits" if self.fits else f"does not fit into {self.free / 1e9:.3g} GB"
        return (
            f"{self.tokens:,} tokens of {self.texts:,} texts: {self.bytes / 1e9:.3g} GB, which {room}; "
            f"about {self.seconds:.3g} s"
        )


@without_gradients
def plan(
    model: nn.Module,
    texts: Texts,
    names: Selector,
    out: str | os.PathLike[str] = ".",
    *,
    dtype: torch.dtype | None = None,
    context: int | None = None,
    batch: int = 16,
) -> Planned:
    """Count what `harvest` would write, and time its first batch; for arguments and errors see there.

    The texts are all read, so a generator is used up.

    >>> from models import load
    >>> planned = plan(load("pydoc-4l"), ["part KV8"] * 100, "blocks.1.mlp_out")
    >>> planned.tokens, planned.bytes, planned.fits  # 128 numbers of 4 bytes, and three of 8
    (800, 428800, True)
    """
    points = [*resolve(names, runner_of(model).points, runner_of(model).points)]
    lengths, first = list[int](), list[list[int]]()
    for piece in _pieces(model, texts, context):
        first += [piece] if len(first) < batch else []
        lengths.append(len(piece))
    if not lengths:
        raise ValueError("texts must hold at least one text; got none")
    start = time.perf_counter()
    tensors = _values(model, points, first, 0, dtype, batch)
    seconds, rows = time.perf_counter() - start, len(tensors["tokens"])
    share, free = sum(lengths) / rows, shutil.disk_usage(out).free
    size = round(share * sum(tensor.nbytes for tensor in tensors.values()))
    return Planned(len(lengths), sum(lengths), size, share * seconds, free)


@without_gradients
def harvest(
    model: nn.Module,
    texts: Texts,
    names: Selector,
    out: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    dtype: torch.dtype | None = None,
    context: int | None = None,
    batch: int = 16,
    per_file: int = 64,
    progress: bool = False,
) -> Activations:
    """Write values of points at every token of some texts.

    It may be called again after anything, also a full disk, and makes what is missing or damaged.

    Args:
        model: any model with hook points, in evaluation mode.
        texts: texts of any lengths, read once, so they may stream. Every job is given all of them.
        names: which points: names, globs or a mode. Their first axes must be `batch pos`.
        out: a directory; it is made if it is not there.
        shard: which job this is, and of how many: `(3, 64)` is the fourth of 64 jobs of any scheduler.
        dtype: what values are written in; None for the model's.
        context: texts are cut into pieces of at most so many tokens, each a text of its own; None to leave them whole.
        batch: how many texts are read together.
        per_file: how many texts a file has.
        progress: whether to show a bar of files, with tokens per second.

    Returns:
        The store, which can be read once all jobs are done.

    Raises:
        ValueError: if the store there is of another model, texts or settings, a shard is none, or a text has no tokens.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.
        OSError: if the disk is full.
    """
    job, jobs = shard
    if not 0 <= job < jobs:
        raise ValueError(f"shard must be (job, jobs) with 0 <= job < jobs; got {shard}")
    if min(batch, per_file) < 1 or (context is not None and context < 1):
        raise ValueError(
            f"batch, per_file and context must be at least 1; got {batch}, {per_file}, {context}"
        )
    runner, folder = runner_of(model), Path(out)
    points = [*resolve(names, runner.points, runner.points)]
    axes = {name: runner.points[name].axes for name in points}
    for name, each in axes.items():
        if each[:2] != ("batch", "pos"):
            raise ValueError(
                "a store has a row for each token, so points must begin with [batch pos]; "
                f"got {name} [{' '.join(each)}]"
            )
    folder.mkdir(parents=True, exist_ok=True)
    require_same(
        {
            "format": 1,
            "points": [[name, *each[2:]] for name, each in axes.items()],
            "config": storage.config_hash(model),
            "weights": storage.weights_hash(model),
            "dtype": str(dtype),
            "context": context,
            "batch": batch,
            "per_file": per_file,
        },
        folder,
    )
    n_files, n_texts, n_tokens = 0, 0, 0
    pieces = _pieces(model, texts, context)
    with tqdm(disable=not progress, unit="file") as bar:
        while some := [*itertools.islice(pieces, per_file)]:
            first, number = n_texts, n_files
            n_files, n_texts = n_files + 1, n_texts + len(some)
            if number % jobs != job:
                continue
            digest = hashlib.sha256(repr(some).encode()).hexdigest()
            there = digest_of(folder, number)
            if there not in (None, digest):
                raise ValueError(
                    f"a store must go on with the same texts; those of file {number} are others"
                )
            if there is None:
                tensors = _values(model, points, some, first, dtype, batch)
                _require_room(folder, storage.nbytes([*tensors.values()]))
                path = path_of(folder, number)
                for unfinished in folder.glob(f"{path.name}.*.partial"):  # of a job that was killed
                    unfinished.unlink()
                storage.save(path, KIND, tensors, {"texts": digest})
                n_tokens += len(tensors["tokens"])
            bar.update()
            bar.set_postfix_str(f"{n_tokens / max(1e-9, bar.format_dict['elapsed']):,.0f} tokens/s")
    if not n_files:
        raise ValueError("texts must hold at least one text; got none")
    write_json(end_of(folder, shard), {"files": n_files, "texts": n_texts})
    return Activations(folder)


def _require_room(folder: Path, size: int) -> None:
    """Refuses to begin a file that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"the disk must have room for a file of {size:,} bytes; {folder} has {free:,}"
        )


def _pieces(model: nn.Module, texts: Texts, context: int | None) -> Iterator[list[int]]:
    """The tokens of each text, or of each of its pieces."""
    for number, text in enumerate(each_text(texts)):
        row = padded([text], model, [number]).tokens[0].tolist()
        size = len(row) if context is None else context
        yield from (row[start : start + size] for start in range(0, len(row), size))


def _values(
    model: nn.Module,
    points: Sequence[str],
    texts: list[list[int]],
    first: int,
    dtype: torch.dtype | None,
    batch: int,
) -> dict[str, Tensor]:
    """The tensors of a file."""
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, len(texts), batch):
        some = texts[start : start + batch]
        text = padded(some, model, range(first + start, first + start + len(some)))
        cache = runner_of(model).capture(text.tokens, names=[*points], **text.arguments(model))
        rows, places = text.real.nonzero(as_tuple=True)
        found: dict[str, Any] = {
            name: cache[name][rows, places].to(dtype or cache[name].dtype) for name in points
        }
        found |= {"tokens": text.tokens[rows, places], "text": rows + start + first, "pos": places}
        for name, value in found.items():
            parts.setdefault(name, []).append(value.cpu())
    return {name: torch.cat(each) for name, each in parts.items()}
