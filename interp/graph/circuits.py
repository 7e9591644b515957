"""Circuits that are found from scores of edges, or drawn at random.

`above`, `top` and `greedy` select edges by their strength: the absolute mean effect of an edge or,
with `signed=True`, how much the edge helps. All three prune edges that are not connected.
"""

import heapq

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import require_integer, seeded, warn
from interp.graph.circuit import Circuit, feeding, largest
from interp.graph.graph import Graph
from interp.kinds import require_made
from interp.results.result import Result

__all__ = ["above", "greedy", "random", "top"]

REMEDY = "use edge_attribution(model, pairs, 'eap_ig_inputs'), more pairs, or more edges"
"""What to do if a circuit does nothing, for warnings and printed results."""

_FEW = 10


def above(graph: Graph, scores: Result, threshold: float, signed: bool = False) -> Circuit:
    """Return the circuit of all edges with a strength above a threshold.

    Edges of unconnected nodes are then pruned, see `Circuit.pruned`.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, such as a result of `edge_patching` or
            `edge_attribution`.
        threshold: the threshold in the unit of the scores.
        signed: whether to keep only edges that help: on average, replacing the edge moves the
            metric towards the metric of the other text. Default: keep edges with large effects of
            either sign.

    Returns:
        The circuit, pruned: the edges with a mean effect above the threshold.

    Raises:
        ValueError: if scores are not finite, if they do not contain all edges of this graph, or,
            with `signed`, if they lack the metric of both texts.

    Warns:
        UserWarning: if fewer than half of at least 10 selected edges are on a path.

    >>> from interp import Pairs, edge_attribution
    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> scores = edge_attribution(model, pairs)  # in logits
    >>> len(above(Graph(model), scores, threshold=1.0))
    12
    """
    return _checked(_circuit(graph, scores, strengths(graph, scores, signed) > threshold))


