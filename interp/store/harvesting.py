"""Harvest: write the values of points over many texts to disk.

1. Divide the texts into groups of `per_file`, in their order. Group n is file n, and belongs to job
   n mod the number of jobs.
2. Skip a file that exists and is undamaged, if it belongs to the same store and texts. For each
   other file, read its texts in batches, stop each forward pass at the last point, and select the
   values at the requested tokens.
3. Write each file completely, with checksums. At its end, each job writes a list of its files, and
   the last job writes the list of all files to the manifest.

Therefore, a job can be killed at any moment and started again, and the files do not depend on the
number of jobs.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooks import CacheError, Selector
from hooks.base import progress_bar, require_kind, shows_progress, without_gradients
from interp.store.activations import Activations
from interp.store.corpora import Corpus, TextPiece, texts_of_files
from interp.store.corpora import count as count_of
from interp.store.engines import JOBS_OF_WORKER, Model, loaded, n_workers, require_executor
from interp.store.files import (
    FOREIGN,
    MANIFEST,
    Folder,
    described,
    ensured_manifest,
    facts_of_all_jobs,
    file_of,
    finished_jobs,
    require_same,
    store_of,
)
from interp.store.rows import HarvestConfig, Overflow, RowReader, require_no_edits
from interp.store.tasks import ModelSource, TaskRun, require_shard, run_tasks, runs_here


@shows_progress
def harvest(
    model: "Model",
    texts: "Corpus",
    names: "Selector",
    out: str | os.PathLike[str],
    config: HarvestConfig = HarvestConfig(),
    *,
    shard: tuple[int, int] = (0, 1),
    executor: Any = None,
    progress: bool = True,
) -> Activations:
    """Write the values of points at every token of many texts to disk, and return the store.

    The same call can be repeated at any time, for example after a full disk. A repeated call writes
    only the files that are missing or damaged. With more texts, the store grows. This is possible
    only if its last file is full, that is, if the number of its texts is a multiple of `per_file`;
    otherwise the call raises a ValueError. Fewer texts than a complete store has raise a ValueError
    too. If a value was not finite in the dtype of the store, the same call with another dtype
    removes the old files and begins again.

    The values do not depend on the number of jobs. On processors of one kind with the same number
    of threads, they are equal bit for bit.

    Args:
        model: any model with hook points, in evaluation mode, or a function that returns a model,
            such as `partial(models.load, "gpt2")`. With several workers, each worker calls the
            function.
        texts: a path, texts, or rows of a table; see `interp.store.corpora`. They are read once, so
            they can be a stream. Each job needs all texts, and processes its own part.
        names: the points: names, globs or a mode. Their first axes must be `batch pos`.
        out: a directory, which is created if it does not exist, or an address of `fsspec`, such as
            `s3://bucket/store`.
        config: the settings: for example, `HarvestConfig(context=128)` cuts texts into pieces of at
            most 128 tokens. See `HarvestConfig` for all settings.
        shard: the number of this job and the number of jobs. `(3, 64)` is the fourth of 64 jobs of
            any scheduler.
        executor: an executor that runs all jobs: `Ray(workers=8)`, or any object with `submit`; see
            `interp.over_examples`. Default: None, which runs this job here.
        progress: whether to show a progress bar, with tokens per second, or, outside a terminal,
            lines of progress.

    Returns:
        The store, which can be read after all jobs have finished. The store has one row for each
        stored token. At a point with the axes `batch pos *rest`, a row is a tensor [*rest], in the
        unit of the point. Each row also contains the token, the number of the text, and the token's
        place in the text.

    Raises:
        ValueError: if the existing store, or a file, has another model, other texts or other
            settings, even if it began at the same time; if the shard is invalid; if the executor
            forks; or if a value is not finite.
        TypeError: if the model, the config or the executor has a wrong type, or if an executor gets
            texts that can be read only once.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.
        HookError: if edits of the model's values are active; if a worker dies; or if the model is
            fully sharded (FSDP) and another process fails between two runs. If a process fails
            inside a run, the other processes wait until it ends, or until the timeout of
            `torch.distributed.init_process_group`.
        OSError: if the disk is full, or would become full according to the size of the first file.
        ImportError: if Ray is not installed.

    >>> import tempfile
    >>> from models import load
    >>> model, out = load("pydoc-4l"), tempfile.mkdtemp()
    >>> store = harvest(model, ["part KV8", "Return the"], "blocks.1.mlp_out", out)
    >>> store
    Activations of 1 point, 18 rows of 2 texts
    >>> store.rows(1)["blocks.1.mlp_out"].shape  # token, d_model
    torch.Size([10, 128])
    >>> for (values,) in store.batches(6, seed=0):  # shuffled
    ...     assert values.shape == (6, 128)
    """
    require_kind("config", config, kind=HarvestConfig, words="a HarvestConfig")
    shard = require_shard(shard, "job, jobs")
    require_executor(executor)
    if executor is None:
        harvest_shard(loaded(model), texts, names=names, out=out, config=config, shard=shard)
        return Activations(out)
    if shard != (0, 1):
        raise ValueError(f"shard must be (0, 1) with executor=, which runs all jobs; got {shard}")
    if isinstance(texts, Iterator):
        raise TypeError(
            "texts must be a path, a list or a table, because each worker reads them; got a "
            f"{type(texts).__name__}"
        )
    if isinstance(model, nn.Module):
        require_no_edits(model)
    here = loaded(model) if runs_here(executor) else None
    run = TaskRun(harvest_shard, (texts, names, out, config), ModelSource(model), model=here)
    n_jobs = JOBS_OF_WORKER * n_workers(executor)
    shards = [Shard(number, n_jobs) for number in range(n_jobs)]
    with progress_bar("jobs", total=n_jobs, unit="job") as count:
        for _ in run_tasks(executor, run, shards):
            count()
    return Activations(out)


class Shard(NamedTuple):
    """The number of a job, and the number of jobs."""

    job: int
    jobs: int

    def __str__(self) -> str:
        return f"job {self.job} of {self.jobs}"


@without_gradients
def harvest_shard(
    model: nn.Module,
    texts: Corpus,
    names: Selector,
    out: str | os.PathLike[str],
    config: HarvestConfig,
    shard: tuple[int, int],
) -> None:
    """Run one job of a harvest.

    Args:
        model: the model.
        texts, names, out, shard: see `harvest`.
        config: the settings for reading and storing.

    Raises:
        ValueError, UnknownNameError, ModeError, HookError, OSError: as for `harvest`.
    """
    job, jobs = shard
    reader = RowReader(model, names, config)
    folder = Folder(out)
    manifest = reader.manifest()
    store = store_of(manifest)
    facts_by_file: dict[str, dict[str, Any]] = {}
    n_files, n_texts = 0, 0
    with reader.runs(), progress_bar("harvest", unit="tok") as count:
        require_same(manifest, folder)
        for number, run in enumerate(texts_of_files(texts, config.column, config.per_file)):
            first = n_texts
            n_files += 1
            n_texts += len(run)
            if number % jobs != job:
                continue
            pieces = reader.pieces(run, first)
            facts = {"store": store, "first": first, "texts": len(run), "sha256": _digest(pieces)}
            facts_of_file = existing_facts(manifest, folder, number=number, facts=facts)
            if facts_of_file is None:
                try:
                    tensors = reader.tensors(pieces, count)
                except Overflow:
                    if "files" not in ensured_manifest(manifest, folder):
                        folder.write_json(MANIFEST, manifest | {"overflow": True})
                    raise
                size = sum(value.nbytes for value in tensors.values())
                n_known = None if facts_by_file else count_of(texts)
                last = number if n_known is None else (n_known - 1) // config.per_file
                _require_room(folder, size, len(range(number, last + 1, jobs)))
                facts_of_file = write_values(
                    manifest, folder, number=number, facts=facts, tensors=tensors
                )
            facts_by_file[str(number)] = facts_of_file
    end = {"of": n_files, "texts": n_texts, "files": facts_by_file}
    finish_job(manifest, folder, shard=shard, end=end)


def _digest(pieces: Sequence[TextPiece]) -> str:
    """Return a hash of the tokens of pieces and of the numbers of their texts."""
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(repr(piece.tolist()).encode())
    return hashed.hexdigest()


def _require_room(folder: Folder, size: int, n_files: int) -> None:
    """Check that the disk has room for `n_files` files of a size in bytes.

    Raises:
        OSError: if the disk does not have enough room.
    """
    if (free := folder.free) is not None and free < size * n_files:
        raise OSError(
            f"the disk must have room for about {size * n_files:,} bytes ({n_files} more like this "
            f"file); {folder.name} has {free:,}"
        )


def existing_facts(
    manifest: Mapping[str, Any], folder: Folder, number: int, facts: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the facts of a file of values if the file exists, or None if it must be written.

    Args:
        manifest: the manifest of the store.
        folder: the folder of the store.
        number: the number of the file.
        facts: the facts that the file must have.

    Raises:
        ValueError: if the file, or its entry in the manifest, belongs to another store or does not
            have these facts.
    """
    written = folder.facts(file_of(number))
    if written:
        listed = [written]
    else:
        listed = require_same(manifest, folder).get("files", [])[number : number + 1]
    for facts_of_file in listed:
        _require_facts(folder, number, facts_of_file=facts_of_file, facts=facts)
    return written


