"""Differences of predictions and of the residual stream between two models, with controls.

For each batch of texts:

1. Run both models, and read `resid_post` layer by layer (`TwoModels.by_layer`).
2. For each layer, measure the difference of the two values at each token, relative to the value of
   the base (`_relative`). Only the last layer is kept.
3. Unembed the last layer of both models, for a few positions at a time, and compute the divergence
   of the predictions at each token (`_divergences`).

Two controls read the next text in place of the same text: `base on the next text` and `tuned on the
next text` compare this model on the next text with the base on the text. The text after the last
text is the first. If there are several batches, each also reads the text after its last text. A
third control, `random`, adds a random direction of the size of the difference to the last stream of
the base.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import UnknownNameError
from hooks.base import Text, generator, to_device, unknown_name
from hooks.shared import names_by_layer
from interp.diffing.twins import BatchOfTwo, TwoModels
from interp.numbers.precision import divergence
from interp.protocol import logits_of, n_logits, of, require_one_vector
from interp.results.result import Result

# The largest number of logits of one model that are computed together: 16 MiB in float64.
_LOGITS_AT_ONCE = 2**21
_RANDOM = "random"
_BASE_ON_NEXT = "base on the next text"
_TUNED_ON_NEXT = "tuned on the next text"
_CONTROLS = (_RANDOM, _BASE_ON_NEXT, _TUNED_ON_NEXT)
_FORMER_CONTROLS = {"other texts": _BASE_ON_NEXT, "shuffled": _TUNED_ON_NEXT}


class Controls(dict[str, Result]):
    """The results of controls by name."""

    def __missing__(self, name: str) -> Result:
        """Raise an error that names the controls.

        Raises:
            UnknownNameError: always.
        """
        if name in _FORMER_CONTROLS:
            message = f"no control is named {name!r}; it is now {_FORMER_CONTROLS[name]!r}"
            raise UnknownNameError(message, name)
        raise unknown_name(name, self, "control")


class StreamChange(NamedTuple):
    """Differences of predictions and of the stream, and the same numbers for the controls.

    Attributes:
        kl: the divergence at each position, `Result` [pos, example].
        stream: the relative difference of `resid_post`, `Result` [layer, pos, example].
        controls: by `kl` and `stream`, the results of each control.
    """

    kl: Result
    stream: Result
    controls: Mapping[str, Controls]


def stream_change(
    models: TwoModels, rows: list[list[int]], batch: int, seed: int = 0
) -> StreamChange:
    """Return the differences of two models on some texts.

    Args:
        models: the two models.
        rows: the tokens of each text.
        batch: the largest number of texts in a batch.
        seed: the seed of the random directions.

    Raises:
        UnknownNameError: if the models have no `resid_post`.
        ValueError: if the stream has several vectors for each token.
    """
    names = names_by_layer("resid_post", models.runner.points)
    for name in names.values():
        require_one_vector(models.runner.points[name].axes, name)
    kl, stream, exists = _differences(models, rows, names=names, batch=batch, seed=seed)
    words = Text.padded([torch.tensor(row) for row in rows]).words(models.tuned)
    words_by_axis = {} if words is None else {"pos": words}
    kl_results = {}
    for kind, values in kl.items():
        kl_results[kind] = Result(
            values,
            ("pos", "example"),
            unit="nats",
            words=words_by_axis,
            bounds=(0.0, math.inf),
            about={"metric": "KL(tuned ‖ base)", "values": kind},
            exists=exists[kind],
        )
    stream_results = {}
    for kind, values in stream.items():
        stream_results[kind] = Result(
            values,
            ("layer", "pos", "example"),
            labels={"layer": [*names]},
            unit="norms of the base",
            words=words_by_axis,
            bounds=(0.0, math.inf),
            about={"metric": "norm of the difference of resid_post", "values": kind},
            exists=exists[kind][None],
        )
    return StreamChange(
        kl=kl_results.pop("difference"),
        stream=stream_results.pop("difference"),
        controls={"kl": Controls(kl_results), "stream": Controls(stream_results)},
    )


def _differences(
    models: TwoModels,
    rows: list[list[int]],
    names: Mapping[int, str],
    batch: int,
    seed: int,
) -> tuple[
    dict[str, Float[Tensor, "pos example"]],
    dict[str, Float[Tensor, "layer pos example"]],
    dict[str, Bool[Tensor, "pos example"]],
]:
    """Return divergences of predictions, differences of streams, and whether they exist, by kind.

    A number does not exist, and is NaN, where a text has no token.

    Args:
        models, rows, batch, seed: see `stream_change`.
        names: the name of the stream after each layer.
    """
    shape = len(names), max(map(len, rows)), len(rows)
    stream = {name: torch.full(shape, torch.nan) for name in ("difference", *_CONTROLS[1:])}
    kl = {name: torch.full(shape[1:], torch.nan) for name in ("difference", *_CONTROLS)}
    exists = {name: torch.zeros(shape[1:], dtype=torch.bool) for name in kl}
    for part in models.batches(rows, batch, with_next=True):
        examples = slice(part.numbers.start, part.numbers.stop)
        masks = _masks(part.tuned, len(part.numbers))
        # The row of the next text may be longer than all texts of the batch.
        columns = slice(0, masks["difference"].shape[1])
        for kind, mask in masks.items():
            exists[kind][columns, examples] = mask.mT
        layers = _Layers()
        models.by_layer(part, names, layers.compare)
        for layer, values_by_kind in enumerate(layers.relative):
            for kind, values in values_by_kind.items():
                stream[kind][layer, columns, examples] = _masked(values, masks[kind])
        tuned, base = layers.last
        for kind, values in _divergences(models, part, tuned, base, seed).items():
            kl[kind][columns, examples] = _masked(values, masks[kind])
    return kl, stream, exists


class _Layers:
    """The relative differences of the streams in each layer, and the last layer of both models.

    Attributes:
        relative: the result of `_relative` for each layer, on the CPU.
        last: the streams of the tuned model and of the base in the last layer so far.
    """

    last: tuple[Tensor, Tensor]

    def __init__(self) -> None:
        self.relative: list[dict[str, Tensor]] = []

    def compare(self, tuned: Tensor, base: Tensor) -> None:
        """Measure one layer, and forget the layer before it."""
        self.last = tuned, base
        relative = _relative(tuned, base)
        self.relative.append({kind: values.cpu() for kind, values in relative.items()})


def _masks(text: Text, n_texts: int) -> dict[str, Bool[Tensor, "batch pos"]]:
    """Return masks that are True at positions where a number exists, by its kind.

    A number that reads the next text exists where both texts have a token. It never exists if there
    is only one text.

    Args:
        text: the texts of a batch, and perhaps a further row for the next text.
        n_texts: the number of texts of the batch.
    """
    real = text.real.cpu()
    both = real & real.roll(-1, 0) if len(real) > 1 else torch.zeros_like(real)
    masks = {"difference": real, _RANDOM: real, _BASE_ON_NEXT: both, _TUNED_ON_NEXT: both}
    return {kind: mask[:n_texts] for kind, mask in masks.items()}


def _masked(
    values: Float[Tensor, "row pos"], mask: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "pos batch"]:
    """Return the values of the texts of a batch, on the CPU, with NaN where the mask is False."""
    return values[: len(mask)].detach().cpu().float().where(mask, torch.nan).mT


def _relative(
    tuned: Float[Tensor, "batch pos d_model"], base: Float[Tensor, "batch pos d_model"]
) -> dict[str, Float[Tensor, "batch pos"]]:
    """Return the norms of differences, divided by the norm of the base."""
    tuned = tuned.double()
    base = to_device(base, tuned.device).double()
    size = base.norm(dim=-1)
    return {
        "difference": (tuned - base).norm(dim=-1) / size,
        _BASE_ON_NEXT: (base.roll(-1, 0) - base).norm(dim=-1) / size,
        _TUNED_ON_NEXT: (tuned.roll(-1, 0) - base).norm(dim=-1) / size,
    }


def _divergences(
    models: TwoModels,
    part: BatchOfTwo,
    tuned: Float[Tensor, "batch pos d_model"],
    base: Float[Tensor, "batch pos d_model"],
    seed: int,
) -> dict[str, Float[Tensor, "batch pos"]]:
    """Return the divergences of predictions from the predictions of the base, by kind.

    Args:
        models: the two models.
        part: the batch.
        tuned, base: the last streams, each on the device of its model.
        seed: the seed of the random directions.
    """
    size = (tuned - to_device(base, tuned.device).to(tuned.dtype)).norm(dim=-1, keepdim=True)
    draws = generator(seed, "stream", part.numbers.start)
    direction = torch.randn(base.shape, generator=draws).to(base)
    direction = direction / direction.norm(dim=-1, keepdim=True)
    moved = base + direction * to_device(size, base.device).to(base.dtype)
    n_columns = max(1, _LOGITS_AT_ONCE // (len(tuned) * n_logits(models.tuned)))
    ours_at = _log_probs(models.tuned, part.tuned, tuned)
    with models.as_base():
        theirs_at = _log_probs(models.base, part.base, base)
        random_at = theirs_at
        if has_unembed(models.base):
            random_at = _log_probs(models.base, part.base, moved)
    parts: list[dict[str, Tensor]] = []
    for start in range(0, tuned.shape[1], n_columns):
        columns = slice(start, start + n_columns)
        ours = ours_at(columns)
        with models.as_base():
            theirs = theirs_at(columns).to(ours.device)
            random = random_at(columns).to(ours.device)
        parts.append(
            {
                "difference": divergence(ours, theirs),
                _RANDOM: divergence(random, theirs),
                _BASE_ON_NEXT: divergence(theirs.roll(-1, 0), theirs),
                _TUNED_ON_NEXT: divergence(ours.roll(-1, 0), theirs),
            }
        )
    joined = {}
    for kind in parts[0]:
        joined[kind] = torch.cat([piece[kind] for piece in parts], 1)
    if not has_unembed(models.base):
        joined[_RANDOM] = torch.full_like(joined[_RANDOM], torch.nan)
    return joined


def _log_probs(
    model: nn.Module, text: Text, resid: Float[Tensor, "batch pos d_model"]
) -> Callable[[slice], Float[Tensor, "batch _pos vocab"]]:
    """Return a function that returns the log-probabilities at some columns, in float64.

    They are computed from the last stream. If a model has no `unembed`, the model runs once more,
    and its logits are used.

    Args:
        model: the model.
        text: the texts.
        resid: the last stream.
    """
    if has_unembed(model):
        unembed = of(model).unembed
        return lambda columns: unembed(resid[:, columns]).double().log_softmax(-1)
    logits = logits_of(model(text.tokens, **text.arguments(model)))
    return lambda columns: logits[:, columns].double().log_softmax(-1)


def has_unembed(model: nn.Module) -> bool:
    """Return whether a model can compute logits from a stream."""
    try:
        of(model, "unembed")
    except TypeError:
        return False
    return True
