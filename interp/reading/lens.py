"""Lenses: the predictions of the residual stream if the model ended at each layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookError
from hooks.base import (
    aligned_rows,
    at_least_float32,
    progress_of,
    require_integer,
    require_kind,
    shows_progress,
    stacked,
    to_device,
    true_columns,
    without_gradients,
    writer_of,
)
from interp import plots
from interp.inputs.cached import mask_of, nan_at_padding, text_of_values
from interp.inputs.words import token_ids
from interp.json_form import Table, form
from interp.kinds import require_cache
from interp.numbers.precision import divergence
from interp.protocol import n_logits, of
from interp.reading.affine import AffineLens, split_rows
from interp.results.entries import sizes_in_words

# The largest number of positions in a printed table.
_SHOWN = 8
# The largest number of layers in a printed table.
_MOST_LAYERS = 36


@dataclass(frozen=True)
class LensReadout(plots.Shown):
    """Predictions from the stream entering each block and, last, from the stream after all blocks.

    Probabilities are 0 to 1. All numbers are in float32 when the model is in half precision.
    Numbers are NaN at padding, and in layers for which a Jacobian lens has no matrix; `tokens` have
    no meaning there.

    Attributes:
        tokens: the likeliest next tokens, best first.
        probabilities: the probabilities of `tokens`.
        target_probabilities: the probabilities of the targets.
        target_ranks: the number of tokens that are likelier than the target; 0 for the likeliest
            token.
        entropy: the entropy of the prediction, in nats.
        kl: KL(final ‖ lens), in nats: how much the prediction of a layer differs from the
            prediction of the model. It is 0 at the last layer.
        first: two lists of strings for the first text: its own tokens [pos], or None if the cache
            does not know them; and its likeliest next tokens [layer pos top]. None if the model has
            no tokenizer. `model.to_pieces(lens.tokens)` returns the strings of all texts.
        real: True at real tokens, False at padding; None if there is no padding. Padding is not
            printed.
    """

    tokens: Int[Tensor, "layer batch pos top"]
    probabilities: Float[Tensor, "layer batch pos top"]
    target_probabilities: Float[Tensor, "layer batch pos"]
    target_ranks: Float[Tensor, "layer batch pos"]
    entropy: Float[Tensor, "layer batch pos"]
    kl: Float[Tensor, "layer batch pos"]
    first: tuple[list[str] | None, list[list[list[str]]]] | None = None
    real: Bool[Tensor, "batch pos"] | None = None

    @property
    def columns(self) -> list[int]:
        """The columns of the first text that are not padding."""
        if self.real is None:
            return [*range(self.tokens.shape[2])]
        return true_columns(self.real[:1])[0]

    @property
    def without_numbers(self) -> list[bool]:
        """For each layer, True if all numbers of the first text are NaN."""
        is_nan = self.probabilities[:, 0, self.columns].isnan()
        without: list[bool] = is_nan.flatten(1).all(1).tolist()
        return without

    def view(self) -> plots.View:
        """Draw the likeliest token of each layer at each position of the first text."""
        return plots.lens(self)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers in the JSON form of all results; see `interp.json_form`.

        The tables have the names of the attributes. If they are known, `first.words` are the tokens
        of the first text, and `first.likeliest` are its likeliest next tokens as text.
        """
        places = "layer batch pos"
        tables = {
            "tokens": Table(self.tokens, f"{places} top"),
            "probabilities": Table(self.probabilities, f"{places} top", "probability"),
            "target_probabilities": Table(self.target_probabilities, places, "probability"),
            "target_ranks": Table(self.target_ranks, places, "rank"),
            "entropy": Table(self.entropy, places, "nats"),
            "kl": Table(self.kl, places, "nats"),
        }
        if self.real is not None:
            tables["real"] = Table(self.real, "batch pos")
        words, likeliest = self.first or (None, None)
        if words is not None:
            tables["first.words"] = Table(words, "pos")
        if likeliest is not None:
            tables["first.likeliest"] = Table(likeliest, "layer pos top")
        return form("LensReadout", tables)

    def __repr__(self) -> str:
        """Return a table of the likeliest tokens of the last layers at the last positions of the
        first text.
        """
        axes = ("layer", "text", "position", "token")
        title = f"LensReadout: {sizes_in_words(axes, self.tokens.shape)}"
        text, likeliest = self.first or (None, self.tokens[:, 0].tolist())
        columns = self.columns[-_SHOWN:]
        earlier = ["…"] if len(self.columns) > _SHOWN else []
        without = self.without_numbers
        rows = []
        for number, layer in enumerate(likeliest):
            best = ["-" if without[number] else repr(layer[column][0]) for column in columns]
            rows.append([str(number), *earlier, *best])
        rows = rows[-_MOST_LAYERS:]
        if text is not None:
            rows.insert(0, ["layer", *earlier, *(repr(text[column]) for column in columns)])
        lines = aligned_rows(rows, between=" ")
        return "\n".join([title, "likeliest next tokens of the first text:", *lines])


