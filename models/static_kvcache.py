"""StaticKVCache: keys and values in memory of fixed size, for steps that are captured once and replayed."""

from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.transfer import to_device
from models.config import TransformerConfig
from models.kvcache import KVCache, LayerCache


class StaticKVCache(KVCache):
    """A `KVCache` that never moves, so a step of one token can be compiled as one graph or captured.

    A call with one token and no masks, after others, finds its column in a tensor. Nothing in it depends
    on Python's numbers but `length`: whoever replays a captured step adds 1 to it each time. Other calls
    are as with a `KVCache`. For use without gradients. Blocks with a window keep all positions too.

    Args:
        max_context: the largest number of positions, for all of which it takes memory.

    Attributes:
        column: the next column of the text: Int[1].
        real: which columns are not padding; those that come next are not: Bool[batch max_context].

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model, cache, tokens = Transformer(config), StaticKVCache(5), torch.tensor([[3, 0, 6]])
    >>> with torch.no_grad():
    ...     first, last = (model(piece, kv_cache=cache) for piece in tokens.split([2, 1], 1))
    ...     torch.allclose(last[0, -1], model(tokens)[0, -1], atol=1e-6)
    True
    """

    drops_keys = False

    def __init__(self, max_context: int) -> None:
        super().__init__(max_context)
        self.column: Int[Tensor, " 1"] = torch.zeros(1, dtype=torch.long)
        self.real: Bool[Tensor, "batch _capacity"] = torch.ones(0, 0, dtype=torch.bool)

    def first_kept(self, window: int, start: int) -> int:
        """0: no key is dropped."""
        return 0

    def _made(self, config: TransformerConfig, limit: int, batch: int) -> list[LayerCache]:
        if config is self._config and self.layers[0].batch in (0, batch):
            return self.layers
        self.real = torch.ones(batch, limit, dtype=torch.bool)
        return [StaticLayerCache(0, limit) for _ in config.windows]

    def extended(
        self, layer: int, start: int, column: Tensor | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values of a layer. See `KVCache.extended`.

        Raises:
            ValueError: if a gradient would be lost.
        """
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "a StaticKVCache must be used without gradients; got keys that need one"
            )
        at = start if column is None else column
        return cast(StaticLayerCache, self.layers[layer]).extended(at, k, v)

    def place(self, device: torch.device) -> None:
        """Brings the tensors about columns to the device of the model's tokens."""
        self.column, self.real = to_device(self.column, device), to_device(self.real, device)

    def reset(self) -> None:
        """Forgets the text, but keeps the memory: steps captured for as many rows can go on."""
        self.length, self.mask = 0, None
        self.column.zero_()
        self.real.fill_(True)

    def commit(self, length: int, mask: Tensor | None) -> None:
        """Accepts what a forward pass has written. See `KVCache.commit`."""
        self.column.add_(length - self.length)
        if mask is not None and mask is not self.mask:
            self.real[:, : mask.shape[1]].copy_(to_device(mask, self.real.device))
        super().commit(length, mask)


class StaticLayerCache(LayerCache):
    """Keys and values of one block, each in one tensor of fixed size."""

    def extended(
        self,
        start: int | Int[Tensor, " 1"],
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_head"],
    ) -> tuple[
        Float[Tensor, "batch kv_head _key d_head"], Float[Tensor, "batch kv_head _key d_head"]
    ]:
        """Stores new keys and values, and returns all so far; with a tensor, the whole memory.

        Args:
            start: the first new column, or the only one as a tensor.
            k, v: keys and values of the new columns.
        """
        if not self.batch:
            # Zeros, because weights of zero multiply what is not yet written.
            shape = (*k.shape[:2], self._limit, k.shape[3])
            self._keys, self._values = k.new_zeros(shape), v.new_zeros(shape)
        if isinstance(start, Tensor):
            self._keys.index_copy_(2, start, k)
            self._values.index_copy_(2, start, v)
            return self._keys, self._values
        self._keys.narrow(2, start, k.shape[2]).copy_(k)
        self._values.narrow(2, start, k.shape[2]).copy_(v)
        end = start + k.shape[2]
        return self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)
