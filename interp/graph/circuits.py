"""Circuits that are found from scores of edges or drawn at random."""

import heapq

import torch
from jaxtyping import Float
from torch import Tensor

from interp.graph.circuit import Circuit, feeding, largest
from interp.graph.graph import Graph
from interp.kinds import require_made
from interp.results.result import Result


def above(graph: Graph, scores: Result, threshold: float, signed: bool = False) -> Circuit:
    """Keep the edges with a strength above a threshold, then prune edges that are not connected.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, such as a result of `edge_patching` or
            `edge_attribution`.
        threshold: the threshold in the unit of the scores.
        signed: whether to keep only edges that help: on average, replacing the edge moves the
            metric towards the metric of the other text. Default: keep edges with large effects of
            either sign.

    Raises:
        ValueError: if scores are not finite, if they do not contain all edges of this graph, or,
            with `signed`, if they lack the metric of both texts.
    """
    return _circuit(graph, scores, strengths(graph, scores, signed) > threshold)


def top(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Keep the `n` strongest edges, then prune edges that are not connected.

    See `above` for the arguments.

    Raises:
        ValueError: if the graph has fewer than `n` edges.
    """
    return _circuit(graph, scores, largest(strengths(graph, scores, signed), n, graph))


def greedy(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Select `n` edges one by one from the logits backward, then prune unconnected edges.

    Each step selects the strongest edge that leads to a node of the circuit so far (Hanna et al.
    2024). The circuit may have fewer than `n` edges: edges from a node without incoming edges, such
    as the edges selected last, are pruned. See `above` for the arguments.

    Raises:
        ValueError: if the graph has fewer than `n` edges.
    """
    strength, feeds = strengths(graph, scores, signed), feeding(graph)
    kept = largest(strength, n, graph).zero_()
    waiting: list[tuple[float, int, int]] = []

    def reach(reader: int) -> None:
        if reader not in reached:
            reached.add(reader)
            for writer in graph.allowed[:, reader].nonzero().flatten().tolist():
                heapq.heappush(waiting, (-strength[writer, reader].item(), writer, reader))

    reached: set[int] = set()
    reach(len(graph.readers) - 1)
    for _ in range(n):
        if not waiting:
            break
        _, writer, reader = heapq.heappop(waiting)
        kept[writer, reader] = True
        for before in feeds[writer].nonzero().flatten().tolist():
            reach(before)
    return _circuit(graph, scores, kept)


def random(graph: Graph, n: int, seed: int = 0) -> Circuit:
    """Return `n` random edges of the graph as a circuit, for comparison.

    Raises:
        ValueError: if the graph has fewer than `n` edges.
    """
    require_made("graph", graph, Graph)
    draw = torch.rand(graph.allowed.shape, generator=torch.Generator().manual_seed(seed))
    return Circuit(graph, largest(draw, n, graph))


def strengths(graph: Graph, scores: Result, signed: bool) -> Float[Tensor, "writer reader"]:
    """Return the strength of each edge: the size of its mean effect or, signed, how much it helps.

    See `above` for the arguments and errors.
    """
    require_made("graph", graph, Graph)
    require_made("scores", scores, Result)
    if scores.axes != ("edge", "example") or scores.labels["edge"] != graph.edges:
        raise ValueError(
            f"scores must be [edge, example] of the {len(graph.edges)} edges of this graph; got "
            f"{[*scores.axes]} of {[*scores.values.shape]}"
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
    rises = (
        scores.base is not None
        and scores.target is not None
        and (scores.target - scores.base).mean() > 0
    )
    return mean if rises else -mean


def _circuit(graph: Graph, scores: Result, kept: Tensor) -> Circuit:
    found_on = scores.about.get("texts", ())
    return Circuit(graph, kept, -_table(graph, _helps(scores)), found_on).pruned()


def _table(graph: Graph, of_edges: Float[Tensor, " edge"]) -> Float[Tensor, "writer reader"]:
    """Return one number for each edge as a table, with NaN where there is no edge."""
    table = of_edges.new_full(graph.allowed.shape, torch.nan, device="cpu")
    table[graph.allowed] = of_edges.cpu()
    return table
