"""Masks of the keys that each query sees: checked as the caller gave them, and kept as rules where large."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from hooks.base import require_kind
from models.checks import should_read
from models.running.kvcache import oldest_reached

# Up to this many queries a mask is made once for all layers; beyond, by blocks of so many in each layer.
BLOCK = 512


class Rule(NamedTuple):
    """A mask that takes no memory: each query sees keys up to its own column, with these exceptions.

    Attributes:
        window: a key must be less than this many positions before its query; 0 means any number.
        real: which keys are not padding: Bool[batch key]; None means all.
        positions: each key's position in its own text: Int[batch key]; None if columns are as far
            apart as positions, because there is no padding within a text.
    """

    window: int = 0
    real: Tensor | None = None
    positions: Tensor | None = None

    def seen(
        self, first: int, start: int, end: int, device: torch.device
    ) -> Bool[Tensor, "_batch 1 query key"]:
        """The mask of the queries from column `start` and the keys from column `first`, up to `end`."""
        columns = torch.arange(first, end, device=device)
        seen = (columns <= columns[start - first :, None])[None]
        if self.window:
            positions = columns[None] if self.positions is None else self.positions[:, first:end]
            seen = seen & (positions[:, None] > positions[:, start - first :, None] - self.window)
        if self.real is not None:
            seen = seen & self.real[:, None, first:end]
        return seen[:, None]


Visible = Tensor | Rule | None
"""The keys that queries see: Bool[batch head query key], where an axis may have size 1, or a rule.

None means all keys up to the query's own. The last query is always at the last key.
"""


def part(
    mask: Visible, queries: slice, shape: Sequence[int], device: torch.device
) -> tuple[slice, Bool[Tensor, "_batch _head _query _key"] | None]:
    """Return the keys that some queries may see at all, and the mask of these queries and keys.

    Args:
        mask: of all queries and keys.
        queries: a slice of them, with a start and a stop.
        shape: how many queries and keys there are.
        device: where numbers are made.
    """
    if isinstance(mask, Tensor):
        return slice(0, shape[1]), mask if mask.shape[2] == 1 else mask[:, :, queries]
    before = shape[1] - shape[0]
    start, end = before + queries.start, before + queries.stop
    first = oldest_reached(mask.window, start) if mask and mask.positions is None else 0
    return slice(first, end), mask and mask.seen(first, start, end, device)


def dense(
    mask: Visible, shape: Sequence[int], device: torch.device
) -> Bool[Tensor, "_batch _head _query _key"]:
    """The mask of all queries and all keys, as numbers."""
    if isinstance(mask, Tensor):
        return mask
    return (mask or Rule()).seen(0, shape[1] - shape[0], shape[1], device)


def shared(mask: Visible, shape: Sequence[int], device: torch.device) -> Visible:
    """The form in which the layers of a model share a mask: numbers if few, otherwise the rule."""
    if (mask is None and shape[0] in (1, shape[1])) or shape[0] > BLOCK:
        return mask
    return dense(mask, shape, device)


def as_real(
    mask: Shaped[Tensor, "..."],
    batch: int,
    end: int,
    start: int | None = None,
    known: Bool[Tensor, "batch end"] | None = None,
    windowed: bool = False,
) -> Bool[Tensor, "batch end"] | None:
    """Return which columns are not padding; None if all are. The mask is read once, on the CPU, if it may be.

    Args:
        mask: the caller's `attention_mask`.
        batch: rows of the tokens.
        end: columns, cached ones included.
        start: how many of them are cached; None without a cache.
        known: which columns are not padding, as far as a cache knows; None if all are.
        windowed: whether a cache drops keys.

    Raises:
        ValueError: if the mask has another shape or other numbers than 0 and 1, a row of padding only
            (without a cache), contradicts what is known, or needs keys that are dropped.
    """
    require_kind("attention_mask", mask, Tensor, "a tensor [batch, key]")
    if mask.shape != (batch, end):
        hint = ": for a mask of queries and keys there is query_key_mask" if mask.ndim > 2 else ""
        raise ValueError(
            f"attention_mask must be [batch, key], here {(batch, end)}, where keys include cached "
            f"positions; got {tuple(mask.shape)}{hint}"
        )
    if not should_read(mask):
        return mask.bool()
    real = _as_boolean("attention_mask", mask.cpu())
    if start is None:
        _check_no_row_is_empty("attention_mask", real)
    elif not (
        real[:, :start].all() if known is None else known[:, :start].cpu().equal(real[:, :start])
    ):
        raise ValueError("attention_mask must be the same as before for cached tokens; got another")
    if start is not None and windowed and bool((real[:, 1:] < real[:, :-1]).any()):
        raise ValueError(
            "padding must be on the left with a KVCache of a sliding window, which keeps the "
            "last keys; got padding after a real token"
        )
    return None if real.all() else real


def as_seen(
    mask: Shaped[Tensor, "..."], shape: tuple[int, int, int, int], is_cached: bool
) -> Bool[Tensor, "_batch _head _query _key"]:
    """The caller's `query_key_mask` with all four axes. It is read once, on the CPU, if it may be.

    Args:
        mask: the caller's.
        shape: sizes of batch, head, query and key.
        is_cached: whether a cache is used; then a row may be without keys.

    Raises:
        ValueError: if the mask has another shape or other numbers than 0 and 1, or a row without keys.
    """
    batch, _, new, end = shape
    shapes = {2: (new, end), 3: (batch, new, end), 4: shape}
    pairs = list(zip(mask.shape, shapes.get(mask.ndim, ()), strict=False))
    # With two axes, [1, key] would be a padding mask in the wrong place.
    if not pairs or any(size != full and (mask.ndim == 2 or size != 1) for size, full in pairs):
        raise ValueError(
            f"query_key_mask must be [query, key], here {shapes[2]}, or [batch, query, key], "
            f"{shapes[3]}, or [batch, head, query, key], {shapes[4]}, where keys include cached "
            f"positions; got {tuple(mask.shape)}"
        )
    mask = mask[None] if mask.ndim == 2 else mask
    mask = mask[:, None] if mask.ndim == 3 else mask
    if not should_read(mask):
        return mask.bool()
    seen = _as_boolean("query_key_mask", mask.cpu())
    if not is_cached:
        _check_no_row_is_empty("query_key_mask", seen)
    return seen


def has_gaps(real: Bool[Tensor, "batch key"]) -> bool:
    """Whether a row has padding between real tokens. A mask that may not be read could have it."""
    if not should_read(real):
        return True
    return bool(((real[:, 1:] > real[:, :-1]).sum(1) + real[:, 0] > 1).any())


def _as_boolean(name: str, mask: Tensor) -> Tensor:
    boolean = mask.bool()
    if not torch.equal(boolean.to(mask.dtype), mask):
        wrong = mask[boolean.to(mask.dtype) != mask][0].item()
        raise ValueError(
            f"{name} must be 1 where a key may be attended to and 0 elsewhere; got {wrong}"
        )
    return boolean


def _check_no_row_is_empty(name: str, allowed: Tensor) -> None:
    # Not with a cache: when a text is read in pieces, a whole piece of a row may be padding.
    if allowed.numel() and not allowed.flatten(1).any(1).all():
        row = int((~allowed.flatten(1).any(1)).nonzero()[0])
        raise ValueError(f"{name} must leave each row a key; got none in row {row}")
