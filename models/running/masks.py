"""Masks of attention patterns in the plain model: padding, later keys and keys outside a window.

A mask is True at the keys that a query sees. All other keys get the weight 0 in the pattern. In an
attached model, `transformers` makes the masks; see `models.attached.padding`.

A mask for many queries is not stored as a tensor. It is a `Rule`, from which each layer computes
the mask of one block of queries after the other. Masks that callers pass are checked (`as_real`,
`as_seen`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.base import is_unwatched, padding_messages, require_kind
from models.running.kvcache import oldest_reached

# If a run has at most this number of queries, all layers share one mask. If it has more queries,
# the mask would be large. Then each layer makes its own mask, for this number of queries at a time.
BLOCK = 512


class Rule(NamedTuple):
    """A mask of queries and keys that is computed in parts (`seen`) and not stored as a whole.

    A query sees the keys up to its own column, except keys outside the window, padding and hidden
    keys.

    Attributes:
        window: the number of positions that a query sees, including its own. 0 means all positions.
        real: True at the keys that are not padding: Bool[batch key]. None if there is no padding.
        positions: the position of each key in its text: Int[batch key]. None if there is no padding
            between tokens, so that distances of columns are distances of positions.
        hidden: True at the keys that no query sees: Bool[batch head key], where an axis may have
            size 1. None if there are no hidden keys.
    """

    window: int = 0
    real: Tensor | None = None
    positions: Tensor | None = None
    hidden: Tensor | None = None

    def seen(
        self, first: int, start: int, end: int, device: torch.device
    ) -> Bool[Tensor, "_batch _head query key"]:
        """Return the mask of some queries and keys.

        Args:
            first: the column of the first key.
            start: the column of the first query.
            end: the column after the last query and the last key.
            device: the device of the mask.
        """
        columns = torch.arange(first, end, device=device)
        visible = (columns <= columns[start - first :, None])[None]
        if self.window:
            positions = columns[None] if self.positions is None else self.positions[:, first:end]
            visible = visible & (
                positions[:, None] > positions[:, start - first :, None] - self.window
            )
        if self.real is not None:
            visible = visible & self.real[:, None, first:end]
        visible = visible[:, None]
        if self.hidden is not None:
            visible = visible & ~self.hidden[:, :, None, first:end]
        return visible


Visible = Tensor | Rule | None
"""The keys that queries see: Bool[batch head query key], where an axis may have size 1, or a rule.

