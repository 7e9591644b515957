"""The nodes of one block in a graph: its heads and its MLP, among the writers and the readers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.transfer import all_to_device
from interp.columns import like
from interp.linear.norms import is_identity, linear_part

At = Callable[[nn.Module], Float[Tensor, "batch pos *size"]]
"""The value that a point had in a run."""


class Written(NamedTuple):
    """How attention writes: `attn_out = sum_h (z_h / scale) weight_h + bias / scale + constant`.

    The scale is that of the norm of what attention adds, in the same run; 1 without such a norm. With one,
    all are in at least float32.

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
        norm = self.block.ln1_post
        return None if is_identity(norm) else norm.scale

    @property
    def attn(self) -> slice:
        """All of its attention among the writers: the heads and the bias."""
        return self.heads if self.bias is None else slice(self.heads.start, self.bias + 1)

    @property
    def written(self) -> Written:
        """How attention writes, from the live weights."""
        attn = self.block.attn
        return written(self.block.ln1_post, attn.W_O, attn.b_O)

    def added(self, at: At) -> list[Float[Tensor, "writer batch pos d_model"]]:
        """What the heads add to the stream and, if it is a writer, what the bias adds."""
        z = at(self.block.attn.z)
        weight, bias, constant = all_to_device(self.written, z.device)
        if self.scale is not None:
            scale = at(self.scale)
            z, bias = (z / scale[..., None]).to(z.dtype), bias / scale
        heads = torch.einsum("bphe,hed->hbpd", z, weight.to(z.dtype))
        if self.bias is None:
            return [heads]
        return [heads, (bias + constant).to(z.dtype).expand_as(heads[:1])]


def written(norm: Any, weight: Tensor, bias: Float[Tensor, " d_model"]) -> Written:
    """How `values weight + bias` is added where a norm comes between, from the live weights."""
    linear = linear_part(norm, len(bias))
    bias = linear.after(bias)
    return Written(linear.after(weight), bias, like(linear.bias, bias))


def layer_of(n: int, block: Any, writers: dict[str, int], readers: dict[str, int]) -> Layer:
    """Adds the nodes of a block."""
    queries, keys = range(len(block.attn.W_Q)), range(len(block.attn.W_K))
    q, k, v = (
        add(readers, 2 * n, [f"a{n}.h{head}<{part}>" for head in heads])
        for part, heads in (("q", queries), ("k", keys), ("v", keys))
    )
    heads, bias, mlp = add(writers, 2 * n + 1, [f"a{n}.h{head}" for head in queries]), None, None
    is_parallel = hasattr(block, "mlp") and not hasattr(block, "resid_mid")
    wrote = written(block.ln1_post, block.attn.W_O, block.attn.b_O)
    if wrote.bias.any() or wrote.constant.any():
        bias = add(writers, 2 * n + 1, [f"a{n}.bias"]).start
    if hasattr(block, "mlp"):
        read = add(readers, 2 * n + (not is_parallel), [f"m{n}"]).start
        mlp = add(writers, 2 * n + 2, [f"m{n}"]).start, read
    return Layer(block, heads, bias, q, k, v, mlp, is_parallel)


def listed(names: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Names of nodes or edges; one stands for itself.

    Raises:
        TypeError: if they are something else.
    """
    several = (names,) if isinstance(names, str) else names
    if not isinstance(several, Iterable):
        raise TypeError(f"{what} must be names; got {names!r} (a metric belongs into Pairs)")
    return tuple(several)


def add(nodes: dict[str, int], time: int, names: Iterable[str]) -> slice:
    """Adds nodes that write or read at a time, and returns their places."""
    start = len(nodes)
    nodes.update(dict.fromkeys(names, time))
    return slice(start, len(nodes))
