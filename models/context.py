"""Context: what blocks read besides the residual stream, such as masks, rotations and past keys."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooks import starting_at
from models.checks import can_be_read
from models.kvcache import KVCache, oldest_reached
from models.positions import Rotation

Past = tuple[Float[Tensor, "_rows kv_head key d_head"], Float[Tensor, "_rows kv_head key d_head"]]
"""One layer's keys and values, after norm and rotation."""


class Context(NamedTuple):
    """What one call gives to every block; made by `model.context(tokens)`.

    Attributes:
        positions: each token's position in its own text, without padding: Int[batch pos], or
            [1 pos] if all rows have the same.
        masks: for each window in use, which keys a query sees: Bool[batch head query key], where an
            axis may have size one. None means all keys up to the query's own position.
        rotation: the cosines and sines that rotary models rotate queries and keys with.
        start: how many columns of the text come before these.
        kv_cache: the cache that holds earlier keys and values, and takes the new ones.
        real: which columns so far are not padding: Bool[batch key]; None without a mask.
        past: the keys and values of earlier columns for each layer, read-only.
    """

    positions: Tensor
    masks: dict[int, Tensor | None]
    rotation: Rotation | None = None
    start: int = 0
    kv_cache: KVCache | None = None
    real: Tensor | None = None
    past: tuple[Past, ...] | None = None

    def piece(self) -> AbstractContextManager[None]:
        """A `with` in which edits know where in the text this call starts. No use while compiling."""
        if self.kv_cache is None or torch.compiler.is_compiling():
            return nullcontext()
        return starting_at(self.start)

    def commit(self) -> None:
        """Tells the key/value cache that all blocks have read the new positions."""
        if self.kv_cache is not None:
            self.kv_cache.commit(self.start + self.positions.shape[1], self.real)

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Earlier and new keys and values of a layer, [batch, kv_head, key, d_head]."""
        if self.kv_cache is not None:
            return self.kv_cache.layers[layer].extended(self.start, k, v)
        if self.past is not None:
            old_k, old_v = self.past[layer]
            return _joined(old_k, k), _joined(old_v, v)
        return k, v

    def repeated(self, n: int) -> "Context":
        """The context of `n` copies of the batch in sequence: row `copy * batch + row`.

        All copies share one past.

        Raises:
            ValueError: if the context has a `KVCache`, which has the rows of one batch only.
        """
        self._refuse_cache("repeated")
        return self._replace(
            positions=_tiled(self.positions, n),
            masks={w: None if m is None else _tiled(m, n) for w, m in self.masks.items()},
            rotation=self.rotation and _both(lambda part: _tiled(part, n), self.rotation),
            real=None if self.real is None else _tiled(self.real, n),
        )

    def after(self, pos: int, past: Sequence[Past]) -> "Context":
        """The context of the same texts from column `pos` on.

        A block that runs on `resid[:, pos:]` gives the same values as on the whole text.

        Args:
            pos: counted from the start of the text.
            past: for each layer, keys and values of all columns before `pos`, after norm and rotation.
                They are only read. Their rows are those of the batch, before or after `repeated`.

        Raises:
            ValueError: if the context has a `KVCache` or no column `pos`, or the past does not have
                `pos` columns.
        """
        self._refuse_cache("after")
        end = self.start + self.positions.shape[1]
        if not self.start <= pos < end:
            raise ValueError(f"pos must be {self.start} to {end - 1}; got {pos}")
        for columns in {part.shape[2] for pair in past for part in pair} - {pos}:
            raise ValueError(f"past must have the {pos} columns before pos; got {columns}")
        skipped = pos - self.start

        def later(mask: Tensor | None) -> Tensor | None:
            if mask is None:  # all keys up to the query's own
                return _mask(0, pos, torch.arange(end, device=self.positions.device)[None])
            return mask if mask.shape[2] == 1 else mask[:, :, skipped:]

        return self._replace(
            positions=self.positions[:, skipped:],
            masks={window: later(mask) for window, mask in self.masks.items()},
            rotation=self.rotation and _both(lambda part: part[:, skipped:], self.rotation),
            start=pos,
            past=tuple(past),
        )

    def _refuse_cache(self, method: str) -> None:
        if self.kv_cache is not None:
            raise ValueError(f"{method}() must be called on a context without a KVCache")


ContextOrMask = Context | Tensor | None
"""What blocks and attention are called with.

