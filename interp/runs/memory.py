"""Default memory of runs and examples that are computed together."""

import torch

from hooks.base import free_memory

# On a GPU, the default is a share of the free memory, between two limits.
_SHARE = 0.5
_LEAST_BYTES = 2**29
_MOST_BYTES = 2**33


def bytes_together(device: torch.device, on_cpu: int) -> int:
    """Return the default of `max_bytes`: the memory of runs or examples that run together.

    The more of them run together, the fewer kernels start, and a GPU waits for each start.

    Args:
        device: the device of the computation.
        on_cpu: the result for the CPU, and for a device that does not report its free memory.
    """
    free = None if device.type == "cpu" else free_memory(device)
    if free is None:
        return on_cpu
    return max(_LEAST_BYTES, min(int(free * _SHARE), _MOST_BYTES))
