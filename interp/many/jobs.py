"""Run parts one after the other, on an executor with `submit`, or on a Ray cluster.

1. A `PartRun` loads the model, runs the analysis on a part, and writes its outcome to the folder or
   returns it.
2. In this process, all parts share one model. Another process keeps its model from part to part,
   until it runs a part of another call.
3. A worker that runs a part writes a note into a temporary folder. If a worker dies, the notes that
   are left name its part.
"""

import concurrent.futures
import os
import queue
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hooks import HookError
from hooks.base import shows_progress
from interp.inputs import parts as running
from interp.many.division import PartOfExamples, ReadExamples
from interp.many.folder import PartFolder
from interp.many.joining import Outcome
from interp.pairs.pairs import Pairs
from interp.store.engines import Model, Ray, loaded


class Ended(NamedTuple):
    """A part that has ended.

    Attributes:
        part: the part.
        outcome: its outcome; None if it is in the folder, or after an error.
        error: the error; None if the part has finished.
    """

    part: PartOfExamples
    outcome: Outcome | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class ModelSource:
    """The source of the model of a call.

    Copies of a source in other processes are equal to it, and sources of two calls differ.

    Attributes:
        make_model: the model, or a function that returns it.
        call: a random name of the call.
    """

    make_model: Model = field(compare=False)
    call: str = field(default_factory=lambda: uuid.uuid4().hex)


# An executor gives a function no other place to keep a model from one part to the next. Only worker
# processes fill this place, with one model.
@lru_cache(maxsize=1)
def _kept(source: ModelSource) -> nn.Module:
    """Return the model of a call."""
    return loaded(source.make_model)


class PartRun:
    """A function that runs one part.

    Args:
        analysis: the analysis.
        source: the source of the model.
        out: the folder for finished parts; None to return outcomes.
        model: the model for parts that run in this process; None to load it from the source.
    """

    def __init__(
        self,
        analysis: Callable[..., Any],
        source: ModelSource,
        out: str | os.PathLike[str] | None,
        model: nn.Module | None,
    ) -> None:
        self._analysis = analysis
        self.source = source
        self._out = out
        self._model = model
        self.notes = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which loads a model of its own."""
        return {**vars(self), "_model": None}

    def __call__(self, part: PartOfExamples) -> Outcome | None:
        """Run a part with the model of this process."""
        return self.run(_kept(self.source) if self._model is None else self._model, part)

    def run(self, model: nn.Module, part: PartOfExamples) -> Outcome | None:
        """Run a part. Return its outcome, or None if it was written to the folder.

        A part that another process has finished in the meantime does not run again.
        """
        folder = None if self._out is None else PartFolder(self._out)
        if folder is not None and folder.read(part.name) is not None:
            return None
        note = Path(self.notes) / str(part.number)
        # On another machine, there is no folder for notes.
        with suppress(OSError):
            note.touch()
        outcome = _outcome(self._analysis, model, part, progress=False)
        if folder is not None:
            folder.write(part.name, outcome)
        with suppress(OSError):
            note.unlink()
        return outcome if folder is None else None


@shows_progress
def _outcome(
    analysis: Callable[..., Any], model: nn.Module, part: PartOfExamples, progress: bool = True
) -> Outcome:
    """Run the analysis on a part, without a progress bar of its own."""
    now = running.RunningPart(part.first, is_whole=part.is_whole)
    examples = _at_model(model, part.examples)
    with running.running(now):
        result = analysis(model, examples, *part.args, **part.options)
    return Outcome.of(result, now)


def _at_model(model: nn.Module, examples: ReadExamples) -> ReadExamples:
    """Return examples on the device of the model."""
    device = next((weight.device for weight in model.parameters()), None)
    if device is None or isinstance(examples, list):
        return examples
    if isinstance(examples, Pairs):
        return examples.to(device)
    return examples.changed(lambda value: value.to(device))


def ended(executor: Any, job: PartRun, parts: Sequence[PartOfExamples]) -> Iterator[Ended]:
    """Run parts, and yield each part when it has ended.

    Args:
        executor: None, a Ray cluster, or an executor with `submit`.
        job: the job.
        parts: the parts.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as notes:
        job.notes = notes
        if executor is None:
            yield from _in_order(job, parts)
        elif isinstance(executor, Ray):
            yield from _on_ray(executor, job, parts)
        else:
            for part in _on_executor(executor, job, parts):
                yield _named(part, Path(notes), parts)


def _in_order(job: PartRun, parts: Sequence[PartOfExamples]) -> Iterator[Ended]:
    """Run parts one after the other."""
    for part in parts:
        try:
            outcome = job(part)
        except Exception as error:
            yield Ended(part, error=error)
        else:
            yield Ended(part, outcome)


def _on_executor(executor: Any, job: PartRun, parts: Sequence[PartOfExamples]) -> Iterator[Ended]:
    """Run parts on an executor. Parts that have not begun at an error are cancelled."""
    ended_futures: queue.SimpleQueue[Any] = queue.SimpleQueue()
    part_of = {}
    try:
        for part in parts:
            future = executor.submit(job, part)
            part_of[future] = part
            future.add_done_callback(ended_futures.put)
        for _ in parts:
            future = ended_futures.get()
            try:
                outcome = future.result()
            except Exception as error:
                yield Ended(part_of[future], error=error)
            else:
                yield Ended(part_of[future], outcome)
    finally:
        for future in part_of:
            future.cancel()


def _named(part: Ended, notes: Path, parts: Sequence[PartOfExamples]) -> Ended:
    """Return a part that has ended. If a worker died, its error names the parts that ran."""
    if not isinstance(part.error, concurrent.futures.BrokenExecutor):
        return part
    numbers = {int(note.name) for note in notes.iterdir()}
    ran = [each for each in parts if each.number in numbers] or [part.part]
    names = " or ".join(map(str, ran))
    error = HookError(
        f"a worker died while it ran {names}; call again with a new executor (with out=, only "
        "unfinished parts run)"
    )
    error.__cause__ = part.error
    return part._replace(error=error)


def _on_ray(cluster: Ray, job: PartRun, parts: Sequence[PartOfExamples]) -> Iterator[Ended]:
    """Run parts on a Ray cluster."""
    for number, outcome, error in cluster.outcomes(_run, job.source.make_model, (job,), parts):
        yield Ended(parts[number], outcome, error)


def _run(model: nn.Module, job: PartRun, part: PartOfExamples) -> Outcome | None:
    """Run a part with the model of a Ray worker."""
    return job.run(model, part)
