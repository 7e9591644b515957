"""The nodes of one block in a graph: its heads and its MLP, among the writers and the readers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.replay import replay
from hooks.transfer import all_to_device, to_device

At = Callable[[nn.Module], Float[Tensor, "batch pos *size"]]
"""The value that a point had in a run."""


class Written(NamedTuple):
    """How attention writes: `attn_out = sum_h (z_h / scale) weight_h + bias / scale + constant`.

    The scale is that of the norm of what attention adds, in the same run; 1 without such a norm.

    Attributes:
        weight: `W_O`, passed through the norm without its division.
        bias: `b_O`, likewise.
        constant: the bias of that norm.
    """

    weight: Float[Tensor, "head d_head d_model"]
    bias: Float[Tensor, " d_model"]
    constant: Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False)
class Layer:
    """The nodes of one block, as places among the writers and the readers of a graph.

    Attributes:
        block: the block.
        heads: its heads among the writers.
        bias: the writer of what attention adds beside its heads, which is the next one; None if that is zero.
        q, k, v: its heads among the readers; `k` and `v` by key head.
        mlp: the MLP's places among the writers and among the readers; None without one.
        is_parallel: whether the MLP reads the stream without what attention adds.
    """

    block: Any
    heads: slice
    bias: int | None
    q: slice
    k: slice
    v: slice
    mlp: tuple[int, int] | None
    is_parallel: bool

    @property
    def device(self) -> torch.device:
        """Where the block's weights are."""
        return self.block.attn.W_O.device

    @property
    def scale(self) -> nn.Module | None:
        """The point of the scale that divides what attention adds; None without one."""
        return getattr(self.block.ln1_post, "scale", None)

    @property
    def attn(self) -> slice:
        """All of its attention among the writers: the heads and the bias."""
        return self.heads if self.bias is None else slice(self.heads.start, self.bias + 1)

    @property
    def written(self) -> Written:
        """How attention writes, from the live weights."""
        return _written(self.block)

    def added(self, at: At) -> list[Float[Tensor, "writer batch pos d_model"]]:
        """What the heads add to the stream and, if it is a writer, what the bias adds."""
        z = at(self.block.attn.z)
        weight, bias, constant = all_to_device(self.written, z.device)
        if self.scale is not None:
            scale = at(self.scale)
            z, bias = (z / scale[..., None]).to(z.dtype), (bias / scale).to(bias.dtype)
        heads = torch.einsum("bphe,hed->hbpd", z, weight)
        if self.bias is None:
            return [heads]
        return [heads, (bias + constant).expand_as(heads[:1])]


def shares(
    norm: Any, x: Float[Tensor, "*axes d_model"]
) -> tuple[Float[Tensor, "*axes d_model"], Float[Tensor, " d_model"]]:
    """What a norm writes of each part of a sum: `part / scale + constant`, the constant once.

    Args:
        norm: a norm with a point `scale` for its divisor. Anything else passes parts on.
        x: the parts of the sum.

    Returns:
        The parts after the norm's linear steps without the division, and the constant, where `x` is.
    """
    if not hasattr(norm, "scale"):
        return x, x.new_zeros(x.shape[-1])
    rows = torch.cat([x.reshape(-1, x.shape[-1]), x.new_zeros(1, x.shape[-1])])
    weights = next(norm.parameters(), rows)
    read = (to_device(rows[None], weights.device),)
    undivided = to_device(replay(norm, read, {}, [(norm.scale, torch.ones_like)])[0], x.device)
    return (undivided[:-1] - undivided[-1]).view(x.shape), undivided[-1]


def _written(block: Any) -> Written:
    weight = block.attn.W_O
    if not hasattr(block.ln1_post, "scale"):
        return Written(weight, block.attn.b_O, torch.zeros_like(block.attn.b_O))
    rows = torch.cat([weight.flatten(0, 1), block.attn.b_O[None]])
    linear, constant = shares(block.ln1_post, rows)
    return Written(linear[:-1].view_as(weight), linear[-1], constant)


def layer_of(n: int, block: Any, writers: dict[str, int], readers: dict[str, int]) -> Layer:
    """Adds the nodes of a block."""
    queries, keys = range(len(block.attn.W_Q)), range(len(block.attn.W_K))
    q, k, v = (
        add(readers, 2 * n, [f"a{n}.h{head}<{part}>" for head in heads])
        for part, heads in (("q", queries), ("k", keys), ("v", keys))
    )
    heads, bias, mlp = add(writers, 2 * n + 1, [f"a{n}.h{head}" for head in queries]), None, None
    written, is_parallel = (
        _written(block),
        hasattr(block, "mlp") and not hasattr(block, "resid_mid"),
    )
    if written.bias.any() or written.constant.any():
        bias = add(writers, 2 * n + 1, [f"a{n}.bias"]).start
    if hasattr(block, "mlp"):
        read = add(readers, 2 * n + (not is_parallel), [f"m{n}"]).start
        mlp = add(writers, 2 * n + 2, [f"m{n}"]).start, read
    return Layer(block, heads, bias, q, k, v, mlp, is_parallel)


def add(nodes: dict[str, int], time: int, names: Iterable[str]) -> slice:
    """Adds nodes that write or read at a time, and returns their places."""
    start = len(nodes)
    nodes.update(dict.fromkeys(names, time))
    return slice(start, len(nodes))
