"""Arguments with which the blocks of an attached model run again: cached keys, masks, positions.

1. `passed` passes the new keys or values of a run through their point, and writes edited ones to
   the cache.
2. `AttachedContext` stores the arguments of each block of one run, so that blocks can run again on
   other streams: on copies of the texts (`repeated`), or from a later position on (`after`), with
   earlier keys in an `AttachedPast`.
3. `repeatable_context` creates a context from the recorded calls, if every argument of the blocks
   has a known meaning.
4. `divided_call` cuts the arguments of a block along their axes of positions, for
   `models.running.pieces`. The cache of the model collects the keys and values of the pieces. If a
   block runs again after earlier keys and values, a `GrowingPast` collects them.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import HookError, HookPoint, start_of_piece
from hooks.base import carried, mapped, memory_of, tensors_in
from hooks.shared import Wire, is_listened_to
from models.attached.forward import (
    fire,
    is_cache,
    own_cache,
    rows_and_positions,
    texts_read,
)
from models.running.context import with_past
from models.running.pieces import Arguments

# The underscores switch off the check that axes of one name have one size in all arguments. Values
# may have a smaller d_head than keys, and new keys may have several copies of the earlier rows.
Keys = Float[Tensor, "_rows _kv_head _key _d_head"]

# The cache argument of the attention module that runs now.
_cache: ContextVar[Any] = ContextVar("cache", default=None)


def take_cache() -> Any:
    """Return the cache argument of the attention module that runs now, and forget it.

    The result is None if the module got no cache, or if its cache was already taken.
    """
    if torch.compiler.is_compiling():
        return None
    cache = _cache.get()
    # Without this, the cache would stay in memory until the thread ends.
    _cache.set(None)
    return cache


@dataclass(eq=False)
class CacheGiven(Wire):
    """A hook before an attention module: it stores the cache that is among the arguments."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Store the cache of keys and values that the module gets, until `take_cache` returns it.

        The module's attention function does not get the cache as an argument, so it calls
        `take_cache`. If the module gets no cache, None is stored.
        """
        if not torch.compiler.is_compiling():
            _cache.set(next(filter(is_cache, (*args, *kwargs.values())), None))


# The number of further keys of the attention module that runs now. A further key belongs to no
# position of the text, as a key that stands for several earlier positions.
_n_further: ContextVar[int] = ContextVar("n_further", default=0)


def n_further_keys() -> int:
    """Return the number of further keys of the attention module that runs now.

    A further key belongs to no position of the text; see `FurtherKeys`. The further keys are the
    last keys of the module.
    """
    return 0 if torch.compiler.is_compiling() else _n_further.get()


def forget_further_keys() -> None:
    """Reset the number that `n_further_keys` returns to 0.

    Attention calls this function at its end. Otherwise the next attention module, which may have no
    further keys, would treat its last keys as further keys.
    """
    if not torch.compiler.is_compiling():
        _n_further.set(0)


@dataclass(eq=False)
class FurtherKeys(Wire):
    """A hook on a module inside attention that returns further keys, and counts these keys.

    Attention appends further keys to the keys of the positions. They belong to no position of the
    text: in DeepSeek V4, one further key stands for several earlier positions.
    """

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Store the number of the keys, until attention has run."""
        if not torch.compiler.is_compiling():
            _n_further.set(next(tensors_in(output)).shape[2])


