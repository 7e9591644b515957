"""The nodes of one block in a graph: its heads and its MLP, among the writers and the readers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.shared import all_to_device
from interp.inputs.token_positions import like
from interp.linear.norms import is_identity, linear_part

At = Callable[[nn.Module], Float[Tensor, "batch pos *size"]]
"""The value that a point had in a run."""


class Written(NamedTuple):
    """Factors of what attention writes: `attn_out = sum_h (z_h / scale) weight_h + bias / scale + constant`.

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


class MLP(NamedTuple):
    """A block's MLP: its places among the writers and among the readers, and its branch."""

    writer: int
    reader: int
    branch: Any


@dataclass(frozen=True, eq=False)
class Layer:
    """The nodes of one block, as places among the writers and the readers of a graph.

    Attributes:
        attention: the block's branch of attention; see `interp.protocol.LanguageModel`.
        heads: its heads among the writers.
        bias: the writer of what attention adds beside its heads, which is the next one; None if that is zero.
        q, k, v: its heads among the readers; `k` and `v` by key head.
        mlp: the MLP; None without one.
    """

    attention: Any
    heads: slice
    bias: int | None
    q: slice
    k: slice
    v: slice
    mlp: MLP | None

    @property
    def is_parallel(self) -> bool:
        """Whether the MLP reads the stream without what attention adds."""
        return self.mlp is not None and self.mlp.branch.reads is self.attention.reads

    @property
    def device(self) -> torch.device:
        """Device of the block's weights."""
        return self.attention.sublayer.W_O.device

    @property
    def scale(self) -> nn.Module | None:
        """The point of the scale that divides what attention adds; None without one."""
        norm = self.attention.after
        return None if is_identity(norm) else norm.scale

    @property
    def attn(self) -> slice:
        """All of its attention among the writers: the heads and the bias."""
        return self.heads if self.bias is None else slice(self.heads.start, self.bias + 1)

    @property
    def written(self) -> Written:
        """Factors of what attention writes, from the live weights."""
        return written(self.attention)

    def added(self, at: At) -> list[Float[Tensor, "writer batch pos d_model"]]:
        """Return the contributions of the heads to the stream and, if it is a writer, of the bias."""
        z = at(self.attention.sublayer.z)
        weight, bias, constant = all_to_device(self.written, z.device)
        if self.scale is not None:
            scale = at(self.scale)
            z, bias = (z / scale[..., None]).to(z.dtype), bias / scale
        heads = torch.einsum("bphe,hed->hbpd", z, weight.to(z.dtype))
        if self.bias is None:
            return [heads]
        return [heads, (bias + constant).to(z.dtype).expand_as(heads[:1])]


def written(attention: Any) -> Written:
    """Return the factors of what a branch of attention writes, from the live weights."""
    weight, bias = attention.sublayer.W_O, attention.sublayer.b_O
    linear = linear_part(attention.after, len(bias))
    bias = linear.after(bias)
    return Written(linear.after(weight), bias, like(linear.bias, bias))


def layer_of(n: int, block: Any, writers: dict[str, int], readers: dict[str, int]) -> Layer:
    """Adds the nodes of a block."""
    attention, *others = block.branches
    queries, keys = range(len(attention.sublayer.W_Q)), range(len(attention.sublayer.W_K))
    q, k, v = (
        add(readers, 2 * n, [f"a{n}.h{head}<{part}>" for head in heads])
        for part, heads in (("q", queries), ("k", keys), ("v", keys))
    )
    heads, bias, mlp = add(writers, 2 * n + 1, [f"a{n}.h{head}" for head in queries]), None, None
    wrote = written(attention)
    if wrote.bias.any() or wrote.constant.any():
        bias = add(writers, 2 * n + 1, [f"a{n}.bias"]).start
    for branch in others:
        time = 2 * n + (branch.reads is not attention.reads)
        read = add(readers, time, [f"m{n}"]).start
        mlp = MLP(add(writers, 2 * n + 2, [f"m{n}"]).start, read, branch)
    return Layer(attention, heads, bias, q, k, v, mlp)


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
