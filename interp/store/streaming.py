"""Statistics of a model's values over texts that stream through it, without a store."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hooks import ActivationCache, Selector
from hooks._torch import without_gradients
from hooks.transfer import to_device
from interp.inputs.texts import Texts, batches
from interp.protocol import runner_of
from interp.results.result import Result
from interp.store.rows import by_token
from interp.store.summary import StatisticsByPoint


@without_gradients
def statistics(
    model: nn.Module,
    texts: Texts,
    names: Selector,
    *,
    reading: Callable[[nn.Module, ActivationCache], Result] | None = None,
    batch: int = 16,
    **options: Any,
) -> StatisticsByPoint:
    """Sums and samples of points, at all real tokens, from one pass of a model over texts. Nothing is kept on disk.

    Args:
        model: any model with hook points, in evaluation mode.
        texts: strings or tokens, read once, so they may stream.
        names: which points. Their first axes must be `batch pos`, if there is no `reading`.
        reading: a table of the cache, such as `lambda model, cache: head_scores(model, cache, "induction")`; statistics are then of
            its numbers over examples, and named `reading`.
        batch: how many texts are read together.
        options: `covariance`, `top`, `sample` and `seed`, see `Statistics.of`.

    Raises:
        ValueError: if there is no text, one is empty, or a point has no row for each token.
        UnknownNameError: if a name matches nothing.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> statistics(load("pydoc-4l"), ["part KV8 part KV8"] * 3, "*.mlp_out")["blocks.1.mlp_out"]
    Statistics of 51 rows [128]
    """
    runner = runner_of(model)
    points = by_token(runner, names) if reading is None else names

    def parts() -> Iterator[StatisticsByPoint]:
        for first, text in batches(texts, model, batch):
            cache = runner.capture(text.tokens, names=points, **text.arguments(model))
            if reading is None:
                rows = {name: v[to_device(text.real, v.device)] for name, v in cache.items()}
                number, pos = text.real.cpu().nonzero(as_tuple=True)
            else:
                rows = {"reading": reading(model, cache).values.movedim(-1, 0)}
                number = torch.arange(len(text.tokens))
                pos = torch.zeros_like(number)
            yield StatisticsByPoint.of(rows, number + first, pos, **options)

    return StatisticsByPoint.together(parts())
