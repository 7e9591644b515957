"""Texts: those of one run, and many that stream through a model, a padded batch at a time."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError
from hooks.base import (
    Text,
    Texts,
    each_text,
    is_batch,
    number_of_texts,
    progress_bar,
    require_integer,
    to_device,
)
from interp.protocol import of


def text_of(cache: ActivationCache) -> Text | None:
    """The texts of a cache's run; None where it was given no `tokens` or `input_ids`.

    >>> from interp.protocol import run_with_cache
    >>> from models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4))
    >>> _, cache = run_with_cache(model.eval(), torch.tensor([[3, 1]]))
    >>> text_of(cache).tokens
    tensor([[3, 1]])
    """
    tokens = cache.inputs.get("tokens", cache.inputs.get("input_ids"))
    if not isinstance(tokens, Tensor):
        return None
    mask = cache.inputs.get("attention_mask")
    mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    fits = mask is not None and mask.shape == tokens.shape[:2]
    # A later piece of a text, or a generation, has the mask that its points read.
    real = None if fits or "decoder_input_ids" in cache.inputs else cache.real()
    if real is not None and real.shape == tokens.shape[:2]:
        mask = real
    return Text(tokens, mask)


def text_of_values(cache: ActivationCache, shape: Sequence[int]) -> Text | None:
    """Return the texts of a cache's values, [batch, pos]; None if the cache does not know their tokens.

    A cache that `at` has cut knows only the texts before the cut.
    """
    text = text_of(cache)
    is_known = text is not None and not cache.is_part and text.tokens.shape == tuple(shape)
    return text if is_known else None


def text_for(model: nn.Module, texts: Texts, attention_mask: Tensor | None = None) -> Text:
    """The texts of a run, as the model reads them.

    Args:
        model: the model.
        texts: see `Texts`.
        attention_mask: the mask of a tensor [batch, pos].

    Raises:
        ValueError: as for `model.to_tokens`, or if other texts come beside a mask.
        TypeError: if the model reads tensors only.
    """
    if isinstance(texts, Text):
        return texts
    if is_batch(texts):
        return Text(texts, attention_mask)
    if attention_mask is not None:
        raise ValueError("attention_mask= needs tokens [batch, pos]; other texts have their own")
    if (to_tokens := getattr(of(model), "to_tokens", None)) is None:
        raise TypeError(
            f"texts must be a tensor [batch, pos] for a {type(model).__name__}, which has no to_tokens; "
            f"got a {type(texts).__name__}"
        )
    text: Text = to_tokens(texts)
    return text


def mask_of(cache: ActivationCache, shape: Sequence[int]) -> Tensor | None:
    """Return the mask of a cache's values, True at real tokens; None if there is no padding.

    Args:
        cache: the cache.
        shape: the shape of the values, [batch, pos].

    Raises:
        CacheError: if texts of the run had padding, and it is not known which of these values are padding.
    """
    mask = cache.real()
    if mask is None and (text := text_of(cache)) is not None:
        mask = text.attention_mask  # of a model that does not say which columns are padding
    if mask is None or mask.shape == tuple(shape):
        return mask
    if bool(mask.all()):
        return None
    raise CacheError(
        f"the cache must know which of its values, [batch, pos] {[*shape]}, are padding; its mask is "
        f"{[*mask.shape]}: read the whole cache, or attach the model before the run"
    )


def nan_at_padding(
    values: Float[Tensor, "*axes batch pos"], mask: Tensor | None
) -> Float[Tensor, "*axes batch pos"]:
    """Values with NaN where the mask says padding."""
    return values if mask is None else values.where(to_device(mask, values.device), torch.nan)


def padded(texts: Sequence[Any], model: nn.Module, numbers: Sequence[int]) -> Text:
    """Texts as one batch, on the model's device, padded on the right. Equal lengths need no mask.

    Args:
        texts: each text, as `each_text` gives it; at least one.
        model: the model that is to read them.
        numbers: the number of each text, for errors.

    Raises:
        ValueError: if a text has no tokens, or is not a string or a list of integers.

    >>> text = padded([[3, 1, 4], [1, 5]], nn.Linear(2, 3), range(2))
    >>> text.tokens.tolist(), text.attention_mask.int().tolist()
    ([[3, 1, 4], [1, 5, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    for number, text in zip(numbers, texts, strict=True):
        if isinstance(text, Mapping):
            raise ValueError(
                f"a text must be a string or a list of tokens; got a {type(text).__name__} as text {number}"
            )
    rows = [
        text_for(model, text).tokens[0] if isinstance(text, str) else torch.as_tensor(text)
        for text in texts
    ]
    for number, row in zip(numbers, rows, strict=True):
        if row.ndim != 1 or not row.numel() or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(
                "a text must be a list of tokens, at least one; "
                f"got {row.dtype} {list(row.shape)} as text {number}"
            )
    device = next((weight.device for weight in model.parameters()), None)
    return Text.padded(rows, getattr(of(model), "pad_token", 0), device=device)


def batches(texts: Texts, model: nn.Module, size: int) -> Iterator[tuple[int, Text]]:
    """Batches of at most `size` texts, each with the number of its first text.

    Raises:
        ValueError: as for `padded`, if `size` is below 1, or if there is no text.
    """
    require_integer("batch", size)
    rest, first = each_text(texts), 0
    # An error may leave this iterator half read, so whoever reads it `shows_progress`, and takes the bar away.
    with progress_bar("texts", number_of_texts(texts)) as count:
        while some := list(itertools.islice(rest, size)):
            numbers = range(first, first + len(some))
            yield first, padded(some, model, numbers)
            count(len(some))
            first = numbers.stop
    if not first:
        raise ValueError("texts must hold at least one text; got none")
