"""Context: what blocks read besides the residual stream, such as masks, rotations and past keys."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from models.checks import can_be_read
from models.config import TransformerConfig
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
                return _mask(0, pos, end, self.positions.device)
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


def place(
    config: TransformerConfig,
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None,
    kv_cache: KVCache | None,
    rotate: Callable[[Tensor], Rotation | None],
) -> Context:
    """The context of one call.

    Args:
        config: the model's config.
        tokens: the new tokens.
        attention_mask: see `Transformer.forward`.
        kv_cache: the keys and values read before.
        rotate: gives the rotation of positions.

    Raises:
        ValueError: if tokens, mask and cache do not fit each other or `n_ctx`.
    """
    (batch, new), device = tokens.shape, tokens.device
    start, known = 0, None
    if kv_cache is not None:
        start, known = kv_cache.reserve(config, batch, new), kv_cache.mask
    elif new > config.n_ctx:
        raise ValueError(f"tokens must fit the context of {config.n_ctx}; got {new}")
    end, windows, real = start + new, set(config.windows), None
    positions = torch.arange(start, end, device=device)[None]
    masks: dict[int, Tensor | None] = {w: _mask(w, start, end, device) for w in windows}
    if attention_mask is None and known is not None:
        attention_mask = torch.cat([known, known.new_ones(batch, new)], 1)
    if attention_mask is not None:
        allowed = _as_boolean(attention_mask.to(device), batch, config.n_heads, new, end)
        if kv_cache is None:
            _check_no_row_is_empty(allowed)
        else:
            _check_fits_cache(allowed, start, known, any(windows))
        if allowed.ndim > 2:
            masks = dict.fromkeys(windows, allowed[:, None] if allowed.ndim == 3 else allowed)
        else:
            # Padding has no position, and no query sees it.
            real, counted = allowed, (allowed.long().cumsum(1) - 1).clamp(min=0)
            masks = {w: _padded_mask(w, start, real, counted) for w in windows}
            positions = counted[:, start:]
    return Context(positions, masks, rotate(positions), start, kv_cache, real)


def _as_boolean(mask: Tensor, batch: int, n_heads: int, new: int, end: int) -> Tensor:
    """`mask` as a boolean tensor, after checking its shape and values."""
    shapes = {2: (batch, end), 3: (batch, new, end), 4: (batch, n_heads, new, end)}
    pairs = list(zip(mask.shape, shapes.get(mask.ndim, ()), strict=False))
    if not pairs or any(size != full and (mask.ndim == 2 or size != 1) for size, full in pairs):
        raise ValueError(
            f"attention_mask must be [batch, key], here {shapes[2]}, or [batch, query, key], "
            f"{shapes[3]}, or [batch, head, query, key], {shapes[4]}, where keys include cached "
            f"positions; got {tuple(mask.shape)}"
        )
    boolean = mask.bool()
    if can_be_read(mask) and not torch.equal(boolean.to(mask.dtype), mask):
        wrong = mask[boolean.to(mask.dtype) != mask][0].item()
        raise ValueError(
            f"attention_mask must be 1 where a key may be attended to and 0 elsewhere; got {wrong}"
        )
    return boolean


def _check_no_row_is_empty(allowed: Tensor) -> None:
    # Not with a cache: when a text is read in pieces, a whole piece of a row may be padding.
    if can_be_read(allowed) and not allowed.flatten(1).any(1).all():
        row = int((~allowed.flatten(1).any(1)).nonzero()[0])
        raise ValueError(f"attention_mask must leave each row a key; got none in row {row}")


def _check_fits_cache(allowed: Tensor, start: int, known: Tensor | None, windowed: bool) -> None:
    """Refuses masks that contradict the mask of cached keys, or need keys that were dropped."""
    if allowed.ndim > 2:
        if windowed:
            raise ValueError(
                "attention_mask must be [batch, key] with a KVCache of a sliding window, which drops "
                f"keys; got {allowed.ndim} axes"
            )
        if known is not None:
            raise ValueError(
                "attention_mask must be [batch, key] as for the cached tokens; got "
                f"{allowed.ndim} axes"
            )
    elif can_be_read(allowed):
        read = allowed[:, :start]
        if not (read.all() if known is None else torch.equal(known, read)):
            raise ValueError(
                "attention_mask must be the same as before for cached tokens; it differs"
            )
        if windowed and bool((allowed[:, 1:] < allowed[:, :-1]).any()):
            raise ValueError(
                "padding must be on the left with a KVCache of a sliding window, which keeps the "
                "last keys; got padding after a real token"
            )


def _mask(
    window: int, start: int, end: int, device: torch.device
) -> Bool[Tensor, "1 1 query key"] | None:
    """Which keys the queries from `start` on see; None means all up to their own."""
    first = oldest_reached(window, start)
    narrow = window and end - start > 1 and end - first > window
    if not narrow and (start == 0 or end - start == 1):
        return None
    query = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    return _seen(window, query, key, query - key)[None, None]


def _padded_mask(
    window: int,
    start: int,
    real: Bool[Tensor, "batch column"],
    positions: Int[Tensor, "batch column"],
) -> Bool[Tensor, "batch 1 query key"]:
    first, end = oldest_reached(window, start), real.shape[1]
    query = torch.arange(start, end, device=real.device)[:, None]
    key = torch.arange(first, end, device=real.device)
    # Distances within a text do not count padding.
    distance = positions[:, start:, None] - positions[:, None, first:]
    return (_seen(window, query, key, distance) & real[:, None, first:])[:, None]


def _seen(window: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
    return (key <= query) & (distance < window) if window else key <= query


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
