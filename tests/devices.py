"""Pretended devices: models of fake tensors on `cuda:0` and others, without such a device."""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

MAKERS = {
    torch.Tensor.new_empty: torch.empty,
    torch.Tensor.new_zeros: torch.zeros,
    torch.Tensor.new_ones: torch.ones,
    torch.Tensor.new_tensor: torch.asarray,
}


class Driverless(TorchFunctionMode):
    """What would ask the device's driver, by functions that do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and args[0].is_cuda:
            return subscript(*args)
        if func in MAKERS and args[0].is_cuda:
            like, *made = args
            given = dict(dtype=like.dtype, device=like.device) | (kwargs or {})
            return MAKERS[func](*made, **given)
        if func is torch.Tensor.copy_ and args[0].is_cuda:
            return torch.ops.aten.copy_(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def subscript(value, index):
    axis, index = 0, index if isinstance(index, tuple) else (index,)
    index = [*index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        given = sum(part is not None for part in index) - 1
        index[at : at + 1] = [slice(None)] * (value.ndim - given)
    for part in index:
        if part is None:
            value = value.unsqueeze(axis)
        elif isinstance(part, int):
            value, axis = value.select(axis, part), axis - 1
        else:
            start, end, _ = part.indices(value.shape[axis])
            value = value.narrow(axis, start, max(end - start, 0))
        axis += 1
    return value


@contextlib.contextmanager
def pretended():
    """Within it, tensors are fake, and may be on any device."""
    choice = sdpa_kernel(SDPBackend.MATH)  # which would ask the driver, in builds for CUDA
    with FakeTensorMode(allow_non_fake_inputs=True), Driverless(), choice, torch.no_grad():
        yield


def placed(config, dtype, *devices):
    """A model of fake tensors in `pretended`: its blocks in equal parts on the devices, in order."""
    from models import Transformer

    with torch.device("meta"):
        model = Transformer(config).eval()
    for name, weight in model.named_parameters(remove_duplicate=False):
        place, _, last = name.rpartition(".")
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        device = devices[layer * len(devices) // len(model.blocks)]
        empty = torch.empty(weight.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(place), last, torch.nn.Parameter(empty))
    return model
