"""Runs of a fully sharded model (FSDP), which all of its processes make together.

Each run gathers weights from all processes, so all must make equally many. A process says before a
run that it makes one. A process that has nothing left to read runs along until no other one does.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hooks.base import is_fully_sharded


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

    def begin_run(self) -> None:
        """Say that this process makes a run now."""
        self._any_runs(True)

    def run_along(self, run: Callable[[], Any]) -> None:
        """Call `run` for each run that other processes still make."""
        while self._any_runs(False):
            run()

    def _any_runs(self, runs: bool) -> bool:
        """Return whether any process makes a run now. All processes must ask."""
        if self._is_alone:
            return False
        asked = torch.tensor([int(runs)], device=self._device)
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return bool(asked.item())


def _group_of(module: nn.Module) -> Any:
    """Return the group of processes that a module is sharded over; None for all processes."""
    group = getattr(module, "process_group", None)
    meshes = [getattr(weight, "device_mesh", None) for weight in module.parameters()]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    return mesh.get_group() if mesh is not None and mesh.ndim == 1 else group
