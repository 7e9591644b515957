"""One check of the arguments of analyses: a cache, a circuit, a graph, scores, dictionaries.

Each says what was given, what is needed and, from `hints`, the call that makes it. A model is checked by `protocol.of` and
`protocol.runner_of`, and pairs by `pairs.pairs.pairs_for`, in the same words.
"""

from typing import Any

from torch import nn

from hooks import ActivationCache
from hooks.base import require_kind


def require_cache(cache: object, model: nn.Module | None = None) -> None:
    """Refuse what is no cache of a model's run, such as a text, tokens, logits or the model.

    Args:
        cache: what was given.
        model: the model that the values must be of; None if any will do.

    Raises:
        TypeError: if it is no cache; the error says the call that makes one.
        CacheError: if it is of another model.

    >>> require_cache("def f(x):")
    Traceback (most recent call last):
    TypeError: cache must be an ActivationCache; got 'def f(x):'; HookedRunner(model).run_with_cache('def f(x):')[1] gives one
    """
    require_kind("cache", cache, ActivationCache, "an ActivationCache")
    assert isinstance(cache, ActivationCache)
    if model is not None:
        cache.require_weights_of(model)


def require_made(name: str, value: object, kind: type[Any]) -> None:
    """Refuse what is none of this package's objects, such as a list of edges for a circuit.

    Raises:
        TypeError: naming the argument, its class, what was given and the call that makes one.

    >>> from interp.results.result import Result
    >>> require_made("scores", 3, Result)
    Traceback (most recent call last):
    TypeError: scores must be a Result; got 3; an analysis such as activation_patching gives one
    """
    plural = kind.__name__ in ("Pairs", "SVDTargets")
    words = kind.__name__ if plural else f"a {kind.__name__}"
    require_kind(name, value, kind, words)
