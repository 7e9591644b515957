"""The nodes of one block in a graph: its heads and its MLP, among the writers and the readers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import all_to_device, shown
from interp.graph.norms import is_identity, linear_part
from interp.numbers.precision import like
from interp.results.node import NodeName, node_name

At = Callable[[nn.Module], Float[Tensor, "batch pos *size"]]
"""The value that a point had in a run."""


class Writers(NamedTuple):
    """Neighbouring writers with what they add: vectors, or values that weights map to vectors.

    Attributes:
        names: the names of the writers.
        values: divided by the scale of the norm of what is added.
        weight: passed through that norm without its division; None where values are vectors.
    """

    names: Sequence[NodeName]
    values: Float[Tensor, "batch pos writer size"]
    weight: Float[Tensor, "writer size d_model"] | None = None

    def vectors(self) -> Float[Tensor, "writer batch pos d_model"]:
        """Return what each adds."""
        if self.weight is None:
            return rearrange(self.values, "batch pos writer d_model -> writer batch pos d_model")
        weight = like(self.weight, self.values)
        return torch.einsum("bpws,wsd->wbpd", self.values, weight)

    def put(self, out: Float[Tensor, "writer batch pos d_model"]) -> None:
        """Put what each adds into `out`, without gradients."""
        values = rearrange(like(self.values, out), "batch pos writer size -> writer batch pos size")
        if self.weight is None:
            out.copy_(values)
        else:
            torch.bmm(values.flatten(1, 2), like(self.weight, out), out=out.flatten(1, 2))

    def along(
        self,
        direction: Float[Tensor, "_batch _pos d_model"],
        out: Float[Tensor, "batch pos writer"],
    ) -> None:
        """Put what each adds along a direction into `out`, without making the vectors."""
        values, read = like(self.values, out), direction[:, :, None]
        if self.weight is not None:
            maps = rearrange(like(self.weight, out), "writer size d_model -> d_model (writer size)")
            read = rearrange(
                direction @ maps,
                "batch pos (writer size) -> batch pos writer size",
                size=self.weight.shape[1],
            )
        if values.shape[-1] == 1:
            torch.mul(values[..., 0], read[..., 0], out=out)
        else:
            torch.sum(values * read, -1, out=out)


class Added(NamedTuple):
    """Factors of what a branch adds: `sum_w (value_w / scale) weight_w + bias / scale + constant`.

    The scale is that of the norm of what is added, in the same run; 1 without such a norm. With
    one, all are in at least float32.

    Attributes:
        weight: of each writer, passed through the norm without its division.
        bias: the branch's bias, likewise.
        constant: the bias of that norm.
    """

    weight: Float[Tensor, "writer size d_model"]
    bias: Float[Tensor, " d_model"]
    constant: Float[Tensor, " d_model"]

    def writers(
        self,
        names: Sequence[NodeName],
        rest: NodeName | None,
        values: Float[Tensor, "batch pos writer size"],
        scale: Float[Tensor, "batch pos 1"] | None,
    ) -> Iterator[Writers]:
        """Yield the writers and, if it has a name, the rest: what is added beside them."""
        weight, bias, constant = all_to_device(self, values.device)
        if scale is not None:
            values, bias = (values / scale[..., None]).to(values.dtype), bias / scale
        yield Writers(names, values, weight)
        if rest is not None:
            bias = (bias + constant).to(values.dtype)
            yield Writers([rest], bias.expand(*values.shape[:2], -1)[:, :, None])

    @property
    def has_rest(self) -> bool:
        """Whether something is added beside the writers. An absent bias is exactly 0."""
        return bool(self.bias.any() or self.constant.any())


def added_by(branch: Any, weight: Tensor, bias: Tensor) -> Added:
    """Return the factors of what a branch adds, from its output weights and bias."""
    linear = linear_part(branch.after, len(bias))
    bias = linear.after(bias)
    return Added(linear.after(weight), bias, like(linear.bias, bias))


class MLP(NamedTuple):
    """A block's MLP: its places among the writers and among the readers, and its branch."""

    writer: int
    reader: int
    branch: Any


