"""The contributions of a model's components to the residual stream of a run.

A component is a part of the model that adds a vector to the stream, such as the embedding, a head
or an MLP. In a graph, it is called a writer.

Most contributions are kept as factors, such as the `z` of a head and its `W_O`. The vectors in the
stream are only computed when they are needed; see `interp.graph.nodes.Writers`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookedRunner, Point
from hooks.base import (
    Index,
    Selection,
    at_least_float32,
    is_rounding,
    stream_rounding,
    to_device,
)
from interp.graph.graph import Graph
from interp.graph.nodes import At, Sublayer, Writers
from interp.graph.norms import LinearPart, is_identity, linear_part
from interp.graph.sublayers import adapter_of, scale_of
from interp.inputs.cached import mask_of
from interp.kinds import require_cache
from interp.protocol import plain, rounding_dtype
from interp.results.node import NodeName, node_name

# The last parts of the points that are read from a cache, without the points of neurons and of
# experts; and the points that are also needed for experts, and for neurons and adapters.
_READ = re.compile(
    r"(^(pos_)?embed|(ln_embed|ln_final|_post)\.scale|attn\.z|(mlp|mixer)_out|resid_\w+)$"
)
_EXPERTS = re.compile(r"mlp\.(routing|chosen|experts|shared)$")
_HIDDEN = re.compile(r"mlp\.post$")


class ResidualComponents:
    """The parts of a run's residual stream, in at least float32.

    Args:
        model: the model of the run.
        cache: its cache.
        pos: read one position of each text: the same position, or one for each text. Default: all
            columns.

    Attributes:
        mask: True at real tokens [batch, pos]; None if all tokens are real.

    Raises:
        CacheError: if the cache is of another model, or if `at` has removed an axis of its values.
        SelectionError: if the position does not exist, or is padding.
    """

    def __init__(self, model: nn.Module, cache: ActivationCache, pos: Index | None = None) -> None:
        self.model: Any = plain(model, "blocks")
        self._cache = cache
        self._columns = None
        self._given = model
        self._layer: dict[str, Tensor] = {}
        self.last = f"blocks.{len(self.model.blocks) - 1}.resid_post"
        require_cache(cache, model)
        batch, n_pos, *axes = self.at(self.last).shape
        self.dtype = self._value(self.last).dtype
        if len(axes) != 1:
            raise CacheError(f"streams must be [batch, pos, d_model]; got {[batch, n_pos, *axes]}")
        self.mask = mask_of(cache, (batch, n_pos))
        if pos is not None:
            columns = Selection.one_each(pos).columns(n_pos, "pos", batch=batch, real=self.mask)
            self._columns = columns.expand(batch, 1)[:, 0]

    @property
    def rounding_dtype(self) -> torch.dtype:
        """The dtype of the rounding of a value in the run; see `interp.protocol.rounding_dtype`."""
        return rounding_dtype(self._given, self.dtype)

    @cached_property
    def _points(self) -> Mapping[str, Point]:
        """The points of the model that the caller passed, by name."""
        return HookedRunner(self._given).points

    @cached_property
    def _layers_with_adapters(self) -> set[str]:
        """The names of the blocks whose MLP has an adapter in its output map."""
        names = set[str]()
        for n, block in enumerate(self.model.blocks):
            if any(adapter_of(mlp) is not None for mlp in getattr(block, "branches", ())[1:]):
                names.add(f"blocks.{n}")
        return names

    @cached_property
    def graph(self) -> Graph:
        """The model's graph, with token and position embeddings as separate writers."""
        return Graph(self.model, split_embeddings=True)

    def at(self, name: str) -> Float[Tensor, "batch pos *size"]:
        """Return the value of a point in at least float32, at the chosen position of each text.

        Raises:
            CacheError: if the point is missing in the cache.
        """
        if name not in self._cache:
            wanted = [_READ]
            if _EXPERTS.search(name):
                wanted.append(_EXPERTS)
            if _HIDDEN.search(name) or self._layers_with_adapters:
                wanted.append(_HIDDEN)
            read = []
            for point in self._points:
                if point == name or any(pattern.search(point) for pattern in wanted):
                    read.append(point)
            names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", point) for point in read))
            raise CacheError(f"the cache has no {name}: run with lazy=True, or with {names=}")
        value = at_least_float32(self._value(name))
        if self._columns is None:
            return value
        columns = to_device(self._columns, value.device)
        return value[torch.arange(len(value), device=value.device), columns][:, None]

    def _value(self, name: str) -> Tensor:
        """Return the value of a point.

        All needed points of its layer are read together, and the values of one layer are kept.
        """
        if name not in self._layer:
            layer = name.rpartition(".attn")[0] or name.rpartition(".")[0]
            needed = [_READ, _HIDDEN] if layer in self._layers_with_adapters else [_READ]
            others = []
            for point in self._cache:
                is_needed = any(pattern.search(point) for pattern in needed)
                if is_needed and point.startswith(f"{layer}."):
                    others.append(point)
            names = list(dict.fromkeys([name, *others]))
            self._layer = dict(zip(names, self._cache.read(*names), strict=True))
        return self._layer[name]

    def norm_in_run(
        self, norm: nn.Module | None
    ) -> tuple[LinearPart, Float[Tensor, "_batch _pos 1"]]:
        """Return the linear part of a norm, and the scale that the norm divided by."""
        stream = self.at(self.last)
        if is_identity(norm):
            return linear_part(None, stream.shape[2]), stream.new_ones(1, 1, 1)
        name = next(name for name, module in self.model.named_modules() if module is norm)
        return linear_part(norm, stream.shape[2]), self.at(f"{name}.scale")

    def __call__(
        self, before: int | None = None, neurons: bool = False, experts: bool = False
    ) -> Iterator[Writers]:
        """Yield the components before a block, or before the unembedding, in the order of
        computation.
        """

        def at(point: nn.Module) -> Tensor:
            """Return the value of a point."""
            return self.at(self.graph.names[point])

        yield self._inputs(at)
        for layer in self.graph.layers[:before]:
            yield from self._between(layer.n)
            has_experts = experts and f"blocks.{layer.n}.mlp.experts" in self._points
            for sublayer in layer.sublayers:
                if has_experts and sublayer.kind == "mlp":
                    yield from self._experts(sublayer)
                else:
                    yield from sublayer.outputs(at, neurons=neurons, adapters=True)
        yield from self._between(before or 0)

    def _between(self, n: int) -> Iterator[Writers]:
        """Yield the vectors added before block `n` outside of all blocks, such as features of
        images (DeepStack).
        """
        names = f"blocks.{n - 1}.resid_post", f"blocks.{n}.resid_pre"
        if all(name in self._cache for name in names):
            left, entering = map(self.at, names)
            left = to_device(left, entering.device)
            # In most models, the two streams are equal. If they differ by more than rounding, a
            # vector was added between the blocks.
            if not torch.equal(left, entering):
                added = entering - left
                if not is_rounding(entering, entering - added, self.dtype).all():
                    yield Writers([NodeName(f"input{n}")], added[:, :, None])

    def _experts(self, part: Sublayer) -> Iterator[Writers]:
        """Yield the outputs of the experts of a block, times their weights, and of the shared
        expert.

        Raises:
            ValueError: if the MLP adds anything else.
        """
        branch = part.branch
        mlp = f"blocks.{part.n}.mlp"
        values = outputs = self.at(f"{mlp}.experts")
        if f"{mlp}.routing" in self._points:
            routing, chosen = (self.at(f"{mlp}.{part}") for part in ("routing", "chosen"))
            chosen = chosen.long()
            weighted = outputs * routing.gather(-1, chosen)[..., None]
            values = outputs.new_zeros(*routing.shape, outputs.shape[-1])
            values.scatter_add_(2, chosen[..., None].expand_as(outputs), weighted)
        names = [node_name(part.n, "expert", number) for number in range(values.shape[2])]
        if f"{mlp}.shared" in self._points:
            values = torch.cat([values, self.at(f"{mlp}.shared")[:, :, None]], 2)
            names.append(node_name(part.n, "shared"))
        linear = linear_part(branch.after, outputs.shape[-1])
        experts: Any = branch.sublayer
        values = linear.after(values * experts.factor)
        scale = scale_of(branch)
        if scale is not None:
            values = values / self.at(self.graph.names[scale])[..., None]
        added = self.at(self.graph.names[branch.added])
        if not is_rounding(values.sum(2) + linear.bias, added, self.dtype).all():
            raise ValueError(
                f"the MLP of block {part.n} must add only the outputs of experts and a shared "
                "expert; it adds more"
            )
        yield Writers(names, values)
        if linear.bias.any():
            yield Writers([node_name(part.n, "mlp_bias")], linear.bias.expand_as(values[:, :, :1]))

    def _inputs(self, at: At) -> Writers:
        """Return the embeddings.

        At positions where other vectors replace them, for example an image, the embeddings are 0,
        and the last vector is the stream that enters the first block.
        """
        inputs = self.graph.inputs(at)
        inputs = rearrange(inputs, "writer batch pos d_model -> batch pos writer d_model")
        names = self.graph.writers[: inputs.shape[2]]
        first = "blocks.0.resid_pre"
        if first in self._cache:
            stream = self.at(first)
            replaced = ~is_rounding(inputs.sum(2), stream, self.dtype).all(-1)[:, :, None, None]
            if replaced.any():
                inputs = torch.cat([inputs * ~replaced, stream[:, :, None] * replaced], 2)
                names = (*names, NodeName("input"))
        return Writers(names, inputs)

    def check(
        self, total: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], *sizes: Tensor
    ) -> float:
        """Return the largest difference between a sum of parts and its expected value at real
        tokens.

        The allowed difference is the rounding of a sum in the cache's dtype, with two additions for
        each block; see `stream_rounding`.

        Args:
            total: the sum of parts.
            expected: the expected value.
            sizes: tensors whose largest absolute numbers determine the rounding.

        Raises:
            CacheError: if the difference is larger than the rounding of the largest number in
                `sizes`.
        """
        difference = (total - to_device(expected, total.device)).abs()
        if self.mask is not None and self._columns is None:
            difference = difference[to_device(self.mask, total.device)]
        gap = difference.max().item()
        dtype = self.dtype
        share = stream_rounding(dtype, 2 * len(self.model.blocks))
        for size in sizes:
            least, most = torch.aminmax(size)
            allowed = share * torch.maximum(-least, most).item()
            if gap <= allowed:
                return float(f"{gap:.2g}")
        raise CacheError(
            f"the parts must add up to within {allowed:.3g}, by the rounding of {dtype}; got a "
            f"difference of {gap:.3g}: was the run edited, were weights changed, or does a block "
            "add something else?"
        )
