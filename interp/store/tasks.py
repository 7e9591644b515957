"""Run tasks in this process, on an executor with a method `submit`, or on a Ray cluster.

1. A task is one job of a harvest, or one part of the examples of `over_examples`.
2. In this process, all tasks share one model. Another process keeps its model from task to task,
   until it runs a task of another call.
3. A worker that runs a task writes a note into a temporary folder. If a worker dies, the notes that
   are left name its task.
"""

import concurrent.futures
import pickle
import queue
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from hooks import HookError
from hooks.base import shown
from interp.store.engines import Model, Ray, loaded


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


# An executor gives a function no other place to keep a model from one task to the next. Only worker
# processes fill this place, with one model.
@lru_cache(maxsize=1)
def _kept(source: ModelSource) -> nn.Module:
    """Return the model of a call."""
    return loaded(source.make_model)


@dataclass(frozen=True, eq=False)
class TaskRun:
    """A function that runs one task.

    Attributes:
        function: a function that is called with the model, the arguments and a task.
        arguments: the arguments that all tasks share.
        source: the source of the model.
        model: the model for tasks that run in this process; None to load it from the source.
        notes: the folder for notes.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    source: ModelSource
    model: nn.Module | None = None
    notes: str = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which loads a model of its own."""
        return {**vars(self), "model": None}

    def __call__(self, number: int, task: Any) -> Any:
        """Run a task with the model of this process, and return its value."""
        note = Path(self.notes) / str(number)
        # On another machine, there is no folder for notes.
        with suppress(OSError):
            note.touch()
        try:
            model = _kept(self.source) if self.model is None else self.model
            return self.function(model, *self.arguments, task)
        finally:
            with suppress(OSError):
                note.unlink()


def require_shard(shard: Any, form: str, name: str = "shard") -> tuple[int, int]:
    """Return the number of a shard and the number of shards.

    Args:
        shard: the two numbers.
        form: their names, for the error.
        name: the name of the argument, for the error.

    Raises:
        TypeError: if they are not two integers.
        ValueError: if the first is negative or too large.
    """
    is_pair = isinstance(shard, tuple | list) and [*map(type, shard)] == [int, int]
    number, n_shards = shard if is_pair else (0, 0)
    if not 0 <= number < n_shards:
        first, last = form.split(", ")
        error = ValueError if is_pair else TypeError
        raise error(
            f"{name} must be two integers ({form}) with 0 <= {first} < {last}; got {shown(shard)}"
        )
    return number, n_shards


def runs_here(executor: Any) -> bool:
    """Return whether all tasks run in this process, and share its model."""
    return executor is None or isinstance(executor, ThreadPoolExecutor)


def run_tasks(executor: Any, run: TaskRun, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Run tasks, and yield the number and the value of each task when it has ended.

    The error of a task is raised with a note that names the task.

    Args:
        executor: None, a Ray cluster, or an executor with `submit`.
        run: the function that runs one task.
        tasks: the tasks. `str(task)` is the name of a task in errors.

    Raises:
        HookError: if a worker dies, or ends its program.
        TypeError: if a task cannot be sent to a process.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as notes:
        run = replace(run, notes=notes)
        for number, value, error in _ended(executor, run, tasks):
            if isinstance(error, concurrent.futures.BrokenExecutor):
                raise _death(number, Path(notes), tasks) from error
            if isinstance(error, SystemExit):
                raise HookError(
                    f"code in a worker must not end the program; {tasks[number]} raised {error!r}"
                ) from error
            if (reason := _unpickled(error, executor, run, tasks[number])) is not None:
                raise TypeError(
                    "worker processes need functions that they can import, so define them with def "
                    f"at the top level of a module, or use threads; got an error: {reason}"
                ) from error
            if error is not None:
                error.add_note(f"this error was raised in {tasks[number]}")
                raise error
            yield number, value


def _ended(
    executor: Any, run: TaskRun, tasks: Sequence[Any]
) -> Iterator[tuple[int, Any, BaseException | None]]:
    """Run tasks, and yield the number, the value and the error of each task when it has ended."""
    if isinstance(executor, Ray):
        return executor.outcomes(run.function, run.source.make_model, run.arguments, tasks)
    return _in_order(run, tasks) if executor is None else _on_executor(executor, run, tasks)


def _in_order(
    run: TaskRun, tasks: Sequence[Any]
) -> Iterator[tuple[int, Any, BaseException | None]]:
    """Run the tasks here, one at a time, and yield the number, the value and the error of each
    task."""
    for number, task in enumerate(tasks):
        value, error = None, None
        try:
            value = run(number, task)
        except Exception as raised:
            error = raised
        yield number, value, error


def _on_executor(
    executor: Any, run: TaskRun, tasks: Sequence[Any]
) -> Iterator[tuple[int, Any, BaseException | None]]:
    """Run tasks on an executor. Tasks that have not begun at an error are cancelled."""
    ended_futures: queue.SimpleQueue[Any] = queue.SimpleQueue()
    number_of = {}
    try:
        for number, task in enumerate(tasks):
            future = executor.submit(run, number, task)
            number_of[future] = number
            future.add_done_callback(ended_futures.put)
        for _ in tasks:
            future = ended_futures.get()
            value, error = None, None
            try:
                value = future.result()
            # In a worker, `SystemExit` is the error of a task, and must not end this process.
            except (Exception, SystemExit) as raised:
                error = raised
            yield number_of[future], value, error
    finally:
        for future in number_of:
            future.cancel()


def _unpickled(
    error: BaseException | None, executor: Any, run: TaskRun, task: Any
) -> Exception | None:
    """Return the reason why a task cannot be sent to a process; None for errors of the task."""
    errors = (pickle.PicklingError, AttributeError, TypeError)
    if not isinstance(executor, ProcessPoolExecutor) or not isinstance(error, errors):
        return None
    try:
        pickle.dumps((run, task))
    except errors as reason:
        return reason
    return None


def _death(number: int, notes: Path, tasks: Sequence[Any]) -> HookError:
    """Return the error of a worker that has died. It names the tasks that ran at that time."""
    numbers = sorted(int(note.name) for note in notes.iterdir()) or [number]
    names = " or ".join(str(tasks[number]) for number in numbers)
    return HookError(
        f"a worker died while it ran {names}; call again with a new executor (tasks whose files "
        "are stored do not run again)"
    )