def write_values(
    manifest: Mapping[str, Any],
    folder: Folder,
    number: int,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Write a file of values, and return its facts (see `interp.store.files`).

    Args:
        manifest, folder, number, facts: see `existing_facts`.
        tensors: the values of points, and the tokens and places of the rows.

    Raises:
        ValueError: if the file belongs to another store, or to other texts. Another process may
            have written it in the meantime.
    """
    ensured_manifest(manifest, folder)
    all_facts = {**facts, "rows": len(tensors["tokens"]), **described(tensors)}
    written = folder.write(number, tensors, all_facts)
    _require_facts(folder, number, facts_of_file=written, facts=facts)
    return {**written}


def _require_facts(
    folder: Folder, number: int, facts_of_file: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Check that a file belongs to the store and to the texts of `facts`.

    Raises:
        ValueError: if the file has other facts.
    """
    if facts_of_file.get("store") != facts["store"]:
        path = folder.path(file_of(number))
        raise ValueError(f"a folder must contain files of one store; {path} {FOREIGN}")
    if {key: facts_of_file[key] for key in facts} != facts:
        raise ValueError(
            f"a store must continue with the same texts; file {number} has other texts, or is a "
            f"last file that is not full: choose another folder, or delete the folder {folder.name}"
        )


def finish_job(
    manifest: Mapping[str, Any], folder: Folder, shard: tuple[int, int], end: Mapping[str, Any]
) -> None:
    """Write the list of the files of a finished job. If all jobs have finished, write the manifest
    with the files of all jobs too.

    Args:
        manifest: the manifest of the store.
        folder: the folder of the store.
        shard: the number of the job and the number of jobs.
        end: the number of files and the number of texts of the whole harvest, and a record of each
            file of this job: its texts, shapes and checksums.

    Raises:
        ValueError: if other jobs had another number of texts, or if the store contains more texts.
    """
    store = store_of(manifest)
    end_name = f"done-{shard[0]}-of-{shard[1]}.json"
    saved, others = ensured_manifest(manifest, folder), finished_jobs(folder, store)
    for name, end_of_job in {MANIFEST: saved, **others}.items():
        n_texts = end_of_job.get("texts", 0)
        may_grow = name in (MANIFEST, end_name)
        if n_texts > end["texts"] or (n_texts < end["texts"] and not may_grow):
            raise ValueError(
                f"a store must continue with the same texts; other jobs had {n_texts}, got "
                f"{end['texts']}"
            )
    for name, end_of_job in others.items():
        # If this job wrote a file again on another machine, its values may differ in some bits. An
        # earlier job may still list the old checksums of this file, so remove these.
        files = {
            number: facts
            for number, facts in end_of_job["files"].items()
            if end["files"].get(number, facts) == facts
        }
        if files != end_of_job["files"]:
            folder.write_json(name, end_of_job | {"files": files})
    folder.write_json(end_name, {"store": store, **end})
    try:
        files_of_all_jobs = facts_of_all_jobs(folder, store)
    except CacheError:
        # Other jobs have not finished. The last job will write the manifest.
        return
    folder.write_json(MANIFEST, {**manifest, **files_of_all_jobs})
    folder.tidy()
