"""A circuit: a set of edges of a model's graph with their scores, which can be saved."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from hooks.base import (
    aligned_rows,
    number_of,
    require_integer,
    require_kind,
    shown,
    storage,
    unknown_name,
)
from interp import plots
from interp.graph.graph import Graph
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.results.node import NodeName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from interp.plots.view import Arrow

_FORMAT = "hookscope-circuit-2"
# The largest numbers of lines, and of heads in a line, that are printed.
_EDGES_SHOWN = 20
_LAYERS_SHOWN = 14
_HEADS_SHOWN = 12


class Circuit(plots.Shown):
    """A set of edges of a graph. A run of a circuit replaces all other edges; see `run_circuit`.

    Circuits of one graph are sets: `|`, `&`, `-`, `in`, `len`, and `~` for the other edges. The
    result of an operation has the scores of the first circuit and the `found_on` of both circuits.

    A printed circuit lists the nodes in each layer, and the edges with the largest absolute scores
    or, without scores, the first edges. `save("circuit.png")` writes a picture.

    Args:
        graph: the graph of the model.
        edges: the names of the edges, such as `a0.h1->a2.h3<k>`, or a boolean table with a row for
            each source of edges, and a column for each target: [writer, reader] of the graph.
        scores: the effect of replacing each edge, in the metric's unit and negative if the edge
            helps. NaN means an unknown effect. They are stored in float64. Default: all unknown.
        found_on: the digests of the texts that the scores were computed on; see `Pairs.digests`.

    Attributes:
        kept: the edges as a table.
        n_left_out: the number of edges that `pruned` left out to make this circuit; 0 for other
            circuits.

    Raises:
        UnknownNameError: if a node is not in the graph; the error names close matches.
        ValueError: if an edge does not exist, or a table does not fit the graph.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> graph = Graph(Transformer(config))
    >>> circuit = Circuit(graph, ["input->a0.h1<v>", "a0.h1->logits", "m0->m1"])
    >>> circuit
    Circuit: 3 of 46 edges, 4 of 8 nodes
      layer 0  head 1  MLP
      edges:
        input->a0.h1<v>
        a0.h1->logits
        m0->m1
    >>> list(circuit.pruned())
    ['input->a0.h1<v>', 'a0.h1->logits']
    """

    kept: Bool[Tensor, "writer reader"]
    scores: Float[Tensor, "writer reader"]
    graph: Graph
    found_on: frozenset[str]
    n_left_out: int

    is_plot = True

    def __init__(
        self,
        graph: Graph,
        edges: Iterable[str] | Shaped[Tensor, "writer reader"],
        scores: Float[Tensor, "writer reader"] | None = None,
        found_on: Iterable[str] = (),
    ) -> None:
        require_made("graph", graph, Graph)
        if isinstance(edges, str) or not isinstance(edges, Iterable):
            rule = (
                "edges must be names, such as ['m0->logits'], or a table with a row for each of "
                "graph.writers and a column for each of graph.readers"
            )
            raise TypeError(f"{rule}; got {shown(edges)}")
        require_kind("scores", scores, (Tensor, type(None)), "a table of scores of edges")
        require_kind("found_on", found_on, Iterable, "hashes of texts", "pairs.digests() has them")
        self.graph = graph
        self.found_on = frozenset(found_on)
        self.n_left_out = 0
        shape = graph.allowed.shape
        scores = torch.full(shape, torch.nan) if scores is None else scores.detach()
        scores = scores.cpu().double()
        if scores.shape != shape or (isinstance(edges, Tensor) and edges.shape != shape):
            raise ValueError(
                "tables must have a row for each of graph.writers and a column for each of "
                f"graph.readers, {[*shape]} in this graph"
            )
        self.scores = scores.where(graph.allowed, torch.nan)
        if isinstance(edges, Tensor):
            self.kept = edges.cpu() & graph.allowed
        else:
            self.kept = torch.zeros(shape, dtype=torch.bool)
            for edge in edges:
                self.kept[graph.index(edge)] = True

    def __iter__(self) -> Iterator[str]:
        for writer, reader in self.kept.nonzero().tolist():
            yield f"{self.graph.writers[writer]}->{self.graph.readers[reader]}"

    def __len__(self) -> int:
        return int(self.kept.sum())

    def __contains__(self, edge: str) -> bool:
        return bool(self.kept[self.graph.index(edge)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Circuit):
            return NotImplemented
        have_same_graph = self.graph.identity == other.graph.identity
        return have_same_graph and torch.equal(self.kept, other.kept)

    # Like other sets that can be compared, circuits have no hash.
    __hash__ = None  # type: ignore[assignment]

    def __or__(self, other: "Circuit") -> "Circuit":
        return self._with(self.kept | self._table_of(other), other.found_on)

    def __and__(self, other: "Circuit") -> "Circuit":
        return self._with(self.kept & self._table_of(other), other.found_on)

    def __sub__(self, other: "Circuit") -> "Circuit":
        return self._with(self.kept & ~self._table_of(other), other.found_on)

    def __invert__(self) -> "Circuit":
        return self._with(self.graph.allowed & ~self.kept)

    @property
    def nodes(self) -> tuple[NodeName, ...]:
        """The writers with an outgoing edge, in the order of computation, and then `logits` if an
        edge leads to the logits.
        """
        has_edge = self.kept.any(1).tolist()
        writers = itertools.compress(self.graph.writers, has_edge)
        logits = self.graph.readers[-1:] if self.kept[:, -1].any() else ()
        return (*writers, *logits)

    def without(self, node: str) -> "Circuit":
        """Return the circuit without the edges to a node and from the node.

        Edges to a key head that other heads use too are not removed.

        Args:
            node: the name of the node, such as `a0.h1`, `m0` or `logits`.

        Raises:
            UnknownNameError: if the graph does not have the node; the error names close matches.

        >>> from models import load
        >>> circuit = Circuit(Graph(load("pydoc-4l")), ["input->m0", "m0->logits", "input->logits"])
        >>> list(circuit.without("m0"))
        ['input->logits']
        """
        nodes = (*self.graph.writers, "logits")
        if node not in nodes:
            raise unknown_name(node, nodes, "node of this graph")
        kept = self.kept.clone()
        if node == "logits":
            kept[:, -1] = False
        else:
            writer = self.graph.writers.index(node)
            feeds = feeding(self.graph)
            # An edge to a key head or value head belongs to all heads that share it. Remove the
            # edge only if no other head uses it.
            is_only_user = feeds.sum(0) == 1
            kept[:, feeds[writer] & is_only_user] = False
            kept[writer] = False
        return self._with(kept)

    def pruned(self) -> "Circuit":
        """Return the circuit without edges of unconnected nodes.

        A connected node has at least one incoming and one outgoing edge. Nodes that read nothing,
        such as the embeddings, need no incoming edge. The logits need no outgoing edge. If the
        source is the other text of each pair, a run of the pruned circuit is the same as a run of
        this circuit. With other sources, or if heads share the scale of a norm after attention, the
        runs may differ.

        >>> from models import load
        >>> circuit = Circuit(Graph(load("pydoc-4l")), ["input->m0", "m0->m1", "input->logits"])
        >>> list(circuit.pruned())  # `m1` has no edge to the logits, so `m0` is not connected.
        ['input->logits']
        """
        kept = self.kept
        feeds = feeding(self.graph)
        reads_nothing = ~feeds.any(1)
        while True:
            has_incoming = reads_nothing | (feeds & kept.any(0)).any(1)
            is_connected = has_incoming & kept.any(1)
            # Keep edges to the readers of connected nodes, and all edges to the logits.
            is_used = (feeds & is_connected[:, None]).any(0)
            is_used[-1] = True
            connected = kept & is_connected[:, None] & is_used
            if torch.equal(connected, kept):
                pruned = self._with(kept)
                pruned.n_left_out = self.n_left_out + len(self) - len(pruned)
                return pruned
            kept = connected

    def drawn(self) -> tuple[list[list[str]], list["Arrow"]]:
        """Return the connected nodes, in rows from the input upward, and the edges between them."""
        from interp.plots.view import Arrow

        pruned = self.pruned()
        rows: dict[Any, list[str]] = {}
        arrows = []
        for node in pruned.nodes:
            if node.layer is None:
                # All inputs are in one row, and the logits are in a row of their own.
                row: Any = node == "logits"
            else:
                row = (node.layer, node.part[0])
            rows.setdefault(row, []).append(node)
        writers, readers = self.graph.writers, self.graph.readers
        scores = pruned.scores.nan_to_num()
        nodes = {*pruned.nodes}
        feeds = feeding(self.graph)
        for writer, reader in pruned.kept.nonzero().tolist():
            users = [writers[user] for user in feeds[:, reader].nonzero().flatten().tolist()]
            kind = readers[reader].kind
            label = kind if kind in "qkv" else ""
            score = scores[writer, reader].item()
            # If several heads share a key head, an edge to it is drawn to each of these heads that
            # is in the circuit.
            for node in [user for user in users if user in nodes] or ["logits"]:
                arrows.append(Arrow(writers[writer], node, label, score))
        return [*rows.values()], arrows

    def as_json(self) -> dict[str, Any]:
        """Return the edges with their scores, and the nodes, in the JSON form of all results; see
        `interp.json_form`.
        """
        labels = {"edge": [*self]}
        tables = {
            "edge.name": Table([*self], "edge"),
            "edge.score": Table(self.scores[self.kept], "edge", "unit of the metric", labels),
            "node.name": Table([*self.nodes], "node"),
            "n_edges": Table(int(self.graph.allowed.sum()), unit="edges of the model"),
        }
        return form("Circuit", tables, {"found_on": self.found_on})

    def plot(self) -> "Figure":
        """Return a figure of the nodes in rows of layers, with the edges. It needs the extra
        `plots`.
        """
        return self.view().figure

    def view(self) -> plots.View:
        """Return a view of the nodes in rows of layers, with the edges."""
        return plots.circuit(self)

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that `save` can call, by suffix."""
        return {**super()._writers(), **dict.fromkeys(storage.SAFETENSORS, self._save)}

    def _save(self, path: Path) -> None:
        """Write the edges, the scores and the identity of the graph."""
        facts = {
            "graph": self.graph.identity,
            "found_on": sorted(self.found_on),
            "n_left_out": self.n_left_out,
        }
        storage.save(path, _FORMAT, {"kept": self.kept, "scores": self.scores}, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: Graph) -> "Circuit":
        """Load a circuit of a graph from a file that was written by `save`.

        Args:
            path: the file.
            graph: the graph of the same model.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged, or was not written by `save`.
            ValueError: if the circuit belongs to another graph.
        """
        with storage.opened(storage.path_of(path), _FORMAT) as (tensors, facts):
            identity = facts["graph"]
            found_on = frozenset(facts["found_on"])
        graph.require(identity)
        circuit = cls(graph, tensors["kept"], scores=tensors["scores"], found_on=found_on)
        # Files of earlier versions do not contain this number.
        circuit.n_left_out = facts.get("n_left_out", 0)
        return circuit

    def _with(self, kept: Tensor, found_on: Iterable[str] = ()) -> "Circuit":
        """Return a circuit of other edges with the same scores."""
        all_found_on = self.found_on.union(found_on)
        return Circuit(self.graph, kept, scores=self.scores, found_on=all_found_on)

    def _table_of(self, other: "Circuit") -> Tensor:
        """Return the edges of another circuit of the same graph as a table."""
        self.graph.require(other.graph.identity)
        return other.kept

    def __repr__(self) -> str:
        n_edges = int(self.graph.allowed.sum())
        # Count the nodes with edges, and the logits.
        n_nodes = int(self.graph.allowed.any(1).sum()) + 1
        counts = f"{len(self)} of {n_edges} edges, {len(self.nodes)} of {n_nodes} nodes"
        lines = [f"Circuit: {counts}", *self._layers_in_words(), *self._edges_in_words()]
        if self.n_left_out:
            left_out = number_of(self.n_left_out, "edge")
            lines.append(f"  left out: {left_out} on no path from the input to the logits")
        return "\n".join(lines)

    def _layers_in_words(self) -> list[str]:
        """Return a line for each of the first layers, with its heads and its other nodes."""
        nodes_of: dict[int, list[NodeName]] = {}
        for node in self.nodes:
            if node.layer is not None:
                nodes_of.setdefault(node.layer, []).append(node)
        rows = []
        for layer, nodes in [*nodes_of.items()][:_LAYERS_SHOWN]:
            heads = [str(node.number) for node in nodes if node.kind == "head"]
            numbers = ", ".join(heads[:_HEADS_SHOWN])
            if n_more := len(heads) - _HEADS_SHOWN:
                numbers += f", … {n_more} more" if n_more > 0 else ""
            in_words = f"head{'s' * (len(heads) > 1)} {numbers}" if heads else ""
            others = ["MLP" if n.kind == "mlp" else str(n) for n in nodes if n.kind != "head"]
            rows.append([f"layer {layer}", in_words, ", ".join(others)])
        # A circuit without heads has no column of heads.
        filled = [column for column in zip(*rows, strict=True) if any(column)]
        lines = aligned_rows([*zip(*filled, strict=True)])
        if len(nodes_of) > len(rows):
            lines.append(f"… {number_of(len(nodes_of) - len(rows), 'more layer')}")
        return [f"  {line}" for line in lines]

    def _edges_in_words(self) -> list[str]:
        """Return a heading, and a line for each of the edges with the largest absolute scores.

        Edges without a score are last, in the order of the circuit.
        """
        scores = self.scores[self.kept].tolist()
        if not scores:
            return []
        edges = sorted(
            zip(self, scores, strict=True),
            key=lambda edge: -math.inf if math.isnan(edge[1]) else abs(edge[1]),
            reverse=True,
        )
        rows = []
        for name, score in edges[:_EDGES_SHOWN]:
            rows.append([name, "" if math.isnan(score) else f"{score:+.4g}"])
        lines = [f"    {line}" for line in aligned_rows(rows)]
        if len(edges) > len(rows):
            lines.append(f"    … {number_of(len(edges) - len(rows), 'more edge')}: list(circuit)")
        meaning = "the effect of replacing each edge (negative if the edge helps)"
        heading = "edges" if math.isnan(edges[0][1]) else f"edges, with {meaning}"
        return [f"  {heading}:", *lines, *self._shared_heads_in_words([name for name, _ in rows])]

    def _shared_heads_in_words(self, edges: Sequence[str]) -> list[str]:
        """Return a line that explains the first reader of edges that several heads share."""
        for edge in edges:
            reader = edge.split("->")[1]
            heads = self.graph.query_heads_of(reader)
            if len(heads) > 1:
                listed = f"{', '.join(map(str, heads[:-1]))} and {heads[-1]}"
                return [f"  <k> and <v> count key heads: query heads {listed} share {reader}"]
        return []


