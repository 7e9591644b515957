"""Receiver heads: heads whose attention from later steps is concentrated on few steps.

The algorithm (Bogdan et al. 2025, "Thought Anchors", arXiv 2506.19143, section 5):

1. Average the attention pattern of a head over the queries of one step and the keys of another
   step, [step, step] (`_between_steps`).
2. The vertical score of a step is the mean of this attention over all steps that are at least
   `distance` steps later (`_vertical_scores`).
3. The score of a head is the kurtosis of its vertical scores (`_kurtosis`).
"""

from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookError
from hooks.base import (
    at_least_float32,
    float32_rounding,
    progress_of,
    require_integer,
    shows_progress,
    stacked,
    to_device,
    without_gradients,
)
from interp.inputs.cached import text_of_values
from interp.kinds import require_cache, require_made
from interp.protocol import of
from interp.results.result import Result
from interp.steps.stepping import Steps

_FEWEST = 3
"""The fewest vertical scores whose kurtosis says anything: for two, it is always -2."""


@shows_progress
@without_gradients
def receiver_heads(
    model: nn.Module,
    cache: ActivationCache,
    steps: Steps,
    *,
    distance: int = 4,
    progress: bool = True,
) -> Result:
    """Return the kurtosis of the attention that the steps of a text receive, for each head.

    In a head with a large kurtosis, many later steps attend to a few steps. The attention
    of step i to step j is the mean of the pattern over the queries of i and the keys of j. The
    vertical score of step j is the mean over all steps i from j + `distance` on. Nearer steps are
    ignored, because most heads attend to them. The kurtosis is Fisher's (0 for a normal
    distribution), without correction of its bias, over the steps with a vertical score (Bogdan et
    al. 2025, "Thought Anchors", arXiv 2506.19143).

    In many models, most heads attend to the first token of a text. Then the first step has the
    largest vertical score in most heads.

    Args:
        model: the model of the run.
        cache: the cache of a run of the steps' text that cached `pattern` at all positions. A lazy
            cache computes one layer at a time.
        steps: the text and its steps.
        distance: the smallest distance in steps between a step and a later step. Default: 4, as in
            the paper.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        A result with the axes `layer`, `head` and `example`, with one example. A head has NaN if
        its vertical scores are all equal.

    Raises:
        ValueError: if fewer than `distance` + 3 steps are given, or the cache is not of the steps'
            text.
        CacheError: if the cache is of another model, or the pattern of a layer is missing.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> text = "Open the file. Read it. Close it. Do it again. Print it. Move it. Stop. Go on."
    >>> steps = Steps(model, text, "")
    >>> cache = run_with_cache(model, steps.text, lazy=True)[1]
    >>> receiver_heads(model, cache, steps, distance=1).top(2)
    layer 2, head 0  +1.224
    layer 3, head 2  +1.132
    """
    of(model)
    require_cache(cache, model)
    require_made("steps", steps, Steps)
    require_integer("distance", distance)
    if len(steps) < distance + _FEWEST:
        raise ValueError(
            f"steps must be at least {distance + _FEWEST} for distance={distance}; got {len(steps)}"
        )
    try:
        names = cache.layer_names("pattern")
        patterns = cache.layers("pattern")
    except HookError as error:
        raise CacheError(f"receiver heads need names='*.pattern': {error}") from None
    first_pattern = next(patterns)
    _require_text(cache, steps, first_pattern)
    layers = progress_of(chain([first_pattern], patterns), "layers", len(names))
    values = stacked(_scores_of_layer(pattern, steps, distance) for pattern in layers)
    return Result(
        values[..., None],
        ("layer", "head", "example"),
        labels={"layer": [*names]},
        unit="kurtosis",
        about={"kind": "receiver_heads", "distance": distance, "steps": len(steps)},
    )


def _require_text(cache: ActivationCache, steps: Steps, pattern: Tensor) -> None:
    """Check that a cache is of the text of the steps.

    Args:
        cache: the cache.
        steps: the steps.
        pattern: the pattern of one layer of the cache.

    Raises:
        ValueError: if it is of another text, or of a part of the text.
    """
    n_tokens = len(steps.tokens)
    if (pattern.shape[0], *pattern.shape[2:]) != (1, n_tokens, n_tokens):
        raise ValueError(
            f"the cache must be of the steps' text, with patterns [1, head, {n_tokens}, "
            f"{n_tokens}]; got {[*pattern.shape]}: run the model on steps.text"
        )
    text = text_of_values(cache, (1, n_tokens))
    if text is not None and text.tokens[0].tolist() != steps.tokens:
        raise ValueError(
            "the cache must be of the steps' text; got other tokens: run the model on steps.text"
        )


def _scores_of_layer(
    pattern: Float[Tensor, "batch head query key"], steps: Steps, distance: int
) -> Float[Tensor, " head"]:
    """Return the kurtosis of the vertical scores of each head of one layer."""
    attention = _between_steps(at_least_float32(pattern[0]), steps)
    return _kurtosis(_vertical_scores(attention, distance)).cpu()


def _between_steps(
    pattern: Float[Tensor, "head query key"], steps: Steps
) -> Float[Tensor, "head later step"]:
    """Return the mean attention from the queries of each step to the keys of each step."""
    shares = torch.zeros(len(steps.tokens), len(steps), dtype=pattern.dtype)
    for number, span in enumerate(steps.spans):
        shares[span.start : span.stop, number] = 1 / len(span)
    shares = to_device(shares, pattern.device)
    return shares.T @ (pattern @ shares)


def _vertical_scores(
    attention: Float[Tensor, "head later step"], distance: int
) -> Float[Tensor, "head scored"]:
    """Return the mean attention to each step from the steps that are at least `distance` later.

    The last `distance` steps have no score.
    """
    n_scored = attention.shape[1] - distance
    scores = [attention[:, step + distance :, step].mean(1) for step in range(n_scored)]
    return torch.stack(scores, 1)


def _kurtosis(values: Float[Tensor, "head scored"]) -> Float[Tensor, " head"]:
    """Return Fisher's kurtosis of each row: the fourth central moment in variances, minus 3."""
    centred = values.double() - values.double().mean(1, keepdim=True)
    variance = centred.square().mean(1)
    kurtosis = (centred**4).mean(1) / variance.square() - 3
    # Equal values have no variance, up to rounding.
    rounding = float32_rounding() * values.double().abs().amax(1)
    return kurtosis.where(variance > rounding**2, torch.nan).to(values.dtype)
