"""What blocks need to know beyond the residual stream: which keys a query sees, rotations, the past."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from models.checks import can_be_read
from models.config import TransformerConfig
from models.kvcache import KVCache
from models.positions import Rotation


class Context(NamedTuple):
    """One call's surroundings; `model.context(tokens)` makes it, every block reads it.

    Attributes:
        positions: each token's place in its own text, padding not counted: Int[batch pos], or
            [1 pos] where all rows agree.
        masks: for each window in use, which keys a query sees: Bool[batch head query key], axes of
            one standing for all; None for all up to its own position.
        rotation: what rotary models turn queries and keys by.
        start: how many positions were read before this call.
        kv_cache: where they are.
        real: which positions so far are no padding: Bool[batch key]; None where no mask says so.
    """

    positions: Tensor
    masks: dict[int, Tensor | None]
    rotation: Rotation | None = None
    start: int = 0
    kv_cache: KVCache | None = None
    real: Tensor | None = None

    def commit(self) -> None:
        """Tells the cache that all blocks have read the new positions."""
        if self.kv_cache is not None:
            self.kv_cache.commit(self.start + self.positions.shape[1], self.real)

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_head, key, d_head]: those cached for a layer, then the new."""
        if self.kv_cache is None:
            return k, v
        return self.kv_cache.layers[layer].extended(self.start, k, v)


def place(
    config: TransformerConfig,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None,
    kv_cache: KVCache | None,
) -> Context:
    """The context of one call, but for its rotation.

    Args:
        config: the model's.
        tokens: the new tokens.
        attention_mask: see `Transformer.forward`.
        kv_cache: what was read before.

    Raises:
        ValueError: if tokens, mask and cache do not fit each other or the config's context.
    """
    batch, new = tokens.shape
    windows, start, known = set(config.windows), 0, None
    if kv_cache is not None:
        start, known = kv_cache.reserve(config, batch, new), kv_cache.mask
    elif new > config.n_ctx:
        raise ValueError(f"{new} tokens do not fit the context of {config.n_ctx}")
    end = start + new
    if attention_mask is None and known is not None:
        attention_mask = torch.cat([known, known.new_ones(batch, new)], 1)
    if attention_mask is None:
        at = torch.arange(start, end, device=tokens.device)[None]
        masks = {window: _causal(window, start, end, tokens.device) for window in windows}
        return Context(at, masks, None, start, kv_cache)
    shapes = {2: (batch, end), 3: (batch, new, end), 4: (batch, config.n_heads, new, end)}
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"attention_mask is a tensor, not a {type(attention_mask).__name__}")
    allowed = _as_mask(attention_mask.to(tokens.device), shapes)
    if kv_cache is None:
        _check_no_row_is_empty(allowed)
    if allowed.ndim > 2:
        masks = _by_query(allowed, known, windows, kv_cache)
        at = torch.arange(start, end, device=tokens.device)[None]
        return Context(at, masks, None, start, kv_cache)
    read = allowed[:, :start]
    if can_be_read(read) and not (read.all() if known is None else torch.equal(known, read)):
        raise ValueError("attention_mask says otherwise of cached tokens than when they were read")
    if kv_cache is not None and any(windows) and _has_gaps(allowed):
        raise ValueError(
            "a sliding window's cache keeps the last keys, so padding must stand on the left"
        )
    positions = (allowed.long().cumsum(1) - 1).clamp(min=0)
    masks = {window: _padded(window, start, allowed, positions) for window in windows}
    return Context(positions[:, start:], masks, None, start, kv_cache, allowed)


def _by_query(
    allowed: Tensor, known: Tensor | None, windows: set[int], kv_cache: KVCache | None
) -> dict[int, Tensor | None]:
    """The masks of all windows, where a mask of queries and keys stands for them."""
    if kv_cache is not None and any(windows):
        raise ValueError(
            "a sliding window's cache drops keys that an attention_mask [batch, query, key] may ask for"
        )
    if known is not None:
        raise ValueError(
            "the cached tokens were read with an attention_mask [batch, key]: go on so"
        )
    return dict.fromkeys(windows, allowed[:, None] if allowed.ndim == 3 else allowed)


def _check_no_row_is_empty(allowed: Tensor) -> None:
    # Where a text is read in pieces, a row may well begin with a whole piece of padding.
    if can_be_read(allowed) and not allowed.flatten(1).any(1).all():
        row = int((~allowed.flatten(1).any(1)).nonzero()[0])
        raise ValueError(f"attention_mask leaves no key at all in row {row} of the batch")


def _has_gaps(allowed: Tensor) -> bool:
    return can_be_read(allowed) and bool((allowed[:, 1:] < allowed[:, :-1]).any())


def _as_mask(mask: Tensor, shapes: dict[int, tuple[int, ...]]) -> Tensor:
    """`mask` as a boolean one, once its shape and its values are those of a mask."""
    expected = shapes.get(mask.ndim, ())
    pairs = list(zip(mask.shape, expected, strict=False))
    if not pairs or any(size != full and (mask.ndim == 2 or size != 1) for size, full in pairs):
        raise ValueError(
            f"attention_mask is [batch, key], here {shapes[2]}, or [batch, query, key], {shapes[3]}, or "
            f"[batch, head, query, key], {shapes[4]}; keys count cached positions too; not "
            f"{tuple(mask.shape)}"
        )
    boolean = mask.bool()
    if can_be_read(mask) and not torch.equal(boolean.to(mask.dtype), mask):
        raise ValueError(
            "attention_mask is boolean, or 1 where a key may be attended to and 0 elsewhere; it has "
            f"values from {mask.min().item()} to {mask.max().item()}"
        )
    return boolean


def _kept(window: int, start: int, end: int) -> int:
    """How many keys a block with this window is given."""
    return end - max(0, start - window + 1) if window else end


def _causal(
    window: int, start: int, end: int, device: torch.device
) -> Bool[Tensor, "1 1 query kept"] | None:
    kept = _kept(window, start, end)
    narrow = window and end - start > 1 and kept > window
    if not narrow and (start == 0 or end - start == 1):
        return None
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(end - kept, end, device=device)
    return _seen(window, query, key, query - key)[None, None]


def _padded(
    window: int, start: int, real: Bool[Tensor, "batch key"], positions: Int[Tensor, "batch key"]
) -> Bool[Tensor, "batch 1 query kept"]:
    end = real.shape[1]
    kept = _kept(window, start, end)
    query = torch.arange(start, end, device=real.device)[:, None]
    key = torch.arange(end - kept, end, device=real.device)
    # Within a text, distances are counted without the padding.
    distance = positions[:, start:, None] - positions[:, None, -kept:]
    return (_seen(window, query, key, distance) & real[:, None, -kept:])[:, None]


def _seen(window: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
    return (key <= query) & (distance < window) if window else key <= query
