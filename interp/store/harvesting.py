"""Harvesting: values of points over many texts, written to disk.

1. Cut the texts into runs of `per_file`, by their order alone. Run n is file n, and belongs to job n mod the number of jobs.
2. Leave out files that are there and whole, of the same store and texts. Read the others in batches, stop each forward pass at
   the last point, and keep the values at the chosen tokens.
3. Write each file whole, with its checksums. At the end write which files there are; the last job puts that into the manifest.

So a job may be killed at any moment and started again, and any number of jobs write the same files.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hooks import CacheError, Selector
from hooks.base import Words, progress_bar, shown, shows_progress, without_gradients
from interp.store.activations import Activations
from interp.store.corpora import Corpus, TextPiece, runs
from interp.store.corpora import count as count_of
from interp.store.engines import Model, Ray, loaded
from interp.store.files import (
    FOREIGN,
    MANIFEST,
    Folder,
    claim,
    described,
    ends,
    file_of,
    gathered,
    require_same,
    store_of,
)
from interp.store.rows import Overflow, RowReader, Settings


@shows_progress
def harvest(
    model: Model,
    texts: Corpus,
    names: Selector,
    out: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    engine: Ray | None = None,
    progress: bool = True,
    **settings: Any,
) -> Activations:
    """Write values of points at every token of many texts.

    It may be called again after anything, also a full disk, and makes what is missing or damaged. Values are the same bits
    whichever job makes them, on processors of one kind with one number of threads. With more texts a store grows; fewer are
    refused. If `dtype` could not hold a value, the same call with another one begins again, and takes the old files away.

    Args:
        model: any model with hook points, in evaluation mode; or a function that makes one, such as
            `partial(models.load, "gpt2")`, which each of several workers calls.
        texts: a path, texts, or rows of a table; see `interp.store.corpora`. They are read once, so they may stream. Every
            job is given all of them, and reads its own.
        names: which points: names, globs or a mode. Their first axes must be `batch pos`.
        out: a directory, which is made if it is not there, or an address of `fsspec`, such as `s3://bucket/store`.
        shard: which job this is, and of how many: `(3, 64)` is the fourth of 64 jobs of any scheduler.
        engine: `Ray(workers=8)` runs the jobs on a Ray cluster; None runs this one here.
        progress: whether to show a bar, with tokens per second, after two seconds.
        settings: how texts are read and what is kept, such as `context=128` and `pos=slice(1, None)`; see `Settings`.

    Returns:
        The store, which can be read once all jobs are done.

    Raises:
        ValueError: if the store there, or a file, is of another model, texts or settings, also if it began at the same time; or
            if a shard or a dtype is none, or a value is not finite.
        TypeError: if the model, the engine or the dtype is none, or there is no such setting.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.
        HookError: if the model's values are edited at this time; or if the model is fully sharded (FSDP) and another process
            fails between two of its runs. One that fails inside a run lets the others wait until it ends, or until the timeout
            of `torch.distributed.init_process_group`.
        OSError: if the disk is full or, as far as the first file tells, would be.
        ImportError: if Ray is not installed.
    """
    Words(Settings).require(settings, ("shard", "engine", "progress"), "harvest")
    read = Settings(**settings)
    is_pair = isinstance(shard, tuple | list) and [*map(type, shard)] == [int, int]
    job, jobs = shard if is_pair else (0, 0)
    if not 0 <= job < jobs:
        raise ValueError(f"shard must be (job, jobs) with 0 <= job < jobs; got {shard}")
    if engine is None:
        harvest_shard(loaded(model), texts, names, out, read, shard)
    elif isinstance(engine, Ray):
        if jobs != 1:
            raise ValueError(f"Ray runs all jobs, so there is no shard to name; got {shard}")
        engine.run(harvest_shard, model, (texts, names, out, read))
    else:
        raise TypeError(f"engine must be interp.store.Ray(...) or None; got {shown(engine)}")
    return Activations(out)


@without_gradients
def harvest_shard(
    model: nn.Module,
    texts: Corpus,
    names: Selector,
    out: str | os.PathLike[str],
    settings: Settings,
    shard: tuple[int, int],
) -> None:
    """Do one job of a harvest; for arguments and errors see there."""
    job, jobs = shard
    reader, folder = RowReader(model, names, settings), Folder(out)
    manifest = reader.manifest()
    store = store_of(manifest)
    here: dict[str, dict[str, Any]] = {}
    n_files, n_texts = 0, 0
    with reader.runs(), progress_bar("harvest", unit="tok") as count:
        require_same(manifest, folder)
        for number, run in enumerate(runs(texts, settings.column, settings.per_file)):
            first, n_files, n_texts = n_texts, number + 1, n_texts + len(run)
            if number % jobs != job:
                continue
            pieces = reader.pieces(run, first)
            facts = {"store": store, "first": first, "texts": len(run), "sha256": _digest(pieces)}
            there = known(manifest, folder, number, facts)
            if there is None:
                try:
                    tensors = reader.tensors(pieces, count)
                except Overflow:
                    if "files" not in claim(manifest, folder):
                        folder.write_json(MANIFEST, manifest | {"overflow": True})
                    raise
                size = sum(value.nbytes for value in tensors.values())
                n_known = None if here else count_of(texts)
                last = number if n_known is None else (n_known - 1) // settings.per_file
                _require_room(folder, size, len(range(number, last + 1, jobs)))
                there = write(manifest, folder, number, facts, tensors)
            here[str(number)] = there
    finish(manifest, folder, shard, {"of": n_files, "texts": n_texts, "files": here})


def _digest(pieces: Sequence[TextPiece]) -> str:
    """A hash of the tokens of pieces, and of which texts they are."""
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(repr(piece.tolist()).encode())
    return hashed.hexdigest()


def _require_room(folder: Folder, size: int, n_files: int) -> None:
    """Refuses to begin what the disk cannot hold: `n_files` files of a size.

    Raises:
        OSError: if it cannot.
    """
    if (free := folder.free) is not None and free < size * n_files:
        raise OSError(
            f"the disk must have room for {size * n_files:,} bytes or so ({n_files} more like this file); "
            f"{folder.name} has {free:,}"
        )


def known(
    manifest: Mapping[str, Any], folder: Folder, number: int, facts: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The facts of a file of values that is there; None if it must be made.

    Raises:
        ValueError: if it, or what the manifest lists in its place, is of another store, or has others of these facts.
    """
    there = folder.facts(file_of(number))
    listed = [there] if there else require_same(manifest, folder).get("files", [])[number:][:1]
    for one in listed:
        _require_facts(folder, number, one, facts)
    return there


