"""Files in both formats of the MIB benchmark: circuits, and scores of nodes and neurons.

The formats are JSON and PyTorch's (Mueller et al. 2025). MIB has keys and values for each query
head. If heads share keys and values, their scores are summed when a file is read, and divided
equally when a file is written. Sublayers that are one node, such as `x5` or `a5`, have names like
MIB's `m5`. MIB's scores are effects on a loss, so scores of edges change their
sign here. Scores of nodes and neurons are not changed.
"""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import CacheError
from hooks.base import storage, strict_json, warn
from interp.graph.circuit import Circuit
from interp.graph.graph import Graph

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

    Args:
        path: the file.
        graph: the graph of the model that the file belongs to.

    Raises:
        FileNotFoundError: if the file does not exist.
        CacheError: if the file does not have a format of MIB.
        ValueError: if the file does not belong to this graph.
    """
    is_pt = Path(path).suffix.lower() == ".pt"
    places: dict[str, tuple[int, int]] = {}
    for place, names in _mib_names(graph).items():
        places |= dict.fromkeys(names, place)
    with storage.one_error(path, "be a circuit in a format of MIB", CacheError):
        # Read JSON with NaN, because files of MIB contain NaN for nodes without a score.
        table = storage.read_saved(Path(path)) if is_pt else json.loads(Path(path).read_text())
        edges, nodes, neurons = _of_pt(table, graph, places) if is_pt else _of_json(table)
    if different := {*places} ^ {*edges}:
        raise ValueError(
            f"the circuit in {path} must have the edges of this graph; "
            f"they differ in {min(different)}"
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

    Unknown scores of edges become 0. In MIB's format each neuron is in the circuit or not; here all
    neurons of a node in the circuit are in the circuit. JSON files leave out the scores of nodes
    that are NaN, and MIB reads these nodes as not scored.

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
    graph = circuit.graph
    edges = _mib_edges(circuit)
    if len(edges) > graph.allowed.sum():
        warn(
            "MIB's format has no shared key heads; each query head receives an equal share of "
            "their scores",
        )
    nodes = _writers_with_edges(graph)
    shapes = {
        "node_scores": (node_scores, [len(nodes)]),
        "neuron_scores": (neuron_scores, [len(nodes), graph.model.config.d_model]),
    }
    for name, (scores, shape) in shapes.items():
        if scores is not None and [*scores.shape] != shape:
            raise ValueError(f"{name} must be {shape} in this graph; got {[*scores.shape]}")
    is_kept = {name: name in circuit.nodes for name in nodes}
    describe = _pt if suffix == ".pt" else _json
    contents = describe(graph, is_kept, edges, score=node_scores, neurons=neuron_scores)
    text = "" if describe is _pt else strict_json.dumps(contents)
    with storage.replacing(Path(path)) as partial:
        if describe is _pt:
            torch.save(contents, partial)
        else:
            partial.write_text(text)


def _mib_edges(circuit: Circuit) -> "Edges":
    """Return the edges of a circuit in MIB's format, with MIB's sign of the scores."""
    edges: Edges = {}
    for place, names in _mib_names(circuit.graph).items():
        share = -circuit.scores[place].nan_to_num().item() / len(names)
        edges |= {name: (share, bool(circuit.kept[place])) for name in names}
    return edges


Edges = dict[str, tuple[float, bool]]
"""The score of each edge, and whether it is in the circuit."""
OptionalScores = Tensor | None


def _of_json(table: Any) -> tuple[Edges, OptionalScores, OptionalScores]:
    """Return the edges and the scores of nodes and neurons from the contents of a JSON file."""
    edges = {
        name: (float(edge["score"]), bool(edge["in_graph"]))
        for name, edge in table["edges"].items()
    }
    nodes = [node for name, node in table["nodes"].items() if name != "logits"]

    def scores(key: str) -> Tensor | None:
        given_scores = [node[key] for node in nodes if key in node]
        if not given_scores:
            return None
        # Nodes without a score get NaN, or a list of NaN for the scores of neurons.
        example = torch.tensor(given_scores[0], dtype=torch.float32)
        no_score = torch.full_like(example, torch.nan).tolist()
        return torch.tensor([node.get(key, no_score) for node in nodes])

    return edges, scores("score"), scores("neurons_scores")


def _json(
    graph: Graph,
    nodes: dict[str, bool],
    edges: Edges,
    score: OptionalScores,
    neurons: OptionalScores,
) -> dict[str, Any]:
    """Return the contents of a JSON file.

    Args:
        graph: the graph.
        nodes: whether each node is in the circuit, by name.
        edges: the edges.
        score: the scores of the nodes.
        neurons: the scores of the neurons.
    """
    described_nodes: dict[str, dict[str, Any]] = {}
    for n, (name, is_kept) in enumerate(nodes.items()):
        node: dict[str, Any] = {"in_graph": is_kept}
        if score is not None and not score[n].isnan():
            node["score"] = float(score[n])
        if neurons is not None:
            node["neurons"] = [is_kept] * neurons.shape[1]
        if neurons is not None and not neurons[n].isnan().all():
            node["neurons_scores"] = neurons[n].tolist()
        described_nodes[name] = node
    described_nodes["logits"] = {"in_graph": True}
    described_edges = {
        name: {"score": edge_score, "in_graph": is_kept}
        for name, (edge_score, is_kept) in edges.items()
    }
    return {"cfg": _config(graph), "nodes": described_nodes, "edges": described_edges}


def _of_pt(
    table: Mapping[str, Any], graph: Graph, names: Iterable[str]
) -> tuple[Edges, OptionalScores, OptionalScores]:
    """Return the edges and the scores of nodes and neurons from the contents of a PyTorch file.

    If the file has other nodes than the graph, no edge is returned.

    Args:
        table: the contents of the file.
        graph: the graph.
        names: the names of the edges in MIB's format.
    """
    config, sources, targets, scores, is_kept, _ = (table[key] for key in _NEEDED)
    writers = _writers_with_edges(graph)
    readers = _readers(graph)
    has_same_order = bool(config["parallel_attn_mlp"]) == _config(graph)["parallel_attn_mlp"]
    edges = {}
    if has_same_order and [*sources] == writers and [*targets] == readers:
        for name in names:
            writer, _, reader = name.partition("->")
            place = writers.index(writer), readers.index(reader)
            edges[name] = float(scores[place]), bool(is_kept[place])
    return edges, table.get("nodes_scores"), table.get("neurons_scores")


def _pt(
    graph: Graph,
    nodes: dict[str, bool],
    edges: Edges,
    score: OptionalScores,
    neurons: OptionalScores,
) -> dict[str, Any]:
    """Return the contents of a PyTorch file; see `_json` for the arguments."""
    writers = [*nodes]
    readers = _readers(graph)
    edge_scores, edge_is_kept = torch.zeros(2, len(writers), len(readers))
    for name, (edge_score, is_kept) in edges.items():
        writer, _, reader = name.partition("->")
        place = writers.index(writer), readers.index(reader)
        edge_scores[place] = edge_score
        edge_is_kept[place] = is_kept
    node_is_kept = torch.tensor([*nodes.values()])
    values = [_config(graph), writers, readers, edge_scores, edge_is_kept.bool(), node_is_kept]
    contents = dict(zip(_NEEDED, values, strict=True))
    if score is not None:
        contents["nodes_scores"] = score
    if neurons is not None:
        contents["neurons_scores"] = neurons
        contents["neurons_in_graph"] = node_is_kept[:, None].expand(*neurons.shape).clone()
    return contents


def _config(graph: Graph) -> dict[str, Any]:
    """Return the sizes of a model in MIB's format."""
    return {
        "n_layers": len(graph.layers),
        "n_heads": max(layer.n_heads for layer in graph.layers),
        "parallel_attn_mlp": graph.layers[0].is_parallel,
        "d_model": graph.model.config.d_model,
    }


