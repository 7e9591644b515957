"""An error for edits without effect, at modules that return several tensors.

An edit changes only the first tensor that a module returns. If the model then reads another tensor
of the output, the edit is lost. For example, a router returns logits, and the weights and numbers
of experts, which were computed from the logits. An edit of only the logits has no effect, because
the block reads the other two tensors. In contrast, attention returns its output and its pattern,
and the block reads only the output, which is edited.

1. An edit replaces the first tensor of a module's output. The other tensors are replaced by watched
   tensors, which detect a read.
2. If the module's parent reads a watched tensor before it returns, an error is raised.
3. At the end of the parent, the watched tensors become plain tensors again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hooks.base import mapped, tensors_in
from hooks.base.errors import HookError
from hooks.point import Point, has_forward


class Watch:
    """A check that raises an error if the model reads a tensor that an edit should have changed.

    An edit changes only the first of several tensors that a module returns. The other tensors are
    watched until the parent module of this module returns. If code reads the numbers of a watched
    tensor before then, a `HookError` is raised, because the edit does not change these numbers.

    Args:
        point: the edited point.
        model: the model.
    """

    def __init__(self, point: Point, model: nn.Module) -> None:
        self.point = point
        self.is_open = False
        name = point.name
        while name:
            name = name.rpartition(".")[0]
            self.parent = model.get_submodule(name)
            if has_forward(self.parent):
                break

    def handed_on(self, output: Any, edited: Tensor) -> Any:
        """Return the output with watched tensors in place of all tensors but the edited one.

        Tensors in lists are not watched, because they are states of the model, such as a cache.
        """
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
        """Return a watched tensor with the same memory. Subclasses of `Tensor` are not watched."""
        if type(tensor) is not Tensor:
            return tensor
        watched = tensor.as_subclass(Beside)
        watched.watch = self
        return watched

    def end(self, output: Any) -> Any:
        """End the watch, and return the parent's output with plain tensors."""
        self.is_open = False
        new = unwatched(output)
        return None if new is output else new


class Beside(Tensor):
    """A watched tensor: a module returned it together with an edited tensor.

    Attributes:
        watch: the watch, which raises an error if the tensor is read too early.
    """

    watch: Watch | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with plain tensors and return its result.

        Raises:
            HookError: if the function reads a watched tensor.
        """
        for tensor in tensors_in((args, kwargs)):
            watch = tensor.watch if isinstance(tensor, Beside) else None
            if watch is not None and watch.is_open and not _is_size(func):
                raise HookError(
                    f"an edit at {watch.point.name} changes only the first tensor that the module "
                    f"returns, but {type(watch.parent).__name__} reads another (a router's experts "
                    "read its weights, not its logits): edit a value that is read"
                )
        return func(*mapped(args, _plain), **mapped(kwargs or {}, _plain))


def unwatched(output: Any) -> Any:
    """Return an output with a plain tensor in place of each watched tensor."""
    is_watched = any(isinstance(tensor, Beside) for tensor in tensors_in(output))
    return mapped(output, _plain) if is_watched else output


def _plain(leaf: Any) -> Any:
    """Return a plain tensor for a watched tensor; any other value is returned unchanged."""
    return leaf.as_subclass(Tensor) if isinstance(leaf, Beside) else leaf


# Attributes and functions that do not read the numbers of a tensor.
_SIZES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"}
_SIZES |= {"size", "dim", "numel", "stride", "is_floating_point", "__len__"}


def _is_size(func: Any) -> bool:
    """Return whether a function reads no numbers of its tensors."""
    # For an attribute such as `shape`, `func` is a method of the attribute, which has the name.
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", None) in _SIZES or getattr(func, "__name__", "") in _SIZES