def write(
    manifest: Mapping[str, Any],
    folder: Folder,
    number: int,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Write a file of values, and give its facts; for errors see `known`, which the file may not be any more."""
    claim(manifest, folder)
    all_facts = {**facts, "rows": len(tensors["tokens"]), **described(tensors)}
    there = folder.write(number, tensors, all_facts)
    _require_facts(folder, number, there, facts)
    return {**there}


def _require_facts(
    folder: Folder, number: int, there: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    if there.get("store") != facts["store"]:
        path = folder.path(file_of(number))
        raise ValueError(f"a store must have its own files; {path} {FOREIGN}")
    if {key: there[key] for key in facts} != facts:
        raise ValueError(
            f"a store must go on with the same texts; those of file {number} are others"
        )


def finish(
    manifest: Mapping[str, Any], folder: Folder, shard: tuple[int, int], end: Mapping[str, Any]
) -> None:
    """Write the end of a job and, if it is the last, the manifest with all files.

    Raises:
        ValueError: if other jobs had other texts, or the store has more.
    """
    store, end_name = store_of(manifest), f"done-{shard[0]}-of-{shard[1]}.json"
    there, others = claim(manifest, folder), ends(folder, store)
    for name, other in {MANIFEST: there, **others}.items():
        had, may_grow = other.get("texts", 0), name in (MANIFEST, end_name)
        if had > end["texts"] or (had < end["texts"] and not may_grow):
            raise ValueError(
                f"a store must go on with the same texts; other jobs had {had}, got {end['texts']}"
            )
    for name, other in others.items():
        # A file that was made again elsewhere may have other bits.
        files = {
            n: facts for n, facts in other["files"].items() if end["files"].get(n, facts) == facts
        }
        if files != other["files"]:
            folder.write_json(name, other | {"files": files})
    folder.write_json(end_name, {"store": store, **end})
    try:
        everything = gathered(folder, store)
    except CacheError:  # other jobs are not done
        return
    folder.write_json(MANIFEST, {**manifest, **everything})
    folder.tidy()
