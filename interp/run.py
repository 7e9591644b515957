"""One run with a cache, for scripts that need no runner of their own."""

from typing import Any

from torch import nn

from hooks import ActivationCache, HookedRunner


def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """The model's output with a cache; arguments as for `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: what the model is called with, and which points to keep.
    """
    return HookedRunner(model).run_with_cache(*args, **options)
