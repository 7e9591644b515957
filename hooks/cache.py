"""ActivationCache: the values of a run by name, read-only."""

import html
import itertools
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from hooks import names
from hooks.base import (
    HintsAtNames,
    Index,
    explains_calls,
    number_of,
    require_device,
    require_room,
    shown,
    stacked,
    storage,
    unknown_name,
    unknown_point,
)
from hooks.base.errors import CacheError, UnknownNameError
from hooks.base.masks import TextMasks
from hooks.base.memory import Bound
from hooks.base.slicing import Slice
from hooks.base.transfer import Copies
from hooks.lazy import LazyValues
from hooks.modes import Options
from hooks.origin import Origin

_FORMAT = "hookscope-cache-6"
# The prefixes of the names of gradients, inputs and masks; no module's name starts with a dot.
_GRAD, _INPUT, _MASK = ".grad.", ".input.", ".mask."

T = TypeVar("T")


class ActivationCache(HintsAtNames, Mapping[str, Tensor]):
    """A read-only mapping from the names of points to their values in one run.

    A key is a full name or, as a short form, a pair: `cache["pattern", 3]` is
    `blocks.3.attn.pattern`, and `cache["resid_post", -1]` is the value of the model's last layer
    with a `resid_post`. Caches come from `HookedRunner.run_with_cache` and `HookedRunner.capture`,
    and from `ActivationCache.load`.

    Args:
        values: the tensors by name.
        axes: the axis names of each value.
        origin: the run and the model of the values. It contains the names of all points of the
            model, from which short forms count the layers.
        grads: the gradients by name; None if the run did not record them.
        masks: the masks of padding in the texts of the values.

    Attributes:
        skipped: the chosen points without a value, each with the reason. For example, the reason is
            that a module of a model without `HookPoint`s did not run.
        is_part: whether `at` has selected texts or positions. Then `inputs` still contain all texts
            and positions of the run.

    >>> from hooks import HookedRunner, HookPoint
    >>> model = nn.Sequential(HookPoint("batch d_model"), nn.ReLU()).eval()
    >>> _, cache = HookedRunner(model).run_with_cache(torch.tensor([[-2.0, 3.0]]))
    >>> cache
    ActivationCache of 1 value, 8 bytes
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
        """The chosen points without a value, each with the reason."""
        return self._origin.skipped

    @property
    def is_part(self) -> bool:
        """True if `at` has selected texts or positions."""
        return self._origin.is_part

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        """Return the value of a full name, or of a (short name, layer) pair.

        Raises:
            UnknownNameError: if the cache has no value of this name. The error names close matches,
                or the reason why the value was skipped.
            TypeError: if the key is neither a name nor a pair.
        """
        return self._values[self.name(key)]

    def name(self, key: str | tuple[str, int]) -> str:
        """Return the full name of `key`.

        Raises:
            UnknownNameError: if this cache does not contain the name.
            TypeError: if the key is neither a name nor a pair.
        """
        match key:
            case str():
                name = key
            case (str(short), int(layer)):
                name = self._layered(short, layer)
            case _:
                form = "a name or a (short name, layer) pair, such as ('ln1.scale', 0)"
                hint = "; layer -1 is the last"
                if isinstance(key, tuple) and not isinstance(key[0], str):
                    hint = "; cache.at(pos=-1) selects a position of all values"
                raise TypeError(f"a key must be {form}; got {shown(key)}{hint}")
        if name not in self._values:
            if name in self.skipped:
                raise UnknownNameError(f"{name!r} was skipped: {self.skipped[name]}")
            raise unknown_point(name, self._values, "value in this cache")
        return name

    def _layered(self, short: str, layer: int) -> str:
        """Return the full name of a short name and a layer. A negative layer counts from the end.

        Raises:
            UnknownNameError: if the model has no such value, or not in this layer.
        """
        by_layer = names.names_by_layer(short, self._all_names())
        index = layer + max(by_layer) + 1 if layer < 0 else layer
        if index not in by_layer:
            raise UnknownNameError(
                f"{short!r} has layers {min(by_layer)} to {max(by_layer)}; got {layer}"
            )
        return by_layer[index]

    def _all_names(self) -> list[str]:
        """Return the names of all points of the model, and of all values."""
        return list(dict.fromkeys([*self._origin.known, *self._values]))

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The arguments of the model's run, by the parameter names of its `forward`.

        These are copies of masks and of tensors without floating-point numbers, such as tokens, and
        None, numbers and strings. All other arguments are left out. `at` does not slice the inputs.

        If a function `run=` ran the model many times, the integers [batch, pos] of all runs, such
        as tokens, are joined along the positions. Only the masks of the last run are included.
        """
        return self._origin.inputs

    @property
    def config_hash(self) -> str:
        """The hash of the configuration of the model that ran."""
        return self._origin.config_hash

    @explains_calls
    def require_weights_of(self, model: nn.Module) -> None:
        """Check that a model has the configuration and the weights of the model that ran.

        The model that ran is accepted if PyTorch has counted no write to its weights since the run.
        (It does not count writes through `weight.data`.) For a different model, or for a cache from
        a file, some numbers of each weight are compared. If the model that ran no longer exists, or
        its weights have changed, only the configuration is compared.

        Raises:
            CacheError: if the configuration or the weights are known to differ.
        """
        self._origin.require(model)

    # Mapping compares item by item, but a comparison of tensors has no single truth value.
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
        """Return the axis names of a value; empty if its module declares no axes."""
        return self._axes[self.name(key)]

    @property
    def grads(self) -> "ActivationCache":
        """The gradient at each point, from the last backward pass.

        Raises:
            CacheError: if the run did not request gradients, or no backward pass has reached the
                points yet.
        """
        if self._grads is None:
            raise CacheError(
                "the cache has no gradients: run with grads=True, and slice after backward()"
            )
        if not self._grads:
            raise CacheError("no gradient has arrived: call backward() on a loss of this run first")
        arrived = {name: self._grads[name] for name in self._axes if name in self._grads}
        without = [name for name in self._axes if name not in arrived]
        skipped = dict.fromkeys(without, "no gradient arrived there") | dict(self.skipped)
        origin = replace(self._origin, skipped=skipped)
        return type(self)(arrived, self._axes, origin, masks=self._masks)

    def layer_names(self, short: str) -> dict[int, str]:
        """Return the full names that end in `short`, by layer.

        Raises:
            UnknownNameError: if no name ends in `short`.
            CacheError: if this cache lacks the value of a layer in which the model has it.
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
        """Yield the values of the points whose names end in `short`, one for each layer, in order.

        A lazy cache computes each value when it is read, and does not store it.

        Args:
            short: the end of the names, such as `attn.z`.

        Raises:
            UnknownNameError: if no name ends in `short`.
            CacheError: if this cache lacks the value of a layer in which the model has it.
        """
        return (self.read(name)[0] for name in self.layer_names(short).values())

    def map_layers(self, short: str, function: Callable[[Tensor], T]) -> list[T]:
        """Apply a function to the value of each layer, and return the results in order of layers.

        A lazy cache has the value of only one layer in memory. It checks for changes of the model
        once, after the last layer, so the host waits once for the device.

        Args:
            short: the end of the names, such as `attn.z`.
            function: a function of a value.

        Raises:
            UnknownNameError: if no name ends in `short`.
            CacheError: if this cache lacks the value of a layer in which the model has it.

        >>> from hooks import HookedRunner
        >>> from models import Transformer, TransformerConfig
        >>> sizes = dict(vocab_size=7, n_ctx=5, n_layers=3, n_heads=1, d_model=4)
        >>> runner = HookedRunner(Transformer(TransformerConfig(**sizes)).eval())
        >>> _, cache = runner.run_with_cache(torch.tensor([[3, 1]]), lazy=True)
        >>> cache.map_layers("pattern", lambda pattern: round(float(pattern.sum())))
        [2, 2, 2]
        """
        full_names = self.layer_names(short).values()
        if isinstance(self._values, LazyValues):
            return self._values.mapped(full_names, function)
        return [function(self._values[name]) for name in full_names]

    @explains_calls
    def stack(self, short: str) -> Shaped[Tensor, "layer ..."]:
        """Return the values of all `layers`, stacked: [layer, ...].

        If they are on several devices, the result is on the device of the first layer.

        Raises:
            UnknownNameError, CacheError: see `layer_names`; a CacheError also if layers of a lazy
                cache differ in shape or dtype.
            MemoryLimitError: if the result does not fit into memory.
        """
        n_layers = len(self.layer_names(short))
        values = self.layers(short)
        first = next(values)
        advice = f"all layers of {short!r}: read one at a time, with cache.layers"
        require_room(n_layers * first.nbytes, first, advice)
        if not isinstance(self._values, LazyValues):
            return stacked([first, *values])
        # With a lazy cache, only one layer is in memory in addition to the result.
        whole = first.new_empty(n_layers, *first.shape)
        for layer, value in zip(whole, itertools.chain([first], values), strict=True):
            if (layer.dtype, layer.shape) != (value.dtype, value.shape):
                raise CacheError(
                    f"{short!r} must have one shape and dtype in all layers; got "
                    f"{layer.dtype} {[*layer.shape]} and {value.dtype} {[*value.shape]}"
                )
            layer.copy_(value)
        return whole

    def read(self, *keys: str | tuple[str, int]) -> tuple[Tensor, ...]:
        """Return the values of several keys.

        A lazy cache runs each block once, and does not store the values.

        Raises:
            UnknownNameError: if the cache does not have a value.
        """
        full_names = [self.name(key) for key in keys]
        if isinstance(self._values, LazyValues):
            values: Mapping[str, Tensor] = self._values.several(full_names)
            return tuple(values[name] for name in full_names)
        return tuple(self._values[name] for name in full_names)

    def at(self, **where: Index) -> "ActivationCache":
        """Return a cache of views, sliced by axis name: `cache.at(batch=0, pos=slice(5, None))`.

        An integer drops the axis. A list or a mask makes copies. Values without the axis are not
        sliced. `pos` also slices `query`, like `pos=` of a run, unless `query` is given too.
        A lazy cache returns a lazy cache, whose values are computed and sliced when they are read.
        A position outside a value raises an error only when the value is read.

        Along `pos`, `query` and `key` of texts with padding, negative places count the real tokens
        of each text: `pos=-1` selects the last real token of each text, as a copy.
        `hooks.base.selection.Selection` documents all forms.

        Raises:
            UnknownNameError: if no value has an axis of this name.
            CacheError: if the indices select no number of a value.
            SelectionError: if a position is padding, or if the number of positions differs between
                texts.
        """
        known = set().union(*(self.axes(name) for name in self))
        for axis in where:
            if axis not in known:
                error = unknown_name(axis, sorted(known), "axis of any value in this cache")
                if axis in ("layer", "layers"):
                    error.args = (f"{error.args[0]}: cache['resid_post', 2] has a layer",)
                raise error
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
        return self._mapped(part, axes, origin=origin, masks=chosen.masks_left())

    def real(
        self, axis: str = "pos", name: str | None = None
    ) -> Bool[Tensor, "batch _size"] | None:
        """Return the mask of real tokens along an axis of the values, sliced like the values.

        The result is None if all tokens are real, the padding is unknown, or `at` dropped the axis.

        Args:
            axis: `pos`, `query` or `key`; or `encoder_pos` for the texts of an encoder.
            name: the name of a value, if the run read several batches of texts, such as the texts
                of an encoder and its decoder: the mask is for the texts of this value.
        """
        return self._masks.along(axis, name)

    @explains_calls
    def to(self, target: torch.device | torch.dtype | str) -> "ActivationCache":
        """Return a cache on another device, or in another floating dtype.

        Integers keep their dtype.

        Lazy values are computed first, one block at a time.

        Raises:
            ValueError: if the dtype is not a floating dtype.
        """
        kind = "dtype" if isinstance(target, torch.dtype) else "device"
        if kind == "device":
            target = require_device(target) or target
        placement = Options(**cast(Any, {kind: target})).placement
        copies = Copies()

        def moved_value(name: str, value: Tensor) -> Tensor:
            return copies(value, placement)

        moved = self._mapped(moved_value, self._axes, origin=self._origin, masks=self._masks)
        placement.wait()
        return moved

    @property
    def nbytes(self) -> int:
        """The present memory of the cache in bytes. Storage that values share counts once."""
        values = self._values
        tensors = values.held() if isinstance(values, LazyValues) else values.values()
        return storage.nbytes(tensors)

    def drop(self) -> None:
        """Free the values that a lazy cache recomputed. They are computed again when they are read.

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
            FileNotFoundError: if the directory does not exist.
        """
        inputs = {name: value for name, value in self.inputs.items() if isinstance(value, Tensor)}
        tensors = {_INPUT + name: value for name, value in inputs.items()}
        tensors |= {_MASK + name: mask for name, mask in self._masks.tensors().items()}
        if self._grads:
            tensors |= {_GRAD + name: grad for name, grad in self.grads.items()}
        facts = {
            "axes": {name: self._axes[name] for name in self},
            "known": self._origin.known,
            "config_hash": self._origin.config_hash,
            "inputs": {name: value for name, value in self.inputs.items() if name not in inputs},
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
    @explains_calls
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module | None = None
    ) -> "ActivationCache":
        """Read a cache that `save` wrote.

        Args:
            path: the file.
            model: if given, the cache must come from a model with the same configuration and
                weights.

        Raises:
            CacheError: if the file is damaged, is not a cache, or comes from a different model.
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
                # Files of earlier versions lack this entry.
                is_part=facts.get("is_part", False),
            )
            text_masks = TextMasks.read(masks, facts["texts"])
            cache = cls(values, axes, origin, grads=grads or None, masks=text_masks)
        if model is not None:
            cache.require_weights_of(model)
        return cache

    def _by_block(self) -> Iterable[tuple[str, Tensor]]:
        """Return all names with their values. Lazy values are computed one block at a time."""
        return self._values.by_block() if isinstance(self._values, LazyValues) else self.items()

    def _mapped(
        self,
        change: Callable[[str, Tensor], Tensor],
        axes: Mapping[str, tuple[str, ...]],
        origin: Origin,
        masks: TextMasks,
    ) -> "ActivationCache":
        """Return a cache with changed values and gradients.

        Only the values of one block are in memory at a time.
        """
        values: dict[str, Tensor] = {}
        bound = Bound([*self], otherwise="read some values at a time, with cache.read")
        for name, value in self._by_block():
            values[name] = change(name, value)
            bound.add(name, values[name])
        grads = {name: change(name, value) for name, value in (self._grads or {}).items()}
        return type(self)(values, axes, origin, grads=grads or None, masks=masks)

    def _repr_html_(self) -> str:
        """Return a table with as many values as `repr` shows."""
        title, *lines = repr(self).splitlines()
        cell = "<td style='text-align: left'>{}</td>"
        rows = ""
        for line in lines:
            words = map(html.escape, line.strip().split(maxsplit=1))
            rows += f"<tr>{''.join(map(cell.format, words))}</tr>"
        return f"<p>{html.escape(title)}</p><table><tbody>{rows}</tbody></table>"

    def __repr__(self) -> str:
        table = names.lines_by_layer({name: self._describe(name) for name in self}, limit=39)
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        title = (
            f"ActivationCache of {number_of(len(self), 'value')}, {self.nbytes:,} bytes{skipped}"
        )
        return f"{title}\n{textwrap.indent(table, '  ')}".rstrip()

    def _describe(self, name: str) -> str:
        """Return the dtype, the shape and the axes of a value, without computing a lazy value."""
        if isinstance(self._values, LazyValues) and not self._values.is_held(name):
            return "not computed yet"
        value = self._values[name]
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}  {' '.join(self.axes(name))}".rstrip()


def _of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file whose names begin with a prefix, by name without the prefix."""
    return {
        name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)
    }
