"""Runs of a fully sharded model (FSDP), which all of its processes make together.

Each run gathers weights from all processes, so all must make equally many.

1. A process says before a run that it makes one.
2. A process that has nothing left to read runs along until no other process makes a run.
3. A process that fails between two runs says so, and the other processes raise an error, too. If it fails inside a run,
   the other processes wait for its weights until it ends, or until the timeout of `init_process_group`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hooks import HookError
from hooks.base import is_fully_sharded

_NO_RUN, _RUN, _FAILED = 0, 1, 2  # the number of the process is added to the last one


class Together:
    """The processes that a model is fully sharded over; a model that is not sharded runs alone.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = [module for module in model.modules() if is_fully_sharded(module)]
        self._is_alone = not sharded
        self._group = None if self._is_alone else _group_of(sharded[0])
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        # Whether the other processes wait for what this one says next.
        self._is_awaited = True

    @contextmanager
    def runs(self, run_along: Callable[[], Any]) -> Iterator[None]:
        """A `with` in which this process makes its runs. At its end it runs along with the other processes.

        Args:
            run_along: makes one run.

        Raises:
            HookError: if another process fails between two runs.
        """
        try:
            yield
        except Exception:
            if self._is_awaited and not self._is_alone:
                self._largest(_FAILED + dist.get_rank())
            raise
        while self._any_runs(False):
            run_along()

    @contextmanager
    def run(self) -> Iterator[None]:
        """A `with` in which this process makes one run, after it has told the other processes.

        Raises:
            HookError: if another process has failed.
        """
        self._any_runs(True)
        self._is_awaited = False
        yield
        self._is_awaited = True

    def _any_runs(self, runs: bool) -> bool:
        """Return whether any process makes a run now. All processes must ask."""
        if self._is_alone:
            return False
        largest = self._largest(_RUN if runs else _NO_RUN)
        if largest >= _FAILED:
            self._is_awaited = False
            raise HookError(
                f"process {largest - _FAILED} of this fully sharded model failed, and no process can run without it: "
                "see its own error (files that are whole stay, and the same call makes the others)"
            )
        return largest == _RUN

    def _largest(self, number: int) -> int:
        """Return the largest of the numbers that the processes give."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return int(numbers.item())


def _group_of(module: nn.Module) -> Any:
    """Return the group of processes that a module is sharded over; None for all processes."""
    group = getattr(module, "process_group", None)
    meshes = [getattr(weight, "device_mesh", None) for weight in module.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else group
