"""Runs of a model: one with a cache, and the runner of every analysis."""

from typing import Any

from torch import nn

from hooks import ActivationCache, HookedRunner, ModeError


def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """The model's output with a cache; arguments as for `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: what the model is called with, and which points to keep.
    """
    return HookedRunner(model).run_with_cache(*args, **options)


def runner_of(model: nn.Module) -> HookedRunner:
    """A runner of a model whose runs can be compared with each other.

    Raises:
        ModeError: if some of the model is in training mode, where dropout draws anew in each run.
    """
    if any(module.training for module in model.modules()):
        raise ModeError("an analysis needs a model without dropout: call model.eval() first")
    return HookedRunner(model)
