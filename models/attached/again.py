"""Attaching a model again: its attachment stays if nothing changed, and is renewed otherwise.

1. An attachment keeps the settings of its call, and the modules, sizes and kernels of the model.
2. A later call with equal settings, on a model that still has these, returns the attachment.
3. Another call first takes the points out. Hooks on points would be lost, so they are an error.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError, HookPoint, HookPoints
from hooks.base import hooks_of, tensors_in
from hooks.shared import PartPoint, carried
from models.attached.configs import configs_of
from models.attached.points import Blocks
from models.attached.stacks import Tower


@dataclass(eq=False)
class Settings:
    """Settings of a call of `attach`, and the model that it saw.

    Attributes:
        example, blocks, attn, mlp: see `attach`.
        modules: the modules of the attached model, points included, by name.
        shapes: the shape of each parameter, by name.
        kernels: the attention kernel that each module with a config asks for.
    """

    example: Any
    blocks: str | None
    attn: str | None
    mlp: str | None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)

    def note(self, model: nn.Module) -> None:
        """Note the modules, sizes and kernels of a model that has its points."""
        self.modules = _modules(model)
        self.shapes = _shapes(model)
        self.kernels = _kernels(model)

    def hold_for(self, other: "Settings", model: nn.Module) -> bool:
        """Return whether other settings are equal, and the model is as it was at attach."""
        names = ("blocks", "attn", "mlp")
        if any(getattr(self, name) != getattr(other, name) for name in names):
            return False
        if not _are_equal(self.example, other.example):
            return False
        if self.modules != _modules(model) or self.shapes != _shapes(model):
            return False
        return self.kernels == _kernels(model)


def require_one_attachment(model: nn.Module) -> None:
    """Refuse a model of which a part, or a model around it, is attached.

    Raises:
        ValueError: if there is another attachment; it says what to detach.
    """
    if carried(model, "language_parts") is not None:
        return
    for name, module in model.named_modules():
        if carried(module, "language_parts") is not None:
            raise ValueError(
                f"no part of the model must be attached already; {name} is: detach(model.{name})"
            )
        if carried(module, "hook_points") is not None:
            raise ValueError(
                "a model must not be part of one that is attached already: detach the whole one, "
                f"whose points are in {name or 'it'}"
            )


def require_no_hooks(model: nn.Module) -> None:
    """Refuse hooks on points, which would be lost if the points were made anew.

    Raises:
        HookError: if a point has a hook.
    """
    for name, module in model.named_modules():
        is_point = isinstance(module, HookPoint | HookPoints | Blocks | Tower)
        if is_point and hooks_of(module):
            raise HookError(
                f"points must have no hooks when attach makes them anew; got a hook at {name}: "
                "leave its with or remove its handle (HookedRunner(model).handles), then attach"
            )


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    # Points of parts, such as dictionaries, come and go with their `with`.
    return {
        name: module for name, module in model.named_modules() if not isinstance(module, PartPoint)
    }


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in model.named_parameters()}


def _kernels(model: nn.Module) -> list[str]:
    return [str(config._attn_implementation) for config in configs_of(model).values()]


def _are_equal(example: Any, other: Any) -> bool:
    """Return whether two examples have the same names and values."""
    if example is other:
        return True
    if example is None or other is None:
        return False
    tensors, others = [*tensors_in(example)], [*tensors_in(other)]
    # Tensors may be cut in the text of an example, so they are compared by themselves.
    return (
        repr(example) == repr(other)
        and len(tensors) == len(others)
        and all(map(_is_same, tensors, others))
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other)
