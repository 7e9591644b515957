"""Context: masks, rotations and past keys, which blocks read in addition to the residual stream."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooks import position_offset, start_of_piece
from hooks.base import (
    Piece,
    all_to_device,
    mapped,
    prompt_read,
    reading,
    real_positions,
    require_integer,
    to_device,
)
from models.positions import Rotation
from models.running.kvcache import KeysAndValues, KVCache, oldest_reached
from models.running.masks import Rule, Visible, as_real, as_seen, has_gaps, rule_of, shared


class Context(NamedTuple):
    """The values that every block reads during one call. `model.context(tokens)` returns a context.

    Attributes:
        positions: the position of each token in its text, without padding: Int[batch pos], or [1
            pos] if all rows have the same positions.
        masks: the keys that each query sees (see `Visible`), by the window of a block: the number
            of positions that its queries see, or 0 for all.
        rotation: the cosines and sines that rotate the queries and keys of rotary models. None in
            other models.
        window_rotation: the same for blocks with a window, if they have their own rotary base or
            scaling; None if `rotation` is for all blocks.
        start: the number of columns of the text before the columns of this call.
        kv_cache: the cache that contains the earlier keys and values. The new keys and values are
            added to it.
        real: True at the columns so far that are not padding: Bool[batch key]; None if there is no
            padding. The tensor is on the CPU if its numbers were checked there.
        past: the keys and values of earlier columns for each layer. They are not changed.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
    >>> tokens, mask = torch.tensor([[0, 3, 6]]), torch.tensor([[0, 1, 1]])
    >>> Transformer(config).context(tokens, attention_mask=mask).positions.tolist()
    [[0, 0, 1]]
    """

    positions: Int[Tensor, "_batch pos"]
    masks: dict[int, Visible]
    rotation: Rotation | None = None
    window_rotation: Rotation | None = None
    start: int = 0
    kv_cache: KVCache | None = None
    real: Bool[Tensor, "batch key"] | None = None
    past: tuple[KeysAndValues, ...] | None = None

    @property
    def is_causal(self) -> bool:
        """True if no query sees a later key. Then values do not depend on later tokens."""
        masks = [mask for mask in self.masks.values() if isinstance(mask, Tensor)]
        return not any(bool(mask.triu(1 + self.start).any()) for mask in masks)

    def rotation_of(self, window: int) -> Rotation | None:
        """Return the rotation of the blocks with a window; 0 means no window."""
        has_own = window and self.window_rotation is not None
        return self.window_rotation if has_own else self.rotation

    def piece(self) -> AbstractContextManager[None]:
        """Return a context manager inside which edits know the columns of this call.

        During compilation, the `with` has no effect.
        """
        if torch.compiler.is_compiling() or (self.kv_cache is None and self.real is None):
            return nullcontext()
        if self.kv_cache is not None and not self.kv_cache.counts_columns:
            return nullcontext()
        if self.kv_cache is None:
            return position_offset(start_of_piece(), self.real)
        prompt = prompt_read()
        n_columns = self.positions.shape[1]
        chunk = prompt and prompt.chunk(self.start, self.real, n_columns=n_columns)
        return reading(chunk or Piece(self.start, self.real))

    def commit(self) -> None:
        """Update the length and the mask of the key/value cache.

        This must be called after all blocks have read the new positions.
        """
        if self.kv_cache is not None:
            self.kv_cache.commit(self.start + self.positions.shape[1], self.real)

    def extended(
        self,
        layer: int,
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_head"],
    ) -> KeysAndValues:
        """Return the earlier and new keys and values of a layer.

        Args:
            layer: the index of the block.
            k, v: the new keys and values.
        """
        if self.kv_cache is not None:
            return self.kv_cache.layers[layer].store(self.start, k, v)
        if self.past is not None:
            old_k, old_v = self.past[layer]
            return with_past(old_k, k), with_past(old_v, v)
        return k, v

    def to(self, device: torch.device) -> "Context":
        """Return the context for blocks on a device.

        Keys and values of past columns are not moved.
        """
        names = ("positions", "masks", "rotation", "window_rotation")
        parts = all_to_device(tuple(getattr(self, name) for name in names), device)
        return self._replace(**dict(zip(names, parts, strict=True)))

    def repeated(self, n: int) -> "Context":
        """Return the context of `n` copies of the batch, one whole copy after the other.

        For example, two copies of the rows 0, 1 and 2 are the rows 0, 1, 2, 0, 1 and 2. All copies
        use the same past.

        Raises:
            ValueError: if the context has a `KVCache`, because a cache has the rows of one batch
                only.
        """
        self._refuse_cache("repeated")
        names = ("positions", "masks", "rotation", "window_rotation", "real")
        tiled = {name: _mapped(lambda part: _tiled(part, n), getattr(self, name)) for name in names}
        return self._replace(**tiled)

    def after(self, pos: int, past: Sequence[KeysAndValues]) -> "Context":
        """Return the context of the same texts from column `pos` on.

        A block that runs on `resid[:, pos:]` returns the same values as a block that runs on the
        whole text.

        Args:
            pos: the first column, counted from the start of the text.
            past: the keys and values of all columns before `pos`, for each layer, after norm and
                rotation. They are not changed. If `repeated` made this context, the past may have
                the rows of one copy or of all copies.

        Raises:
            ValueError: if the context has a `KVCache` or no column `pos`, or if the past does not
                have `pos` columns.
        """
        self._refuse_cache("after")
        end = self.start + self.positions.shape[1]
        require_integer("pos", pos, self.start, most=end - 1)
        for part in chain.from_iterable(past):
            if part.shape[2] != pos:
                raise ValueError(
                    f"past must have the {pos} columns before pos; got {part.shape[2]} columns"
                )
        skipped = pos - self.start
        device = self.positions.device

        def later(mask: Visible) -> Visible:
            if isinstance(mask, Tensor):
                return mask if mask.shape[2] == 1 else mask[:, :, skipped:]
            return shared(mask, (end - pos, end), device)

        def shortened(rotation: Rotation | None) -> Any:
            return _mapped(lambda part: part[:, skipped:], rotation)

        return self._replace(
            positions=self.positions[:, skipped:],
            masks={window: later(mask) for window, mask in self.masks.items()},
            rotation=shortened(self.rotation),
            window_rotation=shortened(self.window_rotation),
            start=pos,
            past=tuple(past),
        )

    def until(self, pos: int) -> "Context":
        """Return the context of the same texts before column `pos`.

        Args:
            pos: the column after the last one, counted from the start of the text.

        Raises:
            ValueError: if the context has a `KVCache` or no column before `pos`.
        """
        self._refuse_cache("until")
        most = self.start + self.positions.shape[1]
        require_integer("pos", pos, self.start + 1, most=most)
        n_kept = pos - self.start

        def earlier(mask: Visible) -> Visible:
            # A rule is for any number of columns.
            return mask[:, :, :n_kept, :pos] if isinstance(mask, Tensor) else mask

        def shortened(rotation: Rotation | None) -> Any:
            return _mapped(lambda part: part[:, :n_kept], rotation)

        return self._replace(
            positions=self.positions[:, :n_kept],
            masks={window: earlier(mask) for window, mask in self.masks.items()},
            rotation=shortened(self.rotation),
            window_rotation=shortened(self.window_rotation),
            real=None if self.real is None else self.real[:, :pos],
        )

    def hiding(self, keys: Bool[Tensor, "_batch _head key"]) -> "Context":
        """Return the context in which no query sees some keys.

        Args:
            keys: True at the hidden keys, from the start of the text to the end of this context.
                The axes of texts and of query heads may have size 1.

        Raises:
            ValueError: if the context has a `KVCache`.

        >>> from models import Transformer, TransformerConfig
        >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
        >>> context = Transformer(config).context(torch.tensor([[0, 3, 6]]))
        >>> hidden = context.hiding(torch.tensor([[[False, True, False]]]))
        >>> hidden.masks[0].seen(0, 2, 3, torch.device("cpu"))
        tensor([[[[ True, False,  True]]]])
        """
        self._refuse_cache("hiding")

        def without(mask: Visible) -> Visible:
            if isinstance(mask, Tensor):
                return mask & ~keys[:, :, None]
            rule = Rule() if mask is None else mask
            hidden = keys if rule.hidden is None else keys | rule.hidden
            return rule._replace(hidden=hidden)

        masks = {window: without(mask) for window, mask in self.masks.items()}
        return self._replace(masks=masks)

    def _refuse_cache(self, method: str) -> None:
        """Check that the context has no `KVCache`.

        Raises:
            ValueError: if it has one; the error names the method.
        """
        if self.kv_cache is not None:
            raise ValueError(f"{method}() must be called on a context without a KVCache")


ContextOrMask = Context | Tensor | None
"""The second argument of blocks and attention.