@shows_progress
@without_gradients
def logit_lens(
    model: nn.Module,
    cache: ActivationCache,
    *,
    lens: AffineLens | None = None,
    targets: Int[Tensor, "batch pos"] | str | None = None,
    top_k: int = 5,
    progress: bool = True,
) -> LensReadout:
    """Return the predictions of the residual stream between all blocks (nostalgebraist 2020).

    A few positions are read at a time, so the memory grows with `top_k` and not with the
    vocabulary.

    Args:
        model: the model of the run, with `unembed` and `config`.
        cache: the cache of a run that cached every `resid_pre` and the last `resid_post`.
        lens: a map of each layer's stream before the unembedding, from `tuned_lens` or
            `jacobian_lens`. Default: no map.
        targets: the tokens to follow through the layers, or one token for all positions as text.
            Default: the tokens that the model predicts.
        top_k: the number of likeliest tokens to return; all tokens of a smaller vocabulary.
            Default: 5.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The likeliest tokens [layer, batch, pos, top] and their probabilities, and the probability
        and rank of the targets, the entropy and the KL in nats [layer, batch, pos].

    Raises:
        TypeError: if the model has no `unembed` or no `config`.
        CacheError: if the cache is of another model, or the stream of a layer is missing.
        ValueError: if targets do not have the cache's shape, a target is not in the vocabulary, or
            the lens is of another model.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> cache = HookedRunner(model).run_with_cache("Return the", lazy=True)[1]
    >>> logit_lens(model, cache)
    LensReadout: 5 layers x 1 text x 10 positions x 5 tokens
    likeliest next tokens of the first text:
    layer … 't' 'u' 'r' 'n' ' ' 't' 'h' 'e'
    0     … 't' 'u' 'r' 'n' ' ' 't' 'h' 'e'
    1     … 'h' 'm' 'e' ' ' 'a' 'h' 'i' 'r'
    2     … 'u' 'r' 'n' ' ' 'a' 'r' 'a' ' '
    3     … 'u' 'r' 'n' ' ' '"' 'h' 'e' ' '
    4     … 'u' 'r' 'n' ' ' 't' 'h' 'e' ' '
    """
    language = of(model, "unembed", "config")
    require_integer("top_k", top_k)
    vocab = n_logits(model)
    require_cache(cache)
    cache.require_weights_of(model)
    if lens is not None:
        hint = "tuned_lens and jacobian_lens give one"
        require_kind("lens", lens, AffineLens, "a lens", hint)
        lens.check(model)
    streams = _streams(cache)
    shape = streams.shape[1:3]
    if isinstance(targets, str):
        targets = torch.full(shape, token_ids(model, targets))
    if targets is not None:
        _require_targets(targets, shape, vocab)
    if lens is not None:
        streams = torch.cat([lens(streams[:-1]), streams[-1:]])
    best, chances, *numbers = _distributions(
        language, vocab, streams=streams, targets=targets, top_k=top_k
    )
    mask = mask_of(cache, shape)
    target, ranks, entropy, kl = (
        nan_at_padding(column, mask) if column.is_floating_point() else column for column in numbers
    )
    chances = rearrange(chances, "stream batch pos top -> top stream batch pos")
    chances = rearrange(nan_at_padding(chances, mask), "top ... -> ... top")
    readout = LensReadout(
        tokens=best,
        probabilities=chances,
        target_probabilities=target,
        target_ranks=ranks,
        entropy=entropy,
        kl=kl,
        real=mask,
    )
    writer = writer_of(model)
    if writer is None:
        return readout
    text = text_of_values(cache, shape)
    read = None if text is None else writer(text.tokens[0])
    return replace(readout, first=(read, writer(best[:, 0])))


