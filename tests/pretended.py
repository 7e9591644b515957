"""Pretended devices, to count waits and copies without a GPU.

A pretended tensor says that it is on a device, but computes on the CPU. `Devices` counts how often
Python would wait for the device, and records each copy between devices.
"""

from collections import Counter
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Use PyTorch's device type "lazy", because its backward passes run without a driver.
DEVICE, SECOND = torch.device("lazy", 0), torch.device("lazy", 1)
# On CUDA, these operations copy a number to the CPU and wait for it, because they need the size of
# their result or check their input. Each value is the number of such waits in one call.
READS = Counter(
    dict.fromkeys(("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"), 1)
    | dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive", "isin"), 1)
    | {"multinomial": 2}
)


class Pretended(Tensor):
    """A tensor on a pretended device. `there` is the tensor on the CPU that has its values."""

    # `from_hf` accepts only weights whose class belongs to PyTorch.
    __module__ = "torch"

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
        # PyTorch's own method asks the driver for the current device, and there is no driver.
        return torch.tensor(data, dtype=self.dtype, device=self.device)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise RuntimeError(f"{operation} outside of the device's `with`")


class Devices(TorchDispatchMode):
    """A mode for a `with`, in which tensors can be on the pretended devices `DEVICE` and `SECOND`.

    Attributes:
        stops: the number of times that Python waited for a device, for each operation.
        waits: the number of times that Python waited for the copies that it had started with
            `non_blocking=True`. Until Python waits for them, these copies contain zeros.
        moves: the shape and the target of each copy from a device to another or to the CPU.
    """

    def __enter__(self):
        self.stops, self.waits, self.moves, self._late = Counter(), 0, [], []
        # `torch.tensor(..., device=...)` must make its tensor on the CPU first, as in PyTorch's
        # fake tensor mode, so that this mode sees the copy to the device.
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
            # Writing through `.data` changes no version, like the write of a real device.
            copy.data.copy_(values)
        self._late.clear()

    def counted(self, run):
        """Return the result of `run`, and the `stops` and the number of `waits` during it."""
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
                # Python does not wait for a copy from one device to another device.
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
            # `where` copies a number on the CPU to the device, and waits for this copy.
            self.stops[name] += name == "where" and len(tensors) > len(pretended)
        self.stops += Counter()  # removes the operations whose count is zero
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        plain = tree_map(lambda leaf: getattr(leaf, "there", leaf), (args, kwargs))
        if name == "histc" and not plain[0][0].is_floating_point():
            # On CUDA, `histc` accepts integers. On the CPU it needs floating point numbers.
            plain = ((plain[0][0].float(), *plain[0][1:]), plain[1])
        result = operation(*plain[0], **plain[1])
        if device.type != DEVICE.type:
            if not pretended:
                return result
            copy = torch.zeros_like(result) if kwargs.get("non_blocking") else result.clone()
            self._late.append((copy, result.clone()))
            return copy
        # The result of an operation in place is one of its arguments. Return the same object.
        same = {id(tensor.there): tensor for tensor in pretended}

        def there(leaf):
            if not isinstance(leaf, Tensor):
                return leaf
            return same[id(leaf)] if id(leaf) in same else Pretended(leaf, device)

        return tree_map(there, result)


def split(model, *devices, **others):
    """Move the blocks of a model to several devices, in order and in equal parts.

    All other parts move to the first device, except the parts that `others` names with their
    device. Return the model.
    """
    for n, block in enumerate(model.blocks):
        block.to(devices[n * len(devices) // len(model.blocks)])
    for name, part in model.named_children():
        if name != "blocks":
            part.to(others.get(name, devices[0]))
    # PyTorch made two tensors of the tied weight, because it moved the weight once for each name.
    if model.config.tied_unembed:
        model.unembedding.weight = model.token_embedding.weight
    return model
