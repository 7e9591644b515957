"""StaticCache: keys and values in buffers of a fixed size, for steps that a compiler traces once.

In `KVCache`, sizes grow with each step, and a compiler would trace each size. Here nothing grows:

1. The position of the new token is a tensor on the device, `column`.
2. New keys and values are written into the buffers at this position, with `index_copy_`.
3. The masks and the positions are computed from `column`: a query sees the keys up to `column`,
   except padding and keys outside the window.
4. After all blocks have read the token, `column` grows by one (`commit`).
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.base import to_device
from models.config import TransformerConfig
from models.running.context import Context, ContextNeeds
from models.running.kvcache import KeysAndValues, KVCache, LayerCache
from models.running.masks import Visible


class StaticCache(KVCache):
    """Buffers of keys and values, which the steps of a generation read and write.

    Each call of the model must have one new token for each row. The padding of a row must be on the
    left. `load` takes the keys and values of the prompts from a `KVCache`.

    Args:
        like: a cache that has read the prompts. The buffers get its batch size, dtypes and devices.
        capacity: the number of positions of the buffers.

    Attributes:
        column: the position of the next token, in columns with padding.
        n_padding: the number of columns of padding of each row.
        buffers: the buffers of each block.
    """

    counts_columns = False

    def __init__(self, like: KVCache, capacity: int) -> None:
        super().__init__()
        device = like.layers[0].device
        self.capacity = capacity
        self.column: Int[Tensor, " 1"] = torch.zeros(1, dtype=torch.int64, device=device)
        self.n_padding: Int[Tensor, "batch 1"] = self.column.repeat(like.layers[0].batch, 1)
        self.buffers = [StaticLayer(layer, self) for layer in like.layers]
        self.layers = [*self.buffers]

    def load(self, cache: KVCache, n_padding: Int[Tensor, "batch 1"] | None) -> None:
        """Start from a cache that has read the prompts.

        From now on, both caches use the buffers. A caller that lets `cache` read a token must call
        `commit` of this cache.

        Args:
            cache: the cache.
            n_padding: the number of columns of padding of each row, on the CPU; None without
                padding.
        """
        for old, layer in zip(cache.layers, self.buffers, strict=True):
            old.move(layer.keys, layer.values, cache.length)
        self.column.fill_(cache.length)
        self.n_padding.zero_()
        if n_padding is not None:
            self.n_padding.copy_(to_device(n_padding, self.n_padding.device))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step reads and writes."""
        keys = [layer.keys for layer in self.buffers]
        values = [layer.values for layer in self.buffers]
        return [self.column, self.n_padding, *keys, *values]

    def context(self, tokens: Int[Tensor, "batch 1"], needs: ContextNeeds) -> Context:
        """Return the context of the next token of each row.

        Args:
            tokens: the tokens. Only their device is used.
            needs: the facts about the blocks. Their windows and rotations are used.
        """
        column, n_padding = self.column.to(tokens.device), self.n_padding.to(tokens.device)
        keys = torch.arange(self.capacity, device=tokens.device)
        seen = (keys <= column) & (keys >= n_padding)  # [batch, key]
        masks: dict[int, Visible] = {}
        for window in needs.windows:
            visible = seen & (keys > column - window) if window else seen
            masks[window] = visible[:, None, None]
        positions = column - n_padding  # [batch, 1]
        return Context(
            positions,
            masks,
            rotation=needs.rotate(positions),
            window_rotation=needs.rotate_windows(positions) if needs.rotate_windows else None,
            kv_cache=self,
        )

    def reserve(self, config: TransformerConfig, batch: int, new: int) -> None:
        """Do nothing: the buffers have space."""

    def commit(self, length: int = 0, mask: Bool[Tensor, "batch _length"] | None = None) -> None:
        """Advance to the next position."""
        self.column.add_(1)


class StaticLayer(LayerCache):
    """The buffers of one block.

    Args:
        like: the layer of another cache with the same batch size, dtype and device.
        cache: the cache, which has the position of the new token.
    """

    def __init__(self, like: LayerCache, cache: StaticCache) -> None:
        super().__init__(like.window, cache.capacity)
        self.keys, self.values = like.new_buffers(cache.capacity)
        self._column = cache.column

    def store(
        self,
        start: int,
        k: Float[Tensor, "batch kv_head 1 d_head"],
        v: Float[Tensor, "batch kv_head 1 d_head"],
    ) -> KeysAndValues:
        """Write a key and a value at the position of the new token, and return whole buffers.

        Args:
            start: not used, because the position is on the device.
            k, v: the key and the value of the new token.
        """
        column = self._column.to(k.device)
        self.keys.index_copy_(2, column, k)
        self.values.index_copy_(2, column, v)
        return self.keys, self.values
