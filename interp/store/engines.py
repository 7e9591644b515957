"""Engines: where the jobs of a harvest run. Ray brings processes, retries and transport."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hooks.base import library, progress_bar, require_integer

Model = nn.Module | Callable[[], nn.Module]
"""A model, or a function that makes one."""

JOBS_OF_WORKER = 4
"""Jobs for each worker: several, so that one that is late or lost keeps few others waiting."""

RETRIES = 10
"""Times that Ray starts a job again whose worker died. Files that were written are not made again."""


def loaded(model: Model) -> nn.Module:
    """The model itself.

    Raises:
        TypeError: if it is none of these.
    """
    made = model if isinstance(model, nn.Module) or not callable(model) else model()
    if not isinstance(made, nn.Module):
        raise TypeError(
            "model must be a module, or a function that makes one, such as "
            f"partial(models.load, 'gpt2'); got {type(made).__name__}"
        )
    return made


@dataclass(frozen=True)
class Ray:
    """Workers of a Ray cluster or, where none is connected, of this machine.

    Attributes:
        workers: how many processes there are, each with a model of its own. Those that the cluster has no room for wait, and
            the others do their jobs.
        resources: what Ray gives each, such as `{"num_gpus": 1}`; one core by default.
    """

    workers: int = 1
    resources: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self,
        job: Callable[..., None],
        model: Model,
        arguments: tuple[Any, ...],
    ) -> None:
        """Do all jobs of a harvest by the workers. One that dies is started again, and its job goes on.

        Args:
            job: is called with the model, the arguments, and which job this is, of how many.
            model: see `harvest`; of a module, each worker gets a copy.
            arguments: the first are the texts.

        Raises:
            ImportError: if Ray is not installed.
            ValueError: if there is no worker.
            TypeError: if the texts can be read only once.
        """
        require_integer("workers", self.workers)
        if isinstance(arguments[0], Iterator):
            raise TypeError(
                "each worker reads the texts, so they must be a path, a list or a table; "
                f"got a {type(arguments[0]).__name__}"
            )
        ray = library("ray", "hookscope[ray]")
        if not ray.is_initialized():
            ray.init()

        class Worker:
            """A process with one model."""

            def __init__(self, model: Model, arguments: tuple[Any, ...]) -> None:
                self._model, self._arguments = loaded(model), arguments

            def ready(self) -> int:
                """Say that the model is there: no job is done yet."""
                return 0

            def run(self, *shard: int) -> int:
                """Do one job."""
                job(self._model, *self._arguments, shard)
                return 1

        options = {"num_cpus": 1, **self.resources, "max_restarts": -1, "max_task_retries": RETRIES}
        actor: Any = ray.remote(Worker).options(**options)
        held = ray.put(model), ray.put(arguments)
        # A job goes to a worker that is there: the cluster may have no room for all.
        started = (actor.remote(*held) for _ in range(self.workers))
        busy: dict[Any, Any] = {worker.ready.remote(): worker for worker in started}
        of = JOBS_OF_WORKER * self.workers
        jobs, left = iter(range(of)), of
        with progress_bar("jobs", total=of, unit="job") as count:
            while left:
                (done,), _ = ray.wait([*busy])
                worker = busy.pop(done)
                try:
                    n_done = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                left -= n_done
                count(n_done)
                if (number := next(jobs, None)) is not None:
                    busy[worker.run.remote(number, of)] = worker
                else:  # one that is started again, with its job, may be waiting for the room
                    ray.kill(worker)
