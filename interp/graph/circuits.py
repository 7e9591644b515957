"""Circuits found from scores of edges or drawn at random, and files in the format of the MIB benchmark."""

import heapq
import json
import os
import re
import warnings
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import storage
from interp.graph.circuit import Circuit, feeding, largest
from interp.graph.graph import Graph
from interp.results.result import Result


def above(graph: Graph, scores: Result, threshold: float, signed: bool = False) -> Circuit:
    """Keep the edges that matter more than a threshold, then prune to what is connected.

    Args:
        graph: the graph of the model.
        scores: effects [edge, example] of all edges, as `edge_patching` and `edge_attribution` give them.
        threshold: in the unit of the scores.
        signed: whether only edges matter that help: those along which replaced values move the metric
            towards the other text's, on average. Otherwise those that move it away do too.

    Raises:
        TypeError: if scores are no Result.
        ValueError: if scores are not finite, or not of all edges of this graph; or, with `signed`, if they do
            not tell the metric of both texts.
    """
    return _circuit(graph, scores, strengths(graph, scores, signed) > threshold)


def top(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Keep the `n` edges that matter most, then prune to what is connected; for arguments see `above`.

    Raises:
        ValueError: if there are not so many edges.
    """
    return _circuit(graph, scores, largest(strengths(graph, scores, signed), n, graph))


def greedy(graph: Graph, scores: Result, n: int, signed: bool = False) -> Circuit:
    """Take `n` edges one by one from the logits backward, then prune to what is connected.

    Each is the one that matters most of those that lead to a node taken so far (Hanna et al. 2024). The circuit may
    have fewer than `n`: edges from a node that nothing taken leads to, such as the last ones taken, are pruned. For
    arguments see `above`.

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
    draw = torch.rand(graph.allowed.shape, generator=torch.Generator().manual_seed(seed))
    return Circuit(graph, largest(draw, n, graph))


def strengths(graph: Graph, scores: Result, signed: bool) -> Float[Tensor, "writer reader"]:
    """Strength of each edge: the size of its mean effect or, signed, how much the edge helps.

    For arguments and errors see `above`.
    """
    if not isinstance(graph, Graph) or not isinstance(scores, Result):
        got = f"{type(graph).__name__} and {type(scores).__name__}"
        raise TypeError(
            f"circuits are made of a Graph and a Result with scores of its edges; got {got}"
        )
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

    An edge helps if replacing it moves the metric towards the target's, whichever text was edited. Without base and
    target, an edge is taken to help if replacing it lowers the metric.
    """
    mean = scores.values.mean(-1)
    rises = (
        scores.base is not None
        and scores.target is not None
        and (scores.target - scores.base).mean() > 0
    )
    return mean if rises else -mean


def read_mib(path: str | os.PathLike[str], graph: Graph) -> Circuit:
    """Reads a circuit in the JSON format of the MIB benchmark (Mueller et al. 2025).

    That format has keys and values for each query head. Where heads share them, their scores are summed, and
    an edge is kept if one of them is. Its scores are of a loss, so they change their sign here.

    Raises:
        FileNotFoundError: if there is no such file.
        CacheError: if it is not such a file.
        ValueError: if it is not of this graph.
    """
    with storage.one_error(path, "be a circuit in MIB's JSON format"):
        table = json.loads(Path(path).read_text())
        edges = [
            (name, float(edge["score"]), bool(edge["in_graph"]))
            for name, edge in table["edges"].items()
        ]
    places = {name: at for at, names in _mib_names(graph).items() for name in names}
    if {*places} != {name for name, _, _ in edges}:
        odd = next(iter({*places} ^ {name for name, _, _ in edges}))
        raise ValueError(
            f"the circuit in {path} must have the edges of this graph; they differ in {odd}"
        )
    scores = torch.zeros(graph.allowed.shape)
    kept = torch.zeros_like(graph.allowed)
    for name, score, in_graph in edges:
        scores[places[name]] -= score
        kept[places[name]] |= in_graph
    return Circuit(graph, kept, scores)


def write_mib(circuit: Circuit, path: str | os.PathLike[str]) -> None:
    """Writes a circuit in the JSON format of the MIB benchmark, completely or not at all.

    Scores that are not known become 0. For signs and shared key heads see `read_mib`.

    Raises:
        FileNotFoundError: if there is no such directory.
        ValueError: if the graph has nodes that the format has not: biases, or embeddings apart.

    Warns:
        UserWarning: if heads share keys and values. Each gets an equal share of the score, and the file has
            more edges than the circuit.
    """
    graph = circuit.graph
    edges: dict[str, dict[str, object]] = {}
    for (writer, reader), names in _mib_names(graph).items():
        score = -circuit.scores[writer, reader].nan_to_num().item() / len(names)
        kept = bool(circuit.kept[writer, reader])
        edges |= {name: {"score": score, "in_graph": kept} for name in names}
    if len(edges) > graph.allowed.sum():
        warnings.warn(
            "MIB's format has no shared key heads: each query head gets an equal share of their scores",
            stacklevel=2,
        )
    first, kept_nodes = graph.layers[0], {*circuit.nodes}
    described = {
        "cfg": {
            "n_layers": len(graph.layers),
            "n_heads": first.heads.stop - first.heads.start,
            "parallel_attn_mlp": first.is_parallel,
            "d_model": graph.model.config.d_model,
        },
        "nodes": {
            name: {"in_graph": name in kept_nodes} for name in (*_joined_edges(graph), "logits")
        },
        "edges": edges,
    }
    with storage.replacing(Path(path)) as partial:
        partial.write_text(json.dumps(described))


def _joined_edges(graph: Graph) -> list[str]:
    """The writers that have edges."""
    return [name for name, row in zip(graph.writers, graph.allowed, strict=True) if row.any()]


def _mib_names(graph: Graph) -> dict[tuple[int, int], list[str]]:
    """The names that MIB's format has for each edge: several where query heads share a key head."""
    odd = [
        name for name in _joined_edges(graph) if not re.fullmatch(r"input|a\d+\.h\d+|m\d+", name)
    ]
    if odd or any(layer.mlp is None for layer in graph.layers):
        raise ValueError(
            "MIB's format has edges from the input, heads and an MLP in each block; this graph has "
            f"{odd or 'blocks without MLPs'}"
        )
    readers = {n: [name] for n, name in enumerate(graph.readers)}
    for layer in graph.layers:
        heads = graph.writers[layer.heads]
        for letter, part in (("k", layer.k), ("v", layer.v)):
            n_heads = len(heads) // (part.stop - part.start)
            for n in range(part.stop - part.start):
                sharing = heads[n * n_heads : (n + 1) * n_heads]
                readers[part.start + n] = [f"{head}<{letter}>" for head in sharing]
    return {
        (writer, reader): [f"{graph.writers[writer]}->{name}" for name in readers[reader]]
        for writer, reader in graph.allowed.nonzero().tolist()
    }


def _circuit(graph: Graph, scores: Result, kept: Tensor) -> Circuit:
    found_on = scores.about.get("texts", ())
    return Circuit(graph, kept, -_table(graph, _helps(scores)), found_on).pruned()


def _table(graph: Graph, of_edges: Float[Tensor, " edge"]) -> Float[Tensor, "writer reader"]:
    """Lay out one number for each edge as a table; NaN where there is no edge."""
    table = of_edges.new_full(graph.allowed.shape, torch.nan, device="cpu")
    table[graph.allowed] = of_edges.cpu()
    return table