@dataclass(frozen=True, eq=False)
class Layer:
    """The nodes of one block, as places among the writers and the readers of a graph.

    Attributes:
        n: the number of the block.
        attention: the block's branch of attention; see `interp.protocol.LanguageModel`.
        heads: its heads among the writers.
        bias: the writer of what attention adds beside its heads, which is the next one; None if
            that is zero.
        q, k, v: its heads among the readers; `k` and `v` by key head.
        mlp: the MLP; None without one.
    """

    n: int
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
        return _scale_of(self.attention)

    @property
    def attn(self) -> slice:
        """All of its attention among the writers: the heads and the bias."""
        return self.heads if self.bias is None else slice(self.heads.start, self.bias + 1)

    @property
    def added(self) -> Added:
        """Factors of what attention adds, from the live weights."""
        attn = self.attention.sublayer
        return added_by(self.attention, attn.W_O, attn.b_O)

    def attention_writers(self, at: At, added: Added | None = None) -> Iterator[Writers]:
        """Yield the heads and, if it is a writer, the bias. `added` are the factors, where they are
        at hand.
        """
        n_heads = range(self.heads.stop - self.heads.start)
        heads = [node_name(self.n, "head", head) for head in n_heads]
        scale = None if self.scale is None else at(self.scale)
        z, added = at(self.attention.sublayer.z), added or self.added
        rest = None if self.bias is None else node_name(self.n, "attn_bias")
        yield from added.writers(heads, rest, z, scale)

    def mlp_writers(self, at: At, neurons: bool = False) -> Iterator[Writers]:
        """Yield the MLP, if there is one, or each of its neurons and its bias."""
        if self.mlp is None:
            return
        branch = self.mlp.branch
        if not neurons:
            yield Writers([node_name(self.n, "mlp")], at(branch.added)[:, :, None])
            return
        mlp, scale = branch.sublayer, _scale_of(branch)
        hidden = at(mlp.post)[..., None]
        names = [node_name(self.n, "neuron", n) for n in range(hidden.shape[2])]
        added = added_by(branch, mlp.W_out[:, None], mlp.b_out)
        scales = None if scale is None else at(scale)
        rest = node_name(self.n, "mlp_bias") if added.has_rest else None
        yield from added.writers(names, rest, hidden, scales)


def _scale_of(branch: Any) -> nn.Module | None:
    return None if is_identity(branch.after) else branch.after.scale


def nodes_of_block(
    n: int, block: Any, writers: dict[NodeName, int], readers: dict[NodeName, int]
) -> Layer:
    """Add the nodes of a block, and return their places."""
    attention, *others = block.branches
    queries, keys = range(len(attention.sublayer.W_Q)), range(len(attention.sublayer.W_K))
    q, k, v = (
        add(readers, 2 * n, [node_name(n, part, head) for head in heads])
        for part, heads in (("q", queries), ("k", keys), ("v", keys))
    )
    heads = add(writers, 2 * n + 1, [node_name(n, "head", head) for head in queries])
    bias, mlp, name = None, None, node_name(n, "mlp")
    if added_by(attention, attention.sublayer.W_O, attention.sublayer.b_O).has_rest:
        bias = add(writers, 2 * n + 1, [node_name(n, "attn_bias")]).start
    for branch in others:
        time = 2 * n + (branch.reads is not attention.reads)
        read = add(readers, time, [name]).start
        mlp = MLP(add(writers, 2 * n + 2, [name]).start, read, branch)
    return Layer(n, attention, heads, bias, q, k, v, mlp)


def require_branches(blocks: nn.ModuleList) -> None:
    """Refuse blocks that do not say what they add to the stream, or whose stream is no sum."""
    for block in blocks:
        if not hasattr(block, "branches"):
            raise TypeError(
                f"a graph needs blocks with branches; got a {type(block).__name__} without them "
                "(models.from_hf makes a model that has them)"
            )
        if any(branch.joined for branch in block.branches):  # type: ignore[union-attr]
            raise ValueError(
                "norm_place must be 'pre', 'output' or 'sandwich' for a graph; got 'post', where the stream is "
                "not a sum of what was written"
            )


def listed(names: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Return names of nodes or edges as a tuple; one name stands for itself.

    Raises:
        TypeError: if they are something else.
    """
    several = (names,) if isinstance(names, str) else names
    if not isinstance(several, Iterable):
        raise TypeError(f"{what} must be names; got {shown(names)} (a metric belongs into Pairs)")
    return tuple(several)


def add(nodes: dict[NodeName, int], time: int, names: Iterable[NodeName]) -> slice:
    """Add nodes that write or read at a time, and return their places."""
    start = len(nodes)
    nodes.update(dict.fromkeys(names, time))
    return slice(start, len(nodes))
