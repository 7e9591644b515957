"""LoRA adapters of the library `peft` inside a model (Hu et al. 2021, "LoRA").

An adapter adds a term of low rank to a linear map: `x W + b` becomes `x W + b + scale * x A B`.

1. `peft` replaces the linear map by a module that contains the map as `base_layer`.
   `adapted_maps` finds these modules by name.
2. `AdaptedMap.base` returns the map without adapters. `AdaptedMap.share` returns the sum of the
   terms of all active adapters. `AdaptedMap.merged` returns one matrix, `W + scale * A B`.
3. `weights_without_adapters` returns the weights of a model under the names that they have in the
   model without adapters.

Adapters may be switched off, and the active adapters may be merged in place (`merge_adapter`). In
both cases `base_layer` computes the whole output, and there is no term.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import at_least_float32


@dataclass(frozen=True, eq=False)
class AdaptedMap:
    """A linear map with LoRA adapters. All weights are read from the modules at each call.

    Attributes:
        module: the module of `peft`, which contains the map.
        factor: a number that multiplies the output of the module.
    """

    module: Any
    factor: float = 1.0

    @property
    def names(self) -> list[str]:
        """The names of the adapters that act; empty if they are switched off or merged."""
        module = self.module
        if module.disable_adapters or module.merged:
            return []
        return [name for name in module.active_adapters if name in module.lora_A]

    def base(self) -> tuple[Float[Tensor, "d_in d_model"], Float[Tensor, " d_model"]]:
        """Return the weight and the bias of the map without adapters: `x @ weight + bias`."""
        layer = self.module.base_layer
        weight = at_least_float32(layer.weight.detach())
        weight = weight.T if isinstance(layer, nn.Linear) else weight
        bias = weight.new_zeros(weight.shape[1]) if layer.bias is None else layer.bias.detach()
        bias = bias.to(weight)
        return (weight, bias) if self.factor == 1 else (weight * self.factor, bias * self.factor)

    def share(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """Return the share of the adapters in the output for some inputs of the map.

        The shares of several active adapters are added.
        """
        share = x.new_zeros(*x.shape[:-1], self.module.out_features)
        for name in self.names:
            down = self.module.lora_A[name]
            up = self.module.lora_B[name]
            output = x @ down.weight.detach().to(x).T @ up.weight.detach().to(x).T
            output = output if up.bias is None else output + up.bias.detach().to(x)
            share += output * (self.module.scaling[name] * self.factor)
        return share

    def merged(self, kind: str) -> Tensor:
        """Return the `weight` or the `bias` of the base layer with all active adapters in it.

        The layout and the dtype are the layout and the dtype of the base layer.
        """
        layer = self.module.base_layer
        before: Tensor = getattr(layer, kind).detach()
        total = at_least_float32(before)
        for name in self.names:
            up = self.module.lora_B[name]
            if kind == "weight":
                down = self.module.lora_A[name].weight.detach().to(total)
                term = up.weight.detach().to(total) @ down
                term = term if isinstance(layer, nn.Linear) else term.T
            elif up.bias is None:
                continue
            else:
                term = up.bias.detach().to(total)
            total = total + term * self.module.scaling[name]
        return total.to(before.dtype)

    @property
    def has_bias(self) -> bool:
        """True if an active adapter has a bias."""
        return any(self.module.lora_B[name].bias is not None for name in self.names)


def adapted_maps(model: nn.Module) -> dict[str, AdaptedMap]:
    """Return the linear maps with LoRA adapters in a model, by the names of their modules.

    Raises:
        ValueError: if the model has an adapter of another kind; see `adapted_map`.
    """
    maps: dict[str, AdaptedMap] = {}
    for name, module in model.named_modules():
        # The wrappers have `peft_config`, and only pass their arguments on.
        if not _is_of_peft(module) or hasattr(module, "peft_config"):
            continue
        if any(name.startswith(f"{outer}.") for outer in maps):
            continue
        adapted = adapted_map(module, name)
        assert adapted is not None
        maps[name] = adapted
    return maps


def adapted_map(module: nn.Module, name: str) -> AdaptedMap | None:
    """Return a module of `peft` as a linear map with LoRA adapters; None for any other module.

    Args:
        module: the module.
        name: its name, for the error.

    Raises:
        ValueError: if the module is an adapter of another kind, such as DoRA, unless it is switched
            off or merged. The error names the kind.
    """
    if not _is_of_peft(module):
        return None
    layer: Any = module
    if not hasattr(layer, "base_layer"):
        raise _other_kind(layer, name)
    if layer.disable_adapters:
        if layer.merged:
            raise ValueError(
                f"adapters that are switched off must not be merged; got {name}, which is merged: "
                "call model.unmerge_adapter() first"
            )
        return AdaptedMap(layer)
    # Adapters of other kinds, such as AdaLoRA, have the same weights, but their own computation.
    lora: Any = sys.modules.get("peft.tuners.lora.layer")
    is_lora = lora is not None and type(layer).forward is lora.Linear.forward
    has_variant = is_lora and not layer.lora_variant.keys().isdisjoint(layer.active_adapters)
    if not layer.merged and (not is_lora or has_variant):
        raise _other_kind(layer, name)
    return AdaptedMap(layer)


def weights_without_adapters(model: nn.Module, maps: Mapping[str, AdaptedMap]) -> dict[str, Tensor]:
    """Return the weights of a model under the names that they have without adapters.

    The weights of the adapters are left out. The weights of an adapted map are those of its base
    layer.

    Args:
        model: the model inside the wrapper of `peft`.
        maps: its maps with adapters, from `adapted_maps`.

    Raises:
        ValueError: if an adapter has a bias, and the map has none.
    """
    state = dict(model.state_dict())
    for name, adapted in maps.items():
        inside = f"{name}.base_layer."
        if f"{inside}bias" not in state and adapted.has_bias:
            raise ValueError(
                f"an adapter with a bias needs a map with a bias; got {name} without a bias "
                "(lora_bias=False trains an adapter without one)"
            )
        for key in [key for key in state if key.startswith(f"{name}.")]:
            weight = state.pop(key)
            if key.startswith(inside):
                state[f"{name}.{key.removeprefix(inside)}"] = weight
    return state


def _is_of_peft(module: nn.Module) -> bool:
    """Return whether the class of a module belongs to the library `peft`."""
    return type(module).__module__.partition(".")[0] == "peft"


def _other_kind(module: Any, name: str) -> ValueError:
    """Return the error for an adapter that is not LoRA on a linear map. It names the kind."""
    kind = type(module).__name__
    package = type(module).__module__.split(".")
    if package[1] == "tuners":
        kind = f"{package[2]} ({kind})"
    variants = getattr(module, "lora_variant", {})
    active = [variants[name] for name in getattr(module, "active_adapters", ()) if name in variants]
    if active:
        kind = type(active[0]).__name__.removesuffix("LinearVariant")
        kind = f"{'DoRA' if kind == 'Dora' else kind} ({type(active[0]).__name__})"
    return ValueError(
        f"an adapter must be LoRA on a linear map for weights and sums of components; got {kind} "
        f"at {name}: merge it first (model = model.merge_and_unload()), or attach the base model"
    )
