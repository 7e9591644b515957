"""Division of a block's call by position, for attached models; see `models.running.pieces`.

1. The arguments of the block are cut along their axes of positions (`cut`).
2. The cache of the model collects the keys and values of the pieces. If a block runs again after
   earlier keys and values, a copy of these collects them (`GrowingPast`).
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hooks.base import carried
from models.attached.context import (
    CACHES,
    AttachedPast,
    Keys,
    by_name,
    cache_among,
    cached_layer,
    can_be_cut,
    cut,
    keeps_only_keys,
)
from models.attached.forward import is_cache
from models.attached.wires import rows_of, texts_read
from models.running.pieces import Call


class GrowingPast(AttachedPast):
    """Keys and values of one layer. Each call of the layer adds its keys and values."""

    def update(self, keys: Keys, values: Keys, *args: Any, **kwargs: Any) -> tuple[Keys, Keys]:
        """Return the earlier keys and values, joined with the new ones, and keep them."""
        self.keys, self.values = super().update(keys, values)
        return self.keys, self.values


def divided(block: nn.Module, call: Call, most: int) -> Iterator[Call] | None:
    """Return the calls of a block for one piece each; see `models.running.pieces.Divide`.

    The result is None if the text is short, if the cache of the block does not contain only keys
    and values, or if the arguments of the block cannot be cut.

    Args:
        block: the block.
        call: the arguments of the block.
        most: the largest number of positions of a piece.
    """
    args, kwargs = call
    if not args or args[0].ndim != 3 or args[0].shape[1] <= most:
        return None
    batch, n_pos = args[0].shape[:2]
    named = by_name(block, args, kwargs)
    cache = cache_among(named)
    if isinstance(cache, AttachedPast):
        n_earlier = cache.get_seq_length()
        if len(cache.keys) != batch:
            return None
        cache = GrowingPast(cache.keys, cache.values)
    else:
        n_earlier = 0
        layer = cached_layer(cache, carried(block, "hook_points").layer)
        if not keeps_only_keys(layer) or layer.get_seq_length():
            return None
        # The cache of a window drops keys that later pieces and masks count.
        if n_pos >= getattr(layer, "sliding_window", n_pos + 1):
            return None
    plain = {name: None if is_cache(value) else value for name, value in named.items()}
    if not can_be_cut(block, plain, batch=batch, n_pos=n_pos, n_earlier=n_earlier):
        return None
    return _pieces_of(args[0], named, cache=cache, most=most)


def _pieces_of(stream: Tensor, named: dict[str, Any], cache: Any, most: int) -> Iterator[Call]:
    """Yield the arguments of a block for one piece after the other.

    Args:
        stream: the stream that enters the block.
        named: the other arguments by name.
        cache: the cache that collects the keys and values.
        most: the largest number of positions of a piece.
    """
    whole = texts_read.get()
    for start in range(0, stream.shape[1], most):
        piece = stream[:, start : start + most]
        new = piece.shape[1]
        kwargs = {}
        for name, value in named.items():
            if name in CACHES and is_cache(value):
                kwargs[name] = cache
            else:
                kwargs[name] = cut(name, value, pos=start, new=new, device=stream.device)
        texts_read.set(rows_of(piece))
        yield (piece,), kwargs
    texts_read.set(whole)
