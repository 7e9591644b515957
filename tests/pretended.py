"""Devices that are not there: tensors that compute on the CPU, and a record of what would move and
stop.
"""

from collections import Counter
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# PyTorch runs backward passes on its lazy devices without a driver.
DEVICE, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)
# How often CUDA's kernels read a value back: for the size of their result, or for a check.
READS = Counter(
    dict.fromkeys(("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"), 1)
    | dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive", "isin"), 1)
    | {"multinomial": 2}
)


class Pretended(Tensor):
    """A tensor on a device; `there` holds its values."""

    __module__ = "torch"  # `from_hf` refuses weights of other kinds

    @staticmethod
    def __new__(cls, there, device):
        about = dict(strides=there.stride(), storage_offset=there.storage_offset())
        about |= dict(dtype=there.dtype, device=device)
        made = Tensor._make_wrapper_subclass(cls, there.shape, **about)
        made.there = there
        return made

    is_cuda = property(lambda self: True)

    def untyped_storage(self):
        return self.there.untyped_storage()

    def new_tensor(self, data):
        # Otherwise a driver is asked for the current device.
        return torch.tensor(data, dtype=self.dtype, device=self.device)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise RuntimeError(f"{operation} outside of the device's `with`")


class Devices(TorchDispatchMode):
    """A `with` in which tensors can be on `DEVICE` and `SECOND`.

    Attributes:
        stops: how often the host waited for a device, by operation.
        waits: how often it waited for copies that it had started. Until then they are zero.
        moves: the shape and the target of each copy from a device to another or to the CPU.
    """

    def __enter__(self):
        self.stops, self.waits, self.moves, self._late = Counter(), 0, [], []
        # As in fake modes: `torch.tensor(..., device=...)` begins on the CPU.
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        event = mock.Mock()
        event.synchronize = self._wait
        parts = {"Event": lambda: event, "current_stream": lambda device: None}
        self._patch = mock.patch.multiple(torch.cuda, **parts)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        torch._C._set_only_lift_cpu_tensors(self._before)
        return super().__exit__(*error)

    def _wait(self):
        self.waits += 1
        for copy, values in self._late:
            copy.data.copy_(values)  # a device's writes are not counted as versions
        self._late.clear()

    def counted(self, run):
        """The result of `run`, the stops and the waits in it."""
        self.stops.clear()
        before = self.waits
        return run(), dict(self.stops), self.waits - before

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), operation.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        pretended = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
        device = torch.device(kwargs.get("device") or (pretended[0].device if pretended else "cpu"))
        if device.type == DEVICE.type:
            device = torch.device(DEVICE.type, device.index or 0)
        if name in ("_to_copy", "copy_"):
            source, device = (args[1], args[0].device) if name == "copy_" else (args[0], device)
            if source.device != device:
                if not source.is_cpu:
                    self.moves.append((tuple(source.shape), device))
                # Two devices copy by themselves.
                waits = not (kwargs.get("non_blocking") or args[2:])
                self.stops[name] += waits and (source.is_cpu or device.type == "cpu")
        elif pretended:
            self.stops[name] += READS[name]
            for other in tensors:
                index = name in ("index", "index_put", "index_put_") and other is not args[0]
                there = other.device == pretended[0].device
                if (index and other.dtype == torch.bool) or not (
                    there or (other.is_cpu and other.ndim == 0)
                ):
                    assert there or (index and other.is_cpu), (
                        f"{operation} of tensors on two devices"
                    )
                    self.stops[name] += 1
            # A number on the CPU is copied to the device.
            self.stops[name] += name == "where" and len(tensors) > len(pretended)
        self.stops += Counter()  # without zeros
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        plain = tree_map(lambda leaf: getattr(leaf, "there", leaf), (args, kwargs))
        if name == "histc" and not plain[0][0].is_floating_point():
            # CUDA counts integers too.
            plain = ((plain[0][0].float(), *plain[0][1:]), plain[1])
        result = operation(*plain[0], **plain[1])
        if device.type != DEVICE.type:
            if not pretended:
                return result
            copy = torch.zeros_like(result) if kwargs.get("non_blocking") else result.clone()
            self._late.append((copy, result.clone()))
            return copy
        same = {id(tensor.there): tensor for tensor in pretended}  # of operations in place

        def there(leaf):
            if not isinstance(leaf, Tensor):
                return leaf
            return same[id(leaf)] if id(leaf) in same else Pretended(leaf, device)

        return tree_map(there, result)


def split(model, *devices, **others):
    """The model with its blocks in equal parts on the devices, in order.

    The rest is on the first device, but for parts that `others` names.
    """
    for n, block in enumerate(model.blocks):
        block.to(devices[n * len(devices) // len(model.blocks)])
    for name, part in model.named_children():
        if name != "blocks":
            part.to(others.get(name, devices[0]))
    if model.config.tied_unembed:  # PyTorch moved each of the two names of the weight
        model.unembedding.weight = model.token_embedding.weight
    return model
