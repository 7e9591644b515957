"""KVCache: the keys and values of positions that a model has already read."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import require_integer
from models.config import TransformerConfig

# The buffers grow by this many positions at a time.
STEP = 512
# Two models can share a cache only if these fields of their configs agree.
DECISIVE = (
    *("n_layers", "d_model", "n_ctx", "n_kv_heads", "d_head", "windows", "qk_norm"),
    *("positions", "rotary_theta", "rotary_fraction", "rotary_pairs", "rotary_scaling"),
)


class KVCache:
    """A key/value cache, with which a model continues a text: `model(new_tokens, kv_cache=cache)`.

    Keys and values are stored after norm, rotation and edits by hooks. A block with a sliding window
    keeps only what the window can still reach. A forward pass that fails leaves the cache unchanged.
    Gradients flow into positions that were read while gradients were recorded. As an intervention, a
    model with other weights but the same sizes and positions can continue from it.

    Args:
        max_context: the largest number of positions; None for the model's `n_ctx`.

    Attributes:
        length: how many positions have been read.
        mask: which of them are not padding: Bool[batch _length]; None if all are. It may be shorter than
            `length`; the positions beyond its end are not padding.

    Raises:
        ValueError: if `max_context` is not a whole number of at least 1.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model, cache, tokens = Transformer(config), KVCache(), torch.tensor([[3, 0, 6]])
    >>> first = model(tokens[:, :2], kv_cache=cache)
    >>> torch.allclose(model(tokens[:, 2:], kv_cache=cache)[0, -1], model(tokens)[0, -1], atol=1e-6)
    True
    """

    def __init__(self, max_context: int | None = None) -> None:
        if max_context is not None:
            require_integer("max_context", max_context)
        self.max_context = max_context
        self.length = 0
        self.mask: Bool[Tensor, "batch _length"] | None = None
        self.layers: list[LayerCache] = []
        self._config: TransformerConfig | None = None

    def __repr__(self) -> str:
        return f"KVCache of {self.length} positions in {len(self.layers)} layers, {self.nbytes:,} bytes"

    @property
    def nbytes(self) -> int:
        """The memory it holds, in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, config: TransformerConfig, batch: int, new: int) -> None:
        """Checks that `new` more positions fit. At the first call it also makes the layers.

        Args:
            config: the config of the model that will run.
            batch: rows of the next call.
            new: positions of the next call.

        Raises:
            ValueError: if they do not fit, or the batch size or the model does not match.
        """
        limit = min(self.max_context or config.n_ctx, config.n_ctx)
        if self.length + new > limit:
            what = "max_context" if limit == self.max_context else "the model's context"
            raise ValueError(
                f"cached and new tokens must fit {what} of {limit}; got {self.length} and {new}"
            )
        if not self.length:
            self.layers = [LayerCache(window, limit) for window in config.windows]
            self._config = config
            return
        if config is not self._config:
            other = [n for n in DECISIVE if getattr(config, n) != getattr(self._config, n)]
            if other:
                raise ValueError(
                    f"a KVCache must be used by models of the same {', '.join(other)}; they differ"
                )
        if self.layers[0].batch != batch:
            raise ValueError(
                f"tokens must have as many rows as the KVCache ({self.layers[0].batch}); got {batch}"
            )


class LayerCache:
    """Keys and values of one block, in order of position.

    Args:
        window: how many positions a query sees, its own included; 0 means all.
        limit: the largest number of positions.
    """

    def __init__(self, window: int, limit: int) -> None:
        self.window = window
        self._limit = limit
        self._first = 0  # the position that the buffers begin with
        self._keys = self._values = torch.empty(0, 0, 0, 0)

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first call."""
        return self._keys.shape[0]

    @property
    def nbytes(self) -> int:
        """The memory it holds, in bytes."""
        return self._keys.nbytes + self._values.nbytes

    def append(
        self,
        start: int,
        k: Float[Tensor, "batch kv_head pos d_head"],
        v: Float[Tensor, "batch kv_head pos d_head"],
    ) -> tuple[
        Float[Tensor, "batch kv_head key d_head"], Float[Tensor, "batch kv_head key d_head"]
    ]:
        """Stores new keys and values, and returns all those that the new positions may see.

        Args:
            start: the first new position. Anything stored from there on is overwritten.
            k, v: keys and values of the new positions.
        """
        oldest, end = oldest_reached(self.window, start), start + k.shape[2]
        is_full = end - self._first > self._keys.shape[2] or not self.batch
        # A backward pass needs the values in a graph, so they must not be overwritten.
        has_graph = self._keys.requires_grad or self._values.requires_grad
        # A compiler cannot ask this, and an inference tensor raises PyTorch's own error there.
        is_locked = (
            not torch.compiler.is_compiling()
            and self._keys.is_inference()
            and not torch.is_inference_mode_enabled()
        )
        if is_full or has_graph or is_locked or k.dtype != self._keys.dtype:
            self._make_room(oldest, start, end, k)
        self._keys.narrow(2, start - self._first, end - start).copy_(k)
        self._values.narrow(2, start - self._first, end - start).copy_(v)
        seen = (2, oldest - self._first, end - oldest)
        return self._keys.narrow(*seen), self._values.narrow(*seen)

    def _make_room(self, oldest: int, start: int, end: int, like: Tensor) -> None:
        """Moves to buffers with room beyond `end`, without positions that no query can see again."""
        # A window's buffers move repeatedly, and need a step of room each time.
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
    """The first position that a query at `start` sees; a window of 0 sees all."""
    return max(0, start - window + 1) if window else 0
