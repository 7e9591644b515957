"""Models whose weights a tensor-parallel plan splits over processes: what each process holds of a value.

1. A weight that is a DTensor with a mesh dimension `tp` shows that a model is split, and over which processes (`mesh_of`).
2. A value is whole if all of them hold the same numbers. They compare sums (`is_whole`).
3. Where each holds a part along one axis, `Shards` joins the parts, and cuts a whole value again.

All processes must ask for the same, in the same order, as they must run the model together.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn


def mesh_of(model: nn.Module) -> Any:
    """The mesh of the processes that weights of the model are split over; None if they are not."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for weight in model.parameters():
        # Weights of FSDP are DTensors too, of another dimension: there each process has texts of its own.
        mesh = getattr(weight, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1:
            return mesh["tp"]
    return None


def is_whole(value: Shaped[Tensor, "*axes"], mesh: Any) -> bool:
    """Return whether all processes of a mesh hold the same numbers."""
    real = torch.view_as_real(value) if value.is_complex() else value
    numbers = real.detach().flatten().to(torch.promote_types(real.dtype, torch.bfloat16))
    # Of seven pieces, because whole parts may well have the same sum: those of a softmax do.
    terms = [numbers.abs(), *numbers.tensor_split(7)]
    sums = torch.stack([term.sum(dtype=torch.float64) for term in terms]).nan_to_num(0.0, 1.0, -1.0)
    bounds = torch.stack([sums, -sums])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group())
    return bool((bounds.sum(0) <= 1e-6 * bounds[0, 0]).all())


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parts of a value that processes hold along one axis.

    Attributes:
        axis: the axis.
        size: its size in the whole value.
        mesh: the processes, in the order of the parts.
    """

    axis: int
    size: int
    mesh: Any

    @classmethod
    def of(cls, part: Shaped[Tensor, "*axes"], axis: int, mesh: Any) -> "Shards":
        """The shards of which this process holds `part`."""
        size = torch.tensor(part.shape[axis], device=part.device)
        dist.all_reduce(size, group=mesh.get_group())
        return cls(axis, int(size), mesh)

    def joined(self, part: Shaped[Tensor, "*axes"]) -> Tensor:
        """The whole value. Gradients of it go to the process that holds the part."""
        from torch.distributed.tensor import DTensor, Shard  # takes long

        shape = torch.Size([*part.shape[: self.axis], self.size, *part.shape[self.axis + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        placed = [Shard(self.axis)]
        return DTensor.from_local(part, self.mesh, placed, shape=shape, stride=stride).full_tensor()

    def part(self, whole: Shaped[Tensor, "*axes"]) -> Tensor:
        """The part of a whole value that this process holds. All processes get the whole gradient."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placed = DTensor.from_local(whole, self.mesh, [Replicate()])
        return placed.redistribute(placements=[Shard(self.axis)]).to_local()
