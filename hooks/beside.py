"""Beside: tensors that a module returns beside an edited one. An edit that they pass by would do less than it says.

A router returns logits, and the weights and numbers of experts that were made of them. To edit the logits alone changes
nothing, as the block reads the others. Attention returns its pattern beside its output, and the block reads the output.

1. An edit replaces the first tensor of a module's output. The others are handed on as tensors that note when they are read.
2. If the module's parent reads one before it returns, that is an error.
3. At the end of the parent they are plain tensors again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hooks.base import mapped, tensors_in
from hooks.base.errors import HookError
from hooks.point import Point, has_forward


class Watch:
    """The time from an edit to the end of the parent.

    Args:
        point: where the edit acts.
        model: the model.
    """

    def __init__(self, point: Point, model: nn.Module) -> None:
        self.point, self.is_open = point, False
        name = point.name
        while name:
            name = name.rpartition(".")[0]
            self.parent = model.get_submodule(name)
            if has_forward(self.parent):
                break

    def handed_on(self, output: Any, edited: Tensor) -> Any:
        """The output, whose other tensors are watched. Those in lists are states, which go on by themselves."""
        self.is_open = True
        if isinstance(output, tuple):
            parts = [self.handed_on(part, edited) for part in output]
            return output._make(parts) if hasattr(output, "_make") else type(output)(parts)
        if isinstance(output, Tensor):
            return output if output is edited else self._watched(output)
        if isinstance(output, Mapping) or dataclasses.is_dataclass(output):
            return mapped(output, lambda leaf: self.handed_on(leaf, edited))
        return output

    def _watched(self, tensor: Tensor) -> Tensor:
        if type(tensor) is not Tensor:
            return tensor
        watched = tensor.as_subclass(Beside)
        watched.watch = self
        return watched

    def end(self, output: Any) -> Any:
        """End at the parent's output, which then holds plain tensors."""
        self.is_open = False
        new = unwatched(output)
        return None if new is output else new


class Beside(Tensor):
    """A tensor beside an edited one.

    Attributes:
        watch: says whether it may be read.
    """

    watch: Watch | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function's result, of plain tensors.

        Raises:
            HookError: if it reads a tensor that is watched.
        """
        for tensor in tensors_in((args, kwargs)):
            watch = tensor.watch if isinstance(tensor, Beside) else None
            if watch is not None and watch.is_open and not _is_size(func):
                raise HookError(
                    f"an edit at {watch.point.name} changes only the first of the tensors that it returns, and "
                    f"{type(watch.parent).__name__} reads another (a router's experts read its weights, not its logits): "
                    "edit a value that is read"
                )
        return func(*mapped(args, _plain), **mapped(kwargs or {}, _plain))


def unwatched(output: Any) -> Any:
    """An output with plain tensors, which may be read."""
    is_watched = any(isinstance(tensor, Beside) for tensor in tensors_in(output))
    return mapped(output, _plain) if is_watched else output


def _plain(leaf: Any) -> Any:
    return leaf.as_subclass(Tensor) if isinstance(leaf, Beside) else leaf


# What tells no number of a tensor.
_SIZES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"}
_SIZES |= {"size", "dim", "numel", "stride", "is_floating_point", "__len__"}


def _is_size(func: Any) -> bool:
    owner = getattr(func, "__self__", None)  # of the getter of an attribute
    return getattr(owner, "__name__", None) in _SIZES or getattr(func, "__name__", "") in _SIZES