def _readers(graph: Graph) -> list[str]:
    """Return the names of the readers in MIB's order."""
    return [name for names in _reader_names(graph) for name in names]


def _reader_names(graph: Graph) -> Iterator[list[str]]:
    """Yield the names of each reader in MIB's format: several if query heads share a key head."""
    for sublayer in graph.sublayers:
        heads = graph.writers[sublayer.heads]
        for part in sublayer.readers:
            readers = graph.readers[part]
            n_sharing = len(heads) // len(readers)
            for n, reader in enumerate(readers):
                if sublayer.is_divided:
                    sharing = heads[n * n_sharing : (n + 1) * n_sharing]
                    yield [f"{head}<{reader.kind}>" for head in sharing]
                else:
                    yield [str(reader)]
    yield [str(graph.readers[-1])]


def _writers_with_edges(graph: Graph) -> list[str]:
    """Return the names of the writers that have edges."""
    has_edge = graph.allowed.any(1).tolist()
    return [str(name) for name in itertools.compress(graph.writers, has_edge)]


def _mib_names(graph: Graph) -> dict[tuple[int, int], list[str]]:
    """Return the names of each edge in MIB's format: several if query heads share a key head."""
    kinds = ("input", "head", "attn", "mixer", "mlp")
    others = [name for name in graph.writers if name.kind not in kinds]
    unknown = [*{*others} & {*_writers_with_edges(graph)}]
    # MIB has no names of undivided sublayers, so their graphs may also have blocks without MLPs.
    is_divided = all(part.is_divided or part.kind == "mlp" for part in graph.sublayers)
    if unknown or (is_divided and any(layer.mlp is None for layer in graph.layers)):
        raise ValueError(
            "MIB's format has edges from the input, heads and an MLP in each block; this graph has "
            f"{unknown or 'blocks without MLPs'}"
        )
    readers = [*_reader_names(graph)]
    names_of_edges = {}
    for writer, reader in graph.allowed.nonzero().tolist():
        names = [f"{graph.writers[writer]}->{name}" for name in readers[reader]]
        names_of_edges[writer, reader] = names
    return names_of_edges
