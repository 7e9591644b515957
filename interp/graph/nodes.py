"""The nodes of one block in a graph: its heads and its MLP, as writers and as readers."""

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
from interp.protocol import Adapter
from interp.results.node import NodeName, node_name

At = Callable[[nn.Module], Float[Tensor, "batch pos *size"]]
"""A function that returns the value of a point in a run."""


class Writers(NamedTuple):
    """Consecutive writers with their outputs: vectors, or values that weights map to vectors.

    Attributes:
        names: the names of the writers.
        values: the output vector of each writer, or the value that its weight maps to this vector.
            If a norm follows the branch, values with weights are divided by the scale of this norm.
        weight: the matrix of each writer that maps its value to its output vector; None if the
            values are vectors. If a norm follows the branch, its gain is multiplied into the
            matrix, and the mean over `d_model` is subtracted if the norm subtracts means.
    """

    names: Sequence[NodeName]
    values: Float[Tensor, "batch pos writer size"]
    weight: Float[Tensor, "writer size d_model"] | None = None

    def vectors(self) -> Float[Tensor, "writer batch pos d_model"]:
        """Return the output of each writer."""
        if self.weight is None:
            return rearrange(self.values, "batch pos writer d_model -> writer batch pos d_model")
        weight = like(self.weight, self.values)
        return torch.einsum("bpws,wsd->wbpd", self.values, weight)

    def put(self, out: Float[Tensor, "writer batch pos d_model"]) -> None:
        """Write the output of each writer into `out`, without gradients."""
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
        """Write the component of each output along a direction into `out`.

        The outputs themselves are not computed.

        Args:
            direction: the direction at each position.
            out: the memory for the result.
        """
        values = like(self.values, out)
        # The direction in the space of the values.
        directions = direction[:, :, None]
        if self.weight is not None:
            maps = rearrange(like(self.weight, out), "writer size d_model -> d_model (writer size)")
            directions = rearrange(
                direction @ maps,
                "batch pos (writer size) -> batch pos writer size",
                size=self.weight.shape[1],
            )
        if values.shape[-1] == 1:
            torch.mul(values[..., 0], directions[..., 0], out=out)
        else:
            torch.sum(values * directions, -1, out=out)


