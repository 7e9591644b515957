"""Dot-product attention as functions of tensors, and the cap of scores and logits."""

import torch
from jaxtyping import Bool, Float, Real, Shaped
from torch import Tensor, nn

from hooks.base import is_unwatched, require_integer, require_room


def scaled_dot_product_attention(
    q: Real[Tensor, "*#axes query d_k"],
    k: Real[Tensor, "*#axes key d_k"],
    v: Real[Tensor, "*#axes key d_v"],
    mask: Shaped[Tensor, "..."] | None = None,
) -> Float[Tensor, "*#axes query d_v"]:
    """Return `softmax(q k^T / sqrt(d_k) + mask) v`, over any leading axes (Vaswani et al. 2017).

    The output of a query without any allowed key is zero, not NaN. Large scores do not overflow,
    because the softmax subtracts the largest score of each row first.

    Args:
        q, k, v: queries, keys, values. Integers are converted to floats.
        mask: a boolean mask, True where a query may attend to a key, or a floating-point mask that
            is added to the scores. Its shape is [query, key], or all axes of the scores, each of
            full size or 1. See `causal_mask`.

    Returns:
        The weighted means of the values, [*axes, query, d_v], in the unit of `v`.

    Raises:
        ValueError: if the mask has another shape, or contains integers.

    >>> import torch
    >>> q = k = torch.zeros(3, 2)
    >>> v = torch.tensor([[1.0], [2.0], [6.0]])
    >>> scaled_dot_product_attention(q, k, v, causal_mask(3)).flatten()
    tensor([1.0000, 1.5000, 3.0000])
    """
    floats = [part.dtype for part in (q, k, v) if part.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()
    q, k, v = (part if part.is_floating_point() else part.to(dtype) for part in (q, k, v))
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)
    return softmax(scores if mask is None else _apply_mask(scores, mask)) @ v


def _apply_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the scores with a mask: a boolean mask sets scores to -inf, a float mask is added.

    Raises:
        ValueError: if the mask contains integers, or its shape does not fit.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"mask must be boolean or floating-point; got {mask.dtype}")
    # A mask with only some of the leading axes is ambiguous: its rows could be heads.
    fits = mask.ndim in (2, scores.ndim) and all(
        size in (1, full) for size, full in zip(mask.shape[::-1], scores.shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"mask must be [query, key] or have all axes of the scores {tuple(scores.shape)}, each "
            f"of full size or 1; got {tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return torch.where(mask, scores, -torch.inf)
    return scores + mask.to(scores.dtype)


def require_room_for_scores(
    q: Float[Tensor, "batch head query d_head"], k: Float[Tensor, "batch kv_head key d_head"]
) -> None:
    """Check that the scores of a layer, the masked scores and the pattern fit into memory together.

    Raises:
        MemoryLimitError: with advice.
    """
    n_scores = q.shape[:3].numel() * k.shape[2]
    purpose = "scores and pattern of a layer: read other values, or give fewer texts"
    require_room(
        3 * n_scores * q.element_size(),
        q,
        f"{purpose}, or the last positions after a kv_cache of the others",
    )


def causal_mask(pos: int, device: torch.device | str | None = None) -> Bool[Tensor, "query key"]:
    """Return a mask that is True where the key is not later than the query.

    Args:
        pos: the number of queries and keys.
        device: the device of the mask. Default: the CPU.

    Returns:
        The mask [query, key], for `scaled_dot_product_attention`.

    Raises:
        TypeError: if `pos` is not a whole number.
        ValueError: if it is below 0.

    >>> causal_mask(3).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    require_integer("pos", pos, least=0)
    return torch.ones(pos, pos, dtype=torch.bool, device=device).tril()


def softmax(
    scores: Float[Tensor, "*axes key"], may_lack_keys: bool = True
) -> Float[Tensor, "*axes key"]:
    """Return the softmax over keys. It may write into `scores`.

    Args:
        scores: the masked scores.
        may_lack_keys: whether a row may contain only -inf. Such rows become zeros. Default: True.
    """
    if not may_lack_keys:
        return torch.softmax(scores, -1, out=scores if is_unwatched(scores) else None)
    first = scores[..., :1]
    unseen = first == -torch.inf
    # A row without keys would give NaN, also in the gradient. So the first key always gets a score
    # that is too small to change the weights of other keys, and its weight is set to zero after the
    # softmax.
    first.masked_fill_(unseen, torch.finfo(scores.dtype).min)
    if is_unwatched(scores):
        # The result is written into `scores`. This avoids another matrix of T² numbers and is three
        # times as fast at T = 1024.
        weights = torch.softmax(scores, -1, out=scores)
    else:
        # Autograd keeps the result of the softmax, so the weights are a copy.
        weights = torch.softmax(scores, -1).clone()
    weights[..., :1].masked_fill_(unseen, 0)
    return weights


class SoftCap(nn.Module):
    """`cap * tanh(x / cap)`: close to `x` near zero, and never beyond the cap (Gemma 2).

    A score of -inf stays -inf, so a key that an edit removed stays removed.
    """

    cap: float

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Return the capped values."""
        return torch.where(x == -torch.inf, x, self.cap * torch.tanh(x / self.cap))