A model passes its context. Without a model, the argument may be a mask of queries and keys, like
`query_key_mask` of `Transformer.forward`, or None for the causal rule and the window. Positions are
then counted from 0.
"""


class ContextNeeds(NamedTuple):
    """The facts about blocks that decide the masks and rotations of their contexts.

    Attributes:
        windows: the windows of the blocks.
        n_heads: the number of query heads of a block.
        is_causal: whether a query sees no later keys, if there is no `query_key_mask`.
        rotate: a function that returns the rotation of positions.
        rotate_windows: the same function for blocks with a window, if they have their own.
    """

    windows: Collection[int]
    n_heads: int
    is_causal: bool
    rotate: Callable[[Tensor], Rotation | None]
    rotate_windows: Callable[[Tensor], Rotation | None] | None = None


def make_context(
    x: Shaped[Tensor, "batch pos *d_model"],
    needs: ContextNeeds,
    *,
    may_read: bool,
    attention_mask: Tensor | None = None,
    query_key_mask: Tensor | None = None,
    kv_cache: KVCache | None = None,
) -> Context:
    """Return the context of one call.

    1. Check the masks of the caller (`_real_columns`, `_checked_mask`).
    2. Count the positions of real tokens (`_counted`).
    3. Make a mask for each window, from the caller's mask or by the rule of the model
       (`_masks_by_rule`).

    Args:
        x: the new tokens, or vectors of the residual stream. Only the shape and the device are
            used.
        needs: the facts about the blocks that will read the context.
        may_read: whether the numbers in masks may be read, to check them.
        attention_mask, query_key_mask: see `Transformer.forward`.
        kv_cache: the cache with earlier keys and values. Default: no cache.

    Raises:
        ValueError: if tokens, masks and cache do not fit each other, or if a model that is not
            causal gets a cache, because earlier values of such a model depend on later tokens.
    """
    is_cached = kv_cache is not None
    if is_cached and not needs.is_causal:
        raise ValueError("kv_cache must be None for a model with causal=False; got a KVCache")
    start = 0 if kv_cache is None else kv_cache.length
    columns = _Columns(
        batch=x.shape[0],
        start=start,
        end=start + x.shape[1],
        is_cached=is_cached,
        drops_keys=is_cached and any(needs.windows),
        device=x.device,
        may_read=may_read,
    )
    real = _real_columns(columns, attention_mask, kv_cache)
    seen = _checked_mask(columns, query_key_mask, needs.n_heads)
    if seen is None and not needs.is_causal:
        seen = x.new_ones(1, 1, x.shape[1], columns.end, dtype=torch.bool)
    real_on_device = None if real is None else to_device(real, x.device)
    positions = _counted(columns, real_on_device)
    masks: dict[int, Visible]
    if seen is not None:
        visible = to_device(seen, x.device)
        visible = visible if real_on_device is None else visible & real_on_device[:, None, None]
        masks = dict.fromkeys(needs.windows, visible)
    else:
        # A window counts positions. With padding between tokens, these differ from columns.
        has_windows = any(needs.windows) and not columns.drops_keys
        counted = positions if has_windows and has_gaps(real, may_read) else None
        masks = _masks_by_rule(columns, needs.windows, real_on_device, positions=counted)
    new_positions = positions[:, start:]
    return Context(
        new_positions,
        masks,
        rotation=needs.rotate(new_positions),
        window_rotation=needs.rotate_windows(new_positions) if needs.rotate_windows else None,
        start=start,
        kv_cache=kv_cache,
        real=real,
    )


class _Columns(NamedTuple):
    """The columns of the texts of one call.

    Attributes:
        batch: the number of texts.
        start: the number of columns before this call.
        end: the number of columns after this call.
        is_cached: whether a cache contains the earlier columns.
        drops_keys: whether this cache drops the keys that no later query sees.
        device: the device of the new tokens.
        may_read: whether the numbers in masks may be read.
    """

    batch: int
    start: int
    end: int
    is_cached: bool
    drops_keys: bool
    device: torch.device
    may_read: bool


def _real_columns(
    columns: _Columns, attention_mask: Tensor | None, kv_cache: KVCache | None
) -> Tensor | None:
    """Return True at the real columns so far, from the checked mask; None without padding."""
    known = None if kv_cache is None else kv_cache.mask_until(columns.end)
    if attention_mask is None:
        return known
    return as_real(
        attention_mask,
        (columns.batch, columns.end),
        n_cached=columns.start if columns.is_cached else None,
        known=known,
        drops_keys=columns.drops_keys,
        may_read=columns.may_read,
    )


def _checked_mask(columns: _Columns, mask: Tensor | None, n_heads: int) -> Tensor | None:
    """Return the mask of queries and keys after a check; None without a mask.

    Raises:
        ValueError: if the mask does not fit the texts, or the cache drops keys.
    """
    if mask is None:
        return None
    shape = (columns.batch, n_heads, columns.end - columns.start, columns.end)
    seen = as_seen(mask, shape, is_cached=columns.is_cached, may_read=columns.may_read)
    if columns.drops_keys:
        raise ValueError(
            "query_key_mask must be None with a KVCache of a sliding window, because this cache "
            f"drops keys; got {tuple(seen.shape)}"
        )
    return seen


def _counted(columns: _Columns, real: Tensor | None) -> Tensor:
    """Return the position of each column: the number of real tokens before it in its text.

    No query sees padding, so any position will do for padding.
    """
    if real is None:
        return torch.arange(columns.end, device=columns.device)[None]
    return real_positions(real)


def _masks_by_rule(
    columns: _Columns, windows: Collection[int], real: Tensor | None, positions: Tensor | None
) -> dict[int, Visible]:
    """Return the mask of queries and keys for each window.

    A query sees the keys up to its own that are inside the window and are not padding.

    Args:
        columns: the columns of the texts.
        windows: the windows of the blocks; 0 for blocks without a window.
        real: True at real columns; None without padding.
        positions: the position of each column. A window then counts positions. None if a window
            counts columns, which is the same if no padding lies between tokens.
    """
    masks: dict[int, Visible] = {}
    for window in windows:
        first = oldest_reached(window, columns.start) if columns.is_cached else 0
        rule = rule_of(window, (first, columns.end), real=real, positions=positions)
        n_new = columns.end - columns.start
        masks[window] = shared(rule, (n_new, columns.end - first), columns.device)
    return masks


def _mapped(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested containers with a change of each tensor."""
    return mapped(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def _tiled(value: Tensor, n: int) -> Tensor:
    """Return `n` copies of a tensor along the batch.

    A batch of one row is not copied, because it broadcasts.
    """
    return value if value.shape[0] == 1 else value.repeat(n, *[1] * (value.ndim - 1))


def with_past(old: Tensor, new: Tensor) -> Tensor:
    """Return past and new keys or values as one tensor.

    If the new rows are several copies of the past rows, the past is repeated too.
    """
    copies = len(new) // len(old)
    old = old.expand(copies, *old.shape)  # [copy, batch, kv_head, key, d_head]
    new = new.unflatten(0, (copies, -1))  # [copy, batch, kv_head, pos, d_head]
    return torch.cat([old, new], 3).flatten(0, 1)  # [copy * batch, kv_head, key + pos, d_head]
