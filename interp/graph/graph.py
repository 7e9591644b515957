"""The graph of a model: writers to the residual stream, its readers, and the edges between them.

A writer is the source of an edge: a node that adds its output to the stream, such as a head, an MLP
or the embeddings. A reader is the target of an edge: an input that is computed from the stream,
such as the queries of a head, the input of an MLP, or the logits.

Circuits, edge attribution and decompositions use the graph. `Graph.layers` contains the indices of
the nodes of a block among writers and readers, and `Graph.all_writers` yields the output of each
writer.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookedRunner, HookError, UnknownNameError
from hooks.base import (
    HintsAtNames,
    config_hash,
    explains_calls,
    is_rounding,
    number_of,
    padding_messages,
    real_of,
    require_kind,
    sides_of_padding,
)
from hooks.shared import is_listened_to, parts_of
from interp.graph.nodes import (
    Added,
    At,
    Layer,
    Sublayer,
    Writers,
    add_nodes,
    biases_of_heads,
    nodes_of_block,
)
from interp.graph.norms import is_identity, linear_part
from interp.graph.sublayers import heads_of, require_branches
from interp.inputs.cached import mask_of
from interp.numbers.precision import like
from interp.protocol import plain, rounding_dtype, runner_of
from interp.results.node import NodeName

_STEPS = ("config", "blocks", "context", "input_resid", "logits", "unembed")


class Graph(HintsAtNames):
    """The nodes and edges of a model, named as in Hanna et al. 2024, "Have Faith in Faithfulness".

    An edge leads from a writer, a node that adds its output to the residual stream, to a reader, an
    input that is computed from the stream.

    Writers are `input` (the stream entering the first block), `a0.h1` (a head) and `m0` (an MLP).
    Readers are `a2.h3<q>`, `a2.h3<k>`, `a2.h3<v>`, `m2` and `logits`; grouped heads have one `<k>`
    and one `<v>` for each key head. An edge such as `a0.h1->a2.h3<k>` joins a writer to a later
    reader: the MLP of a parallel block does not read the heads of that block. A reader reads the
    stream before its norm.

    A head writes `z @ W_O`. If the model has a norm after attention, the output of a head is its
    share of the norm's output: `z @ W_O` passed through the norm and divided by the norm's scale in
    the same run. `a0.bias` is the rest of the attention output: `b_O` and the bias of the norm.
    `a0.bias` is a writer if it is not zero. It has edges only if a norm divides `b_O` by its scale.
    Otherwise `a0.bias` is the same in every run, so replacing it has no effect.

    A sublayer that cannot be divided is one node, which writes one sum and reads the stream once:
    `x5` is a mixer of positions without attention, such as a state space, and `a5` is attention
    whose heads, or queries, keys and values, cannot be separated, such as latent attention.

    LoRA adapters of an attached model are merged into the weights, so heads and MLPs contain their
    adapters.

    Args:
        model: a model with the parts that `interp.protocol` lists for graphs, such as a
            `models.Transformer`; or an attached decoder. For an attached decoder, the graph uses
            the plain model of `models.from_hf` or a view of its blocks.
        split_embeddings: whether token and position embeddings are the writers `embed` and
            `pos_embed`, instead of `input`. If the model has a norm of the sum of both embeddings,
            both are divided by the scale of this norm, and the bias of the norm is the writer
            `input.bias`.

    Attributes:
        model: the model whose parts the graph uses.
        writers, readers: the names of the nodes, in the order of computation.
        n_inputs: the number of the first writers, which write the stream of the first block.
        layers: the nodes of each block.
        sublayers: the sublayers of all blocks, in the order of computation.
        allowed: a boolean table of the edges that exist.
        names: the name of each point of the model.
        points: the points that `contributions` needs in a cache.
        needed: the names of these points.

    Raises:
        TypeError: if the model lacks a part.
        ValueError: if the norms are applied to the sum of stream and sublayer
            (`norm_place="post"`), because the stream is then not the sum of the writers' outputs;
            or for the reasons of `models.from_hf`.

    >>> from models import load
    >>> graph = Graph(load("pydoc-4l"))
    >>> graph
    Graph of a Transformer: 4 layers, 25 writers, 53 readers, 479 edges
    >>> graph.edges[0]  # from the embeddings to the query of the first head
    'input->a0.h0<q>'
    """

    # The model is a module with the parts of `LanguageModel`. Python has no type for both.
    model: Any
    names: dict[nn.Module, str]
    writers: tuple[NodeName, ...]
    readers: tuple[NodeName, ...]
    n_inputs: int
    layers: tuple[Layer, ...]
    sublayers: tuple[Sublayer, ...]
    allowed: Bool[Tensor, "writer reader"]
    points: tuple[nn.Module, ...]
    needed: list[str]

    @explains_calls
    def __init__(self, model: nn.Module, split_embeddings: bool = False) -> None:
        self._whole = model
        self.model = plain(model, *_STEPS)
        require_branches(self.model.blocks)
        points = HookedRunner(self.model).points
        self.names = {point.module: name for name, point in points.items()}
        if split_embeddings and getattr(self.model, "is_scaled", False):
            raise ValueError(
                f"sums of components need blocks that only add to the stream; the blocks of "
                f"{type(model).__name__} also multiply the stream by numbers"
            )
        self._inputs, self._norm = self._sum_of_inputs(split_embeddings)
        # Map each node to the time when it writes or reads. A reader reads the outputs of writers
        # with the same or an earlier time.
        write_times: dict[NodeName, int] = {}
        read_times: dict[NodeName, int] = {}
        inputs = [self.names[point] for point in self._inputs] if split_embeddings else ["input"]
        add_nodes(write_times, 0, map(NodeName, inputs))
        if linear_part(self._norm, self.model.config.d_model).bias.any():
            add_nodes(write_times, 0, [NodeName("input.bias")])
        self.n_inputs = len(write_times)
        self.layers, time = self._add_blocks(write_times, read_times)
        self.sublayers = tuple(part for layer in self.layers for part in layer.sublayers)
        add_nodes(read_times, time, [NodeName("logits")])
        self.writers = tuple(write_times)
        self.readers = tuple(read_times)
        self._places: dict[str, dict[str, int]] = {
            "writer": {name: n for n, name in enumerate(self.writers)},
            "reader": {name: n for n, name in enumerate(self.readers)},
        }
        self.allowed = self._edges(write_times, read_times)
        self.points = tuple(self._points())
        self.needed = [self.names[point] for point in self.points]

    def _add_blocks(
        self, write_times: dict[NodeName, int], read_times: dict[NodeName, int]
    ) -> tuple[tuple[Layer, ...], int]:
        """Add the nodes of all blocks, and return these nodes and the time after the last block.

        Args:
            write_times, read_times: the time when each node writes or reads. The nodes are added to
                them.
        """
        blocks = self.model.blocks
        have_biases = biases_of_heads(blocks)
        time = 0
        layers = []
        for n, block in enumerate(blocks):
            layer, time = nodes_of_block(
                n,
                block,
                have_biases=have_biases[n],
                writers=write_times,
                readers=read_times,
                time=time,
            )
            layers.append(layer)
        return tuple(layers), time

    def _sum_of_inputs(self, split_embeddings: bool) -> tuple[list[nn.Module], Any]:
        """Return the points whose sum is the stream of the first block, and the norm of the sum."""
        stream = self.model.blocks[0].resid_pre
        if not split_embeddings:
            return [stream], None
        parts = [getattr(self.model, part, None) for part in ("embed", "pos_embed")]
        norm: Any = getattr(self.model, "ln_embed", None)
        points = [part for part in parts if part in self.names] or [stream]
        return points, None if is_identity(norm) else norm

    def _edges(
        self, write_times: Mapping[NodeName, int], read_times: Mapping[NodeName, int]
    ) -> Bool[Tensor, "writer reader"]:
        """Return the edges from each writer, if its output varies between runs, to later readers.

        Args:
            write_times, read_times: the time when each node writes or reads.
        """
        # A bias varies only if the scale of a norm divides it.
        varying_biases = []
        for sublayer in self.sublayers:
            if sublayer.scale is None:
                continue
            added = sublayer.added
            if added is not None and added.bias.any():
                varying_biases.append(sublayer.bias)
        varies = []
        for n, name in enumerate(write_times):
            varies.append(n in varying_biases or not name.kind.endswith("bias"))
        times_written = torch.tensor([*write_times.values()])
        times_read = torch.tensor([*read_times.values()])
        return (times_written[:, None] <= times_read) & torch.tensor(varies)[:, None]

    def __repr__(self) -> str:
        return (
            f"Graph of a {type(self._whole).__name__}: {number_of(len(self.layers), 'layer')}, "
            f"{number_of(len(self.writers), 'writer')}, {number_of(len(self.readers), 'reader')}, "
            f"{number_of(int(self.allowed.sum()), 'edge')}"
        )

    def _points(self) -> Iterator[nn.Module]:
        """Yield the points that contain the writers' outputs, and then the point of their sum."""
        yield from self._inputs
        if self._norm is not None:
            yield self._norm.scale
        for sublayer in self.sublayers:
            yield from sublayer.points()
        yield self.model.blocks[-1].resid_post

    @property
    def like(self) -> Tensor:
        """An empty tensor with the dtype and the device of the first block's weights."""
        return self.layers[0].weight.new_empty(0)

    def runner(self, for_gradients: bool = False) -> HookedRunner:
        """Return a runner of the model whose parts the graph uses.

        Args:
            for_gradients: whether gradients at readers are needed. They are read inside the
                sublayers, so a dictionary must not take the place of a sublayer.

        Raises:
            HookError: if hooks are active on the given model, or a dictionary acts only at some
                positions, because the graph runs parts of the model separately. Also if gradients
                are needed, and a dictionary is spliced in with another `error` than "live".
            ModeError: if the given model is in training mode.
        """
        runner_of(self._whole)
        if is_listened_to(self._whole, parts=False):
            raise HookError(
                "a graph runs parts of the model separately, so no hook may be active on the model"
            )
        for name, part in parts_of(self._whole).items():
            if part.needs_columns:
                raise HookError(
                    "a graph runs parts of the model separately, so a dictionary must act at all "
                    f"positions; got splice(pos=...) at {name}"
                )
            if for_gradients and not part.keeps_gradients:
                raise HookError(
                    "scores of edges are derivatives at the inputs of sublayers, so a dictionary "
                    "must not change them: use splice(..., error='live'); got a dictionary at "
                    f"{name} with{part.settings}"
                )
        return HookedRunner(self.model)

    @cached_property
    def edges(self) -> tuple[str, ...]:
        """The names of all edges, `writer->reader`, in the order of the writers."""
        return tuple(
            f"{self.writers[writer]}->{self.readers[reader]}"
            for writer, reader in self.allowed.nonzero().tolist()
        )

    def query_heads_of(self, reader: str) -> list[int]:
        """Return the query heads that share a reader of keys or values, such as `a0.h1<k>`.

        The number in the name of the reader is the number of the key head. If each query head has
        its own keys, the result is the head itself. For other readers, the list is empty.

        >>> from models import load
        >>> Graph(load("pydoc-4l")).query_heads_of("a2.h1<v>")
        [1]
        """
        node = self.readers[self.place("reader", reader)]
        if node.kind not in ("k", "v") or node.number is None:
            return []
        counts = {"q": 0, node.kind: 0}
        for other in self.readers:
            if other.layer == node.layer and other.kind in counts:
                counts[other.kind] += 1
        n_sharing = counts["q"] // counts[node.kind]
        return [*range(node.number * n_sharing, (node.number + 1) * n_sharing)]

    def place(self, kind: Literal["writer", "reader"], name: str) -> int:
        """Return the index of a node among the writers or the readers.

        Args:
            kind: `writer` or `reader`.
            name: the name of the node.

        Raises:
            UnknownNameError: if the node does not exist; the error names close matches.
        """
        known = self._places[kind]
        if name not in known:
            example = repr([*known][-2])
            # The caller may have passed a head in another form. Name the nodes of this head.
            if head := _head_in(name):
                parts, layer, number = head
                node = f"a{layer}.h{number}"
                nodes = [node] if kind == "writer" else [f"{node}<{part}>" for part in parts]
                example += f"; of this head {', '.join(nodes)}"
            if kind == "reader" and (shared := self._reader_of_query_head(name)):
                example += f"; this query head shares {shared} with other heads"
            if nodes := self._nodes_at(kind, name):
                ends = [*dict.fromkeys([nodes[0], nodes[-1]])]
                are = f"s at this point are {' to '.join(ends)}"
                example += f"; the {kind}" + (are if ends[1:] else f" at this point is {ends[0]}")
            example += self._why_without_heads(str(name))
            message = f"no {kind} of this graph (such as {example}) is named {name!r}"
            # Wildcards are no spelling of a name.
            raise UnknownNameError(message, str(name).strip("*?"), known)
        return known[name]

    def places(self, kind: Literal["writer", "reader"], name: str) -> list[int]:
        """Return the indices of all nodes that a name with wildcards matches, in order.

        `*` stands for any characters and `?` for one: `a2.*` matches all heads of layer 2. A name
        without wildcards has the index of `place`.

        Args:
            kind: `writer` or `reader`.
            name: the name of a node, with or without wildcards.

        Raises:
            UnknownNameError: if no node matches; the error names close matches.

        >>> from models import load
        >>> Graph(load("pydoc-4l")).places("reader", "a1.h?<q>")
        [13, 14, 15, 16]
        """
        known = self._places[kind]
        if isinstance(name, str) and set("*?") & set(name):
            matches = [n for node, n in known.items() if fnmatch.fnmatchcase(node, name)]
            if matches:
                return matches
        return [self.place(kind, name)]

    def _nodes_at(self, kind: Literal["writer", "reader"], point: Any) -> list[str]:
        """Return the nodes whose value a hook point contains, for the error of a wrong name.

        Args:
            kind: `writer` or `reader`.
            point: the name that may be the name of a point.
        """
        indices = slice(0)
        # TransformerLens begins the last part of a name with `hook_`.
        point = point.replace("hook_", "") if isinstance(point, str) else point
        for sublayer in self.sublayers:
            branch = sublayer.branch
            places = {branch.added: sublayer.reads}
            if kind == "writer":
                places = {branch.added: slice(sublayer.writers.start, sublayer.writers.stop)}
                if sublayer.has_heads:
                    places[heads_of(branch).z] = sublayer.heads
            elif sublayer.is_divided:
                points = (getattr(sublayer.divided, part) for part in "qkv")
                places = dict(zip(points, sublayer.readers, strict=True))
            for module, nodes_of_point in places.items():
                if self.names.get(module) == point:
                    indices = nodes_of_point
        nodes = self.writers if kind == "writer" else self.readers
        return [str(node) for node in nodes[indices]]

    def _why_without_heads(self, name: str) -> str:
        """Return why the block of a head has no heads, for the end of an error; else nothing."""
        head = re.match(r"a(\d+)\.h\d", name)
        blocks = self.model.blocks
        block = blocks[int(head[1])] if head and int(head[1]) < len(blocks) else None
        reason = getattr(block, "why_undivided", "")
        return f"; a{head[1]} is one node without heads: {reason}" if head and reason else ""

    def _reader_of_query_head(self, name: Any) -> str | None:
        """Return the shared reader of a name with the number of a query head; None if none fits."""
        found = re.fullmatch(r"a(\d+)\.h(\d+)<([kv])>", name) if isinstance(name, str) else None
        if found is None:
            return None
        layer, head, kind = int(found[1]), int(found[2]), found[3]
        for reader in self.readers:
            if (reader.layer, reader.kind) == (layer, kind) and head in self.query_heads_of(reader):
                return str(reader)
        return None

    def index(self, edge: str) -> tuple[int, int]:
        """Return the row and the column of an edge in tables [writer, reader] of this graph.

        Args:
            edge: the name of the edge, such as `m0->logits`: the writer, an arrow and the reader.

        Returns:
            The place of the writer in `writers`, and the place of the reader in `readers`.

        Raises:
            UnknownNameError: if a node does not exist; the error names close matches.
            ValueError: if the reader does not read the output of the writer.
        """
        require_kind("an edge", edge, str, "a name, such as 'm0->logits'")
        names = edge.split("->")
        if len(names) != 2:
            raise ValueError(f"an edge must be 'source->target', as 'm0->logits'; got {edge!r}")
        writer = self.place("writer", names[0])
        reader = self.place("reader", names[1])
        if not self.allowed[writer, reader]:
            raise ValueError(
                "an edge must lead from a node to the input of a later node, and a bias has no "
                f"edges; got {edge}"
            )
        return writer, reader

    def mask(self, circuit: Iterable[str]) -> Float[Tensor, "writer reader"]:
        """Return the mask of replaced edges in a run of a circuit: 1 for edges outside the circuit.

        Args:
            circuit: the names of the edges that are not replaced.

        Raises:
            UnknownNameError, ValueError: for the reasons of `index`.
        """
        require_kind(
            "circuit", circuit, Iterable, "a Circuit, or names of edges, such as ['m0->logits']"
        )
        mask = self.allowed.float()
        for edge in circuit:
            mask[self.index(edge)] = 0
        return mask

    @cached_property
    def identity(self) -> list[Any]:
        """The nodes and the hash of the configuration.

        Graphs of equal models have equal identities.
        """
        return [[*self.writers], [*self.readers], config_hash(self.model)]

    def require(self, identity: list[Any]) -> None:
        """Check that the identity belongs to this graph.

        Raises:
            ValueError: if the nodes or the configuration of the model differ.
        """
        if identity != self.identity:
            what = (
                "other nodes" if identity[:2] != self.identity[:2] else "a model of another config"
            )
            raise ValueError(f"a circuit must belong to this graph; got a circuit of {what}")

    def contributions(
        self, cache: Mapping[str, Tensor]
    ) -> Float[Tensor, "writer batch pos d_model"]:
        """Return the contribution of each writer to the stream, [writer, batch, pos, d_model].

        The contributions add up to the stream after the last block.

        Args:
            cache: values of a run at the points `needed`, eager or lazy.

        Raises:
            CacheError: if the cache lacks a point or belongs to another model, or if the
                contributions do not add up to its stream.
        """
        if isinstance(cache, ActivationCache):
            cache.require_weights_of(self._whole)
        return self.added(cache)

    def added(self, values: Mapping[str, Tensor]) -> Float[Tensor, "writer batch pos d_model"]:
        """Return the same as `contributions`, without a check that the values are of this model.

        Args:
            values: the values of a run at the points `needed`, by name.
        """
        missing = [name for name in self.needed if name not in values]
        if missing:
            raise CacheError(
                f"a graph needs a cache with names=graph.needed; got a cache without {missing[0]}"
            )

        def at(point: nn.Module) -> Tensor:
            return values[self.names[point]]

        stream = at(self.points[-1])
        contributions = stream.new_empty(len(self.writers), *stream.shape)
        start = 0
        for group in self.all_writers(at):
            contributions[start : start + len(group.names)] = group.vectors()
            start += len(group.names)
        rounding = rounding_dtype(self._whole, stream.dtype)
        if not is_rounding(contributions.detach().sum(0), stream, rounding).all():
            raise CacheError(
                "contributions must add up to the stream of the cache; the cache belongs to "
                "another model, was edited, or blocks add more to the stream"
            )
        return contributions

    def mean(self, cache: ActivationCache) -> Float[Tensor, "writer 1 pos d_model"]:
        """Return the mean contribution of each writer over texts, at each position.

        Padding is ignored.

        Args:
            cache: see `contributions`. The cache also contains the mask of padding.

        Raises:
            CacheError: for the reasons of `contributions`.
            ValueError: if texts have padding before a real token, because their positions are then
                in different columns; or if all texts have padding in a column.
        """
        contributions = self.contributions(cache)
        shape = contributions.shape[1:3]
        is_real = real_of(mask_of(cache, shape), shape).to(contributions.device)
        has_left, _ = sides_of_padding(is_real)
        if has_left:
            because = "a mean at each position needs all first tokens in one column"
            raise ValueError(padding_messages.wrong_side("left", because))
        if not is_real.any(0).all():
            raise ValueError(padding_messages.no_real_token("a mean at each position", "a column"))
        weights = is_real.to(contributions.dtype) / is_real.sum(0)
        return torch.einsum("wbpd,bp->wpd", contributions, weights)[:, None]

    def all_writers(self, at: At, added: Sequence[Added | None] | None = None) -> Iterator[Writers]:
        """Yield the writers with their outputs in a run, in order.

        Args:
            at: a function that returns the value of a point in a run.
            added: the factors of the heads of each sublayer. Default: compute them.
        """
        inputs = self.inputs(at)
        vectors = rearrange(inputs, "writer batch pos d_model -> batch pos writer d_model")
        yield Writers(self.writers[: len(inputs)], vectors)
        factors = added or [None] * len(self.sublayers)
        for sublayer, factor in zip(self.sublayers, factors, strict=True):
            yield from sublayer.outputs(at, factor)

    def inputs(self, at: At) -> Float[Tensor, "writer batch pos d_model"]:
        """Return the contributions of the first writers, the embeddings."""
        parts = torch.stack([at(point) for point in self._inputs])
        if self._norm is None:
            return parts
        linear = linear_part(self._norm, parts.shape[-1])
        divided = (linear.after(parts) / at(self._norm.scale)).to(parts.dtype)
        if "input.bias" not in self.writers:
            return divided
        return torch.cat([divided, like(linear.bias, divided).expand_as(divided[:1])])


