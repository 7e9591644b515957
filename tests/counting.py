"""Count the work of a GPU without a GPU: starts of kernels, and waits of Python.

Counts are not times, so tests may assert them. See `counted`.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended import DEVICE, Devices

# These operations return a view, memory without values, a dtype or a number. They start no kernel.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
NO_KERNEL |= {"_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"}
NO_KERNEL |= {"promote_types", "result_type", "_local_scalar_dense"}


class Starts(TorchDispatchMode):
    """A mode for a `with` that counts operations, except views.

    It runs on the CPU, where PyTorch keeps fused attention and linear maps as one operation.

    Attributes:
        operations: the number of calls of each operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view and operation.overloadpacket.__name__ not in NO_KERNEL:
            self.operations[operation.overloadpacket.__name__] += 1
        return operation(*args, **kwargs or {})


class HostStarts(Starts):
    """A mode that counts only operations whose tensors are all on the CPU.

    It runs with tensors on the pretended device. There, these operations start no kernel.
    """

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        before = self.operations.copy()
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if not all(tensor.is_cpu for tensor in tensors):
            self.operations = before
        return result


@dataclasses.dataclass(frozen=True)
class Counts:
    """The work of one call.

    Attributes:
        starts: the number of kernels that Python starts.
        waits: the number of times that Python waits for the device.
        operations, stops: both numbers, divided by operation.
        on_host: the number of operations on tensors that stay on the CPU, such as a small table of
            the tokens. They start no kernel and are not in `operations`.
    """

    starts: int
    waits: int
    operations: Counter[str]
    stops: Counter[str]
    on_host: Counter[str]


def counted(job: Callable[..., object], *given: Any) -> Counts:
    """Return the work of `job(*given)` on a device.

    Kernels are counted in a run on the CPU. Waits are counted in a second run, on copies of `given`
    that are on the pretended device (see `tests.pretended`). The pretended device divides fused
    operations into parts, so kernels cannot be counted there. But this run shows which operations
    stay on the CPU, and these are subtracted.

    Args:
        job: a function of the given values. It must take all models and tensors as arguments.
        given: models, tensors, and tuples or dicts of tensors, on the CPU.
    """
    job(*given)  # a first call may prepare tables that later calls use again
    with Starts() as starts:
        job(*given)
    with Devices() as devices:
        there = [_moved(value) for value in given]
        job(*there)
        _, stops, waits = devices.counted(lambda: job(*there))
        with HostStarts() as host:
            job(*there)
    on_host = starts.operations & host.operations
    operations = starts.operations - on_host
    return Counts(
        starts=operations.total(),
        waits=sum(stops.values()) + waits,
        operations=operations,
        stops=Counter(stops),
        on_host=on_host,
    )


def _moved(value: Any) -> Any:
    """Return a copy of a model, a tensor, or a tuple or dict of tensors on the pretended device."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to(DEVICE)
    return tree_map(lambda leaf: leaf.to(DEVICE) if isinstance(leaf, Tensor) else leaf, value)
