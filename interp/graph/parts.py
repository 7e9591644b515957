"""What the parts of a model wrote to the residual stream in a run, kept as factors."""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookedRunner
from hooks.transfer import to_device
from interp.columns import at_least_float32
from interp.graph.graph import Graph
from interp.graph.nodes import shares
from interp.protocol import check_cache, plain

# What is read of a run, but for neurons.
_READ = re.compile(r"(^(pos_)?embed|(ln_embed|ln_final|_post)\.scale|attn\.z|mlp_out|resid_\w+)$")


class Part(NamedTuple):
    """Components that write to the stream by one map: `values weight`, through the linear steps of a norm.

    Attributes:
        names: those of the components.
        values: what is mapped, already divided by the norm's scale.
        weight: the map; None if values are vectors of the stream's size.
        norm: the norm of what is added; anything without a point `scale` passes it on.
    """

    names: Sequence[str]
    values: Float[Tensor, "batch pos component size"]
    weight: Float[Tensor, "component size d_model"] | None = None
    norm: Any = None

    def write(self, out: Float[Tensor, "component batch pos d_model"]) -> None:
        """Puts what each component wrote into `out`."""
        vectors = to_device(self.values, out.device).movedim(2, 0)
        if self.weight is None:
            out.copy_(vectors)
        else:
            weight = to_device(self.weight, out.device).to(out.dtype)
            torch.bmm(vectors.flatten(1, 2), weight, out=out.view(len(out), -1, out.shape[-1]))
        if hasattr(self.norm, "scale"):
            out.copy_(shares(self.norm, out)[0])

    def along(
        self, direction: Float[Tensor, "_batch _pos d_model"]
    ) -> Float[Tensor, "component batch pos"]:
        """What each component wrote along a direction, without making what it wrote."""
        read = transposed(self.norm, to_device(direction, self.values.device))[0][:, :, None]
        if self.weight is not None:
            weight = to_device(self.weight, read.device).to(read.dtype)
            read = torch.einsum("bpd,csd->bpcs", read[:, :, 0], weight)
        return (self.values * read).sum(-1).movedim(2, 0)


class Parts:
    """The parts of a run's residual stream, in at least float32.

    Args:
        model: the model of the run.
        cache: its cache.
        tokens: its tokens; only their shape is read, for a check.
        pos: read one column of each text: the same, or one for each. None for all columns.

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
            columns = torch.as_tensor(pos, device="cpu").expand(batch)
            if not ((columns >= -n_pos) & (columns < n_pos)).all():
                raise ValueError(f"pos must be {-n_pos} to {n_pos - 1}; got {pos}")
            self._columns = columns

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
        names = [name for name in writers[: layers[0].heads.start] if name != "input.bias"]
        embeds, norm = torch.stack([*map(self.at, names)], 2), getattr(self.model, "ln_embed", None)
        yield from self._normed("ln_embed", norm, names, embeds, None, None, "input.bias")
        for n, layer in enumerate(layers[:before]):
            block, at = layer.block, f"blocks.{n}"
            heads, z, attn = writers[layer.heads], self.at(f"{at}.attn.z"), block.attn
            post = f"{at}.ln1_post", block.ln1_post
            yield from self._normed(*post, heads, z, attn.W_O, attn.b_O, f"a{n}.bias")
            if layer.mlp is not None and neurons:
                hidden, mlp = self.at(f"{at}.mlp.post")[..., None], block.mlp
                names = [f"m{n}.n{neuron}" for neuron in range(hidden.shape[2])]
                post = f"{at}.ln2_post", block.ln2_post
                weight = mlp.W_out[:, None]
                yield from self._normed(*post, names, hidden, weight, mlp.b_out, f"m{n}.bias")
            elif layer.mlp is not None:
                yield Part([f"m{n}"], self.at(f"{at}.mlp_out")[:, :, None])

    def _normed(
        self,
        path: str,
        norm: Any,
        names: Sequence[str],
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rest: str,
    ) -> Iterator[Part]:
        """Components that are added and normed together, and what is added beside them."""
        zeros = values.new_zeros(values.shape[-1] if weight is None else weight.shape[-1])
        vector, constant = shares(
            norm, zeros if bias is None else to_device(bias, zeros.device).to(zeros.dtype)
        )
        if hasattr(norm, "scale"):
            scale = self.at(f"{path}.scale")
            values, vector = values / scale[..., None], vector / scale
        yield Part(names, values, weight, norm)
        vector = vector + constant
        if vector.any():
            yield Part([rest], vector.expand(*values.shape[:2], -1)[:, :, None])

    def check(
        self, found: Float[Tensor, "*axes"], expected: Float[Tensor, "*axes"], size: Tensor
    ) -> float:
        """How far a sum of parts is from what it should be.

        Raises:
            CacheError: if that is more than rounding in the cache's dtype can explain, of `size`.
        """
        gap = (found - to_device(expected, found.device)).abs().max().item()
        dtype = self._cache[self.last].dtype
        allowed = min(0.03, 1000 * torch.finfo(dtype).eps) * size.abs().max().item()
        if not gap <= allowed:  # NaN is not
            raise CacheError(
                f"the parts must add up to within {allowed:.3g}; got a difference of {gap:.3g}: the cache is of "
                "another model, its run was edited, or its blocks add something else"
            )
        return float(f"{gap:.2g}")


def transposed(
    norm: Any, direction: Float[Tensor, "*axes d_model"]
) -> tuple[Float[Tensor, "*axes d_model"], Float[Tensor, "*axes"]]:
    """What a direction of a norm's output reads of its input: `direction · norm(x) = read · x / scale + constant`.

    Args:
        norm: a norm with a point `scale`. Anything else passes directions on.
        direction: directions of its output.

    Returns:
        The directions that read its input, and the constants.
    """
    if not hasattr(norm, "scale"):
        return direction, direction.new_zeros(direction.shape[:-1])
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros_like(direction).requires_grad_()
        linear, constant = shares(norm, x)
        (read,) = torch.autograd.grad(linear, x, direction.clone())
    return read, direction @ constant.detach()