class Added(NamedTuple):
    """The factors of a branch's output, which is a sum over its writers and its biases.

    The output is `sum_w (value_w / scale) weight_w + bias / scale + constant`. The scale is the
    scale of the norm after the branch in the same run, or 1 without a norm. With a norm, all
    factors are in at least float32.

    Attributes:
        weight: the weight of each writer, passed through the norm without its division.
        bias: the bias of the branch, passed through the norm in the same way.
        constant: the bias of the norm.
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
        """Yield the writers. If `rest` is a name, also yield the biases as a writer with this name.

        Args:
            names: the names of the writers.
            rest: the name of the sum of the biases; None if the biases are zero.
            values: the value of each writer in a run.
            scale: the scale of the norm after the branch in the same run; None without a norm.
        """
        weight, bias, constant = all_to_device(self, values.device)
        if scale is not None:
            values = (values / scale[..., None]).to(values.dtype)
            bias = bias / scale
        yield Writers(names, values, weight)
        if rest is not None:
            bias = (bias + constant).to(values.dtype)
            yield Writers([rest], bias.expand(*values.shape[:2], -1)[:, :, None])

    @property
    def has_rest(self) -> bool:
        """True if the output contains a bias. A branch without biases has zeros in their place."""
        return bool(self.bias.any() or self.constant.any())


def added_by(branch: Any, weight: Tensor, bias: Tensor) -> Added:
    """Return the factors of a branch's output.

    Args:
        branch: the branch.
        weight: the output weight of each writer.
        bias: the output bias of the branch.
    """
    linear = linear_part(branch.after, len(bias))
    bias = linear.after(bias)
    return Added(linear.after(weight), bias, like(linear.bias, bias))


class MLP(NamedTuple):
    """The MLP of a block.

    Attributes:
        writer: the index of the MLP among the writers.
        reader: the index of the MLP among the readers.
        branch: the branch of the MLP; see `interp.protocol.LanguageModel`.
    """

    writer: int
    reader: int
    branch: Any


@dataclass(frozen=True, eq=False)
class Layer:
    """The nodes of one block, as indices of the writers and the readers of a graph.

    Attributes:
        n: the number of the block.
        attention: the attention branch of the block; see `interp.protocol.LanguageModel`.
        heads: the indices of the heads among the writers.
        bias: the index of the writer that contains the biases of attention: all that attention adds
            besides its heads. It is the next index after the heads; None if the biases are zero.
        q, k, v: the indices of the heads among the readers; `k` and `v` have one index for each key
            head.
        mlp: the MLP; None if the block has no MLP.
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
        """True if the MLP reads the stream before the attention of the block is added."""
        return self.mlp is not None and self.mlp.branch.reads is self.attention.reads

    @property
    def device(self) -> torch.device:
        """The device of the block's weights."""
        return self.attention.sublayer.W_O.device

    @property
    def scale(self) -> nn.Module | None:
        """The point of the scale that divides the output of attention; None if there is no norm."""
        return _scale_of(self.attention)

    @property
    def attn(self) -> slice:
        """The indices of the heads and the bias among the writers."""
        return self.heads if self.bias is None else slice(self.heads.start, self.bias + 1)

    @property
    def added(self) -> Added:
        """The output weights and the biases of attention, computed from the current weights."""
        attn = self.attention.sublayer
        return added_by(self.attention, attn.W_O, attn.b_O)

    def attention_writers(
        self, at: At, added: Added | None = None, adapters: bool = False
    ) -> Iterator[Writers]:
        """Yield the heads as writers and, if the block has one, the writer of the bias.

        Args:
            at: a function that returns the value of a point in a run.
            added: the factors of the attention output. Default: compute them.
            adapters: whether the adapter of the output map is a separate writer, the last one.
                Otherwise it is part of the heads.
        """
        n_heads = self.heads.stop - self.heads.start
        heads = [node_name(self.n, "head", head) for head in range(n_heads)]
        scale = None if self.scale is None else at(self.scale)
        z = at(self.attention.sublayer.z)
        adapter = adapter_of(self.attention) if adapters else None
        if adapter is None:
            added = added or self.added
            has_rest = self.bias is not None
        else:
            weight, bias = adapter.base()
            weight = rearrange(weight, "(head d_head) d_model -> head d_head d_model", head=n_heads)
            added = added_by(self.attention, weight, bias)
            has_rest = added.has_rest
        rest = node_name(self.n, "attn_bias") if has_rest else None
        yield from added.writers(heads, rest, values=z, scale=scale)
        if adapter is not None:
            share = share_of_adapter(self.attention, adapter, z.flatten(2), at)
            yield Writers([node_name(self.n, "attn_adapter")], share[:, :, None])

    def mlp_writers(
        self, at: At, neurons: bool = False, adapters: bool = False
    ) -> Iterator[Writers]:
        """Yield the MLP, or each of its neurons and its bias. Without an MLP, yield nothing.

        Args:
            at: a function that returns the value of a point in a run.
            neurons: whether each neuron is a separate writer.
            adapters: whether the adapter of the output map is a separate writer, the last one.
                Otherwise it is part of the MLP or the neurons.
        """
        if self.mlp is None:
            return
        branch = self.mlp.branch
        mlp = branch.sublayer
        adapter = adapter_of(branch) if adapters else None
        share = None
        if adapter is not None:
            share = share_of_adapter(branch, adapter, at(mlp.post), at)
        if not neurons:
            whole = at(branch.added)
            rest_of_mlp = whole if share is None else whole - share
            yield Writers([node_name(self.n, "mlp")], rest_of_mlp[:, :, None])
        else:
            hidden = at(mlp.post)[..., None]
            names = [node_name(self.n, "neuron", n) for n in range(hidden.shape[2])]
            weight, bias = (mlp.W_out, mlp.b_out) if adapter is None else adapter.base()
            added = added_by(branch, weight[:, None], bias)
            scale_point = _scale_of(branch)
            scale = None if scale_point is None else at(scale_point)
            rest = node_name(self.n, "mlp_bias") if added.has_rest else None
            yield from added.writers(names, rest, values=hidden, scale=scale)
        if share is not None:
            yield Writers([node_name(self.n, "mlp_adapter")], share[:, :, None])


