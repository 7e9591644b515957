"""The settings of a call of `attach`. A second call compares them with its own settings."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import is_same, tensors_in
from hooks.shared import PartPoint
from models.attached.original import configs_of


@dataclass(eq=False)
class AttachSettings:
    """The settings of a call of `attach`, and the state of the model in that call.

    Attributes:
        example, blocks, attn, mlp: see `attach`.
        modules: the modules of the attached model, points included, by name.
        shapes: the shape of each parameter, by name.
        kernels: the attention kernel of each module with a config.
    """

    example: Any
    blocks: str | None
    attn: str | None
    mlp: str | None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)

    def note(self, model: nn.Module) -> None:
        """Store the modules, sizes and kernels of a model after `attach`.

        `hold_for` compares them with the model at a later call.
        """
        self.modules = _modules(model)
        self.shapes = _shapes(model)
        self.kernels = _kernels(model)

    def hold_for(self, earlier: "AttachSettings | None", model: nn.Module) -> bool:
        """Return whether an earlier call of `attach` had these settings and an unchanged model.

        The modules, the sizes and the kernels of the model are compared.

        Args:
            earlier: the settings of the model's attachment; None while `attach` runs.
            model: the model.
        """
        if earlier is None:
            return False
        names = ("blocks", "attn", "mlp")
        if any(getattr(self, name) != getattr(earlier, name) for name in names):
            return False
        if not _are_equal(earlier.example, self.example):
            return False
        if earlier.modules != _modules(model) or earlier.shapes != _shapes(model):
            return False
        return earlier.kernels == _kernels(model)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, without any `PartPoint`."""
    # A `PartPoint`, for example of a spliced dictionary, exists only inside a `with` statement, so
    # it is no change of the model.
    return {
        name: module for name, module in model.named_modules() if not isinstance(module, PartPoint)
    }


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter, by name."""
    return {name: weight.shape for name, weight in model.named_parameters()}


def _kernels(model: nn.Module) -> list[str]:
    """Return the attention kernel of each module with a config."""
    return [str(config._attn_implementation) for config in configs_of(model).values()]


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two examples have the same names and values."""
    if first is second:
        return True
    if first is None or second is None:
        return False
    first_tensors = [*tensors_in(first)]
    second_tensors = [*tensors_in(second)]
    # `repr` may shorten tensors, so tensors are compared separately.
    return (
        repr(first) == repr(second)
        and len(first_tensors) == len(second_tensors)
        and all(map(_is_same_there, first_tensors, second_tensors))
    )


def _is_same_there(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same numbers and the same device."""
    return first.device == second.device and is_same(first, second)
