"""The nodes of one block in a graph: its heads, mixers and MLPs, as writers and as readers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import all_to_device, shown, stacked
from interp.graph.norms import is_identity, linear_part
from interp.graph.sublayers import (
    BlockBranch,
    DividedAttention,
    SublayerKind,
    adapter_of,
    divided_of,
    has_heads,
    heads_of,
    is_divided,
    kind_of,
    neurons_of,
    reads_context,
    scale_of,
    weight_of,
)
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

    >>> z = torch.tensor([[[[1.0, 2.0]]]])  # one head with two numbers, at one position
    >>> W_O = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 0.0, 5.0]]])
    >>> Writers([node_name(0, "head", 0)], z, W_O).vectors()
    tensor([[[[ 3.,  0., 10.]]]])
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
        """Yield the heads or the neurons of the branch as writers, and then the sum of its biases.

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


def added_by(branch: BlockBranch, weight: Tensor, bias: Tensor) -> Added:
    """Return the factors of a branch's output.

    Args:
        branch: the branch.
        weight: the output weight of each writer.
        bias: the output bias of the branch.
    """
    linear = linear_part(branch.after, len(bias))
    bias = linear.after(bias)
    return Added(linear.after(weight), bias, like(linear.bias, bias))


@dataclass(frozen=True, eq=False)
class Sublayer:
    """The nodes of one sublayer, as indices of the writers and the readers of a graph.

    Attention that can be divided writes one vector for each head and reads queries, keys and
    values separately. Any other sublayer writes one vector, and reads the stream once. Attention
    that can be divided only at its output writes one vector for each head and reads the stream
    once.

    Attributes:
        n: the number of the block.
        kind: the kind of the sublayer.
        branch: the branch of the sublayer.
        heads: the indices among the writers, one for each head. A sublayer without heads has one
            index.
        bias: the index of the writer that contains the biases of attention: all that attention adds
            besides its heads. It is the next index after the heads; None if the biases are zero or
            the sublayer has no heads.
        readers: the indices among the readers. Divided attention has three slices: queries, keys
            and values, with one key and one value for each key head. Any other sublayer has one
            slice with one index.
    """

    n: int
    kind: SublayerKind
    branch: BlockBranch
    heads: slice
    bias: int | None
    readers: tuple[slice, ...]

    @property
    def is_divided(self) -> bool:
        """True if queries, keys and values are separate readers."""
        return len(self.readers) == 3

    @property
    def divided(self) -> DividedAttention:
        """The attention of a sublayer that `is_divided`."""
        return divided_of(self.branch)

    @property
    def has_heads(self) -> bool:
        """True if the heads are separate writers."""
        return has_heads(self.branch)

    @property
    def writers(self) -> range:
        """The indices among the writers, with the bias."""
        return range(self.heads.start, self.heads.stop if self.bias is None else self.bias + 1)

    @property
    def reads(self) -> slice:
        """The indices of all readers."""
        return slice(self.readers[0].start, self.readers[-1].stop)

    @property
    def scale(self) -> nn.Module | None:
        """The point of the scale that divides the heads; None if there is no norm after them."""
        return scale_of(self.branch) if self.has_heads else None

    @property
    def added(self) -> Added | None:
        """The output weights and the biases of the heads, computed from the current weights.

        None if the sublayer has no heads.
        """
        if not self.has_heads:
            return None
        heads = heads_of(self.branch)
        return added_by(self.branch, heads.W_O, heads.b_O)

    def points(self) -> Iterator[nn.Module]:
        """Yield the points that contain the outputs of the writers."""
        yield heads_of(self.branch).z if self.has_heads else self.branch.added
        if self.scale is not None:
            yield self.scale

    def output(
        self, stream: Float[Tensor, "batch pos d_model"], context: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the sublayer adds to the stream, from the stream that it reads.

        Args:
            stream: the stream before the norm.
            context: the other inputs of the block, which an MLP does not read.
        """
        inputs = (stream, context) if reads_context(self.branch, self.kind) else (stream,)
        return self.branch(*inputs)

    def outputs(
        self,
        at: At,
        added: Added | None = None,
        neurons: bool = False,
        adapters: bool = False,
    ) -> Iterator[Writers]:
        """Yield the writers with their outputs in a run.

        Args:
            at: a function that returns the value of a point in a run.
            added: the factors of the heads. Default: compute them.
            neurons: whether each neuron of an MLP is a separate writer, with a writer for the bias.
            adapters: whether the adapter of the output map is a separate writer, the last one.
                Otherwise it is part of the heads, the MLP or the neurons.
        """
        if self.has_heads:
            yield from self._heads(at, added, adapters)
        elif self.kind == "mlp":
            yield from self._mlp(at, neurons, adapters)
        else:
            yield Writers([node_name(self.n, self.kind)], at(self.branch.added)[:, :, None])

    def _heads(self, at: At, added: Added | None, adapters: bool) -> Iterator[Writers]:
        """Yield the heads as writers, then the bias and the adapter if they are writers.

        For the arguments, see `outputs`.
        """
        attention = heads_of(self.branch)
        n_heads = self.heads.stop - self.heads.start
        heads = [node_name(self.n, "head", head) for head in range(n_heads)]
        scale = None if self.scale is None else at(self.scale)
        z = at(attention.z)
        adapter = adapter_of(self.branch) if adapters else None
        if adapter is None:
            added = added or added_by(self.branch, attention.W_O, attention.b_O)
            has_rest = self.bias is not None
        else:
            weight, bias = adapter.base()
            weight = rearrange(weight, "(head d_head) d_model -> head d_head d_model", head=n_heads)
            added = added_by(self.branch, weight, bias)
            has_rest = added.has_rest
        rest = node_name(self.n, "attn_bias") if has_rest else None
        yield from added.writers(heads, rest, values=z, scale=scale)
        if adapter is not None:
            share = share_of_adapter(self.branch, adapter, z.flatten(2), at)
            yield Writers([node_name(self.n, "attn_adapter")], share[:, :, None])

    def _mlp(self, at: At, neurons: bool, adapters: bool) -> Iterator[Writers]:
        """Yield the MLP, or each of its neurons and its bias, and then its adapter if requested.

        For the arguments, see `outputs`.
        """
        branch = self.branch
        mlp = neurons_of(branch)
        adapter = adapter_of(branch) if adapters else None
        share = None
        if adapter is not None:
            share = share_of_adapter(branch, adapter, at(mlp.post), at)
        if not neurons:
            whole = at(branch.added)
            rest_of_mlp = whole if share is None else whole - share
            yield Writers([node_name(self.n, "mlp")], rest_of_mlp[:, :, None])
        else:
            if not hasattr(mlp, "post"):
                raise ValueError(
                    f"the MLP of block {self.n} must have a hidden layer to be divided into "
                    "neurons; got an MLP without one, such as a mixture of experts: leave out "
                    "neurons=True"
                )
            hidden = at(mlp.post)[..., None]
            names = [node_name(self.n, "neuron", n) for n in range(hidden.shape[2])]
            weight, bias = (mlp.W_out, mlp.b_out) if adapter is None else adapter.base()
            added = added_by(branch, weight[:, None], bias)
            scale_point = scale_of(branch)
            scale = None if scale_point is None else at(scale_point)
            rest = node_name(self.n, "mlp_bias") if added.has_rest else None
            yield from added.writers(names, rest, values=hidden, scale=scale)
        if share is not None:
            yield Writers([node_name(self.n, "mlp_adapter")], share[:, :, None])


@dataclass(frozen=True, eq=False)
class Layer:
    """The nodes of one block.

    Attributes:
        n: the number of the block.
        sublayers: the sublayers of the block, in the order of computation.
    """

    n: int
    sublayers: tuple[Sublayer, ...]

    @property
    def weight(self) -> Tensor:
        """A weight of the block, which has the block's dtype and device."""
        return weight_of(self.sublayers[0].branch)

    @property
    def device(self) -> torch.device:
        """The device of the block's weights."""
        return self.weight.device

    @property
    def heads(self) -> Sublayer:
        """The attention of the block with separate heads, queries, keys and values.

        Raises:
            ValueError: if the block mixes positions in another way.
        """
        mixing = [sublayer for sublayer in self.sublayers if sublayer.kind != "mlp"]
        if len(mixing) != 1 or not mixing[0].is_divided:
            nodes = " and ".join(node_name(self.n, part.kind) for part in mixing) or "no attention"
            raise ValueError(
                f"block {self.n} must have attention with separate queries, keys and values, and "
                f"no other mixer of positions; got {nodes}"
            )
        return mixing[0]

    @property
    def attention(self) -> BlockBranch:
        """The branch of `heads`."""
        return self.heads.branch

    @property
    def n_heads(self) -> int:
        """The number of heads that are separate writers."""
        sizes = [part.heads.stop - part.heads.start for part in self.sublayers if part.has_heads]
        return sum(sizes)

    @property
    def mlp(self) -> Sublayer | None:
        """The MLP; None if the block has no MLP."""
        return next((part for part in self.sublayers if part.kind == "mlp"), None)

    @property
    def is_parallel(self) -> bool:
        """True if the MLP reads the stream that the first sublayer reads."""
        first, mlp = self.sublayers[0], self.mlp
        return mlp not in (None, first) and mlp.branch.reads is first.branch.reads


def share_of_adapter(
    branch: BlockBranch, adapter: Adapter, read: Float[Tensor, "batch pos d_in"], at: At
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
    scale_point = scale_of(branch)
    if scale_point is None:
        return share
    return linear_part(branch.after, share.shape[-1]).after(share) / at(scale_point)


def biases_of_heads(blocks: Iterable[Any]) -> list[list[bool]]:
    """Return whether the heads of each branch of each block have biases.

    A branch without heads gets False. All numbers are read from their devices at once.

    Args:
        blocks: the blocks.
    """
    branches = [[*block.branches] for block in blocks]
    have_biases = [[False] * len(branches_of_block) for branches_of_block in branches]
    places = []
    flags = []
    for n, branches_of_block in enumerate(branches):
        for number, branch in enumerate(branches_of_block):
            if has_heads(branch):
                bias = heads_of(branch).b_O
                linear = linear_part(branch.after, len(bias))
                flag = linear.after(bias).any()
                if not is_identity(branch.after):
                    flag = flag | like(linear.bias, bias).any()
                places.append((n, number))
                flags.append(flag)
    if flags:
        for (n, number), has_bias in zip(places, stacked(flags).tolist(), strict=True):
            have_biases[n][number] = has_bias
    return have_biases


def nodes_of_block(
    n: int,
    block: Any,
    have_biases: Sequence[bool],
    writers: dict[NodeName, int],
    readers: dict[NodeName, int],
    time: int,
) -> tuple[Layer, int]:
    """Add the nodes of a block to the nodes of a graph.

    A sublayer reads the outputs of the writers with the same or an earlier time. Sublayers that
    read the same stream read at the same time, and write one unit of time later.

    Args:
        n: the number of the block.
        block: the block.
        have_biases: whether the heads of each branch have biases; see `biases_of_heads`.
        writers, readers: the nodes so far, with the times when they write or read.
        time: the time at which the block begins.

    Returns:
        The nodes of the block as indices, and the time at which the block ends.

    The heads read at the time 0 and write at the time 1. The MLP reads their outputs at the time 1
    and writes at the time 2:

    >>> from models import load
    >>> blocks = load("pydoc-4l").blocks
    >>> writers, readers = {}, {}
    >>> have_biases = biases_of_heads(blocks)[0]
    >>> layer, time = nodes_of_block(0, blocks[0], have_biases, writers, readers, time=0)
    >>> writers
    {'a0.h0': 1, 'a0.h1': 1, 'a0.h2': 1, 'a0.h3': 1, 'a0.bias': 1, 'm0': 2}
    >>> [name for name, time in readers.items() if time == 1], time
    (['m0'], 2)
    >>> [(sublayer.kind, sublayer.writers, sublayer.reads) for sublayer in layer.sublayers]
    [('attn', range(0, 5), slice(0, 12, None)), ('mlp', range(5, 6), slice(12, 13, None))]
    """
    sublayers: list[Sublayer] = []
    for number, branch in enumerate(block.branches):
        if sublayers and branch.reads is not sublayers[-1].branch.reads:
            time += 1
        kind = kind_of(branch, number)
        nodes = _nodes_of_branch(
            n,
            kind,
            branch,
            has_bias=have_biases[number],
            writers=writers,
            readers=readers,
            time=time,
        )
        sublayers.append(nodes)
    return Layer(n, tuple(sublayers)), time + 1


def _nodes_of_branch(
    n: int,
    kind: SublayerKind,
    branch: BlockBranch,
    has_bias: bool,
    writers: dict[NodeName, int],
    readers: dict[NodeName, int],
    time: int,
) -> Sublayer:
    """Add the nodes of a sublayer to the nodes of a graph, and return the sublayer.

    Args:
        n: the number of the block.
        kind: the kind of the sublayer.
        branch: the sublayer with its norms.
        has_bias: whether the bias of the heads is a separate writer.
        writers, readers: the nodes so far, with the times when they write or read. The new nodes
            are added to them.
        time: the time at which the sublayer reads. It writes one unit later.
    """
    reads: tuple[slice, ...]
    if is_divided(branch):
        divided = divided_of(branch)
        weights = (("q", divided.W_Q), ("k", divided.W_K), ("v", divided.W_V))
        slices = []
        for part, weight in weights:
            names = [node_name(n, part, head) for head in range(len(weight))]
            slices.append(add_nodes(readers, time, names))
        reads = tuple(slices)
    else:
        reads = (add_nodes(readers, time, [node_name(n, kind)]),)
    bias = None
    if has_heads(branch):
        heads = [node_name(n, "head", head) for head in range(len(heads_of(branch).W_O))]
        written = add_nodes(writers, time + 1, heads)
        if has_bias:
            bias = add_nodes(writers, time + 1, [node_name(n, "attn_bias")]).start
    else:
        written = add_nodes(writers, time + 1, [node_name(n, kind)])
    return Sublayer(n, kind, branch=branch, heads=written, bias=bias, readers=reads)


def as_names(names: str | Iterable[str], what: str) -> tuple[str, ...]:
    """Return names of nodes or edges as a tuple. A single name becomes a tuple of one name.

    Args:
        names: one name, or several names.
        what: the name of the argument, for the error.

    Raises:
        TypeError: if `names` is not a name or an iterable of names.
    """
    if isinstance(names, str):
        return (names,)
    if isinstance(names, tuple) and [*map(type, names)][-2:] == [int, int]:
        # Other analyses accept a head as (layer, head), and some libraries as (input, layer, head).
        # Here, the tuple is passed on as one unknown name. The error of `Graph.place` lists the
        # nodes of this head.
        names = [names]  # type: ignore[list-item]
    if not isinstance(names, Iterable):
        raise TypeError(
            f"{what} must be names; got {shown(names)} (pass a metric to Pairs instead)"
        )
    return tuple(names)


def add_nodes(nodes: dict[NodeName, int], time: int, names: Iterable[NodeName]) -> slice:
    """Add nodes that write or read at the same time, and return their indices.

    Args:
        nodes: the nodes so far, with their times.
        time: the time.
        names: the names of the new nodes.
    """
    start = len(nodes)
    nodes.update(dict.fromkeys(names, time))
    return slice(start, len(nodes))