def adapter_of(branch: Any) -> Adapter | None:
    """Return the adapter of a branch's output map, or None; see `interp.protocol.Adapter`."""
    adapter: Adapter | None = getattr(branch.sublayer, "adapter", None)
    return adapter


def share_of_adapter(
    branch: Any, adapter: Adapter, read: Float[Tensor, "batch pos d_in"], at: At
) -> Float[Tensor, "batch pos d_model"]:
    """Return the share of an adapter in the output of a branch, in a run.

    If a norm follows the branch, the share is passed through the norm without its bias, and divided
    by the scale of the norm.

    Args:
        branch: the branch.
        adapter: the adapter of its output map.
        read: the input of the output map.
        at: a function that returns the value of a point in a run.
    """
    share = adapter.share(read)
    scale_point = _scale_of(branch)
    if scale_point is None:
        return share
    return linear_part(branch.after, share.shape[-1]).after(share) / at(scale_point)


def _scale_of(branch: Any) -> nn.Module | None:
    """Return the point of the scale of the norm after a branch; None if there is no norm."""
    return None if is_identity(branch.after) else branch.after.scale


def nodes_of_block(
    n: int, block: Any, writers: dict[NodeName, int], readers: dict[NodeName, int]
) -> Layer:
    """Add the nodes of a block to the nodes of a graph, and return their indices.

    Args:
        n: the number of the block.
        block: the block.
        writers, readers: the nodes so far, with the times when they write or read. Attention of
            block n reads at time 2n and writes at 2n + 1. The MLP reads at 2n + 1, or at 2n in a
            parallel block, and writes at 2n + 2.
    """
    attention, *other_branches = block.branches
    queries = range(len(attention.sublayer.W_Q))
    keys = range(len(attention.sublayer.W_K))
    q = add(readers, 2 * n, [node_name(n, "q", head) for head in queries])
    k = add(readers, 2 * n, [node_name(n, "k", head) for head in keys])
    v = add(readers, 2 * n, [node_name(n, "v", head) for head in keys])
    heads = add(writers, 2 * n + 1, [node_name(n, "head", head) for head in queries])
    bias = None
    if added_by(attention, attention.sublayer.W_O, attention.sublayer.b_O).has_rest:
        bias = add(writers, 2 * n + 1, [node_name(n, "attn_bias")]).start
    mlp = None
    for branch in other_branches:
        name = node_name(n, "mlp")
        is_parallel = branch.reads is attention.reads
        reader = add(readers, 2 * n if is_parallel else 2 * n + 1, [name]).start
        writer = add(writers, 2 * n + 2, [name]).start
        mlp = MLP(writer, reader, branch)
    return Layer(n=n, attention=attention, heads=heads, bias=bias, q=q, k=k, v=v, mlp=mlp)


def require_branches(blocks: nn.ModuleList) -> None:
    """Raise an error if blocks have no branches, or if their stream is not a sum of outputs."""
    for block in blocks:
        if not hasattr(block, "branches"):
            raise TypeError(
                f"a graph needs blocks with branches; got a {type(block).__name__} without "
                "branches "
                "(models.from_hf returns a model with branches)"
            )
        if any(branch.joined for branch in block.branches):  # type: ignore[union-attr]
            raise ValueError(
                "norm_place must be 'pre', 'output' or 'sandwich' for a graph; got 'post', where "
                "the stream is "
                "not the sum of the outputs of the writers"
            )


def listed(names: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Return names of nodes or edges as a tuple. A single name becomes a tuple of one name.

    Args:
        names: one name, or several names.
        what: the name of the argument, for the error.

    Raises:
        TypeError: if `names` is not a name or an iterable of names.
    """
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, Iterable):
        raise TypeError(
            f"{what} must be names; got {shown(names)} (pass a metric to Pairs instead)"
        )
    return tuple(names)


def add(nodes: dict[NodeName, int], time: int, names: Iterable[NodeName]) -> slice:
    """Add nodes that write or read at the same time, and return their indices.

    Args:
        nodes: the nodes so far, with their times.
        time: the time.
        names: the names of the new nodes.
    """
    start = len(nodes)
    nodes.update(dict.fromkeys(names, time))
    return slice(start, len(nodes))