def top(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Return the circuit of the `n` strongest edges.

    Edges of unconnected nodes are then pruned, so the circuit may have fewer than `n` edges:
    `n_left_out` is the number of pruned edges. The function `greedy` selects edges that are
    connected.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, such as a result of `edge_attribution`.
        signed: whether to keep only edges that help, as in the function `above`. Default: keep
            edges with large effects of either sign.
        n: the number of edges to select.

    Returns:
        The circuit, pruned, of at most `n` edges.

    Raises:
        ValueError: if the graph has fewer than `n` edges, or as in the function `above`.

    Warns:
        UserWarning: if fewer than half of at least 10 selected edges are on a path.

    >>> from interp import Pairs, edge_attribution
    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> top(Graph(model), edge_attribution(model, pairs), 10)
    Circuit: 9 of 479 edges, 7 of 22 nodes
      layer 0  head 3  MLP
      layer 1          MLP
      layer 2          MLP
      layer 3          MLP
      edges, with the effect of replacing each edge (negative if the edge helps):
        m2->logits       -4.864
        input->a0.h3<v>  -4.835
        input->m0        -3.429
        a0.h3->m0        -2.86
        m1->logits       -2.819
        m3->logits       -2.763
        m0->m1           +2.271
        m1->m2           -2.134
        m1->m3           +1.991
      left out: 1 edge on no path from the input to the logits
    """
    return _checked(strongest(graph, scores, n, signed))


def strongest(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Return the same circuit as `top`, without a warning if hardly any edge is on a path."""
    return _circuit(graph, scores, largest(strengths(graph, scores, signed), n, graph))


def greedy(
    graph: Graph, scores: Result, n: int, signed: bool = False, *, exact: bool = False
) -> Circuit:
    """Return the circuit of `n` edges that are selected one by one, from the logits backward.

    Each step selects the strongest edge that leads to a node of the circuit so far (Hanna et al.
    2024). So every selected edge has a path to the logits, unlike an edge that `top` selects. At
    the end, edges from nodes without incoming edges are pruned, so the circuit may have fewer than
    `n` edges: `n_left_out` is the number of pruned edges.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, such as a result of `edge_attribution`. The
            strength of an edge is its absolute mean effect.
        n: the number of edges to select.
        signed: whether to use how much an edge helps as its strength, instead of its absolute mean
            effect; see `above`.
        exact: whether the pruned circuit must have exactly `n` edges. An edge that would connect
            too many others is then passed over. If no edge is left to select, the circuit has fewer
            edges, with a warning; this can happen for circuits of a few edges, and of nearly all
            edges of the graph. Default: False, as in the paper.

    Returns:
        A circuit with the scores of the edges, in the metric's unit.

    Raises:
        ValueError: if the graph has fewer than `n` edges, or as in the function `above`.

    Warns:
        UserWarning: if fewer than half of at least 10 selected edges are on a path; with `exact`,
            if the circuit has fewer than `n` edges.

    >>> from interp import Pairs, edge_attribution
    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> circuit = greedy(Graph(model), edge_attribution(model, pairs), 10)
    >>> len(circuit), circuit.n_left_out
    (10, 0)
    >>> list(circuit)[:4]
    ['input->a0.h3<v>', 'input->m0', 'a0.h3->m0', 'm0->m1']
    """
    strength = strengths(graph, scores, signed)
    largest(strength, n, graph)
    circuit = _circuit(graph, scores, _backward(graph, strength, n, exact=exact))
    if exact and len(circuit) < n:
        warn(
            f"exact=True found only {len(circuit)} of {n} connected edges: each other edge would "
            "connect too many edges, or none"
        )
    return _checked(circuit)


def random_backward(graph: Graph, n: int, seed: int) -> Circuit:
    """Return the circuit that `greedy` selects if the strengths of the edges are random.

    Args:
        graph: the graph of the model.
        n: the number of edges that are selected. The edges that are on no path are then pruned.
        seed: the seed of the strengths.
    """
    strength = _table(graph, torch.rand(len(graph.edges), generator=seeded(seed)))
    return Circuit(graph, _backward(graph, strength, n, exact=False)).pruned()


def _backward(
    graph: Graph,
    strength: Float[Tensor, "writer reader"],
    n: int,
    *,
    exact: bool,
) -> Bool[Tensor, "writer reader"]:
    """Return a table of edges that are selected one by one, from the logits backward.

    Args:
        graph: the graph.
        strength: the strength of each edge.
        n: the number of edges; with `exact`, the number of edges after pruning.
        exact: see `greedy`.

    Returns:
        The selected edges. With `exact`, all of them are on a path from the input to the logits.
    """
    feeds = feeding(graph)
    kept = torch.zeros_like(graph.allowed)
    grown = _Connected(feeds)
    # The edges to all reached readers, the strongest edge first.
    candidates: list[tuple[float, int, int]] = []
    reached: set[int] = set()

    def reach(reader: int) -> None:
        if reader not in reached:
            reached.add(reader)
            for writer in graph.allowed[:, reader].nonzero().flatten().tolist():
                heapq.heappush(candidates, (-strength[writer, reader].item(), writer, reader))

    reach(len(graph.readers) - 1)
    n_counted = 0
    while candidates and n_counted < n:
        _, writer, reader = heapq.heappop(candidates)
        n_new = grown.gain(writer, reader) if exact else 1
        if n_counted + n_new > n:
            continue
        n_counted += n_new
        grown.add(writer, reader)
        kept[writer, reader] = True
        for reader_of_writer in feeds[writer].nonzero().flatten().tolist():
            reach(reader_of_writer)
    return kept & grown.from_input if exact else kept


class _Connected:
    """The edges of a growing circuit that are on a path from the input.

    All edges of the circuit must have a path to the logits.

    Args:
        feeds: True where a reader belongs to the same node as a writer; see `feeding`.
    """

    def __init__(self, feeds: Bool[Tensor, "writer reader"]) -> None:
        self._fed_by = [column.nonzero().flatten().tolist() for column in feeds.T]
        # The writers that an edge from the input reaches. Writers that read nothing are the input.
        self._alive = {*(~feeds.any(1)).nonzero().flatten().tolist()}
        self._readers: list[list[int]] = [[] for _ in feeds]

    @property
    def from_input(self) -> Bool[Tensor, "writer #reader"]:
        """True for each writer that an edge from the input reaches."""
        reached = torch.zeros(len(self._readers), 1, dtype=torch.bool)
        reached[[*self._alive]] = True
        return reached

    def gain(self, writer: int, reader: int) -> int:
        """Return how many more edges are on a path from the input after an edge is added."""
        return 0 if writer not in self._alive else 1 + self._reached(reader)[0]

    def add(self, writer: int, reader: int) -> None:
        """Add an edge."""
        self._readers[writer].append(reader)
        if writer in self._alive:
            self._alive |= self._reached(reader)[1]

    def _reached(self, reader: int) -> tuple[int, set[int]]:
        """Return the number of edges and the writers that are newly reached through a reader."""
        n_edges = 0
        writers: set[int] = set()
        readers = [reader]
        while readers:
            for writer in self._fed_by[readers.pop()]:
                if writer not in self._alive and writer not in writers:
                    writers.add(writer)
                    n_edges += len(self._readers[writer])
                    readers += self._readers[writer]
        return n_edges, writers


def random(
    graph: Graph,
    n: int,
    seed: int = 0,
    *,
    connected: bool = False,
    among: Circuit | None = None,
) -> Circuit:
    """Return the circuit of `n` random edges, for comparison.

    In a large graph, random edges are usually on no path from the input to the logits. With
    `connected`, all edges are on a path, but the circuit may still do as much as no edge. A
    comparison that a circuit can lose draws connected edges from the strongest edges:
    `among=greedy(graph, scores, 2 * n, exact=True)`.

    Args:
        graph: the graph of the model.
        n: the number of edges.
        seed: the seed of the choice of edges. Default: 0.
        connected: whether all edges must be on a path from the input to the logits. Random edges
            are then removed, and with them the edges that are on no path any more, until `n` edges
            are left. Default: each set of `n` edges of the graph is equally likely.
        among: the circuit whose edges are drawn. Default: all edges of the graph.

    Returns:
        The circuit of `n` edges. With `connected`, it has fewer edges if fewer edges of `among` are
        on paths, and a few more edges if the removal of any edge would leave fewer than `n`.

    Raises:
        ValueError: if the graph, or `among`, has fewer than `n` edges, or `among` is of another
            graph.

    >>> from models import load
    >>> list(random(Graph(load("pydoc-4l")), 3))
    ['input->m3', 'm0->a1.h1<q>', 'm0->a1.h2<k>']
    """
    require_made("graph", graph, Graph)
    generator = seeded(seed)
    random_numbers = torch.rand(graph.allowed.shape, generator=generator)
    if among is not None:
        require_made("among", among, Circuit)
        graph.require(among.graph.identity)
        require_integer("n", n, least=0)
        if n > len(among):
            raise ValueError(f"among must have at least n edges ({n}); got {len(among)}")
        # The numbers are from 0 to 1, so all other edges are weaker.
        random_numbers -= (~among.kept).float()
    if not connected:
        return Circuit(graph, largest(random_numbers, n, graph))
    require_integer("n", n, least=0, most=int(graph.allowed.sum()))
    whole = Circuit(graph, graph.allowed) if among is None else among
    return _thinned(whole, random_numbers, n)


def _thinned(circuit: Circuit, random_numbers: Float[Tensor, "writer reader"], n: int) -> Circuit:
    """Return a circuit from which random edges are removed until `n` edges on paths are left.

    Args:
        circuit: the circuit, without scores in the result.
        random_numbers: a number for each edge. Edges with small numbers are removed first.
        n: the number of edges that must be left.
    """
    left = Circuit(circuit.graph, circuit.kept).pruned()
    waiting = left.kept.nonzero()
    waiting = waiting[random_numbers[waiting[:, 0], waiting[:, 1]].argsort(stable=True)]
    at_once = len(left) - n
    while len(left) > n and len(waiting):
        at_once = min(at_once, len(left) - n)
        removed = waiting[:at_once]
        kept = left.kept.clone()
        kept[removed[:, 0], removed[:, 1]] = False
        thinner = Circuit(circuit.graph, kept).pruned()
        if len(thinner) >= n:
            left = thinner
            waiting = waiting[at_once:]
            waiting = waiting[left.kept[waiting[:, 0], waiting[:, 1]]]
        elif at_once > 1:
            at_once //= 2
        else:
            # The circuit needs this edge.
            waiting = waiting[1:]
    return Circuit(circuit.graph, left.kept)


def random_pool(graph: Graph, strength: Float[Tensor, "writer reader"], n: int) -> Circuit:
    """Return the edges that random circuits of `n` edges are drawn from by default.

    They are the `2 * n` strongest edges, which `greedy` selects with `exact=True`. They are all
    edges of the graph if it has fewer edges, or if the strength of an edge is unknown.

    Args:
        graph: the graph of the model.
        strength: the strength of each edge; NaN if it is unknown.
        n: the number of edges of a random circuit.
    """
    n_edges = int(graph.allowed.sum())
    if 2 * n >= n_edges or not strength[graph.allowed].isfinite().all():
        return Circuit(graph, graph.allowed)
    return Circuit(graph, _backward(graph, strength, 2 * n, exact=True))


def strengths(graph: Graph, scores: Result, signed: bool) -> Float[Tensor, "writer reader"]:
    """Return the strength of each edge: its absolute mean effect or, if signed, how much it helps.

    The strength is in the unit of the scores, and NaN where there is no edge.

    Args:
        graph, scores, signed: the arguments of the function `above`.

    Raises:
        ValueError: for the reasons of `above`.
    """
    require_made("graph", graph, Graph)
    require_made("scores", scores, Result)
    if scores.axes != ("edge", "example") or scores.labels["edge"] != graph.edges:
        raise ValueError(
            f"scores must be [edge, example] of the {len(graph.edges)} edges of this graph; got "
            f"{[*scores.axes]} of {[*scores.values.shape]} (edge_attribution(model, pairs) gives "
            "them)"
        )
    if not scores.values.isfinite().all():
        raise ValueError("scores must be finite for every edge of this graph; got infinity or NaN")
    if signed and (scores.base is None or scores.target is None):
        raise ValueError(
            "signed scores must have base and target, the metrics of both texts; got scores "
            "without them"
        )
    helps = _table(graph, _helps(scores))
    return helps if signed else helps.abs()


def _helps(scores: Result) -> Float[Tensor, " edge"]:
    """Return the mean effect of each edge, with a positive sign if the edge helps.

    An edge helps if replacing it moves the metric towards the target, for both directions. Without
    base and target, an edge helps if replacing it lowers the metric.
    """
    mean = scores.values.mean(-1)
    if scores.base is None or scores.target is None:
        return -mean
    metric_rises = (scores.target - scores.base).mean() > 0
    return mean if metric_rises else -mean


def _circuit(graph: Graph, scores: Result, kept: Tensor) -> Circuit:
    """Return the circuit of some edges with their scores, without edges of unconnected nodes."""
    found_on = scores.about.get("texts", ())
    effects = -_table(graph, _helps(scores))
    return Circuit(graph, kept, scores=effects, found_on=found_on).pruned()


def _checked(circuit: Circuit) -> Circuit:
    """Return the circuit of selected edges.

    Warns:
        UserWarning: if fewer than half of the selected edges are on a path. The shortest paths have
            a few edges, so the circuit of a few edges is often empty, and there is no warning.
    """
    n_selected = len(circuit) + circuit.n_left_out
    if n_selected >= _FEW and 2 * len(circuit) < n_selected:
        warn(
            f"only {len(circuit)} of {n_selected} selected edges are on a path from the input to "
            f"the logits; the scores may have no common signal: {REMEDY}"
        )
    return circuit


def _table(graph: Graph, of_edges: Float[Tensor, " edge"]) -> Float[Tensor, "writer reader"]:
    """Return one number for each edge as a table, with NaN where there is no edge."""
    table = of_edges.new_full(graph.allowed.shape, torch.nan, device="cpu")
    table[graph.allowed] = of_edges.cpu()
    return table
