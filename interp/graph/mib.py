"""Files in both formats of the MIB benchmark: circuits, and scores of nodes and neurons.

The formats are JSON and PyTorch's (Mueller et al. 2025). MIB has keys and values for each query
head. If heads share keys and values, their scores are summed when a file is read, and divided
equally when a file is written. MIB's scores are effects on a loss, so scores of edges change their
sign here. Scores of nodes and neurons are not changed.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import CacheError
from hooks.base import storage, strict_json, warn
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph
from interp.results.node import NodeName, node_name

_NEEDED = ("cfg", "src_nodes", "dst_nodes", "edges_scores", "edges_in_graph", "nodes_in_graph")


class MIB(NamedTuple):
    """The contents of a file of the MIB benchmark.

    Attributes:
        circuit: the edges and their scores.
        node_scores: the score of each node except the logits; None if the file has no scores of
            nodes.
        neuron_scores: the score of each number in the output of a node; None if the file has no
            scores of neurons. NaN means that the number has no score.
    """

    circuit: Circuit
    node_scores: Float[Tensor, " node"] | None = None
    neuron_scores: Float[Tensor, "node d_model"] | None = None


def read_mib(path: str | os.PathLike[str], graph: Graph) -> MIB:
    """Read a file of the MIB benchmark: PyTorch's format if it ends in `.pt`, otherwise JSON.

    If query heads share a key head, an edge is kept if it is kept for one of these heads.

    Raises:
        FileNotFoundError: if the file does not exist.
        CacheError: if the file does not have a format of MIB.
        ValueError: if the file does not belong to this graph.
    """
    is_pt = Path(path).suffix.lower() == ".pt"
    places = {name: at for at, names in _mib_names(graph).items() for name in names}
    with storage.one_error(path, "be a circuit in a format of MIB", CacheError):
        # In files of MIB, NaN is the score of a node without a score.
        table = storage.read_saved(Path(path)) if is_pt else json.loads(Path(path).read_text())
        edges, nodes, neurons = _of_pt(table, graph, places) if is_pt else _of_json(table)
    if odd := {*places} ^ {*edges}:
        raise ValueError(
            f"the circuit in {path} must have the edges of this graph; they differ in {min(odd)}"
        )
    scores = torch.zeros(graph.allowed.shape)
    kept = torch.zeros_like(graph.allowed)
    for name, (score, in_graph) in edges.items():
        scores[places[name]] -= score
        kept[places[name]] |= in_graph
    return MIB(Circuit(graph, kept, scores), nodes, neurons)


def write_mib(
    circuit: Circuit,
    path: str | os.PathLike[str],
    node_scores: Float[Tensor, " node"] | None = None,
    neuron_scores: Float[Tensor, "node d_model"] | None = None,
) -> None:
    """Write a file of the MIB benchmark, completely or not at all. Its suffix decides the format.

    Unknown scores of edges become 0. Neurons are in the graph if their node is in the graph. JSON
    files do not contain scores of nodes that are NaN, and MIB reads these nodes as not scored.

    Args:
        circuit: the edges and their scores.
        path: the file; its name ends in `.pt` or `.json`.
        node_scores, neuron_scores: the scores of the nodes in MIB's order: the input, then the
            heads and the MLP of each block.

    Raises:
        FileNotFoundError: if the directory does not exist.
        ValueError: if the path has another suffix; if the graph has nodes that the format does not
            have, which are biases and separate embeddings; if the scores do not fit the nodes; or
            if JSON cannot represent a score, such as NaN for some neurons of a node.

    Warns:
        UserWarning: if heads share keys and values. Each head receives an equal share of the score,
            and the file has more edges than the circuit.
    """
    suffix = storage.suffix_of(path, (".pt", ".json"))
    graph, edges = circuit.graph, dict[str, tuple[float, bool]]()
    for at, names in _mib_names(graph).items():
        share = -circuit.scores[at].nan_to_num().item() / len(names)
        edges |= {name: (share, bool(circuit.kept[at])) for name in names}
    if len(edges) > graph.allowed.sum():
        warn(
            "MIB's format has no shared key heads; each query head receives an equal share of "
            "their scores",
        )
    nodes, width = _joined_edges(graph), graph.model.config.d_model
    for name, scores, shape in (
        ("node_scores", node_scores, (len(nodes),)),
        ("neuron_scores", neuron_scores, (len(nodes), width)),
    ):
        if scores is not None and scores.shape != shape:
            raise ValueError(f"{name} must be {[*shape]} in this graph; got {[*scores.shape]}")
    kept = [name in circuit.nodes for name in nodes]
    make = _pt if suffix == ".pt" else _json
    described = make(
        _config(graph), dict(zip(nodes, kept, strict=True)), edges, node_scores, neuron_scores
    )
    text = "" if make is _pt else strict_json.dumps(described)
    with storage.replacing(Path(path)) as partial:
        if make is _pt:
            torch.save(described, partial)
        else:
            partial.write_text(text)


Edges = dict[str, tuple[float, bool]]
"""The score of each edge, and whether it is in the circuit."""
Scores = Tensor | None


def _of_json(table: Any) -> tuple[Edges, Scores, Scores]:
    edges = {
        name: (float(edge["score"]), bool(edge["in_graph"]))
        for name, edge in table["edges"].items()
    }
    nodes = [node for name, node in table["nodes"].items() if name != "logits"]

    def scores(key: str) -> Tensor | None:
        known = [node[key] for node in nodes if key in node]
        if not known:
            return None
        # A node without a score has NaN, or a list of NaN.
        unscored = torch.full_like(torch.tensor(known[0], dtype=torch.float32), torch.nan).tolist()
        return torch.tensor([node.get(key, unscored) for node in nodes])

    return edges, scores("score"), scores("neurons_scores")


def _json(
    config: dict[str, Any], nodes: dict[str, bool], edges: Edges, score: Scores, neurons: Scores
) -> dict[str, Any]:
    described: dict[str, dict[str, Any]] = {name: {"in_graph": n} for name, n in nodes.items()}
    for at, (name, kept) in enumerate(nodes.items()):
        if score is not None and not score[at].isnan():
            described[name]["score"] = float(score[at])
        if neurons is not None:
            described[name]["neurons"] = [kept] * neurons.shape[1]
        if neurons is not None and not neurons[at].isnan().all():
            described[name]["neurons_scores"] = neurons[at].tolist()
    described["logits"] = {"in_graph": True}
    table = {name: {"score": score, "in_graph": kept} for name, (score, kept) in edges.items()}
    return {"cfg": config, "nodes": described, "edges": table}


def _of_pt(
    table: Mapping[str, Any], graph: Graph, names: Iterable[str]
) -> tuple[Edges, Scores, Scores]:
    config, sources, readers, scores, kept, _ = (table[key] for key in _NEEDED)
    writers, columns = _joined_edges(graph), _readers(_config(graph))
    shape = bool(config["parallel_attn_mlp"]), [*sources], [*readers]
    edges = {}
    if shape == (_config(graph)["parallel_attn_mlp"], writers, columns):
        for name in names:
            writer, _, reader = name.partition("->")
            at = writers.index(writer), columns.index(reader)
            edges[name] = float(scores[at]), bool(kept[at])
    return edges, table.get("nodes_scores"), table.get("neurons_scores")


def _pt(
    config: dict[str, Any], nodes: dict[str, bool], edges: Edges, score: Scores, neurons: Scores
) -> dict[str, Any]:
    readers = _readers(config)
    table, in_graph = torch.zeros(2, len(nodes), len(readers))
    for name, (value, kept) in edges.items():
        writer, _, reader = name.partition("->")
        at = [*nodes].index(writer), readers.index(reader)
        table[at], in_graph[at] = value, kept
    is_in = torch.tensor([*nodes.values()])
    values = [config, [*nodes], readers, table, in_graph.bool(), is_in]
    described = dict(zip(_NEEDED, values, strict=True))
    if score is not None:
        described["nodes_scores"] = score
    if neurons is not None:
        described["neurons_scores"] = neurons
        described["neurons_in_graph"] = is_in[:, None].expand(*neurons.shape).clone()
    return described


def _config(graph: Graph) -> dict[str, Any]:
    first = graph.layers[0]
    return {
        "n_layers": len(graph.layers),
        "n_heads": first.heads.stop - first.heads.start,
        "parallel_attn_mlp": first.is_parallel,
        "d_model": graph.model.config.d_model,
    }


def _readers(config: Mapping[str, Any]) -> list[str]:
    readers: list[NodeName] = []
    for layer in range(config["n_layers"]):
        heads = range(config["n_heads"])
        readers += [node_name(layer, part, head) for part in "qkv" for head in heads]
        readers.append(node_name(layer, "mlp"))
    return [*map(str, readers), "logits"]


def _joined_edges(graph: Graph) -> list[str]:
    """Return the names of the writers that have edges."""
    return [str(name) for name, row in zip(graph.writers, graph.allowed, strict=True) if row.any()]


def _mib_names(graph: Graph) -> dict[tuple[int, int], list[str]]:
    """Return the names of each edge in MIB's format: several if query heads share a key head."""
    others = [name for name in graph.writers if name.kind not in ("input", "head", "mlp")]
    odd = [*{*others} & {*_joined_edges(graph)}]
    if odd or any(layer.mlp is None for layer in graph.layers):
        raise ValueError(
            "MIB's format has edges from the input, heads and an MLP in each block; this graph has "
            f"{odd or 'blocks without MLPs'}"
        )
    readers = {n: [str(name)] for n, name in enumerate(graph.readers)}
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