A model gives its context. Without a model it may be a mask of queries and keys, like `query_key_mask`
of `Transformer.forward`, or None for the causal rule and the window. Positions then count from 0.
"""


def place(
    x: Shaped[Tensor, "batch pos *d_model"],
    windows: Collection[int],
    n_heads: int,
    rotate: Callable[[Tensor], Rotation | None],
    attention_mask: Tensor | None = None,
    query_key_mask: Tensor | None = None,
    kv_cache: KVCache | None = None,
) -> Context:
    """The context of one call.

    Args:
        x: the new tokens, or vectors of the stream; only shape and device matter.
        windows: the windows of the blocks that will read it.
        n_heads: their query heads.
        rotate: gives the rotation of positions.
        attention_mask, query_key_mask: see `Transformer.forward`.
        kv_cache: the keys and values read before.

    Raises:
        ValueError: if tokens, masks and cache do not fit each other.
    """
    (batch, new), device = x.shape[:2], x.device
    start, known = (0, None) if kv_cache is None else (kv_cache.length, kv_cache.mask)
    end, real = start + new, None
    counted = torch.arange(end, device=device)[None]
    if attention_mask is None and known is not None:
        attention_mask = torch.cat([known, known.new_ones(batch, new)], 1)
    if attention_mask is not None:
        real = _as_real(attention_mask.to(device), batch, end)
        if kv_cache is None:
            _check_no_row_is_empty("attention_mask", real)
        else:
            _check_fits_cache(real, start, known, any(windows))
        # Padding has no position, and no query sees it.
        counted = (real.long().cumsum(1) - 1).clamp(min=0)
    masks: dict[int, Tensor | None]
    if query_key_mask is not None:
        seen = _as_seen(query_key_mask.to(device), batch, n_heads, new, end)
        if kv_cache is None:
            _check_no_row_is_empty("query_key_mask", seen)
        elif any(windows):
            raise ValueError(
                "query_key_mask must be None with a KVCache of a sliding window, which drops keys; "
                f"got {tuple(query_key_mask.shape)}"
            )
        masks = dict.fromkeys(windows, seen if real is None else seen & real[:, None, None])
    else:
        masks = {w: _mask(w, start, counted, real) for w in windows}
    positions = counted[:, start:]
    return Context(positions, masks, rotate(positions), start, kv_cache, real)


def _as_real(mask: Tensor, batch: int, end: int) -> Bool[Tensor, "batch column"]:
    if mask.shape != (batch, end):
        hint = ": for a mask of queries and keys there is query_key_mask" if mask.ndim > 2 else ""
        raise ValueError(
            f"attention_mask must be [batch, key], here {(batch, end)}, where keys include cached "
            f"positions; got {tuple(mask.shape)}{hint}"
        )
    return _as_boolean("attention_mask", mask)


def _as_seen(
    mask: Tensor, batch: int, n_heads: int, new: int, end: int
) -> Bool[Tensor, "_batch _head _query _key"]:
    shapes = {2: (new, end), 3: (batch, new, end), 4: (batch, n_heads, new, end)}
    pairs = list(zip(mask.shape, shapes.get(mask.ndim, ()), strict=False))
    # With two axes, [1, key] would be a padding mask in the wrong place.
    if not pairs or any(size != full and (mask.ndim == 2 or size != 1) for size, full in pairs):
        raise ValueError(
            f"query_key_mask must be [query, key], here {shapes[2]}, or [batch, query, key], "
            f"{shapes[3]}, or [batch, head, query, key], {shapes[4]}, where keys include cached "
            f"positions; got {tuple(mask.shape)}"
        )
    seen = _as_boolean("query_key_mask", mask)
    seen = seen[None] if seen.ndim == 2 else seen
    return seen[:, None] if seen.ndim == 3 else seen


def _as_boolean(name: str, mask: Tensor) -> Tensor:
    boolean = mask.bool()
    if can_be_read(mask) and not torch.equal(boolean.to(mask.dtype), mask):
        wrong = mask[boolean.to(mask.dtype) != mask][0].item()
        raise ValueError(
            f"{name} must be 1 where a key may be attended to and 0 elsewhere; got {wrong}"
        )
    return boolean


def _check_no_row_is_empty(name: str, allowed: Tensor) -> None:
    # Not with a cache: when a text is read in pieces, a whole piece of a row may be padding.
    if allowed.numel() and can_be_read(allowed) and not allowed.flatten(1).any(1).all():
        row = int((~allowed.flatten(1).any(1)).nonzero()[0])
        raise ValueError(f"{name} must leave each row a key; got none in row {row}")


def _check_fits_cache(real: Tensor, start: int, known: Tensor | None, windowed: bool) -> None:
    """Refuses padding that contradicts the mask of cached keys, or needs keys that were dropped."""
    if not can_be_read(real):
        return
    read = real[:, :start]
    if not (read.all() if known is None else torch.equal(known, read)):
        raise ValueError("attention_mask must be the same as before for cached tokens; got another")
    if windowed and bool((real[:, 1:] < real[:, :-1]).any()):
        raise ValueError(
            "padding must be on the left with a KVCache of a sliding window, which keeps the "
            "last keys; got padding after a real token"
        )


def _mask(
    window: int,
    start: int,
    positions: Int[Tensor, "_batch column"],
    real: Bool[Tensor, "batch column"] | None = None,
) -> Bool[Tensor, "_batch 1 query key"] | None:
    """Which keys the queries from column `start` on see; None means all up to their own."""
    first, end = oldest_reached(window, start), positions.shape[1]
    narrow = window and end - start > 1 and end - first > window
    if real is None and not narrow and (start == 0 or end - start == 1):
        return None
    columns = torch.arange(end, device=positions.device)
    seen = (columns[first:] <= columns[start:, None])[None]
    if window:
        # Distances within a text do not count padding.
        seen = seen & (positions[:, start:, None] - positions[:, None, first:] < window)
    return (seen if real is None else seen & real[:, None, first:])[:, None]


def _both(change: Callable[[Tensor], Tensor], rotation: Rotation) -> Rotation:
    return change(rotation[0]), change(rotation[1])


def _tiled(value: Tensor, n: int) -> Tensor:
    """`n` copies along the batch. A batch of one broadcasts, so it stays as it is."""
    return value if value.shape[0] == 1 else value.repeat(n, *[1] * (value.ndim - 1))


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """Past and new keys or values, joined. The new ones may have several copies of the past's batch."""
    copies = len(new) // len(old)
    old = old.expand(copies, *old.shape)
    return torch.cat([old, new.unflatten(0, (copies, -1))], 3).flatten(0, 1)
