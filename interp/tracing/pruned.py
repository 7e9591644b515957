"""A pruned attribution graph: what is drawn, and written to and read from files."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hooks.base import storage, strict_json, unknown_name
from interp import pictures
from interp.tracing import influence, neuronpedia
from interp.tracing.nodes import AttentionCell, Link, Node


@dataclass(repr=False)
class PrunedGraph(pictures.Shown):
    """The nodes and links of an attribution graph that carry most influence; it shows itself in a notebook.

    Attributes:
        nodes, links: what is left.
        tokens: the text, in pieces.
        scores: `replacement`, `completeness` and `gap` of the whole graph; empty if they are not known.
        node_threshold: the share of influence of the nodes that are left.
        supernodes: names of groups, with the names of their nodes.
        pins: names of nodes that are pinned.
        about: other facts from a file, such as `slug` and `scan`.
        cells: scores of attention that decide a target, where the graph was made with `attention=True`. Files have none.
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

    def __getitem__(self, name: str) -> Node:
        """Return a node.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
        """
        known = {node.id: node for node in self.nodes}
        if name not in known:
            raise unknown_name(name, known, "node of this graph")
        return known[name]

    def inputs(self, name: str) -> list[tuple[str, float]]:
        """What acts on a node, the strongest first."""
        node = self[name].id
        return _strongest((link.source, link.weight) for link in self.links if link.target == node)

    def outputs(self, name: str) -> list[tuple[str, float]]:
        """What a node acts on, the strongest first."""
        node = self[name].id
        return _strongest((link.target, link.weight) for link in self.links if link.source == node)

    def subgraph_scores(self, pins: Sequence[str] | None = None) -> dict[str, float]:
        """Replacement and completeness of the pinned nodes, by the links that are left.

        Features that are not pinned count as errors: what one adds is added to the error of its place, and what adds to
        it is left out. So it is on Neuronpedia's page, but that leaves out features whose error was pruned away,
        which here are errors of their own.

        Args:
            pins: the names of nodes; the graph's pins.

        Returns:
            Scores by the names `replacement` and `completeness`.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
            ValueError: if links go in a circle.
        """
        pinned = {self[name].id for name in (self.pins if pins is None else pins)}
        places = {node.id: n for n, node in enumerate(self.nodes)}
        effects = torch.zeros(len(places), len(places), dtype=torch.float64)
        for link in self.links:
            effects[places[link.target], places[link.source]] = link.weight
        errors = {
            (node.layer, node.pos): places[node.id] for node in self.nodes if node.kind == "error"
        }
        for node in self.nodes:
            if node.kind == "feature" and node.id not in pinned:
                place, total = (
                    places[node.id],
                    errors.setdefault((node.layer, node.pos), places[node.id]),
                )
                effects[place] = 0
                if place != total:
                    effects[:, total] += effects[:, place]
                    effects[:, place] = 0
        is_error = torch.zeros(len(places), dtype=torch.bool)
        is_error[[*errors.values()]] = True
        is_input = torch.tensor([node.kind in ("token", "position", "bias") for node in self.nodes])
        # Targets that are no token have no probability.
        chances = [
            1.0 if node.kind == "logit" and node.probability is None else node.probability or 0.0
            for node in self.nodes
        ]
        weights, column = effects.new_tensor(chances), torch.arange(len(places))
        return influence.scores(effects, weights, column, is_error, is_input)

    def view(self) -> pictures.View:
        """Its nodes and links, with the strongest paths first."""
        return pictures.attribution(self)

    def __repr__(self) -> str:
        kinds = Counter(node.kind for node in self.nodes)
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        scores = "".join(f", {name} {value:.3g}" for name, value in self.scores.items())
        heads = f", {len(self.cells)} scores of heads" if self.cells else ""
        return f"PrunedGraph of {''.join(self.tokens)[:60]!r}: {len(self.links)} links; nodes: {counts}{heads}{scores}"

    def as_json(self, slug: str, scan: str) -> dict[str, Any]:
        """Return it in Neuronpedia's format. At nodes, None stands for NaN and infinity.

        Args:
            slug: the name of the graph.
            scan: the name of the model.

        Raises:
            ValueError: if the weight of a link is not finite, as each link of the format has one.
        """
        for link in self.links:
            if not math.isfinite(link.weight):
                ends = f"{link.source} to {link.target}"
                raise ValueError(f"weights of links must be finite; got {link.weight} from {ends}")
        metadata = {
            "prompt": "".join(self.tokens), "transcoder_list": [], **self.about, "slug": slug, "scan": scan,
            "prompt_tokens": [*self.tokens], "schema_version": 1,
        }  # fmt: skip
        if self.node_threshold is not None:
            metadata["node_threshold"] = self.node_threshold
        state = {
            "pinnedIds": [*self.pins], "supernodes": [[name, *ids] for name, ids in self.supernodes.items()],
            "linkType": "both", "clickedId": "", "sg_pos": "",
        }  # fmt: skip
        best = max((node.probability or 0.0 for node in self.nodes), default=0.0)
        made = {
            "metadata": metadata,
            "qParams": state,
            "nodes": [neuronpedia.node_facts(node, best) for node in self.nodes],
            "links": [link._asdict() for link in self.links],
        }
        return dict(strict_json.finite(made))

    def to_neuronpedia(self, directory: str | os.PathLike[str], slug: str, scan: str) -> Path:
        """Write `slug.json` in Neuronpedia's format, and return its path.

        circuit-tracer's page shows the directory; it finds the graphs by `graph-metadata.json`, which is written too.

        Args:
            directory: where it goes; made if it is not there.
            slug, scan: see `as_json`.

        Raises:
            ValueError: if `graph-metadata.json` is there and lists no graphs, the directory has the name of
                a file, or the weight of a link is not finite.
        """
        storage.require_folder(directory)
        path, data = Path(directory) / f"{slug}.json", self.as_json(slug, scan)
        path.parent.mkdir(parents=True, exist_ok=True)
        index = path.with_name("graph-metadata.json")
        with _errors_of(index):
            # Only this list is written again, where NaN of an older file becomes null.
            listed = json.loads(index.read_text("utf-8"))["graphs"] if index.exists() else []
            graphs = [each for each in listed if each["slug"] != slug]
        for file, content in ((path, data), (index, {"graphs": [*graphs, data["metadata"]]})):
            text = strict_json.dumps(strict_json.finite(content))
            with storage.replacing(file) as partial:
                partial.write_text(text, encoding="utf-8")
        return path

    @classmethod
    def from_neuronpedia(cls, path: str | os.PathLike[str]) -> "PrunedGraph":
        """Read what `to_neuronpedia`, circuit-tracer and its page, Neuronpedia or Anthropic wrote.

        Nodes get the names of `Node`, and labels that were edited in a page are the labels of their nodes.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if a part is missing, a number is not finite, a node is of an unknown type, two have
                one name, or a link has an end that is no node.
        """
        with _errors_of(path):
            return cls._from_json(
                strict_json.loads(storage.path_of(path).read_text(encoding="utf-8"))
            )

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> "PrunedGraph":
        metadata = dict(data["metadata"])
        tokens = metadata.pop("prompt_tokens")
        pins, groups, labels = neuronpedia.state(data["qParams"] or {})
        nodes = [neuronpedia.read(each, tokens, labels) for each in data["nodes"]]
        # circuit-tracer names an error `0_layer_pos`, as it would a feature of layer 0.
        names = {each["node_id"]: node.id for each, node in zip(data["nodes"], nodes, strict=True)}
        distinct = min(len(names), len({node.id for node in nodes}))
        if distinct < len(nodes):
            counts = Counter(each["node_id"] for each in data["nodes"])
            raise ValueError(
                "each node must have a name of its own; "
                f"it has {len(nodes) - distinct} names twice, such as {counts.most_common(1)[0][0]}"
            )
        links = [
            Link(
                names[link["source"]], names[link["target"]], neuronpedia.number_of(link, "weight")
            )
            for link in data["links"]
        ]
        # Anthropic's page names the nodes in its state by `jsNodeId`.
        names = {each["jsNodeId"]: names[each["node_id"]] for each in data["nodes"]} | names
        supernodes: dict[str, list[str]] = {}
        for label, *ids in groups:
            name, count = label, 1
            while name in supernodes:
                name, count = f"{label} ({count + 1})", count + 1
            supernodes[name] = [names.get(each, each) for each in ids]
        threshold = metadata.pop("node_threshold", None)
        pins = [names.get(each, each) for each in pins]
        return cls(nodes, links, tokens, {}, threshold, supernodes, pins, metadata)


@contextmanager
def _errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    """Errors that a file's content raises, as one that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} must be as Neuronpedia has it; a part has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be as Neuronpedia has it: {error}") from None


def _strongest(ends: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(ends, key=lambda end: -abs(end[1]))
