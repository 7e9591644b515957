"""Parts of a value in several processes, for models that a tensor-parallel plan splits.

1. A model is split if a weight is a DTensor with a mesh dimension `tp`. The mesh contains the
   processes (`mesh_of`).
2. A value is whole if all processes have the same numbers. They compare sums (`is_whole`).
3. If each process has a part along one axis, `Shards` joins the parts, and divides a whole value
   again.

All processes must make the same calls in the same order, because they run the model together.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks.base.closeness import float32_rounding


def mesh_of(model: nn.Module) -> Any:
    """Return the mesh of the processes over which a model is split; None if it is not split."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for weight in model.parameters():
        # Weights of FSDP are DTensors too, but with a different mesh dimension: each process then
        # has different texts.
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1:
            return mesh["tp"]
    return None


def whole(weight: Shaped[Tensor, "*axes"]) -> Tensor:
    """Return a weight with the parts of all processes, if tensor parallel or FSDP divides it.

    All processes must make the same call. Other weights are returned as they are.
    """
    join = getattr(weight, "full_tensor", None)
    return weight if join is None else join()


def is_whole(value: Shaped[Tensor, "*axes"], mesh: Any) -> bool:
    """Return whether all processes of a mesh have the same numbers."""
    real = torch.view_as_real(value) if value.is_complex() else value
    numbers = real.detach().flatten().to(torch.promote_types(real.dtype, torch.bfloat16))
    # Different parts may have the same sum, such as rows of attention patterns, which sum to 1. So
    # compare the sums of seven pieces of the value too.
    terms = [numbers.abs(), *numbers.tensor_split(7)]
    sums = torch.stack([term.sum(dtype=torch.float64) for term in terms]).nan_to_num(0.0, 1.0, -1.0)
    bounds = torch.stack([sums, -sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group())
    return bool((bounds.sum(0) <= float32_rounding() * bounds[0, 0]).all())


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of a value in several processes, along one axis.

    Attributes:
        axis: the axis.
        size: the size of the axis in the whole value.
        mesh: the processes, in the order of the parts.
    """

    axis: int
    size: int
    mesh: Any

    @classmethod
    def of(cls, part: Shaped[Tensor, "*axes"], axis: int, mesh: Any) -> "Shards":
        """Return the shards of a value.

        Args:
            part: the part of the value in this process.
            axis: the axis along which the value is divided.
            mesh: the processes, in the order of the parts.
        """
        size = torch.tensor(part.shape[axis], device=part.device)
        dist.all_reduce(size, group=mesh.get_group())
        return cls(axis, int(size), mesh)

    def joined(self, part: Shaped[Tensor, "*axes"]) -> Tensor:
        """Return the whole value, with the parts of all processes.

        In a backward pass, each process receives the gradient of its own part.
        """
        # This import is slow, and most programs never need it.
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size([*part.shape[: self.axis], self.size, *part.shape[self.axis + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        placed = [Shard(self.axis)]
        return DTensor.from_local(part, self.mesh, placed, shape=shape, stride=stride).full_tensor()

    def part(self, value: Shaped[Tensor, "*axes"]) -> Tensor:
        """Return the part of a whole value that belongs to this process.

        In a backward pass, each process receives the gradient of the whole value.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placed = DTensor.from_local(value, self.mesh, [Replicate()])
        return placed.redistribute(placements=[Shard(self.axis)]).to_local()