class AttachedPast:
    """Keys and values of one layer at earlier positions.

    A call of the layer appends its new keys and values to a copy, and does not change the earlier
    ones.

    Args:
        keys, values: the keys and values of earlier positions. If a call has n times as many rows,
            they are repeated n times.
    """

    def __init__(self, keys: Keys, values: Keys) -> None:
        self.keys, self.values = keys, values

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of earlier positions."""
        return self.keys.shape[2]

    def update(self, keys: Keys, values: Keys, *args: Any, **kwargs: Any) -> tuple[Keys, Keys]:
        """Return the earlier keys and values, joined with the new ones."""
        return with_past(self.keys, keys), with_past(self.values, values)


def past_of(cache: Any, layer: int | None) -> AttachedPast | None:
    """Return a copy of the keys and values of a layer in a cache; None if the cache is empty.

    Raises:
        HookError: if `cache` is not a cache, or if its layer contains more than keys and values of
            seen positions, for example a recurrent state or free places.
    """
    if not is_cache(cache):
        raise HookError(
            f"lazy=True needs arguments without other objects; got a {type(cache).__name__}: run "
            "without lazy=True, or without this argument (for a cache: with use_cache=False)"
        )
    cached = cached_layer(cache, layer)
    if cached is not None and not cached.get_seq_length():
        return None
    if not keeps_only_keys(cached):
        layer_words = "" if cached is None else f" with a {type(cached).__name__}"
        raise HookError(
            "lazy=True needs a cache with only the keys and values of earlier tokens; got a "
            f"{type(cache).__name__}{layer_words}, which may contain more, such as the state of a "
            "mixer or free places: run with use_cache=False, or without lazy=True"
        )
    return AttachedPast(cached.keys.detach().clone(), cached.values.detach().clone())


_OF_KEYS = {
    *("keys", "values", "device", "dtype", "is_initialized", "record_past"),
    *("sliding_window", "_sliding_window_tensor", "cumulative_length"),
}
"""The attributes of a layer that contains only keys and values, with or without a window."""


def keeps_only_keys(layer: Any) -> bool:
    """Return whether a layer of a cache contains only the keys and values of seen positions.

    A layer with any other attribute may contain more, such as a recurrent state, quantized keys or
    free places.
    """
    names = getattr(layer, "__dict__", {}).keys()
    return {"keys", "values"} <= names <= _OF_KEYS


def cached_layer(cache: Any, layer: Any) -> Any:
    """Return the part of a cache for one layer, or None."""
    layers = getattr(own_cache(cache), "layers", ())
    return layers[layer] if isinstance(layer, int) and 0 <= layer < len(layers) else None


def first_new(keys: Keys, new: int, cache: Any, layer: Any) -> int:
    """Return the index at which the keys of the new positions begin.

    A static cache has a fixed length, so there are free places after the keys.

    Args:
        keys: the keys of all positions, and the free places after them.
        new: the number of new positions.
        cache, layer: the cache, or None, and the index of the layer.
    """
    cached = cached_layer(cache, layer)
    if hasattr(cached, "max_cache_len") and _is_part(cached.keys, keys):
        # If the cache is a window and it is full, it drops its oldest keys and puts the new ones at
        # its end.
        return min(start_of_piece() or 0, keys.shape[2] - new)
    return keys.shape[2] - new


def passed(
    point: HookPoint,
    keys: Keys,
    new: range,
    cached: Any,
    cache: Any,
    is_lent: bool,
    is_both: bool = False,
) -> Keys:
    """Return all keys or values, with the `new` ones as they leave a point.

    Args:
        point: the point.
        keys: the keys or values of all positions that a query may see.
        new: the indices of the new positions.
        cached: the tensor of the cache that must receive edited keys or values for later calls.
        cache: the cache, or None.
        is_lent: whether later modules use the same tensor, and must see an edit too.
        is_both: whether one tensor is both the keys and the values. Default: False.

    Raises:
        HookError: if edited keys or values cannot be stored in the cache.
    """
    before = keys[:, :, new.start : new.stop].transpose(1, 2)
    if (cached is not None or is_lent) and is_listened_to(point):
        # Give hooks a copy. A hook may store the tensor, and the model later writes into the memory
        # of its cache.
        before = before.clone()
    after = fire(point, before)
    if after is before:
        return keys
    if not is_lent and (cache is None or isinstance(cache, AttachedPast)):
        if len(new) == keys.shape[2]:
            return after.transpose(1, 2)
        earlier, later = keys[:, :, : new.start], keys[:, :, new.stop :]
        return torch.cat([earlier, after.transpose(1, 2), later], 2)
    if is_both:
        raise HookError(
            "keys and values of this model are one tensor in its cache, so they cannot be edited "
            "separately in a run with a cache (run with use_cache=False)"
        )
    if not is_lent and not _is_part(cached, keys):
        problem = (
            "keys and values of this model cannot be edited in a run with a cache, because its "
            "cache stores other tensors"
        )
        raise HookError(f"{problem} (run with use_cache=False)")
    keys[:, :, new.start : new.stop] = after.transpose(1, 2)
    return keys


def _is_part(cached: Any, keys: Keys) -> bool:
    """Return whether the tensor of a cache shares the memory of these keys."""
    return isinstance(cached, Tensor) and memory_of(cached) == memory_of(keys)


# The arguments of blocks with a known meaning, each with the index of its axis of texts (None
# without this axis) and of its axis of queries. Axes are counted from the end, because positions in
# several sections (m-rope) have one more axis in front: [section, batch, pos].
AXES: Mapping[str, tuple[int | None, int]] = {
    "attention_mask": (-4, -2),
    "position_ids": (-2, -1),
    "position_embeddings": (-3, -2),
    "cache_position": (None, -1),
}
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class AttachedContext(NamedTuple):
    """The arguments that the blocks of one run read besides the stream.

    Attributes:
        given: the arguments of the model, without the tokens.
        n_pos: the number of positions of the texts.
        calls: for each block, its arguments by name, without the stream. The cache is None.
        held: for each block, the keys and values that the run put into its cache.
        past: for each block, the keys and values at the positions before this context begins. It is
            empty if the context begins at the first position.
    """

    given: dict[str, Any]
    n_pos: int = 0
    calls: tuple[dict[str, Any], ...] = ()
    held: tuple[tuple[Tensor, Tensor], ...] = ()
    past: tuple[Any, ...] = ()

    def arguments(self, layer: int) -> dict[str, Any]:
        """Return the arguments of a block besides the stream."""
        kwargs = dict(self.calls[layer])
        if self.past:
            kwargs[next(name for name in CACHES if name in kwargs)] = AttachedPast(
                *self.past[layer]
            )
        return kwargs

    def repeated(self, n: int) -> "AttachedContext":
        """Return the context of `n` copies of the texts, one whole batch after the other.

        With texts a and b and n = 2, the rows are a, b, a, b.
        """
        # Several blocks may get the same mask, so copy each mask only once.
        tiled: dict[int, Tensor] = {}
        batch = len(self.held[0][0]) if self.held else 0

        def tile(name: str, leaf: Any) -> Any:
            axis = _axis_of_texts(name, leaf)
            # All texts share one row, so all copies can share it too.
            if axis is None or (leaf.shape[axis] == 1 and batch != 1):
                return leaf
            # With a single text, repeat its row, because some blocks need a row for each text.
            if leaf.shape[axis] == 1:
                return leaf.expand(*leaf.shape[:axis], n, *leaf.shape[axis + 1 :])
            if id(leaf) not in tiled:
                tiled[id(leaf)] = torch.cat([leaf] * n, axis)
            return tiled[id(leaf)]

        def tiled_call(call: dict[str, Any]) -> dict[str, Any]:
            return {name: mapped(value, partial(tile, name)) for name, value in call.items()}

        return self._replace(calls=tuple(map(tiled_call, self.calls)))

    def after(self, pos: int, past: Sequence[Sequence[Tensor]]) -> "AttachedContext":
        """Return the context of the same texts from position `pos` on.

        Args:
            pos: the first position.
            past: for each block, the keys and values before this position, in the layout of its
                cache.
        """
        new = self.n_pos - pos
        # Blocks that get the same argument also share its part.
        parts: dict[tuple[str, int, torch.device], Any] = {}
        calls = list[dict[str, Any]]()
        for call, (keys, *_) in zip(self.calls, past, strict=True):
            later = {}
            for name, value in call.items():
                key = name, id(value), keys.device
                if key not in parts:
                    parts[key] = cut(name, value, pos=pos, new=new, device=keys.device)
                later[name] = parts[key]
            calls.append(later)
        return self._replace(calls=tuple(calls), past=tuple(past))

    def hiding(self, keys: Bool[Tensor, "_batch _head key"]) -> "AttachedContext | None":
        """Return the context in which no query sees some keys.

        The result is None if a block gets no mask, or if the keys of the heads differ, because some
        blocks refuse a mask of each head.

        Args:
            keys: True at the hidden keys, from the start of the text to the end of this context.
                The axes of texts and of query heads may have size 1.
        """
        if keys.shape[1] > 1:
            return None
        hidden = keys[:, :, None]
        # Several blocks may get the same mask.
        changed: dict[int, Tensor] = {}
        calls = list[dict[str, Any]]()
        for call in self.calls:
            mask = call.get("attention_mask")
            if not isinstance(mask, Tensor):
                return None
            if id(mask) not in changed:
                lowest = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
                changed[id(mask)] = torch.where(hidden, lowest, mask)
            calls.append(call | {"attention_mask": changed[id(mask)]})
        return self._replace(calls=tuple(calls))


def cut(name: str, value: Any, pos: int, new: int, device: torch.device) -> Any:
    """Return the part of an argument for the `new` positions from `pos` on.

    Args:
        name: the name of the argument of a block.
        value: the argument for some positions. If it is a mask, its last query is at its last key.
        pos: the first position of the part, counted from the first position of the argument.
        new: the number of positions of the part.
        device: the device of a new mask.
    """
    if name not in AXES:
        return value
    if name == "attention_mask" and value is None and new > 1 and pos:
        # Without a mask, kernels assume that queries and keys begin at the same position. Here the
        # keys begin `pos` positions earlier, so a mask is needed.
        return torch.ones(1, 1, new, pos + new, dtype=torch.bool, device=device).tril(pos)

    def narrowed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if name == "attention_mask":
            # Leave out the keys after the last query of the part.
            leaf = leaf[..., : leaf.shape[-1] - leaf.shape[-2] + pos + new]
        return leaf.narrow(AXES[name][1], pos, new)

    return mapped(value, narrowed)


def _axis_of_texts(name: str, leaf: Any) -> int | None:
    """Return the index of an argument's axis of texts; None for an argument without this axis.

    The axis has a row for each text, or one row for all texts.
    """
    axis = AXES[name][0] if name in AXES else None
    if not isinstance(leaf, Tensor) or axis is None or leaf.ndim < -axis:
        return None
    return leaf.ndim + axis


def _has_known_axes(name: str, leaf: Tensor, batch: int, n_pos: int) -> bool:
    """Return whether a tensor has its axis of texts and its axis of queries where `AXES` says.

    The axis of queries must have the size `n_pos`. The axis of texts must have the size `batch`, or
    1 if all texts share a row.

    Args:
        name: the name of the argument that contains the tensor.
        leaf: the tensor.
        batch: the number of texts.
        n_pos: the number of queries.
    """
    if leaf.ndim < -AXES[name][1] or leaf.shape[AXES[name][1]] != n_pos:
        return False
    if (axis := _axis_of_texts(name, leaf)) is None:
        # All texts share the argument, so its axis of queries must be its first axis.
        return leaf.ndim == -AXES[name][1]
    # If all texts share a row, no axis in front may have the size of the batch. Otherwise this axis
    # may be the axis of texts.
    return leaf.shape[axis] == batch or (leaf.shape[axis] == 1 and batch not in leaf.shape[:axis])


def repeatable_context(
    blocks: Sequence[nn.Module], calls: Sequence[tuple[Any, Any]], model_arguments: dict[str, Any]
) -> AttachedContext | None:
    """Return the context of a run, from its calls of the blocks; None if these cannot be repeated.

    The calls can be repeated if, for each block:

    - no query sees a later key;
    - the tensors among its arguments are only the stream and the arguments in `AXES`, with the axes
      that are named there;
    - the cache contains its keys and values of all positions of the run, and no others.

    Args:
        blocks: the blocks.
        calls: the arguments of each block, positional and by name.
        model_arguments: the arguments of the model, without the tokens.
    """
    arguments = []
    keys_and_values = []
    for block, (args, kwargs) in zip(blocks, calls, strict=True):
        named = by_name(block, args, kwargs)
        layer = cached_layer(cache_among(named), carried(block, "hook_points").layer)
        n_pos = args[0].shape[1] if args else 0
        if not keeps_only_keys(layer) or layer.keys is None or layer.keys.shape[2] != n_pos:
            return None
        plain = {name: None if is_cache(value) else value for name, value in named.items()}
        if not can_be_cut(block, plain, batch=len(layer.keys), n_pos=n_pos):
            return None
        arguments.append(plain)
        keys_and_values.append((layer.keys, layer.values))
    return AttachedContext(
        model_arguments, n_pos, calls=tuple(arguments), held=tuple(keys_and_values)
    )


def by_name(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a block by name, without the stream, which is the first one."""
    names = list(inspect.signature(block.forward).parameters)
    return dict(zip(names[1:], args[1:], strict=False)) | kwargs