def _distributions(
    language: Any,
    vocab: int,
    streams: Float[Tensor, "stream batch pos d_model"],
    targets: Int[Tensor, "batch pos"] | None,
    top_k: int,
) -> Iterator[Shaped[Tensor, "stream batch pos *top"]]:
    """Yield the tensors of `LensReadout`, in the order that `_read` returns them. They are computed
    for a few positions at a time.
    """
    columns: list[Tensor] = []
    flat = rearrange(streams, "stream batch pos d_model -> stream (batch pos) d_model")
    followed = None if targets is None else targets.flatten()
    parts = split_rows(flat, vocab)
    start = 0
    for rows in progress_of(parts, "positions", len(parts)):
        logits = at_least_float32(language.unembed(rows))
        end = start + rows.shape[1]
        target = logits[-1].argmax(-1) if followed is None else followed[start:end]
        part = _read(logits, to_device(target, logits.device), min(top_k, vocab))
        # Write into whole tensors instead of joining parts at the end. Small parts would lie in
        # memory between the large logits, and the freed memory of the logits could not be reused.
        columns = columns or [
            numbers.new_empty(len(numbers), flat.shape[1], *numbers.shape[2:]) for numbers in part
        ]
        for column, numbers in zip(columns, part, strict=True):
            column[:, start:end] = numbers
        start = end
    by_row = "stream (batch pos) ... -> stream batch pos ..."
    return (rearrange(column, by_row, batch=streams.shape[1]) for column in columns)


def _require_targets(targets: Int[Tensor, "*axes"], shape: torch.Size, vocab: int) -> None:
    """Check that targets are tokens of the model, one for each position.

    Raises:
        TypeError: if they are no tensor.
        ValueError: if they do not have the cache's shape, or a target is not in the vocabulary.
    """
    require_kind("targets", targets, Tensor, "a text of one token, or a tensor [batch, pos]")
    if targets.shape != shape:
        raise ValueError(
            f"targets must have the cache's shape, {list(shape)}; got {list(targets.shape)}"
        )
    for target in targets.aminmax() if targets.numel() else ():
        require_integer("targets", int(target), least=0, most=vocab - 1)


def _streams(cache: ActivationCache) -> Float[Tensor, "stream batch pos d_model"]:
    """Return the stream entering each block and, last, the stream after all blocks.

    Raises:
        CacheError: if a stream is missing, or is not whole.
    """
    try:
        entering = progress_of(
            cache.layers("resid_pre"), "layers", len(cache.layer_names("resid_pre"))
        )
        streams = stacked([*entering, *cache.read(("resid_post", -1))])
    except HookError as error:
        raise CacheError(f"a lens needs names=['*.resid_pre', '*.resid_post']: {error}") from None
    if streams.ndim != 4:
        raise CacheError(
            f"a lens needs streams [batch, pos, d_model]; got {list(streams.shape[1:])}"
        )
    return streams


def _read(
    logits: Float[Tensor, "layer row vocab"], targets: Int[Tensor, " row"], top_k: int
) -> tuple[Tensor, ...]:
    """Return the tensors of `LensReadout` for some positions: the likeliest tokens, their
    probabilities, the probability and the rank of the targets, the entropy, and the KL.
    """
    log_probs = logits.log_softmax(-1)
    index = targets.expand(len(logits), -1)[..., None]
    best = logits.topk(top_k).indices
    # Compare logits and not `log_probs`, which have one more rounding.
    target_logits = logits.gather(-1, index)
    ranks = (logits > target_logits).sum(-1).to(logits.dtype)
    ranks = ranks.where(~target_logits[..., 0].isnan(), torch.nan)
    return (
        best,
        log_probs.gather(-1, best).exp(),
        log_probs.gather(-1, index)[..., 0].exp(),
        ranks,
        torch.special.entr(log_probs.exp()).sum(-1),
        divergence(log_probs[-1], log_probs),
    )
