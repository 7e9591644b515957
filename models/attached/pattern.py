"""Attention patterns of attached models: softmax of scores, masked at padding and later keys.

The library `transformers` makes a mask from the causal rule, the window of a block and the padding
of the texts, and passes the mask to each attention module. If a hook is active at `scores` or
`pattern`, `pattern_of` computes the pattern:

1. Add the mask to the scores, after the cap and the bias (`_masked_scores`). Without a mask, hide
   the later keys.
2. Find the queries that see no key after an edit. Their pattern is 0 (`queries_without_keys`).
3. Compute the softmax over keys, with the sink of each head if the model has sinks.

Without a hook, the kernel of the model does the same. A module with its own attention code adds the
mask itself; only step 2 is added to its softmax. The masks of the plain model are in
`models.running.masks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks.base import wide_dtype


@dataclass(frozen=True)
class KernelOptions:
    """The arguments of an attention function of `transformers` that change its numbers.

    Attributes:
        is_causal: whether queries see no later keys if there is no mask.
        scaling: the factor of q·k. Default: one over the square root of d_head.
        dropout: the dropout probability of the pattern in training.
        softcap: the bound of the scores; None without a bound.
        s_aux: the score of the sink of each head, [head]; None without sinks (gpt-oss).
        position_bias: a bias that is added to the scores; None without a bias.
    """

    is_causal: bool
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, kwargs: Mapping[str, Any]) -> "KernelOptions":
        """Return the options among the arguments of a module's attention function."""
        names = ("scaling", "dropout", "softcap", "s_aux", "position_bias")
        known = {name: kwargs[name] for name in names if name in kwargs}
        is_causal = kwargs.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return cls(is_causal, **known)


def pattern_of(
    scores: Float[Tensor, "batch head query key"],
    mask: Any,
    options: KernelOptions,
    dtype: torch.dtype,
    is_edited: bool,
) -> Float[Tensor, "batch head query key"]:
    """Return the attention pattern: the softmax of the masked scores over keys.

    Args:
        scores: the scores, which hooks may have edited.
        mask: the mask that the module computed, or None.
        options: the cap, the bias and the sinks.
        dtype: the dtype of the pattern. A pattern with sinks has the dtype of the masked scores.
        is_edited: whether a hook has edited the scores.
    """
    masked = _masked_scores(scores, mask, options=options, is_edited=is_edited)
    without_keys = queries_without_keys(scores, masked) if is_edited else None
    if without_keys is not None:
        masked = masked.masked_fill(without_keys, 0)
    if options.s_aux is None:
        pattern = F.softmax(masked, -1, dtype=wide_dtype(masked.dtype)).to(dtype)
    else:
        pattern = _softmax_with_sink(masked, options.s_aux)
    return pattern if without_keys is None else pattern.masked_fill(without_keys, 0)


def _masked_scores(
    scores: Float[Tensor, "batch head query key"],
    mask: Any,
    options: KernelOptions,
    is_edited: bool,
) -> Float[Tensor, "batch head query key"]:
    """Return the scores with the cap, the bias and the mask.

    Args:
        scores: the scores, which hooks may have edited.
        mask: the mask that the module computed, or None.
        options: the cap and the bias.
        is_edited: whether a hook has edited the scores.
    """
    softcap = options.softcap
    bias = options.position_bias
    masked = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    if is_edited:
        # The cap makes a score of -inf finite, so set the keys that an edit removed to -inf again.
        masked = masked.masked_fill(torch.isneginf(scores), -torch.inf)
    if mask is None and options.is_causal and scores.shape[-2] > 1:
        mask = _causal(masked)
    masked = masked if bias is None else masked + bias
    if mask is None:
        return masked
    if mask.dtype == torch.bool:
        # A query without visible keys gets a uniform pattern, as in the eager kernels.
        return masked.masked_fill(~mask, torch.finfo(masked.dtype).min)
    return masked + mask


def _causal(scores: Tensor) -> Tensor:
    """Return the causal mask of scores, [query, key]; True at visible keys."""
    # Without a mask, queries and keys begin at the same position. Any further keys are free places
    # of a static cache.
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def queries_without_keys(
    scores: Float[Tensor, "batch head query key"], masked: Float[Tensor, "batch head query key"]
) -> Bool[Tensor, "batch head query 1"]:
    """Return the queries for which edits of the scores left no visible key.

    For these queries, softmax would return NaN. Or, because the kernels mask with the lowest finite
    number, the queries would attend to masked keys. Instead, the pattern of these queries is 0, as
    in a plain transformer.

    Args:
        scores: edited scores. Edits set keys to -inf, as `edits.knockout` does.
        masked: the same scores after the mask.
    """
    lowest = torch.finfo(masked.dtype).min / 2
    has_lost_keys = torch.isneginf(scores).any(-1, keepdim=True)
    return has_lost_keys & (masked.amax(-1, keepdim=True) <= lowest)


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """Return the weights of the keys in a model whose heads have sinks (gpt-oss).

    The sink of a head gets a part of each query's attention, so the weights of the keys sum to less
    than 1.
    """
    sink = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
    joined = torch.cat([scores, sink], -1)
    joined = joined - joined.amax(-1, keepdim=True)
    return F.softmax(joined, -1, dtype=joined.dtype)[..., :-1]
