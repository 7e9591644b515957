"""ActivationCache: the values that a run kept, by name, read-only."""

import html
import itertools
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from hooks import names
from hooks.base import (
    HintsAtNames,
    Index,
    require_device,
    require_room,
    shown,
    stacked,
    storage,
    unknown_name,
    unknown_point,
)
from hooks.base.errors import CacheError, UnknownNameError
from hooks.base.memory import Bound
from hooks.base.transfer import Copies
from hooks.lazy import LazyValues
from hooks.masks import TextMasks
from hooks.modes import Options
from hooks.origin import Origin
from hooks.slicing import Slice

_FORMAT = "hookscope-cache-6"
# Before the name of a gradient, an input or a mask; no module's name starts with a dot.
_GRAD, _INPUT, _MASK = ".grad.", ".input.", ".mask."


class ActivationCache(HintsAtNames, Mapping[str, Tensor]):
    """A read-only mapping from names of points to the values they had in one run.

    Keys are full names. A pair is a short form: `cache["pattern", 3]` is `blocks.3.attn.pattern`, and
    `cache["resid_post", -1]` belongs to the last of the model's layers that has one. Caches come from
    `HookedRunner.run_with_cache` and `HookedRunner.capture`, and from `ActivationCache.load`.

    Args:
        values: the tensors by name.
        axes: the axis names of each value.
        origin: the run and the model that the values came from. Short forms count the layers of its points.
        grads: gradients by name; None where the run did not ask for them.
        masks: the padding of the texts that the values belong to.

    Attributes:
        skipped: the chosen points that have no value, each with the reason: in a model without
            `HookPoint`s, a module that did not run, for instance.
        is_part: whether `at` has cut texts or positions, so that `inputs` are of more than the values.

    >>> from hooks import HookedRunner, HookPoint
    >>> model = nn.Sequential(HookPoint("batch d_model"), nn.ReLU()).eval()
    >>> _, cache = HookedRunner(model).run_with_cache(torch.tensor([[-2.0, 3.0]]))
    >>> cache
    ActivationCache of 1 values, 8 bytes
      0  float32 [1, 2]  batch d_model
    >>> cache.at(d_model=1)["0"]
    tensor([3.])
    """

    def __init__(
        self,
        values: dict[str, Tensor] | LazyValues,
        axes: Mapping[str, tuple[str, ...]],
        origin: Origin | None = None,
        *,
        grads: Mapping[str, Tensor] | None = None,
        masks: TextMasks | None = None,
    ) -> None:
        self._values = values
        self._axes = axes
        self._origin = origin or Origin()
        self._grads = grads
        self._masks = masks or TextMasks()

    @property
    def skipped(self) -> Mapping[str, str]:
        """See above."""
        return self._origin.skipped

    @property
    def is_part(self) -> bool:
        """See above."""
        return self._origin.is_part

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """The value under a full name, or under a (short name, layer) pair.

        Raises:
            UnknownNameError: if the cache has no such value. The error names close matches, or says why
                the value was skipped.
        """
        return self._values[self.name(key)]

    def name(self, key: str | tuple[str, int]) -> str:
        """The full name that `key` stands for.

        Raises:
            UnknownNameError: if this cache does not hold it.
        """
        match key:
            case str():
                name = key
            case (str(short), int(layer)):
                name = self._layered(short, layer)
            case _:
                form = "a name or a (short name, layer) pair, such as ('ln1.scale', 0)"
                raise TypeError(f"a key must be {form}; got {shown(key)}")
        if name not in self._values:
            if name in self.skipped:
                raise UnknownNameError(f"{name!r} was skipped: {self.skipped[name]}")
            raise unknown_point(name, self._values, "value in this cache")
        return name

    def _layered(self, short: str, layer: int) -> str:
        by_layer = names.names_by_layer(short, self._all_names())
        index = layer + max(by_layer) + 1 if layer < 0 else layer
        if index not in by_layer:
            raise UnknownNameError(
                f"{short!r} has layers {min(by_layer)} to {max(by_layer)}; got {layer}"
            )
        return by_layer[index]

    def _all_names(self) -> list[str]:
        return list(dict.fromkeys([*self._origin.known, *self._values]))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The arguments of the model's run, by the names of its `forward`.

        Masks and tensors that are not of floating-point numbers are copies; other tensors are left out, and
        so is all but None, numbers and strings. `at` does not slice them. A function `run=` may run the model
        many times: then integers [batch, pos], such as tokens, are joined along the positions, and masks are
        the last ones.
        """
        return self._origin.inputs

    @property
    def config_hash(self) -> str:
        """The hash of the configuration that the values came from."""
        return self._origin.config_hash

    def require_weights_of(self, model: nn.Module) -> None:
        """Refuse a model that is known to have another configuration or other weights than this cache's.

        The model that ran is accepted as it is. Of another, or for a cache from a file, some numbers of
        each weight are compared. If the model that ran is gone, only the configuration is.

        Raises:
            CacheError: if its configuration or its weights differ.
        """
        self._origin.require(model)

    # Mapping compares item by item, and comparing tensors does not give one truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        try:
            self.name(cast(Any, key))
        except (KeyError, TypeError):
            return False
        return True

    def axes(self, key: str | tuple[str, int]) -> tuple[str, ...]:
        """The axis names of a value; empty where its module declares none."""
        return self._axes[self.name(key)]

    @property
    def grads(self) -> "ActivationCache":
        """The gradient at each point, from the last backward pass.

        Raises:
            CacheError: if the run did not ask for them, or no backward pass has reached them yet.
        """
        if self._grads is None:
            raise CacheError("no gradients here: run with grads=True, and slice after backward()")
        if not self._grads:
            raise CacheError("no gradient has arrived: call backward() on a loss of this run first")
        arrived = {name: self._grads[name] for name in self._axes if name in self._grads}
        without = [name for name in self._axes if name not in arrived]
        skipped = dict.fromkeys(without, "no gradient arrived there") | dict(self.skipped)
        origin = replace(self._origin, skipped=skipped)
        return type(self)(arrived, self._axes, origin, masks=self._masks)

    def layer_names(self, short: str) -> dict[int, str]:
        """The full names that end in `short`, by layer.

        Raises:
            UnknownNameError: if there is no such value.
            CacheError: if the model has the value in a layer, and this cache does not.
        """
        by_layer = names.names_by_layer(short, self._all_names())
        absent = [name for name in by_layer.values() if name not in self._values]
        if absent:
            reasons = [self.skipped[name] for name in absent[:4] if name in self.skipped]
            verb = "is" if len(absent) == 1 else "are"
            listed = f"{', '.join(absent[:4])} {verb} not in this cache"
            raise CacheError(
                "; ".join([f"all layers of {short!r} are needed, and {listed}", *reasons])
            )
        return by_layer

    def layers(self, short: str) -> Iterator[Tensor]:
        """The values of all layers whose names end in `short`, one after the other. A lazy cache keeps none of them.

        Raises:
            UnknownNameError, CacheError: as for `layer_names`.
        """
        return (self.read(name)[0] for name in self.layer_names(short).values())

    def stack(self, short: str) -> Shaped[Tensor, "layer ..."]:
        """The values of all `layers`, stacked: [layer, ...].

        If they are on several devices, the result is on the device of the first layer.

        Raises:
            UnknownNameError, CacheError: as for `layer_names`, or if layers of a lazy cache differ in shape or dtype.
            MemoryLimitError: if the result does not fit into memory.
        """
        n_layers, values = len(self.layer_names(short)), self.layers(short)
        first = next(values)
        advice = f"all layers of {short!r}: read one at a time, with cache.layers"
        require_room(n_layers * first.nbytes, first, advice)
        if not isinstance(self._values, LazyValues):
            return stacked([first, *values])
        # Of a lazy cache only one layer is in memory besides the result.
        whole = first.new_empty(n_layers, *first.shape)
        for layer, value in zip(whole, itertools.chain([first], values), strict=True):
            kinds = [f"{each.dtype} {[*each.shape]}" for each in (layer, value)]
            if kinds[0] != kinds[1]:
                raise CacheError(
                    f"{short!r} must be alike in all layers; got {' and '.join(kinds)}"
                )
            layer.copy_(value)
        return whole

    def read(self, *keys: str | tuple[str, int]) -> tuple[Tensor, ...]:
        """The values under several keys. A lazy cache runs each of their blocks once, and keeps none of them.

        Raises:
            UnknownNameError: if the cache has no such value.
        """
        full_names = [self.name(key) for key in keys]
        if isinstance(self._values, LazyValues):
            values: Mapping[str, Tensor] = self._values.several(full_names)
            return tuple(values[name] for name in full_names)
        return tuple(self._values[name] for name in full_names)

    def at(self, **where: Index) -> "ActivationCache":
        """A cache of views, sliced by axis name: `cache.at(batch=0, pos=slice(5, None))`.

        An integer drops the axis. A list or a mask makes copies. Values without the axis stay whole. `pos` also cuts
        `query`, as `positions=` of a run does, unless that is given too. Of a lazy cache it
        is lazy: a value is computed and cut when it is read, and only then is a place that it lacks an error.

        Along `pos`, `query` and `key` of texts with padding, negative places count real tokens of each text, so `pos=-1`
        is the last one of each, a copy; `hooks.positions.Selection` has all forms.

        Raises:
            UnknownNameError: if no value has an axis of that name.
            CacheError: if nothing of a value is selected.
            SelectionError: if a place along positions is padding, or texts would have other numbers of places.
        """
        known = {axis for name in self for axis in self.axes(name)}
        for axis in where:
            if axis not in known:
                raise unknown_name(axis, sorted(known), "axis of any value in this cache")
        if "pos" in where and "query" in known:
            where = {"query": where["pos"], **where}
        chosen = Slice(where, self._masks)

        def part(name: str, value: Tensor) -> Tensor:
            return chosen.part(value, self.axes(name), name)

        axes = {name: chosen.axes_left(self.axes(name)) for name in self}
        cuts_texts = not where.keys().isdisjoint(("batch", "pos"))
        origin = replace(self._origin, is_part=self.is_part or cuts_texts)
        if isinstance(self._values, LazyValues):
            parts = self._values.changed(part)
            return type(self)(parts, axes, origin, masks=chosen.masks_left())
        return self._mapped(part, axes, origin, chosen.masks_left())

    def real(
        self, axis: str = "pos", name: str | None = None
    ) -> Bool[Tensor, "batch _size"] | None:
        """The mask of the values' places along `pos`, `query` or `key`: True at real tokens, as far as `at` left them.

        None if all are real, nobody knows, or the axis is gone. A run may read several batches of texts, as an encoder and its
        decoder do; with `name` it is the mask of the texts of this value.
        """
        return self._masks.along(axis, name)

    def to(self, target: torch.device | torch.dtype | str) -> "ActivationCache":
        """A cache on another device, or in another floating dtype. Integers keep their dtype.

        Lazy values are computed first, one block at a time.

        Raises:
            ValueError: if the dtype is not a floating one.
        """
        kind = "dtype" if isinstance(target, torch.dtype) else "device"
        if kind == "device":
            target = require_device(target) or target
        placement = Options(**cast(Any, {kind: target})).placement
        copies = Copies()

        def moved_value(name: str, value: Tensor) -> Tensor:
            return copies(value, placement)

        moved = self._mapped(moved_value, self._axes, self._origin, self._masks)
        placement.wait()
        return moved

    @property
    def nbytes(self) -> int:
        """The memory that the cache holds now, in bytes. Storage that values share counts once."""
        values = self._values
        held = values.held() if isinstance(values, LazyValues) else values.values()
        return storage.nbytes(held)

    def drop(self) -> None:
        """Free the values that a lazy cache recomputed. It computes them again when asked.

        Raises:
            CacheError: if the cache is not lazy, because the values would be lost.
        """
        if not isinstance(self._values, LazyValues):
            raise CacheError("only a lazy cache can drop values and compute them again")
        self._values.drop()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the values and gradients as safetensors, completely or not at all.

        Lazy values are computed while they are written, one block at a time.

        Raises:
            FileNotFoundError: if there is no such directory.
        """
        inputs = {n: value for n, value in self.inputs.items() if isinstance(value, Tensor)}
        tensors = {_INPUT + name: value for name, value in inputs.items()}
        tensors |= {_MASK + name: mask for name, mask in self._masks.tensors().items()}
        if self._grads:
            tensors |= {_GRAD + name: grad for name, grad in self.grads.items()}
        facts = {
            "axes": {name: self._axes[name] for name in self},
            "known": self._origin.known,
            "config_hash": self._origin.config_hash,
            "inputs": {n: value for n, value in self.inputs.items() if n not in inputs},
            "hashed": self._origin.weights_hash(),
            "skipped": dict(self.skipped),
            "texts": dict(self._masks.numbers),
            "is_part": self.is_part,
        }
        storage.save(
            storage.path_of(path),
            _FORMAT,
            tensors,
            facts,
            names=self.keys(),
            later=self._by_block(),
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module | None = None
    ) -> "ActivationCache":
        """Read a cache that `save` wrote.

        Args:
            path: the file.
            model: if given, the cache must come from a model with its configuration and weights.

        Raises:
            CacheError: if the file is damaged, is no cache, or came from another model.
        """
        with storage.opened(storage.path_of(path), _FORMAT) as (tensors, facts):
            axes = {name: tuple(listed) for name, listed in facts["axes"].items()}
            values = {name: tensors[name] for name in axes}
            grads, inputs, masks = (_of_kind(kind, tensors) for kind in (_GRAD, _INPUT, _MASK))
            origin = Origin(
                known=tuple(facts["known"]),
                config_hash=facts["config_hash"],
                inputs=inputs | facts["inputs"],
                hashed=facts["hashed"],
                skipped=facts["skipped"],
                # Files of earlier versions do not say it.
                is_part=facts.get("is_part", False),
            )
            text_masks = TextMasks.read(masks, facts["texts"])
            cache = cls(values, axes, origin, grads=grads or None, masks=text_masks)
        if model is not None:
            cache.require_weights_of(model)
        return cache

    def _by_block(self) -> Iterable[tuple[str, Tensor]]:
        return self._values.by_block() if isinstance(self._values, LazyValues) else self.items()

    def _mapped(
        self,
        change: Callable[[str, Tensor], Tensor],
        axes: Mapping[str, tuple[str, ...]],
        origin: Origin,
        masks: TextMasks,
    ) -> "ActivationCache":
        """Return a cache whose values and gradients are changed. The values of one block are in memory at a time."""
        values: dict[str, Tensor] = {}
        bound = Bound([*self], otherwise="read some values at a time, with cache.read")
        for name, value in self._by_block():
            values[name] = change(name, value)
            bound.add(name, values[name])
        grads = {name: change(name, value) for name, value in (self._grads or {}).items()}
        return type(self)(values, axes, origin, grads=grads or None, masks=masks)

    def _repr_html_(self) -> str:
        """The table of its values, as many as `repr` shows."""
        title, *lines = repr(self).splitlines()
        cell = "<td style='text-align: left'>{}</td>"
        cells = (map(html.escape, line.strip().split(maxsplit=1)) for line in lines)
        rows = "".join(f"<tr>{''.join(map(cell.format, row))}</tr>" for row in cells)
        return f"<p>{html.escape(title)}</p><table><tbody>{rows}</tbody></table>"

    def __repr__(self) -> str:
        table = names.lines_by_layer({name: self._describe(name) for name in self}, limit=39)
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        title = f"ActivationCache of {len(self)} values, {self.nbytes:,} bytes{skipped}"
        return f"{title}\n{textwrap.indent(table, '  ')}".rstrip()

    def _describe(self, name: str) -> str:
        if isinstance(self._values, LazyValues) and not self._values.is_held(name):
            return "not computed yet"
        value = self._values[name]
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}  {' '.join(self.axes(name))}".rstrip()


def _of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file whose names begin with a kind, without it."""
    return {n.removeprefix(kind): tensor for n, tensor in tensors.items() if n.startswith(kind)}
