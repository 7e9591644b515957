"""Pruned attribution graphs, which can be drawn, saved and loaded."""

import json
import math
import os
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hooks.base import explains_calls, number_of, storage, strict_json, unknown_name
from interp import plots
from interp.attribution_graphs import influence, neuronpedia
from interp.attribution_graphs.nodes import AttentionCell, Link, Node
from interp.json_form import Table, columns, form, records

_NEURONPEDIA = "a graph in Neuronpedia's format"


@dataclass(repr=False)
class PrunedGraph(plots.Shown):
    """The nodes and links of an attribution graph that carry most influence.

    A notebook displays the graph. `save("x.json")` writes the whole graph, and
    `PrunedGraph.load("x.json")` reads it. `to_neuronpedia` and `from_neuronpedia` exchange graphs
    with other programs, without `scores` and `cells`.

    Attributes:
        nodes, links: the remaining nodes and links.
        tokens: the tokens of the text.
        scores: `replacement`, `completeness` and `gap` of the whole graph, or an empty mapping if
            they are unknown.
        node_threshold: the share of the influence that the remaining nodes have. Default: unknown.
        supernodes: the names of the nodes in each group. Default: no groups.
        pins: the names of the pinned nodes. Default: no pins.
        about: the other metadata of the file from which the graph was loaded, such as `slug` (the
            name of the graph) and `scan` (the name of the model). Default: empty.
        cells: the attention scores that decide a target, if the graph was made with
            `attention=True`. Files of Neuronpedia do not contain them.

    >>> import tempfile
    >>> from interp import attribution_graph, load_transcoders
    >>> from models import load
    >>> model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    >>> graph = attribution_graph(model, "part KV8 and part K", transcoders, max_features=100)
    >>> pruned = graph.pruned(0.5, 0.8)
    >>> pruned.inputs("5_54_18")[0][0]  # the embedding of the V of KV8 acts most on the logit of V
    'E_54_6'
    >>> path = pruned.to_neuronpedia(tempfile.mkdtemp(), "kv8", "pydoc-4l")
    >>> len(PrunedGraph.from_neuronpedia(path).links) == len(pruned.links)
    True
    """

    nodes: Sequence[Node]
    links: Sequence[Link]
    tokens: Sequence[str]
    scores: Mapping[str, float] = field(default_factory=dict)
    node_threshold: float | None = None
    supernodes: dict[str, list[str]] = field(default_factory=dict)
    pins: list[str] = field(default_factory=list)
    about: Mapping[str, object] = field(default_factory=dict)
    cells: Sequence[AttentionCell] = ()
    # The name that each node has in the file from which the graph was loaded, by the name here.
    _names_in_file: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __getitem__(self, name: str) -> Node:
        """Return the node with a name.

        Raises:
            UnknownNameError: if there is no node with this name. The error lists close matches.
        """
        known = {node.id: node for node in self.nodes}
        if name not in known:
            raise unknown_name(name, known, "node of this graph")
        return known[name]

    def inputs(self, name: str) -> list[tuple[str, float]]:
        """Return the sources of the links to a node with their weights, the strongest first."""
        node = self[name].id
        return _strongest((link.source, link.weight) for link in self.links if link.target == node)

    def outputs(self, name: str) -> list[tuple[str, float]]:
        """Return the targets of the links from a node with their weights, the strongest first."""
        node = self[name].id
        return _strongest((link.target, link.weight) for link in self.links if link.source == node)

    def subgraph_scores(self, pins: Sequence[str] | None = None) -> dict[str, float]:
        """Return the replacement and completeness of the pinned nodes, computed from the links of
        this graph.

        Features that are not pinned count as errors: their effects are added to the effects of the
        error node of the same layer and position, and links to them are ignored. Neuronpedia's page
        does the same if this error node is in the graph. If the error node was pruned, the page
        ignores the feature, and this method treats the feature itself as an error.

        Args:
            pins: the names of the nodes. Default: the pins of the graph.

        Returns:
            The scores by the names `replacement` and `completeness`.

        Raises:
            UnknownNameError: if there is no node with one of the names. The error lists close
                matches.
            ValueError: if links form a cycle.
        """
        pinned = {self[name].id for name in (self.pins if pins is None else pins)}
        places = {node.id: place for place, node in enumerate(self.nodes)}
        effects = torch.zeros(len(places), len(places), dtype=torch.float64)
        for link in self.links:
            effects[places[link.target], places[link.source]] = link.weight
        errors = {
            (node.layer, node.pos): places[node.id] for node in self.nodes if node.kind == "error"
        }
        for node in self.nodes:
            if node.kind == "feature" and node.id not in pinned:
                place = places[node.id]
                total = errors.setdefault((node.layer, node.pos), places[node.id])
                effects[place] = 0
                if place != total:
                    effects[:, total] += effects[:, place]
                    effects[:, place] = 0
        is_error = torch.zeros(len(places), dtype=torch.bool)
        is_error[[*errors.values()]] = True
        is_input = torch.tensor([node.kind in ("token", "position", "bias") for node in self.nodes])
        # Targets that are not tokens have no probability, and get the weight 1.
        chances = [
            1.0 if node.kind == "logit" and node.probability is None else node.probability or 0.0
            for node in self.nodes
        ]
        weights = effects.new_tensor(chances)
        column = torch.arange(len(places))
        return influence.scores_of_graph(
            effects, weights, column=column, is_error=is_error, is_input=is_input
        )

    def view(self) -> plots.View:
        """Return a view of the nodes and links, with the strongest paths first."""
        return plots.attribution(self)

    @explains_calls
    def as_json(self) -> dict[str, Any]:
        """Return the nodes, the links and all scores in the JSON form of all results; see
        `interp.json_form`.

        The weight of a link is in the unit of its target: its logit, or its pre-activation if it is
        a feature. `neuronpedia` returns the graph in the format of Neuronpedia.
        """
        units = {
            "activation": "value of the feature",
            "probability": "probability",
            "influence": "share of influence",
        }
        tables = {"tokens": Table([*self.tokens], "pos")}
        tables |= columns("node", self.nodes, " ".join(Node._fields), units)
        tables |= columns("link", self.links, " ".join(Link._fields), {"weight": "unit of target"})
        cell_units = {"weight": "unit of target", "pattern": "share of attention"}
        tables |= columns("cell", self.cells, " ".join(AttentionCell._fields), cell_units)
        for name, score in self.scores.items():
            tables[name] = Table(score, unit="share")
        about = {"node_threshold": self.node_threshold, **self.about}
        about |= {"supernodes": self.supernodes, "pins": self.pins}
        about |= {"names_in_file": self._names_in_file} if self._names_in_file else {}
        return form("PrunedGraph", tables, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PrunedGraph":
        """Load a graph that `save` wrote to a `.json` file.

        The graph equals the saved graph, except that numbers that were not finite are NaN or None.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if `save` did not write the file. `from_neuronpedia` reads files in the
                format of Neuronpedia.
        """
        with _errors_of(path, "a graph that save wrote"):
            data = strict_json.loads(storage.path_of(path).read_text(encoding="utf-8"))
            tables, about = data["tables"], dict(data["about"])
            nodes = [
                node._replace(raises=node.raises or ()) for node in records("node", Node, tables)
            ]
            links = [
                link._replace(weight=_number(link.weight)) for link in records("link", Link, tables)
            ]
            cells = [*map(_with_tuples, records("cell", AttentionCell, tables))]
            scores = {
                name: _number(table["values"])
                for name, table in tables.items()
                if name != "tokens" and "." not in name
            }
            return cls(
                nodes=nodes,
                links=links,
                tokens=tables["tokens"]["values"],
                scores=scores,
                node_threshold=about.pop("node_threshold"),
                supernodes=about.pop("supernodes"),
                pins=about.pop("pins"),
                cells=cells or (),
                _names_in_file=about.pop("names_in_file", {}),
                about=about,
            )

    def __repr__(self) -> str:
        kinds = Counter(node.kind for node in self.nodes)
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        scores = "".join(f", {name} {value:.3g}" for name, value in self.scores.items())
        heads = f", {len(self.cells)} scores of heads" if self.cells else ""
        return (
            f"PrunedGraph of {''.join(self.tokens)[:60]!r}: "
            f"{number_of(len(self.links), 'link')}; nodes: {counts}{heads}{scores}"
        )

    def neuronpedia(self, slug: str, scan: str) -> dict[str, Any]:
        """Return the graph in Neuronpedia's format. NaN and infinity at nodes become None.

        The nodes of a graph that was loaded from a file have the names of this file, unless a node
        that was added has one of these names.

        Args:
            slug: the name of the graph.
            scan: the name of the model.

        Raises:
            ValueError: if the weight of a link is not finite, because the format requires a weight.
        """
        for link in self.links:
            if not math.isfinite(link.weight):
                ends = f"{link.source} to {link.target}"
                raise ValueError(f"weights of links must be finite; got {link.weight} from {ends}")
        metadata = {
            "prompt": "".join(self.tokens),
            "transcoder_list": [],
            **self.about,
            "slug": slug,
            "scan": scan,
            "prompt_tokens": [*self.tokens],
            "schema_version": 1,
        }
        if self.node_threshold is not None:
            metadata["node_threshold"] = self.node_threshold
        names = self._names_to_write()
        best = max((node.probability or 0.0 for node in self.nodes), default=0.0)
        facts = {
            "metadata": metadata,
            "qParams": self._state_of_page(names),
            "nodes": [
                neuronpedia.node_facts(node, best) | {"node_id": names[node.id]}
                for node in self.nodes
            ],
            "links": [
                {
                    "source": names.get(link.source, link.source),
                    "target": names.get(link.target, link.target),
                    "weight": link.weight,
                }
                for link in self.links
            ],
        }
        return dict(strict_json.finite(facts))

    def _state_of_page(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return the pins and groups in Neuronpedia's format.

        Args:
            names: the name of each node in the file, by its name in this package.
        """
        groups = []
        for label, members in self.supernodes.items():
            groups.append([label, *(names.get(member, member) for member in members)])
        return {
            "pinnedIds": [names.get(pin, pin) for pin in self.pins],
            "supernodes": groups,
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        }

    def _names_to_write(self) -> dict[str, str]:
        """Return the name of each node in a file, by its name in this package."""
        names = {node.id: self._names_in_file.get(node.id, node.id) for node in self.nodes}
        # circuit-tracer names the error of layer 3 at position 7 `0_3_7`, which is the name of a
        # feature here. If such a feature was added, links with this name would be ambiguous.
        is_distinct = len({*names.values()}) == len(names)
        return names if is_distinct else {name: name for name in names}

    def to_neuronpedia(self, directory: str | os.PathLike[str], slug: str, scan: str) -> Path:
        """Write `slug.json` in Neuronpedia's format, and return its path.

        The page of circuit-tracer can display the directory. The page finds the graphs in
        `graph-metadata.json`, and this method updates that file.

        Args:
            directory: the directory of the file, which is created if it does not exist.
            slug: the name of the graph.
            scan: the name of the model.

        Raises:
            ValueError: if the slug is not the name of a file in the directory, an existing
                `graph-metadata.json` lists no graphs, the directory is a file, or the weight of a
                link is not finite.
        """
        storage.require_folder(directory)
        if Path(slug).name != slug or "\\" in slug or slug in ("", "..", "graph-metadata"):
            raise ValueError(f"slug must be a name of a file without a folder; got {slug!r}")
        path = Path(directory) / f"{slug}.json"
        data = self.neuronpedia(slug, scan)
        path.parent.mkdir(parents=True, exist_ok=True)
        index = path.with_name("graph-metadata.json")
        with _errors_of(index, _NEURONPEDIA):
            # Keep the other graphs in the list. Other entries of the file are not written again.
            listed = json.loads(index.read_text("utf-8"))["graphs"] if index.exists() else []
            graphs = [entry for entry in listed if entry["slug"] != slug]
        for file, content in ((path, data), (index, {"graphs": [*graphs, data["metadata"]]})):
            text = strict_json.dumps(strict_json.finite(content))
            with storage.replacing(file) as partial:
                partial.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def from_neuronpedia(cls, path: str | os.PathLike[str]) -> "PrunedGraph":
        """Load a graph that `to_neuronpedia`, circuit-tracer, its page, Neuronpedia or Anthropic
        wrote.

        Nodes get the names of `Node`. `to_neuronpedia` writes the names of this file again. Labels
        that were edited in a page become the labels of the nodes.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if a part is missing, a number is not finite, the type of a node is unknown,
                two nodes have the same name, or a link has an end that is no node.
        """
        with _errors_of(path, _NEURONPEDIA):
            return cls._from_json(
                strict_json.loads(storage.path_of(path).read_text(encoding="utf-8"))
            )

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> "PrunedGraph":
        """Return the graph that the content of a JSON file describes.

        Raises:
            KeyError: if a part is missing.
            ValueError: if a part is impossible, or two nodes have the same name.
        """
        metadata = dict(data["metadata"])
        tokens = metadata.pop("prompt_tokens")
        pins, groups, labels = neuronpedia.state(data["qParams"] or {})
        nodes = [neuronpedia.read(facts, tokens, labels) for facts in data["nodes"]]
        names = _names_by_theirs(data["nodes"], nodes)
        links = [
            Link(
                source=names[link["source"]],
                target=names[link["target"]],
                weight=neuronpedia.number_of(link, "weight"),
            )
            for link in data["links"]
        ]
        # The pins and groups that Anthropic's page saves contain the `jsNodeId` of nodes.
        # Other pages save the `node_id`, so accept both.
        names = {facts["jsNodeId"]: names[facts["node_id"]] for facts in data["nodes"]} | names
        supernodes: dict[str, list[str]] = {}
        for label, *ids in groups:
            name = _unused_name(label, supernodes)
            supernodes[name] = [names.get(member, member) for member in ids]
        threshold = metadata.pop("node_threshold", None)
        pins = [names.get(pin, pin) for pin in pins]
        pairs = zip(nodes, data["nodes"], strict=True)
        in_file = {node.id: facts["node_id"] for node, facts in pairs}
        return cls(
            nodes=nodes,
            links=links,
            tokens=tokens,
            scores={},
            node_threshold=threshold,
            supernodes=supernodes,
            pins=pins,
            about=metadata,
            _names_in_file=in_file,
        )


def _names_by_theirs(data: Sequence[Mapping[str, Any]], nodes: Sequence[Node]) -> dict[str, str]:
    """Return a mapping from the name of each node in the file to its name in this package.

    Raises:
        ValueError: if two nodes have the same name.
    """
    # The names in the file may be ambiguous: circuit-tracer names an error `0_layer_pos`, which is
    # also the name of a feature in layer 0. Such a pair raises an error.
    names = {facts["node_id"]: node.id for facts, node in zip(data, nodes, strict=True)}
    distinct = min(len(names), len({node.id for node in nodes}))
    if distinct < len(nodes):
        counts = Counter(facts["node_id"] for facts in data)
        raise ValueError(
            "the names of nodes must be unique; "
            f"{len(nodes) - distinct} names are repeated, such as {counts.most_common(1)[0][0]}"
        )
    return names


def _unused_name(label: str, names: Container[str]) -> str:
    """Return the label if no name is equal to it, or else the label with a number, as in
    `verbs (2)`.
    """
    name = label
    count = 1
    while name in names:
        count += 1
        name = f"{label} ({count})"
    return name


@contextmanager
def _errors_of(path: str | os.PathLike[str], rule: str) -> Iterator[None]:
    """Convert errors that the content of a file raises to a ValueError that names the file.

    Args:
        path: the file.
        rule: the content that the file must have.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} must be {rule}; {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be {rule}: {error}") from None


def _with_tuples(cell: AttentionCell) -> AttentionCell:
    """Return a cell of a JSON file with its pairs as tuples, in place of lists."""
    pairs = [(query, key, effect) for query, key, effect in cell.pairs]
    return cell._replace(pairs=pairs)


def _number(value: float | None) -> float:
    """Return a number of a JSON file; NaN for None, because files have no NaN and no infinity."""
    return math.nan if value is None else value


def _strongest(ends: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the ends of links by the absolute values of their weights, in descending order."""
    return sorted(ends, key=lambda end: -abs(end[1]))
