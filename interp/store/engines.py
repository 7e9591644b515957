"""Executors run the jobs of a harvest, and the parts of `over_examples`.

`tasks` runs jobs and parts on them. Ray provides processes, retries and transport.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hooks.base import library, require_integer, shown, without_handle
from interp.protocol import is_maker

Model = nn.Module | Callable[[], nn.Module]
"""A model, or a function that returns a model."""

JOBS_OF_WORKER = 4
"""The number of jobs for each worker.

With several jobs for each worker, a slow or lost job delays few other jobs.
"""

RETRIES = 10
"""The number of times that Ray restarts a job after its worker dies.

Files that were already written are not made again.
"""


WORKERS = 8
"""The number of workers of an executor that does not tell its number, such as a client of Dask."""


def n_workers(executor: Any) -> int:
    """Return the number of workers of an executor."""
    if isinstance(executor, Ray):
        return executor.workers
    # Executors have no public attribute for this number.
    return int(getattr(executor, "_max_workers", WORKERS))


def loaded(model: Model) -> nn.Module:
    """Return the model, from a model or from a function that returns a model.

    Raises:
        TypeError: if `model` is neither a model nor a function that returns a model.
    """
    module = without_handle(model() if is_maker(model) else model)
    if not isinstance(module, nn.Module):
        hint = "; give runner.model" if hasattr(module, "run_with_cache") else ""
        raise TypeError(
            "model must be a module, or a function that returns a module, such as "
            f"partial(models.load, 'gpt2'); got {type(module).__name__}{hint}"
        )
    return module


def require_executor(executor: Any) -> None:
    """Check that an executor can run jobs.

    Raises:
        TypeError: if it has no `submit`.
        ValueError: if it forks this process. A forked process has no threads of PyTorch, but their
            locks, and may wait for them forever.
    """
    if executor is None or isinstance(executor, Ray):
        return
    spawn = 'ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn"))'
    if not hasattr(executor, "submit"):
        raise TypeError(
            f"executor must have submit(), such as {spawn}, or be interp.store.Ray(...); got "
            f"{shown(executor)}"
        )
    # Executors have no public attribute for their start method.
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "executor must not fork this process, because forked processes wait forever for "
            f"threads of PyTorch; got the start method fork: write {spawn}"
        )


@dataclass(frozen=True)
class Ray:
    """Workers on a Ray cluster, or on this machine if no cluster is connected.

    Attributes:
        workers: the number of processes. Each process has its own model. If the cluster has no room
            for a process, the other processes run its jobs.
        resources: the resources of each process in Ray, such as `{"num_gpus": 1}`. Default: one CPU
            core.

    >>> from interp.store import harvest
    >>> workers = Ray(workers=8, resources={"num_gpus": 1})
    >>> harvest(model, texts, "*.resid_post", "out", executor=workers)  # doctest: +SKIP
    """

    workers: int = 1
    resources: Mapping[str, Any] = field(default_factory=dict)

    def outcomes(
        self,
        job: Callable[..., Any],
        model: Model,
        arguments: tuple[Any, ...],
        tasks: Sequence[Any],
    ) -> Iterator[tuple[int, Any, BaseException | None]]:
        """Run a job for each task, and yield the outcome of each task when it has ended.

        If a worker dies, it is restarted and its task is repeated, at most `RETRIES` times.

        Args:
            job: a function that is called with the model, the arguments and a task.
            model: see `harvest`. If it is a module, each worker gets a copy.
            arguments: the arguments that all tasks share.
            tasks: the tasks.

        Yields:
            The number of the task, the value that the job returned, and the error of the task, or
            None.

        Raises:
            ImportError: if Ray is not installed.
            ValueError: if `workers` is below 1.
        """
        require_integer("workers", self.workers)
        ray = library("ray", extra="ray")
        if not ray.is_initialized():
            ray.init()
        options = {"num_cpus": 1, **self.resources, "max_restarts": -1, "max_task_retries": RETRIES}
        actor: Any = ray.remote(_worker_class(job)).options(**options)
        references = ray.put(model), ray.put(arguments)
        n_actors = min(self.workers, len(tasks))
        workers = [actor.remote(*references) for _ in range(n_actors)]
        yield from _run_tasks(ray, workers, tasks)


def _worker_class(job: Callable[..., Any]) -> type:
    """Return the class of the processes that run a job."""

    class Worker:
        """A process with one model."""

        def __init__(self, model: Model, arguments: tuple[Any, ...]) -> None:
            self._model = loaded(model)
            self._arguments = arguments

        def ready(self) -> None:
            """Return as soon as the model is loaded."""

        def run(self, task: Any) -> Any:
            """Run the job for one task, and return its value."""
            return job(self._model, *self._arguments, task)

    return Worker


def _run_tasks(
    ray: Any, workers: Sequence[Any], tasks: Sequence[Any]
) -> Iterator[tuple[int, Any, BaseException | None]]:
    """Give each worker a task as soon as it is free, and yield the outcome of each task.

    A worker gets its first task after it has started, because the cluster may not have room for all
    workers.
    """
    busy: dict[Any, tuple[Any, int | None]] = {}
    for worker in workers:
        busy[worker.ready.remote()] = worker, None
    rest = iter(range(len(tasks)))
    n_left = len(tasks)
    try:
        while n_left:
            (ended,), _ = ray.wait([*busy])
            worker, number = busy.pop(ended)
            value, error = None, None
            try:
                value = ray.get(ended)
            except ray.exceptions.RayTaskError as failed:
                error = failed.cause
            except ray.exceptions.RayError as failed:
                error = failed
            if number is not None:
                n_left -= 1
                yield number, value, error
            elif error is not None:
                raise error
            if (following := next(rest, None)) is not None:
                busy[worker.run.remote(tasks[following])] = worker, following
            else:
                # No task is left for this worker, so end it. A worker that was restarted, and that
                # still has a task, may be waiting for its resources.
                ray.kill(worker)
    finally:
        for worker, _ in busy.values():
            ray.kill(worker)
