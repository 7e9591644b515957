"""Engines run the jobs of a harvest. Ray provides processes, retries and transport."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hooks.base import library, progress_bar, require_integer

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


def loaded(model: Model) -> nn.Module:
    """Return the model, from a model or from a function that returns a model.

    Raises:
        TypeError: if `model` is neither a model nor a function that returns a model.
    """
    module = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(module, nn.Module):
        raise TypeError(
            "model must be a module, or a function that returns a module, such as "
            f"partial(models.load, 'gpt2'); got {type(module).__name__}"
        )
    return module


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
    >>> harvest(model, texts, "*.resid_post", "out", engine=workers)  # doctest: +SKIP
    """

    workers: int = 1
    resources: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self,
        job: Callable[..., None],
        model: Model,
        arguments: tuple[Any, ...],
    ) -> None:
        """Run all jobs of a harvest. If a worker dies, it is restarted and its job continues.

        Args:
            job: a function that runs one job. It is called with the model, the arguments and the
                pair (job, number of jobs).
            model: see `harvest`. If it is a module, each worker gets a copy.
            arguments: the arguments of the job. The first argument is the texts.

        Raises:
            ImportError: if Ray is not installed.
            ValueError: if `workers` is below 1.
            TypeError: if the texts can be read only once.
        """
        require_integer("workers", self.workers)
        if isinstance(arguments[0], Iterator):
            raise TypeError(
                "texts must be a path, a list or a table, because each worker reads them; "
                f"got a {type(arguments[0]).__name__}"
            )
        ray = library("ray", "hookscope[ray]")
        if not ray.is_initialized():
            ray.init()
        options = {"num_cpus": 1, **self.resources, "max_restarts": -1, "max_task_retries": RETRIES}
        actor: Any = ray.remote(_worker_class(job)).options(**options)
        references = ray.put(model), ray.put(arguments)
        workers = [actor.remote(*references) for _ in range(self.workers)]
        _run_jobs(ray, workers, JOBS_OF_WORKER * self.workers)


def _worker_class(job: Callable[..., None]) -> type:
    """Return the class of the processes that run a job."""

    class Worker:
        """A process with one model."""

        def __init__(self, model: Model, arguments: tuple[Any, ...]) -> None:
            self._model = loaded(model)
            self._arguments = arguments

        def ready(self) -> int:
            """Return 0, the number of finished jobs, as soon as the model is loaded."""
            return 0

        def run(self, *shard: int) -> int:
            """Run one job, and return 1, the number of finished jobs."""
            job(self._model, *self._arguments, shard)
            return 1

    return Worker


def _run_jobs(ray: Any, workers: Sequence[Any], n_jobs: int) -> None:
    """Give each worker a job as soon as it is free, until all jobs have finished.

    A worker gets its first job after it has started, because the cluster may not have room for all
    workers.
    """
    busy = {worker.ready.remote(): worker for worker in workers}
    jobs = iter(range(n_jobs))
    n_left = n_jobs
    with progress_bar("jobs", total=n_jobs, unit="job") as count:
        while n_left:
            (finished,), _ = ray.wait([*busy])
            worker = busy.pop(finished)
            try:
                n_done = ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            n_left -= n_done
            count(n_done)
            if (number := next(jobs, None)) is not None:
                busy[worker.run.remote(number, n_jobs)] = worker
            else:
                # No job is left for this worker, so end it. A worker that was restarted, and that
                # still has a job, may be waiting for its resources.
                ray.kill(worker)
