"""Checks of the arguments of analyses: a cache, a circuit, a graph, scores, dictionaries.

Each error names the given value, the class that is needed and, from `hints`, the call that creates
it. `protocol.of` and `protocol.runner_of` check models with the same form of errors.
"""

from typing import Any

from torch import nn

from hooks import ActivationCache
from hooks.base import require_kind


def require_cache(cache: object, model: nn.Module | None = None) -> None:
    """Check that a value is the cache of a run, and not a text, tokens, logits or the model.

    Args:
        cache: the value to check.
        model: the model that the cache must belong to. Default: any model.

    Raises:
        TypeError: if the value is not a cache. The error contains the call that creates a cache.
        CacheError: if the cache is of another model.

    >>> require_cache("def f(x):")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: cache must be an ActivationCache; got 'def f(x):'...
    """
    require_kind("cache", cache, ActivationCache, "an ActivationCache")
    assert isinstance(cache, ActivationCache)
    if model is not None:
        cache.require_weights_of(model)


def require_made(name: str, value: object, kind: type[Any]) -> None:
    """Check the class of an argument, such as a list of edges instead of a circuit.

    Args:
        name: the name of the argument, for the error.
        value: the value of the argument.
        kind: the class that the value must have.

    Raises:
        TypeError: if the argument has another class. The error names the argument, its class, the
            given value and the call that creates it.

    >>> from interp.results.result import Result
    >>> require_made("scores", 3, Result)
    Traceback (most recent call last):
    TypeError: scores must be a Result; got 3; an analysis such as activation_patching gives one
    """
    is_plural = kind.__name__ in ("Pairs", "Steps", "SVDTargets", "Transcoders")
    class_in_words = kind.__name__ if is_plural else f"a {kind.__name__}"
    require_kind(name, value, kind, class_in_words)
