"""Contributions of a model's parts to the residual stream of a run, kept as factors."""

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookedRunner
from hooks.shared import Index, Selection, real_columns, to_device
from interp.graph.graph import Graph
from interp.inputs.texts import mask_of
from interp.inputs.token_positions import at_least_float32, like
from interp.linear.norms import LinearPart, is_identity, linear_part
from interp.protocol import plain

# What is read of a run, but for neurons.
_READ = re.compile(r"(^(pos_)?embed|(ln_embed|ln_final|_post)\.scale|attn\.z|mlp_out|resid_\w+)$")


class ComponentGroup(NamedTuple):
    """Components that write to the stream by one map, or that are vectors of the stream.

    Attributes:
        names: those of the components.
        values: what is mapped, already divided by the scale of the norm of what is added.
        map: the weights, and what that norm does besides; None for vectors.
    """

    names: Sequence[str]
    values: Float[Tensor, "batch pos component size"]
    map: tuple[Float[Tensor, "component size d_model"], LinearPart] | None = None

    def write(self, out: Float[Tensor, "component batch pos d_model"]) -> None:
        """Puts what each component wrote into `out`."""
        values = like(self.values, out)
        vectors = rearrange(values, "batch pos component size -> component batch pos size")
        if self.map is None:
            out.copy_(vectors)
        else:
            weight, norm = self.map
            torch.bmm(vectors.flatten(1, 2), like(norm.after(weight), out), out=out.flatten(1, 2))

    def along(
        self,
        direction: Float[Tensor, "_batch _pos d_model"],
        out: Float[Tensor, "batch pos component"],
    ) -> None:
        """Puts what each component wrote along a direction into `out`, without making what it wrote."""
        values, read = like(self.values, out), direction[:, :, None]
        if self.map is not None:
            weight, norm = self.map
            maps = rearrange(
                like(weight, out), "component size d_model -> d_model (component size)"
            )
            read = norm.before(direction) @ maps
            read = rearrange(
                read, "... (component size) -> ... component size", size=weight.shape[1]
            )
        if values.shape[-1] == 1:
            torch.mul(values[..., 0], read[..., 0], out=out)
        else:
            torch.sum(values * read, -1, out=out)