def largest(
    strength: Float[Tensor, "writer reader"], n: int, graph: Graph
) -> Bool[Tensor, "writer reader"]:
    """Return a table of the `n` strongest edges of a graph.

    Of equally strong edges, the earlier edges are returned.

    Args:
        strength: the strength of each edge.
        n: the number of edges.
        graph: the graph.

    Raises:
        ValueError: if the graph has fewer than `n` edges.
    """
    require_integer("n", n, least=0, most=int(graph.allowed.sum()))
    order = strength[graph.allowed].argsort(descending=True, stable=True)
    places = graph.allowed.nonzero()[order[:n]]
    kept = torch.zeros_like(graph.allowed)
    kept[places[:, 0], places[:, 1]] = True
    return kept


def feeding(graph: Graph) -> Bool[Tensor, "writer reader"]:
    """Return a table that is True where a reader belongs to the same node as a writer.

    A head, for example, is one writer and has three readers: its query, its key and its value.
    Heads that share keys and values also share these readers.
    """
    feeds = torch.zeros(graph.allowed.shape, dtype=torch.bool)
    for sublayer in graph.sublayers:
        heads = range(sublayer.heads.start, sublayer.heads.stop)
        for part in sublayer.readers:
            heads_per_part = len(heads) // (part.stop - part.start)
            for n, head in enumerate(heads):
                feeds[head, part.start + n // heads_per_part] = True
    return feeds
