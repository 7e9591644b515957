"""The arguments of an attached model's blocks, for blocks that run again on other streams."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hooks.base import mapped, tensors_in
from hooks.shared import carried
from models.attached.forward import is_cache
from models.attached.past import AttachedPast, cached_layer, keeps_only_keys

# The arguments whose meaning is known, with their axes over texts and over queries. Positions of several sections (m-rope)
# are [section, batch, pos], so axes are counted from the end.
AXES: dict[str, tuple[int | None, int]] = {
    "attention_mask": (-4, -2),
    "position_ids": (-2, -1),
    "position_embeddings": (-3, -2),
    "cache_position": (None, -1),
}
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class AttachedContext(NamedTuple):
    """The arguments that the blocks of one run read besides the stream.

    Attributes:
        given: the model's arguments besides the tokens.
        n_pos: how many positions the texts have.
        calls: for each block its arguments by name, besides the stream and cached keys.
        held: for each block the keys and values that its cache has.
        past: for each block the keys and values before the first position.
    """

    given: dict[str, Any]
    n_pos: int = 0
    calls: tuple[dict[str, Any], ...] = ()
    held: tuple[tuple[Tensor, Tensor], ...] = ()
    past: tuple[Any, ...] = ()

    def arguments(self, layer: int) -> dict[str, Any]:
        """The arguments of a block besides the stream."""
        kwargs = dict(self.calls[layer])
        if self.past:
            kwargs[next(name for name in CACHES if name in kwargs)] = AttachedPast(
                *self.past[layer]
            )
        return kwargs

    def repeated(self, n: int) -> "AttachedContext":
        """The context of `n` copies of the texts in sequence: row `copy * batch + row`."""
        tiled: dict[int, Tensor] = {}  # blocks share masks
        batch = len(self.held[0][0]) if self.held else 0

        def tile(name: str, leaf: Any) -> Any:
            axis = _axis_of_texts(name, leaf)
            if axis is None or (leaf.shape[axis] == 1 and batch != 1):  # for all texts
                return leaf
            if leaf.shape[axis] == 1:  # some blocks want a row for each
                return leaf.expand(*leaf.shape[:axis], n, *leaf.shape[axis + 1 :])
            if id(leaf) not in tiled:
                tiled[id(leaf)] = torch.cat([leaf] * n, axis)
            return tiled[id(leaf)]

        calls = [
            {name: mapped(value, partial(tile, name)) for name, value in call.items()}
            for call in self.calls
        ]
        return self._replace(calls=tuple(calls))

    def after(self, pos: int, past: Sequence[Sequence[Tensor]]) -> "AttachedContext":
        """The context of the same texts from position `pos` on.

        Args:
            pos: the first position.
            past: for each block the keys and values before it, as its cache holds them.
        """
        new = self.n_pos - pos

        calls = [
            {name: _later(name, value, pos, new, keys.device) for name, value in kwargs.items()}
            for kwargs, (keys, *_) in zip(self.calls, past, strict=True)
        ]
        return self._replace(calls=tuple(calls), past=tuple(past))


def _later(name: str, value: Any, pos: int, new: int, device: torch.device) -> Any:
    if name not in AXES:
        return value
    if name == "attention_mask" and value is None and new > 1:
        # Without a mask the kernels take the first key for the first query's.
        return torch.ones(1, 1, new, pos + new, dtype=torch.bool, device=device).tril(pos)

    def cut(leaf: Any) -> Any:
        return leaf.narrow(AXES[name][1], pos, new) if isinstance(leaf, Tensor) else leaf

    return mapped(value, cut)


def _axis_of_texts(name: str, leaf: Any) -> int | None:
    """The axis of an argument that has a row for each text, or one for all of them; None without one."""
    axis = AXES[name][0] if name in AXES else None
    if not isinstance(leaf, Tensor) or axis is None or leaf.ndim < -axis:
        return None
    return leaf.ndim + axis


def _has_known_axes(name: str, leaf: Tensor, batch: int, n_pos: int) -> bool:
    """Whether an argument has its texts and its queries along the axes that are known."""
    if leaf.ndim < -AXES[name][1] or leaf.shape[AXES[name][1]] != n_pos:
        return False
    if (axis := _axis_of_texts(name, leaf)) is None:
        return leaf.ndim == -AXES[name][1]  # no axis comes before, so all texts share it
    # Where all texts share a row, no axis before it may be the texts'.
    return leaf.shape[axis] == batch or (leaf.shape[axis] == 1 and batch not in leaf.shape[:axis])


def repeatable_context(
    blocks: Sequence[nn.Module], calls: Sequence[tuple[Any, Any]], model_arguments: dict[str, Any]
) -> AttachedContext | None:
    """The context of a run, from how it called the blocks; None if they cannot be called again.

    They can if each is causal, has no tensors among its arguments but those in `AXES`, with these axes, and has put all
    its keys and values into a cache.
    """
    arguments, held = [], []
    for block, (args, kwargs) in zip(blocks, calls, strict=True):
        names = list(inspect.signature(block.forward).parameters)
        named = dict(zip(names[1:], args[1:], strict=False)) | kwargs
        cache = next((named[name] for name in CACHES if is_cache(named.get(name))), None)
        kept = cached_layer(cache, carried(block, "hook_points").layer)
        n_pos = args[0].shape[1] if args else 0
        if not keeps_only_keys(kept) or kept.keys is None or kept.keys.shape[2] != n_pos:
            return None
        plain = {name: None if is_cache(value) else value for name, value in named.items()}
        others = {name: value for name, value in plain.items() if name not in AXES}
        if any(True for _ in tensors_in(others)) or not _is_causal(block, plain, n_pos):
            return None
        batch, read = len(kept.keys), {name: plain[name] for name in AXES if name in plain}
        leaves = [(name, leaf) for name, value in read.items() for leaf in tensors_in(value)]
        if not all(_has_known_axes(name, leaf, batch, n_pos) for name, leaf in leaves):
            return None
        arguments.append(plain)
        held.append((kept.keys, kept.values))
    return AttachedContext(model_arguments, n_pos, tuple(arguments), tuple(held))


def _is_causal(block: nn.Module, kwargs: dict[str, Any], n_pos: int) -> bool:
    """Whether no query sees a later key."""
    mask = kwargs.get("attention_mask")
    if mask is None:
        return all(getattr(module, "is_causal", True) for module in block.modules())
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (n_pos, n_pos):
        return False
    # What is added to a score that is seen may be a bias, and not 0.
    least = torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else 0
    seen = mask > least
    return not bool(seen.triu(1).any())