@explains_calls
def writers(
    model: nn.Module, cache: Mapping[str, Tensor]
) -> Float[Tensor, "writer batch pos d_model"]:
    """Return the contribution of each writer to the stream; see `Graph.contributions`.

    Args:
        model: a model that has a `Graph`.
        cache: a cache of a whole run, or of the points `Graph.needed`.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "def f(x):")
    >>> contributions = writers(model, cache)
    >>> contributions.shape  # [writer, batch, pos, d_model]
    torch.Size([25, 1, 9, 128])
    >>> torch.allclose(contributions.sum(0), cache["resid_post", -1], atol=1e-4)
    True
    """
    return Graph(model).contributions(cache)


def _head_in(name: Any) -> tuple[str, int, int] | None:
    """Return the inputs, the layer and the number of a head in a form of other analyses.

    The forms are (layer, head), (input, layer, head) and `L2H0`.

    >>> _head_in(("q", 2, 0)), _head_in("L2H0"), _head_in("m2")
    (('q', 2, 0), ('qkv', 2, 0), None)
    """
    if isinstance(name, str):
        found = re.fullmatch(r"L(\d+)\.?H(\d+)", name, re.IGNORECASE)
        return found and ("qkv", int(found[1]), int(found[2]))
    if not isinstance(name, tuple):
        return None
    match name:
        case int(layer), int(head):
            return "qkv", layer, head
        case str(part), int(layer), int(head) if part in ("q", "k", "v"):
            return part, layer, head
    return None