class ResidualComponents:
    """The parts of a run's residual stream, in at least float32.

    Args:
        model: the model of the run.
        cache: its cache.
        pos: read one position of each text: the same, or one for each. None for all columns.

    Attributes:
        mask: True at real tokens [batch, pos]; None if all are.

    Raises:
        CacheError: if the cache is of another model, or lost an axis.
        SelectionError: if there is no such position, or it is padding.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: ActivationCache,
        pos: Index | None = None,
    ) -> None:
        self.model: Any = plain(model, "blocks")
        self._cache, self._columns = cache, None
        self._layer: dict[str, Tensor] = {}
        self.last = f"blocks.{len(self.model.blocks) - 1}.resid_post"
        cache.require_weights_of(model)
        batch, n_pos, *axes = self.at(self.last).shape
        self.dtype = self._value(self.last).dtype
        if len(axes) != 1:
            raise CacheError(f"streams must be [batch, pos, d_model]; got {[batch, n_pos, *axes]}")
        self.mask = mask_of(cache, (batch, n_pos))
        if pos is not None:
            real = None if self.mask is None else real_columns(self.mask)
            rows = Selection.one_each(pos).rows(n_pos, "pos", batch, real)
            self._columns = torch.tensor(rows).expand(batch, 1)[:, 0]

    @cached_property
    def graph(self) -> Graph:
        """The model's graph, with embeddings apart."""
        return Graph(self.model, split_embeddings=True)

    def at(self, name: str) -> Float[Tensor, "batch pos *size"]:
        """The value of a point.

        Raises:
            CacheError: if the cache lacks it.
        """
        if name not in self._cache:
            points = HookedRunner(self.model).points
            read = [point for point in points if _READ.search(point) or point == name]
            names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", point) for point in read))
            raise CacheError(f"the cache has no {name}: run with lazy=True, or with {names=}")
        value = at_least_float32(self._value(name))
        if self._columns is None:
            return value
        columns = to_device(self._columns, value.device)
        return value[torch.arange(len(value), device=value.device), columns][:, None]

    def _value(self, name: str) -> Tensor:
        """The value of a point, read with all others of its layer that are needed. One layer's are kept."""
        if name not in self._layer:
            layer = name.rpartition(".attn")[0] or name.rpartition(".")[0]
            others = [n for n in self._cache if n.startswith(f"{layer}.") and _READ.search(n)]
            names = list(dict.fromkeys([name, *others]))
            self._layer = dict(zip(names, self._cache.read(*names), strict=True))
        return self._layer[name]

    def norm_in_run(
        self, norm: nn.Module | None
    ) -> tuple[LinearPart, Float[Tensor, "_batch _pos 1"]]:
        """The linear part of a norm, and what the norm divided by."""
        stream = self.at(self.last)
        if is_identity(norm):
            return linear_part(None, stream.shape[2]), stream.new_ones(1, 1, 1)
        name = next(name for name, module in self.model.named_modules() if module is norm)
        return linear_part(norm, stream.shape[2]), self.at(f"{name}.scale")

    def __call__(
        self, before: int | None = None, neurons: bool = False
    ) -> Iterator[ComponentGroup]:
        """Yield the components before a block, or before the unembedding, in the order of computation."""
        layers, writers = self.graph.layers, self.graph.writers
        yield from self._inputs()
        for n, layer in enumerate(layers[:before]):
            at, attn = f"blocks.{n}", layer.attention.sublayer
            heads, z = writers[layer.heads], self.at(f"{at}.attn.z")
            yield from self._written(heads, z, attn.W_O, attn.b_O, f"{at}.ln1_post", f"a{n}.bias")
            if layer.mlp is not None and neurons:
                hidden, mlp = self.at(f"{at}.mlp.post")[..., None], layer.mlp.branch.sublayer
                names = [f"m{n}.n{neuron}" for neuron in range(hidden.shape[2])]
                weight, norm = mlp.W_out[:, None], f"{at}.ln2_post"
                yield from self._written(names, hidden, weight, mlp.b_out, norm, f"m{n}.bias")
            elif layer.mlp is not None:
                yield ComponentGroup([f"m{n}"], self.at(f"{at}.mlp_out")[:, :, None])

    def _inputs(self) -> Iterator[ComponentGroup]:
        """Yield the embeddings and, where something else stands in their place, such as an image, the stream."""
        inputs = self.graph.inputs(lambda point: self.at(self.graph.names[point]))
        inputs = rearrange(inputs, "writer batch pos d_model -> batch pos writer d_model")
        names, first = self.graph.writers[: inputs.shape[2]], "blocks.0.resid_pre"
        if first in self._cache:
            stream = self.at(first)
            allowed = 8 * torch.finfo(self.dtype).eps * stream.abs().max()
            replaced = ((inputs.sum(2) - stream).abs() > allowed).any(-1)[:, :, None, None]
            if replaced.any():
                inputs = torch.cat([inputs * ~replaced, stream[:, :, None] * replaced], 2)
                names = (*names, "input")
        yield ComponentGroup(names, inputs)

    def _written(
        self,
        names: Sequence[str],
        values: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: str,
        rest: str,
    ) -> Iterator[ComponentGroup]:
        """Yield components that are added and normed together, then the bias that is added with them."""
        module = self.model.get_submodule(norm)
        linear = linear_part(module, len(bias))
        bias = like(linear.after(bias), values)
        if not is_identity(module):
            scale = self.at(f"{norm}.scale")
            values, bias = values / scale[..., None], bias / scale
        yield ComponentGroup(names, values, (weight, linear))
        bias = bias + like(linear.bias, bias)
        if bias.any():
            yield ComponentGroup([rest], bias.expand(*values.shape[:2], -1)[:, :, None])

    def check(
        self, total: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], *sizes: Tensor
    ) -> float:
        """Return the largest difference between a sum of parts and its expected value, at real tokens.

        The stream is rounded after each addition, in the cache's dtype, so that differences grow as the square root
        of the number of blocks. Apart from that, float32 is allowed for: some norms compute in it always.

        Raises:
            CacheError: if the difference is more than rounding of the largest number in `sizes` can explain.
        """
        difference = (total - to_device(expected, total.device)).abs()
        if self.mask is not None and self._columns is None:
            difference = difference[to_device(self.mask, total.device)]
        gap, dtype = difference.max().item(), self.dtype
        rounding = 4 * torch.finfo(dtype).eps * math.sqrt(2 * len(self.model.blocks)) + 1e-4
        for size in sizes:
            least, most = torch.aminmax(size)
            allowed = rounding * torch.maximum(-least, most).item()
            if gap <= allowed:
                return float(f"{gap:.2g}")
        raise CacheError(
            f"the parts must add up to within {allowed:.3g}, by the rounding of {dtype}; got a difference of "
            f"{gap:.3g}: was the run edited, were weights changed, or does a block add something else?"
        )
