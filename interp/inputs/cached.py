"""Texts of a cache: the tokens and the mask that the model read in the cached run."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import ActivationCache, CacheError
from hooks.base import (
    Text,
    padding_messages,
    text_of_inputs,
    to_device,
)


def text_of(cache: ActivationCache) -> Text | None:
    """Return the texts that the model read in a cached run.

    The result is None if the run had no argument named `tokens` or `input_ids`.

    >>> from interp.protocol import run_with_cache
    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
    >>> _, cache = run_with_cache(Transformer(config).eval(), torch.tensor([[3, 1]]))
    >>> text_of(cache).tokens
    tensor([[3, 1]])
    """
    text = text_of_inputs(cache.inputs)
    if text is None:
        return None
    shape = text.tokens.shape[:2]
    mask = text.attention_mask
    mask_fits = mask is not None and mask.shape == shape
    if mask_fits or "decoder_input_ids" in cache.inputs:
        return text
    # A generation has no argument with this mask, and the mask of a run that continued earlier
    # tokens has more columns than its tokens. The cache may know the mask in both cases.
    cached_mask = cache.real()
    if cached_mask is None or cached_mask.shape != shape:
        return text
    return Text(text.tokens, cached_mask)


def text_of_values(cache: ActivationCache, shape: Sequence[int]) -> Text | None:
    """Return the texts of a cached run if each of their tokens has a value in the cache.

    The result is None if the run had no texts, if `cache.at` has selected texts or positions, or if
    the texts have another shape than the values.

    Args:
        cache: the cache.
        shape: the batch size and the number of positions of the values, [batch, pos].
    """
    text = text_of(cache)
    is_known = text is not None and not cache.is_part and text.tokens.shape == tuple(shape)
    return text if is_known else None


def mask_of(cache: ActivationCache, shape: Sequence[int]) -> Tensor | None:
    """Return the mask of the texts of cached values, True at real tokens.

    None means that no token is padding, as far as the cache knows.

    Args:
        cache: the cache.
        shape: the batch size and the number of positions of the values, [batch, pos].

    Raises:
        CacheError: if the texts of the run had padding, but the cache does not know which of these
            values are padding.
    """
    mask = cache.real()
    if mask is None and (text := text_of(cache)) is not None:
        # The cache of a model that is not attached has no mask, but the arguments of the run may
        # contain the mask.
        mask = text.attention_mask
    if mask is None or mask.shape == tuple(shape):
        return mask
    if bool(mask.all()):
        return None
    remedy = "read the whole cache, or attach the model before the run"
    raise CacheError(
        padding_messages.mask_shape("the mask of the cache", shape, mask.shape, remedy=remedy)
    )


def nan_at_padding(
    values: Float[Tensor, "*axes batch pos"], mask: Tensor | None
) -> Float[Tensor, "*axes batch pos"]:
    """Return values with NaN at padding.

    Args:
        values: the values.
        mask: True at real tokens, [batch, pos]; None if there is no padding.
    """
    return values if mask is None else values.where(to_device(mask, values.device), torch.nan)
