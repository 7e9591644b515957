"""The settings of a call of `attach`, and the checks of a model before it gets points.

1. Check that the model can get points, and find its earlier attachment (`earlier_attachment`).
2. The earlier attachment stays if its settings are equal, and the modules, sizes and kernels of the
   model are the same (`AttachSettings.hold_for`).
3. Otherwise remove the earlier attachment, and check that the names of points are free
   (`make_room`).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError
from hooks.base import carried, hooks_of, is_same, require_module, tensors_in
from hooks.shared import PartPoint
from models.attached.original import configs_of, is_encoder_decoder
from models.attached.points import TOP, points_of
from models.transformer import Transformer


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
        """Return whether earlier settings are equal, and the model has not changed since then.

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


def earlier_attachment(model: nn.Module) -> Any:
    """Return the attachment of a model that can get points; None without an attachment.

    Raises:
        TypeError, ValueError: if the model cannot get points; see `_require_attachable`.
    """
    _require_attachable(model)
    return carried(model, "language_parts")


def _require_attachable(model: nn.Module) -> None:
    """Require a model that can get points: with weights, not compiled, and without attached parts.

    Raises:
        TypeError: if it is not a module, or is a `models.Transformer` or a compiled model.
        ValueError: if it has no weights, or if a part of it, or a model that contains it, is
            attached.
    """
    require_module(model)
    if isinstance(model, Transformer):
        raise TypeError(
            "a models.Transformer already has points; use HookedRunner(model) without attach"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError("attach must come before torch.compile; got a compiled model")
    if all(weight.is_meta for weight in model.parameters()) and not hasattr(model, "_hf_hook"):
        kind = type(model).__name__
        raise ValueError(f"attach runs the model, so it must have weights; got {kind} on meta")
    if carried(model, "language_parts") is not None:
        return
    for name, module in model.named_modules():
        if carried(module, "language_parts") is not None:
            raise ValueError(
                f"no part of the model may be attached; {name} is attached: call "
                f"detach(model.{name}) first"
            )
        if carried(module, "hook_points") is not None:
            raise ValueError(
                "the model must not be part of a larger attached model: detach that model first "
                f"(its points are in {name or 'this model'})"
            )


def make_room(model: nn.Module, earlier: Any) -> None:
    """Remove an earlier attachment, and check that the names of points are free.

    Args:
        model: the model.
        earlier: its attachment; None without an attachment.

    Raises:
        HookError: if a point of the attachment has a hook.
        ValueError: if the model has an attribute with the name of a point.
    """
    if earlier is not None:
        _require_no_hooks(model)
        earlier.remove()
    _require_free_names(model)


def _require_no_hooks(model: nn.Module) -> None:
    """Require points without hooks, because creating the points again would lose the hooks.

    Raises:
        HookError: if a point has a hook.
    """
    points = {*points_of(model)}
    for name, module in model.named_modules():
        if module in points and hooks_of(module):
            raise HookError(
                f"points must have no hooks when attach creates them again; got a hook at {name}: "
                "leave its with block or remove its handle (HookedRunner(model).handles)"
            )


def _require_free_names(model: nn.Module) -> None:
    """Require that the names of the points (`TOP`: `embed`, `blocks`, ...) are free in the model.

    Raises:
        ValueError: if the model has an attribute of this name. The error contains the name.
    """
    parts = ("encoder", "decoder") if is_encoder_decoder(model) else ()
    children = dict(model.named_children())
    for owner in (model, *map(children.get, parts)):
        for name in TOP:
            if hasattr(owner, name):
                raise ValueError(f"{', '.join(TOP)} must be free for points; the model has {name}")