None means that a query sees all keys up to its own. The last query is always at the last key.
"""


def part(
    mask: Visible, queries: slice, shape: Sequence[int], device: torch.device
) -> tuple[slice, Bool[Tensor, "_batch _head _query _key"] | None]:
    """Return a slice of the keys that some queries may see, and the mask of these queries and keys.

    Args:
        mask: the mask of all queries and keys.
        queries: a slice of the queries, with a start and a stop.
        shape: the number of queries and the number of keys.
        device: the device of the mask that a rule makes.
    """
    if isinstance(mask, Tensor):
        return slice(0, shape[1]), mask if mask.shape[2] == 1 else mask[:, :, queries]
    n_cached = shape[1] - shape[0]
    start, end = n_cached + queries.start, n_cached + queries.stop
    first = oldest_reached(mask.window, start) if mask and mask.positions is None else 0
    return slice(first, end), mask and mask.seen(first, start, end, device)


def dense(
    mask: Visible, shape: Sequence[int], device: torch.device
) -> Bool[Tensor, "_batch _head _query _key"]:
    """Return the mask of all queries and all keys as a tensor."""
    if isinstance(mask, Tensor):
        return mask
    return (mask or Rule()).seen(0, shape[1] - shape[0], shape[1], device)


def masked(
    scores: Float[Tensor, "batch head query key"], mask: Visible, may_write: bool
) -> Float[Tensor, "batch head query key"]:
    """Return the scores with -inf at the keys that a query does not see.

    Args:
        scores: the scores.
        mask: the keys that queries see.
        may_write: whether the result may be written into `scores`. This saves memory for another
            matrix of scores, and time.
    """
    shape = scores.shape[2:]
    if not (may_write and is_unwatched(scores)):
        return torch.where(dense(mask, shape, scores.device), scores, -torch.inf)
    if mask is None:
        columns = torch.arange(shape[1], device=scores.device)
        hidden = columns > columns[shape[1] - shape[0] :, None]
    else:
        hidden = ~dense(mask, shape, scores.device)
    return scores.masked_fill_(hidden, -torch.inf)


def shared(mask: Visible, shape: Sequence[int], device: torch.device) -> Visible:
    """Return the mask of a call in a form that all layers of a model can use.

    The result is a tensor if this tensor is small. Otherwise, it is `mask` itself, from which each
    layer computes its own tensor when it needs it.
    """
    if (mask is None and shape[0] in (1, shape[1])) or shape[0] > BLOCK:
        return mask
    return dense(mask, shape, device)


def rule_of(
    window: int, columns: tuple[int, int], real: Tensor | None, positions: Tensor | None
) -> Rule | None:
    """Return the rule for the keys that each query sees, from a window and the padding.

    The queries are the last positions of the keys. The result is None if each query sees all keys
    up to its own.

    Args:
        window: the window, or 0.
        columns: the column of the first key, and the column after the last key. The first column is
            above 0 if a cache has dropped keys that are older than the window.
        real: True at the columns that are not padding; None if there is no padding.
        positions: the position of each column, if texts have padding between tokens. A window then
            counts positions instead of columns. The first column must be 0.
    """
    # A `range` of these columns would be compiled anew for each length of a text.
    first, end = columns
    if real is None:
        return Rule(window) if window and end - first > window else None
    return Rule(window, real[:, first:], positions)


def as_real(
    mask: Shaped[Tensor, "..."],
    shape: tuple[int, int],
    *,
    n_cached: int | None,
    known: Bool[Tensor, "batch end"] | None,
    drops_keys: bool,
    may_read: bool,
) -> Bool[Tensor, "batch end"] | None:
    """Return a mask, True at the columns that are not padding, or None if there is no padding.

    The mask is checked on the CPU. If its values may not be read, only its shape is checked.

    Args:
        mask: the caller's `attention_mask`.
        shape: the number of rows of the tokens, and the number of columns, including cached
            columns.
        n_cached: the number of cached columns, or None if there is no cache.
        known: True at the columns that are not padding according to the cache. None if there is no
            padding.
        drops_keys: whether the cache drops the keys that no window can reach.
        may_read: whether the values may be read.

    Raises:
        ValueError: if the mask has a wrong shape, if it contains other numbers than 0 and 1, if a
            row contains only padding (without a cache), if the mask differs from `known`, or if
            padding follows a real token and the cache drops keys.
    """
    require_kind("attention_mask", mask, Tensor, words="a tensor [batch, key]")
    if mask.shape != shape:
        remedy = "pass a mask of queries and keys as query_key_mask" if mask.ndim > 2 else ""
        raise ValueError(
            padding_messages.mask_shape(
                "attention_mask",
                needed=shape,
                given=mask.shape,
                axes="[batch, key] with the keys of cached positions",
                remedy=remedy,
            )
        )
    if not may_read:
        return mask.bool()
    real = as_boolean("attention_mask", mask.cpu())
    if n_cached is None:
        if (row := _first_empty_row(real)) is not None:
            raise ValueError(padding_messages.no_real_token("attention_mask", f"row {row}"))
        return None if real.all() else real
    cached = real[:, :n_cached]
    is_same = cached.all() if known is None else known[:, :n_cached].cpu().equal(cached)
    if not is_same:
        raise ValueError(padding_messages.mask_changed())
    if drops_keys and bool((real[:, 1:] < real[:, :-1]).any()):
        because = "the KVCache of a sliding window contains only the last keys"
        raise ValueError(padding_messages.wrong_side("right", because))
    return None if real.all() else real


def as_seen(
    mask: Shaped[Tensor, "..."], shape: tuple[int, int, int, int], is_cached: bool, may_read: bool
) -> Bool[Tensor, "_batch _head _query _key"]:
    """Return the caller's `query_key_mask` with all four axes.

    The mask is checked on the CPU. If its values may not be read, only its shape is checked.

    Args:
        mask: the caller's `query_key_mask`.
        shape: the sizes of batch, head, query and key.
        is_cached: whether a cache is used. With a cache, a row may have no keys.
        may_read: whether the values may be read.

    Raises:
        ValueError: if the mask has a wrong shape, if it contains other numbers than 0 and 1, or if
            a row has no keys.
    """
    batch, _, new, end = shape
    shapes = {2: (new, end), 3: (batch, new, end), 4: shape}
    pairs = list(zip(mask.shape, shapes.get(mask.ndim, ()), strict=False))
    # With two axes, a mask [1, key] is probably a padding mask, so its axes must have their full
    # sizes.
    if not pairs or any(size != full and (mask.ndim == 2 or size != 1) for size, full in pairs):
        raise ValueError(
            f"query_key_mask must be [query, key], here {shapes[2]}, or [batch, query, key], "
            f"{shapes[3]}, or [batch, head, query, key], {shapes[4]}, including the keys of cached "
            f"positions; got {tuple(mask.shape)}"
        )
    mask = mask[None] if mask.ndim == 2 else mask
    mask = mask[:, None] if mask.ndim == 3 else mask
    if not may_read:
        return mask.bool()
    visible = as_boolean("query_key_mask", mask.cpu())
    if not is_cached and (row := _first_empty_row(visible)) is not None:
        raise ValueError(
            f"query_key_mask must leave each row at least one key; got no key in row {row}"
        )
    return visible


def has_gaps(real: Bool[Tensor, "batch key"] | None, may_read: bool) -> bool:
    """Return whether a row has padding between real tokens.

    The result is True if the mask may not be read.
    """
    if real is None:
        return False
    if not may_read:
        return True
    return bool(((real[:, 1:] > real[:, :-1]).sum(1) + real[:, 0] > 1).any())


def as_boolean(name: str, mask: Tensor) -> Tensor:
    """Return a mask of 0 and 1 as booleans.

    Raises:
        ValueError: if the mask contains another number; the error names the mask.
    """
    boolean = mask.bool()
    if not torch.equal(boolean.to(mask.dtype), mask):
        wrong = mask[boolean.to(mask.dtype) != mask][0].item()
        raise ValueError(padding_messages.mask_numbers(name, wrong))
    return boolean


def _first_empty_row(allowed: Tensor) -> int | None:
    """Return the first row without any key; None if each row has a key.

    Callers do not check this with a cache, because a whole piece of a row may be padding if a text
    is read in pieces.
    """
    if not allowed.numel() or allowed.flatten(1).any(1).all():
        return None
    return int((~allowed.flatten(1).any(1)).nonzero()[0])
