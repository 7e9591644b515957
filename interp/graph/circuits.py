"""Circuits found from scores of edges or drawn at random."""

import heapq

import torch
from jaxtyping import Float
from torch import Tensor

from interp.graph.circuit import Circuit, feeding, largest
from interp.graph.graph import Graph
from interp.kinds import require_made
from interp.results.result import Result


def above(graph: Graph, scores: Result, threshold: float, signed: bool = False) -> Circuit:
    """Keep the edges that matter more than a threshold, then prune to what is connected.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, as `edge_patching` and `edge_attribution` give
            them.
        threshold: in the unit of the scores.
        signed: whether only edges matter that help: those along which replaced values move the
            metric towards the other text's, on average. Otherwise those that move it away do too.

    Raises:
        ValueError: if scores are not finite, or not of all edges of this graph; or, with `signed`,
            if they do not tell the metric of both texts.
    """
    return _circuit(graph, scores, strengths(graph, scores, signed) > threshold)


def top(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Keep the `n` edges that matter most, then prune; for arguments see `above`.

    Raises:
        ValueError: if there are not so many edges.
    """
    return _circuit(graph, scores, largest(strengths(graph, scores, signed), n, graph))


def greedy(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Take `n` edges one by one from the logits backward, then prune to what is connected.

    Each is the one that matters most of those that lead to a node taken so far (Hanna et al. 2024).
    The circuit may have fewer than `n`: edges from a node that nothing taken leads to, such as the
    last ones taken, are pruned. For arguments see `above`.

    Raises:
        ValueError: if there are not so many edges.
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
    """`n` edges drawn at random from all of the graph, to compare circuits with.

    Raises:
        ValueError: if there are not so many edges.
    """
    require_made("graph", graph, Graph)
    draw = torch.rand(graph.allowed.shape, generator=torch.Generator().manual_seed(seed))
    return Circuit(graph, largest(draw, n, graph))


def strengths(graph: Graph, scores: Result, signed: bool) -> Float[Tensor, "writer reader"]:
    """Strength of each edge: the size of its mean effect or, signed, how much the edge helps.

    For arguments and errors see `above`.
    """
    require_made("graph", graph, Graph)
    require_made("scores", scores, Result)
    if scores.axes != ("edge", "example") or scores.labels["edge"] != graph.edges:
        raise ValueError(
            f"scores must be [edge, example] of the {len(graph.edges)} edges of this graph; got "
            f"{[*scores.axes]} of {[*scores.values.shape]}"
        )
    if not scores.values.isfinite().all():
        raise ValueError("scores must be finite for every edge of this graph; got others")
    if signed and (scores.base is None or scores.target is None):
        raise ValueError(
            "signed scores must have base and target, the metric of both texts; got none"
        )
    helps = _table(graph, _helps(scores))
    return helps if signed else helps.abs()


def _helps(scores: Result) -> Float[Tensor, " edge"]:
    """The mean effect of each edge, positive where the edge helps.

    An edge helps if replacing it moves the metric towards the target's, whichever text was edited.
    Without base and target, an edge is taken to help if replacing it lowers the metric.
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
    """Lay out one number for each edge as a table; NaN where there is no edge."""
    table = of_edges.new_full(graph.allowed.shape, torch.nan, device="cpu")
    table[graph.allowed] = of_edges.cpu()
    return table