def cache_among(named: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a block, or None."""
    return next((named[name] for name in CACHES if is_cache(named.get(name))), None)


def can_be_cut(
    block: nn.Module, plain: dict[str, Any], batch: int, n_pos: int, n_earlier: int = 0
) -> bool:
    """Return whether the arguments of a block can be divided by position.

    No query may see a later key, and all tensors must be arguments in `AXES`, with the axes that
    are named there.

    Args:
        block: the block.
        plain: its arguments by name, without the stream and the cache.
        batch: the number of texts.
        n_pos: the number of queries.
        n_earlier: the number of keys before the first query. Default: 0.
    """
    others = {name: value for name, value in plain.items() if name not in AXES}
    if any(True for _ in tensors_in(others)) or not _is_causal(block, plain, n_pos, n_earlier):
        return False
    for name in AXES.keys() & plain.keys():
        for leaf in tensors_in(plain[name]):
            if not _has_known_axes(name, leaf, batch=batch, n_pos=n_pos):
                return False
    return True


def _is_causal(block: nn.Module, kwargs: dict[str, Any], n_pos: int, n_earlier: int = 0) -> bool:
    """Return whether no query of a block sees a later key."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return all(getattr(module, "is_causal", True) for module in block.modules())
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (n_pos, n_earlier + n_pos):
        return False
    # The mask may add a bias to the score of a visible key, so visible keys are not only at 0.
    least = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    is_visible = mask > least
    return not bool(is_visible.triu(1 + n_earlier).any())


class GrowingPast(AttachedPast):
    """Keys and values of one layer. Each call of the layer adds its keys and values."""

    def update(self, keys: Keys, values: Keys, *args: Any, **kwargs: Any) -> tuple[Keys, Keys]:
        """Return the earlier keys and values, joined with the new ones, and keep them."""
        self.keys, self.values = super().update(keys, values)
        return self.keys, self.values


def divided_call(block: nn.Module, call: Arguments, most: int) -> Iterator[Arguments] | None:
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


def _pieces_of(stream: Tensor, named: dict[str, Any], cache: Any, most: int) -> Iterator[Arguments]:
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
        texts_read.set(rows_and_positions(piece))
        yield (piece,), kwargs
    texts_read.set(whole)
