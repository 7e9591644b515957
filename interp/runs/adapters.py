"""Adapters of the library peft: a model with an adapter is two models, with the adapter on and off.

The layers of an adapter are found by an attribute, `adapter_layer_names`, so peft is not imported.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from hooks.base import explains_calls, require_module


@dataclass(frozen=True)
class WithoutAdapter:
    """A model with an adapter that is switched off in the runs of an analysis.

    `without_adapter` makes it.

    Attributes:
        model: the model, whose adapter is switched on outside these runs.
    """

    model: nn.Module

    def off(self) -> AbstractContextManager[None]:
        """Return a context manager inside which the adapter is switched off; see `adapter_off`."""
        return adapter_off(self.model)

    def __repr__(self) -> str:
        return f"{type(self.model).__name__} without its adapter"


@explains_calls
def without_adapter(model: nn.Module) -> WithoutAdapter:
    """Return a model of peft without its adapter, as the source of an analysis.

    `activation_patching(model, texts, source=without_adapter(model))` patches values of the base
    into the model with its adapter. There is no second copy of the weights, and the model is not
    changed: the adapter is switched off only while the values of the source are computed.

    Args:
        model: a model with an adapter of peft, with hook points (`models.attach`).

    Returns:
        The model without its adapter, for `source=` of an analysis and `base=` of `compare_models`.

    Raises:
        TypeError: if the model is not a module.
        ValueError: if the model has no adapter, if an adapter is merged into the weights, or if an
            adapter has trained biases of the model itself.

    >>> from interp import activation_patching
    >>> source = without_adapter(model)  # doctest: +SKIP
    >>> activation_patching(model, texts, "z", source=source).top(3)  # doctest: +SKIP
    """
    require_module(model)
    require_adapter(model)
    return WithoutAdapter(model)


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers of the adapters of a model, by the names of the modules."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "adapter_layer_names")
    }


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters of a model off inside a `with` statement.

    The end of the `with` restores the state of each layer, and `requires_grad` of each parameter.
    Without this, the library would make an adapter trainable when it switches the adapter on.

    Raises:
        ValueError: if the model has no adapter, if an adapter is merged into the weights, or if an
            adapter has trained biases of the model itself.
    """
    require_adapter(model)
    layers = [*adapter_layers(model).values()]
    were_off = [getattr(layer, "disable_adapters", False) is True for layer in layers]
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, was_off in zip(layers, were_off, strict=True):
            layer.enable_adapters(not was_off)
        for weight, requires_grad in trainable:
            weight.requires_grad_(requires_grad)


def require_adapter(model: nn.Module) -> None:
    """Check that a model has an adapter that can be switched off.

    Raises:
        ValueError: if the model has no adapter, if an adapter is merged into the weights, or if an
            adapter has trained biases of the model itself.
    """
    layers = adapter_layers(model)
    if not layers:
        raise ValueError(
            "one model can be both models only if it has an adapter to switch off; got a "
            f"{type(model).__name__} with no adapter"
        )
    for name, layer in layers.items():
        # A merged layer would be unmerged by its first run without the adapter.
        if getattr(layer, "merged", False) is True:
            raise ValueError(
                f"an adapter must not be merged; got a merged adapter at {name}: call "
                "unmerge_adapter(), or use the base model as base"
            )
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "bias", "none") != "none":
            raise ValueError(
                "an adapter must have bias='none', because trained biases of the model cannot be "
                f"switched off; got bias={config.bias!r} in the adapter {name!r}: use the base "
                "model as base"
            )
