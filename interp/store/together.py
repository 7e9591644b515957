"""Run a fully sharded model (FSDP) in all of its processes together.

Each run gathers weights from all processes, so all processes must make the same number of runs.

1. Before each run, a process announces the run to the other processes.
2. A process that has finished its texts goes on with runs whose results are not used, until no
   process announces a run.
3. A process that fails between two runs announces the failure, and the other processes raise an
   error, too. If a process fails inside a run, the other processes wait for its weights until it
   ends, or until the timeout of `init_process_group`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hooks import HookError
from hooks.base import is_fully_sharded

# The announcements of a process. A process that failed announces `_FAILED` plus its number.
_NO_RUN = 0
_RUN = 1
_FAILED = 2


class Together:
    """The processes over which a model is fully sharded. A model that is not sharded runs alone.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = [module for module in model.modules() if is_fully_sharded(module)]
        self._is_alone = not sharded
        self._group = None if self._is_alone else _group_of(sharded[0])
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        # True if the next step of the other processes is to wait for an announcement of this one.
        # It is False during a run.
        self._is_awaited = True

    @contextmanager
    def runs(self, run_along: Callable[[], Any]) -> Iterator[None]:
        """Return a context for all runs of this process.

        At the end of the context, this process makes runs whose results are not used, until the
        other processes have finished.

        Args:
            run_along: a function that makes one run whose result is not used.

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
        """Return a context for one run of this process, which is announced to the other processes.

        Raises:
            HookError: if another process has failed.
        """
        self._any_runs(True)
        self._is_awaited = False
        yield
        self._is_awaited = True

    def _any_runs(self, runs: bool) -> bool:
        """Return True if any process makes a run now. All processes must call this together."""
        if self._is_alone:
            return False
        largest = self._largest(_RUN if runs else _NO_RUN)
        if largest >= _FAILED:
            self._is_awaited = False
            raise HookError(
                f"process {largest - _FAILED} of this fully sharded model failed, and no process "
                "can run without it: see the error of that process (finished files are valid, and "
                "the same call makes the missing files)"
            )
        return largest == _RUN

    def _largest(self, number: int) -> int:
        """Return the largest number of all processes."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return int(numbers.item())


def _group_of(module: nn.Module) -> Any:
    """Return the process group over which a module is sharded; None means all processes."""
    group = getattr(module, "process_group", None)
    meshes = [getattr(weight, "device_mesh", None) for weight in module.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else group
