"""Cached keys and values of an attached model: which are new, and how an edited one reaches the cache."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookError, HookPoint, start_of_piece
from hooks.base import memory_of
from hooks.shared import Wire, is_listened_to
from models.attached.forward import is_cache, own_cache
from models.attached.wires import fire
from models.running.context import joined

# Values may be narrower than keys, and there may be copies of the rows.
Keys = Float[Tensor, "_rows _kv_head _key _d_head"]

# The cache that the attention module which runs now was given.
_cache: ContextVar[Any] = ContextVar("cache", default=None)


def take_cache() -> Any:
    """The cache that the running attention module was given, or None. A second call gives None."""
    if torch.compiler.is_compiling():
        return None
    cache = _cache.get()
    _cache.set(None)  # or it would live as long as the thread
    return cache


@dataclass(eq=False)
class CacheGiven(Wire):
    """A hook before an attention module: notes the cache among its arguments."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes it."""
        if not torch.compiler.is_compiling():
            _cache.set(next(filter(is_cache, (*args, *kwargs.values())), None))


class AttachedPast:
    """Keys and values of one layer, to which a call adds its own without changing them.

    Args:
        keys, values: of earlier positions. A call may have several copies of their rows.
    """

    def __init__(self, keys: Keys, values: Keys) -> None:
        self.keys, self.values = keys, values

    def get_seq_length(self, *args: Any) -> int:
        """The number of earlier positions."""
        return self.keys.shape[2]

    def update(self, keys: Keys, values: Keys, *args: Any, **kwargs: Any) -> tuple[Keys, Keys]:
        """Earlier and new keys and values."""
        return joined(self.keys, keys), joined(self.values, values)


def past_of(cache: Any, layer: int | None) -> AttachedPast | None:
    """A copy of what a cache holds for a layer; None if it is empty.

    Raises:
        HookError: if that is more than keys and values of the last positions, or no cache was given.
    """
    if not is_cache(cache):
        raise HookError(f"lazy=True needs plain arguments; got a {type(cache).__name__}")
    held = cached_layer(cache, layer)
    if held is not None and not held.get_seq_length():
        return None
    if not keeps_only_keys(held):
        got = type(cache if held is None else held).__name__
        raise HookError(f"lazy=True needs a DynamicCache of keys and values; got a {got}")
    return AttachedPast(held.keys.detach().clone(), held.values.detach().clone())


def keeps_only_keys(held: Any) -> bool:
    """Whether the part of a cache for one layer is keys and values, and no state of a recurrence."""
    return type(held).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer")


def number_of(attention: nn.Module) -> Any:
    """The number of an attention module's layer in a cache, or None."""
    return getattr(attention, "layer_idx", getattr(attention, "layer_id", None))


def cached_layer(cache: Any, layer: Any) -> Any:
    """The part of a cache for one layer, or None."""
    layers = getattr(own_cache(cache), "layers", ())
    return layers[layer] if isinstance(layer, int) and 0 <= layer < len(layers) else None


def first_new(keys: Keys, new: int, cache: Any, layer: Any) -> int:
    """The place where the keys of the `new` positions begin. A static cache has free places after them."""
    held = cached_layer(cache, layer)
    if type(held).__name__.startswith("Static") and _is_part(held.keys, keys):
        # A window that is full moves on, and the new ones are its last.
        return min(start_of_piece() or 0, keys.shape[2] - new)
    return keys.shape[2] - new


def passed(point: HookPoint, keys: Keys, new: range, held: Any, cache: Any, is_lent: bool) -> Keys:
    """All keys or values, of which the `new` positions' went through a point.

    Args:
        point: the point.
        keys: those of all positions that a query may see.
        new: which places are new.
        held: the tensor of the cache that needs edited ones for later calls.
        cache: the cache, or None.
        is_lent: whether later modules use the same tensor, and must see an edit too.

    Raises:
        HookError: if the cache cannot take edited ones.
    """
    before = keys[:, :, new.start : new.stop].transpose(1, 2)
    if (held is not None or is_lent) and is_listened_to(point):
        before = before.clone()  # a hook's cache may keep it, and this memory may be written into
    after = fire(point, before)
    if after is before:
        return keys
    if not is_lent and (cache is None or isinstance(cache, AttachedPast)):
        if len(new) == keys.shape[2]:
            return after.transpose(1, 2)
        return torch.cat([keys[:, :, : new.start], after.transpose(1, 2)], 2)
    if not is_lent and not _is_part(held, keys):
        what = "keys and values of this model cannot be edited where a cache keeps them, as it keeps others"
        raise HookError(f"{what} (use_cache=False helps)")
    keys[:, :, new.start : new.stop] = after.transpose(1, 2)
    return keys


def _is_part(held: Any, keys: Keys) -> bool:
    return isinstance(held, Tensor) and memory_of(held) == memory_of(keys)
