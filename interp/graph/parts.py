"""What the parts of a model wrote to the residual stream in a run, kept as factors."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookedRunner
from hooks.pieces import real_columns
from hooks.transfer import to_device
from interp.columns import at_least_float32, like
from interp.graph.graph import Graph
from interp.linear.norms import LinearPart, is_identity, linear_part
from interp.positions import Selection
from interp.protocol import check_cache, plain
from interp.texts import text_of

# What is read of a run, but for neurons.
_READ = re.compile(r"(^(pos_)?embed|(ln_embed|ln_final|_post)\.scale|attn\.z|mlp_out|resid_\w+)$")


class Part(NamedTuple):
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
        vectors = like(self.values, out).movedim(2, 0)
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
            read = norm.before(direction) @ like(weight, out).flatten(0, 1).mT
            read = read.unflatten(-1, weight.shape[:2])
        if values.shape[-1] == 1:
            torch.mul(values[..., 0], read[..., 0], out=out)
        else:
            torch.sum(values * read, -1, out=out)


class Parts:
    """The parts of a run's residual stream, in at least float32.

    Args:
        model: the model of the run.
        cache: its cache.
        tokens: its tokens; only their shape is read, for a check.
        pos: read one column of each text: the same, or one for each; -1 is the last real token. None for all.

    Raises:
        CacheError: if the cache is of another model, or lost an axis.
        ValueError: if tokens have another shape, or there is no such column.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: ActivationCache,
        tokens: Int[Tensor, "batch pos"] | None = None,
        pos: int | Int[Tensor, " batch"] | None = None,
    ) -> None:
        self.model: Any = plain(model, "blocks")
        self._cache, self._columns = cache, None
        self.last = f"blocks.{len(self.model.blocks) - 1}.resid_post"
        check_cache(model, cache)
        batch, n_pos, *axes = self.at(self.last).shape
        if len(axes) != 1:
            raise CacheError(f"streams must be [batch, pos, d_model]; got {[batch, n_pos, *axes]}")
        if tokens is not None and tokens.shape != (batch, n_pos):
            raise ValueError(
                f"tokens must have the cache's shape, {[batch, n_pos]}; got {list(tokens.shape)}"
            )
        if pos is not None:
            text = text_of(cache)
            real = None if text is None or text.mask is None else real_columns(text.mask)
            rows = Selection.one_each(pos).rows(n_pos, "pos", batch, real)
            self._columns = torch.tensor(rows)[:, 0].expand(batch)

    @cached_property
    def graph(self) -> Graph:
        """The model's graph, with embeddings apart."""
        return Graph(self.model, apart=True)

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
        value = at_least_float32(self._cache[name])
        if self._columns is None:
            return value
        columns = to_device(self._columns, value.device)
        return value[torch.arange(len(value), device=value.device), columns][:, None]

    def __call__(self, before: int | None = None, neurons: bool = False) -> Iterator[Part]:
        """What was written before a block, or before the unembedding, in the order of computation."""
        layers, writers = self.graph.layers, self.graph.writers
        inputs = self.graph.inputs(lambda point: self.at(self.graph.names[point]))
        yield Part(writers[: len(inputs)], inputs.movedim(0, 2))
        for n, layer in enumerate(layers[:before]):
            at, attn = f"blocks.{n}", layer.block.attn
            heads, z = writers[layer.heads], self.at(f"{at}.attn.z")
            yield from self._written(heads, z, attn.W_O, attn.b_O, f"{at}.ln1_post", f"a{n}.bias")
            if layer.mlp is not None and neurons:
                hidden, mlp = self.at(f"{at}.mlp.post")[..., None], layer.block.mlp
                names = [f"m{n}.n{neuron}" for neuron in range(hidden.shape[2])]
                weight, norm = mlp.W_out[:, None], f"{at}.ln2_post"
                yield from self._written(names, hidden, weight, mlp.b_out, norm, f"m{n}.bias")
            elif layer.mlp is not None:
                yield Part([f"m{n}"], self.at(f"{at}.mlp_out")[:, :, None])

    def _written(
        self,
        names: Sequence[str],
        values: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: str,
        rest: str,
    ) -> Iterator[Part]:
        """Components that are added and normed together, and what is added beside them."""
        module = self.model.get_submodule(norm)
        linear = linear_part(module, len(bias))
        bias = like(linear.after(bias), values)
        if not is_identity(module):
            scale = self.at(f"{norm}.scale")
            values, bias = values / scale[..., None], bias / scale
        yield Part(names, values, (weight, linear))
        bias = bias + like(linear.bias, bias)
        if bias.any():
            yield Part([rest], bias.expand(*values.shape[:2], -1)[:, :, None])

    def check(
        self, found: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], size: Tensor
    ) -> float:
        """How far a sum of parts is from what it should be.

        Raises:
            CacheError: if that is more than rounding in the cache's dtype can explain, of `size`.
        """
        gap = (found - to_device(expected, found.device)).abs().max().item()
        dtype, (least, most) = self._cache[self.last].dtype, torch.aminmax(size)
        allowed = min(0.03, 1000 * torch.finfo(dtype).eps) * torch.maximum(-least, most).item()
        if not gap <= allowed:  # NaN is not
            raise CacheError(
                f"the parts must add up to within {allowed:.3g}; got a difference of {gap:.3g}: the cache is of "
                "another model, its run was edited, or its blocks add something else"
            )
        return float(f"{gap:.2g}")
