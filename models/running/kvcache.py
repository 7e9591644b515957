"""KVCache: a cache of the keys and values of positions that a model has already read."""

from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import number_of, padding_messages, require_integer
from models.config import TransformerConfig

# The buffers grow by this many positions at a time.
STEP = 512
# Two models can share a cache only if these fields of their configs agree.
DECISIVE = (
    *("n_layers", "d_model", "n_ctx", "n_kv_heads", "d_head", "windows", "qk_norm"),
    *("positions", "rotary_theta", "rotary_fraction", "rotary_pairs", "rotary_scaling"),
    "window_rotary",
)

KeysAndValues = tuple[
    Float[Tensor, "batch kv_head key d_head"], Float[Tensor, "batch kv_head key d_head"]
]
"""The keys and values of one layer, after norm and rotation."""


class KVCache:
    """A cache of keys and values, with which a model continues a text.

    Call `model(new_tokens, kv_cache=cache)`. Keys and values are stored after norm, rotation and
    edits by hooks. For a block with a sliding window, only the positions that the window can still
    reach are stored. A forward pass that fails does not change the cache. If gradients were on in
    earlier calls, a backward pass also reaches the positions of these calls. Another model can
    continue from the cache, as an intervention, if its config has the same sizes, windows and kind
    of positions (`DECISIVE`). Its weights may differ.

    Args:
        max_context: the largest number of positions. Default: the model's `n_ctx`.

    Attributes:
        length: the number of positions that have been read.
        mask: a boolean tensor [batch, pos] with True at the positions that are not padding; None if
            there is no padding. The mask may have fewer than `length` positions. Positions after
            its end are not padding.

    Raises:
        TypeError: if `max_context` is not a whole number.
        ValueError: if it is below 1.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model, cache, tokens = Transformer(config), KVCache(), torch.tensor([[3, 0, 6]])
    >>> first = model(tokens[:, :2], kv_cache=cache)
    >>> torch.allclose(model(tokens[:, 2:], kv_cache=cache)[0, -1], model(tokens)[0, -1], atol=1e-6)
    True
    """

    # Whether Python knows the position of the next token, as hooks with positions need.
    counts_columns: ClassVar[bool] = True

    max_context: int | None
    length: int
    mask: Bool[Tensor, "batch _length"] | None
    layers: "list[LayerCache]"

    def __init__(self, max_context: int | None = None) -> None:
        if max_context is not None:
            require_integer("max_context", max_context)
        self.max_context = max_context
        self.length = 0
        self.mask = None
        self.layers = []
        self._config: TransformerConfig | None = None

    def __repr__(self) -> str:
        return (
            f"KVCache of {number_of(self.length, 'position')} in "
            f"{number_of(len(self.layers), 'layer')}, {self.nbytes:,} bytes"
        )

    @property
    def nbytes(self) -> int:
        """The size of the keys and values in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def mask_until(self, end: int) -> Bool[Tensor, "batch end"] | None:
        """Return True at the columns before `end` that are not padding, or None without padding.

        New columns are not padding.
        """
        if self.mask is None:
            return None
        n_new = end - self.mask.shape[1]
        return torch.cat([self.mask, self.mask.new_ones(len(self.mask), n_new)], 1)

    def commit(self, length: int, mask: Bool[Tensor, "batch _length"] | None) -> None:
        """Set the number of positions and their mask, after all blocks have read the new ones.

        Args:
            length: the number of positions, counting cached positions.
            mask: True at the positions that are not padding; None if there is no padding.
        """
        self.length = length
        self.mask = mask

    def repeat(self, n: int) -> None:
        """Repeat the only row, so that the next call may have `n` rows that continue it.

        Args:
            n: the number of rows.

        Raises:
            ValueError: if the cache has several rows, or a mask.
        """
        require_integer("n", n)
        if self.mask is not None or any(layer.batch != 1 for layer in self.layers):
            raise ValueError(
                padding_messages.several_texts("the text in the cache of repeat()", "other texts")
            )
        for layer in self.layers:
            layer.repeat(n)

    def reserve(self, config: TransformerConfig, batch: int, new: int) -> None:
        """Check that `new` more positions fit. The first call also makes the layers of the cache.

        Args:
            config: the config of the model that will run.
            batch: the number of rows of the next call.
            new: the number of positions of the next call.

        Raises:
            ValueError: if the positions do not fit, or if the batch size or the model does not
                match the cache.
        """
        limit = min(self.max_context or config.n_ctx, config.n_ctx)
        if self.length + new > limit:
            owner = "max_context" if limit == self.max_context else "the model's context"
            raise ValueError(
                f"cached and new tokens must fit {owner} of {limit}; got {self.length} and {new}"
            )
        if not self.length:
            self.layers = [LayerCache(window, limit) for window in config.windows]
            self._config = config
            return
        if config is not self._config:
            differing = [
                field
                for field in DECISIVE
                if getattr(config, field) != getattr(self._config, field)
            ]
            if differing:
                raise ValueError(
                    f"models that share a KVCache must have the same {', '.join(differing)}; got "
                    "different values"
                )
        if self.layers[0].batch != batch:
            raise ValueError(
                f"tokens must have the batch size of the KVCache ({self.layers[0].batch}); got "
                f"{batch}"
            )


class LayerCache:
    """The keys and values of one block, in the order of their positions.

    Args:
        window: the number of positions that a query sees, including its own. 0 means all positions.
        limit: the largest number of positions.
    """

    window: int

    def __init__(self, window: int, limit: int) -> None:
        self.window = window
        self._limit = limit
        # The first position in the buffers.
        self._first = 0
        self._keys = torch.empty(0, 0, 0, 0)
        self._values = self._keys

    def move(
        self,
        keys: Float[Tensor, "batch kv_head _key d_head"],
        values: Float[Tensor, "batch kv_head _key d_head"],
        end: int,
    ) -> None:
        """Move the keys and values before `end` into other buffers, which begin at position 0.

        Positions without a key are zero.

        Args:
            keys, values: the buffers.
            end: the number of positions that have been read.
        """
        for old, new in ((self._keys, keys), (self._values, values)):
            new.zero_()
            new[:, :, self._first : end] = old[:, :, : end - self._first]
        self._keys, self._values, self._first = keys, values, 0

    def new_buffers(
        self, capacity: int
    ) -> tuple[
        Float[Tensor, "batch kv_head _key d_head"], Float[Tensor, "batch kv_head _key d_head"]
    ]:
        """Return empty buffers for the keys and values of `capacity` positions."""
        batch, heads, _, width = self._keys.shape
        keys, values = (self._keys.new_empty(batch, heads, capacity, width) for _ in range(2))
        return keys, values

    @property
    def about(self) -> tuple[Any, ...]:
        """The batch size, heads, width, dtype and device of the keys."""
        batch, heads, _, width = self._keys.shape
        return batch, heads, width, self._keys.dtype, self._keys.device

    @property
    def device(self) -> torch.device:
        """The device of the keys and values."""
        return self._keys.device

    @property
    def batch(self) -> int:
        """The number of rows of the batch. It is 0 before the first call."""
        return self._keys.shape[0]

    @property
    def nbytes(self) -> int:
        """The size of the keys and values in bytes."""
        return self._keys.nbytes + self._values.nbytes

    def store(
        self,
        start: int,
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_head"],
    ) -> KeysAndValues:
        """Store new keys and values, and return all keys and values that the new positions may see.

        Args:
            start: the first new position. Keys and values that are stored from this position on are
                overwritten.
            k, v: the keys and values of the new positions.
        """
        oldest = oldest_reached(self.window, start)
        end = start + k.shape[2]
        is_full = end - self._first > self._keys.shape[2] or not self.batch
        # A backward pass needs the values in the graph, so these must not be overwritten.
        has_graph = self._keys.requires_grad or self._values.requires_grad
        # The compiler does not support these calls. In compiled code, PyTorch itself raises an
        # error for an inference tensor.
        is_locked = (
            not torch.compiler.is_compiling()
            and self._keys.is_inference()
            and not torch.is_inference_mode_enabled()
        )
        if is_full or has_graph or is_locked or k.dtype != self._keys.dtype:
            self._make_room(oldest, start, end=end, like=k)
        self._keys.narrow(2, start - self._first, end - start).copy_(k)
        self._values.narrow(2, start - self._first, end - start).copy_(v)
        reached = (2, oldest - self._first, end - oldest)
        return self._keys.narrow(*reached), self._values.narrow(*reached)

    def repeat(self, n: int) -> None:
        """Repeat the only row of the keys and values `n` times."""
        self._keys = self._keys.repeat(n, 1, 1, 1)
        self._values = self._values.repeat(n, 1, 1, 1)

    def _make_room(self, oldest: int, start: int, end: int, like: Tensor) -> None:
        """Move the keys and values to new buffers that have space until `end` or further.

        Positions that no later query can see are dropped.

        Args:
            oldest: the first position whose keys and values are kept.
            start: the first new position.
            end: the position after the last new position.
            like: a tensor with the batch, heads, width, dtype and device of the buffers.
        """
        # A block with a window stores few positions, so its buffers would often be full and moved.
        # They get space for STEP more positions.
        needed = end - oldest + (STEP if self.window else 0)
        capacity = min(-(-needed // STEP) * STEP, self._limit - oldest)
        batch, heads, _, width = like.shape
        keys, values = (like.new_empty(batch, heads, capacity, width) for _ in range(2))
        if start > oldest:
            old = (2, oldest - self._first, start - oldest)
            keys.narrow(2, 0, start - oldest).copy_(self._keys.narrow(*old))
            values.narrow(2, 0, start - oldest).copy_(self._values.narrow(*old))
        self._keys, self._values, self._first = keys, values, oldest


def oldest_reached(window: int, start: int) -> int:
    """Return the first position that a query at `start` sees. A window of 0 sees all positions."""
    return max(0, start - window + 1) if window else 0
