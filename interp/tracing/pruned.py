"""A pruned attribution graph: what is drawn, and written to and read from files."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hooks import storage
from hooks.errors import unknown_name
from interp import pictures
from interp.tracing import neuronpedia
from interp.tracing.nodes import Link, Node


@dataclass(repr=False)
class PrunedGraph:
    """The nodes and links of an attribution graph that carry most influence; it shows itself in a notebook.

    Attributes:
        nodes, links: what is left.
        tokens: the text, in pieces.
        scores: `replacement`, `completeness` and `gap` of the whole graph; empty if they are not known.
        node_threshold: the share of influence of the nodes that are left.
        supernodes: names of groups, with the names of their nodes.
        pins: names of nodes that are pinned.
        about: other facts from a file, such as `slug` and `scan`.
    """

    nodes: Sequence[Node]
    links: Sequence[Link]
    tokens: Sequence[str]
    scores: Mapping[str, float] = field(default_factory=dict)
    node_threshold: float | None = None
    supernodes: dict[str, list[str]] = field(default_factory=dict)
    pins: list[str] = field(default_factory=list)
    about: Mapping[str, object] = field(default_factory=dict)

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

    def _repr_html_(self) -> str:
        return pictures.attribution(self)._repr_html_()

    def __repr__(self) -> str:
        kinds = Counter(node.kind for node in self.nodes)
        counts = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
        scores = "".join(f", {name} {value:.3g}" for name, value in self.scores.items())
        return f"PrunedGraph of {''.join(self.tokens)[:60]!r}: {len(self.links)} links; nodes: {counts}{scores}"

    def as_json(self, slug: str, scan: str) -> dict[str, Any]:
        """Return it in Neuronpedia's format.

        Args:
            slug: the name of the graph.
            scan: the name of the model.
        """
        metadata = {
            **self.about, "slug": slug, "scan": scan, "prompt_tokens": [*self.tokens], "prompt": "".join(self.tokens),
            "schema_version": 1,
        }  # fmt: skip
        if self.node_threshold is not None:
            metadata["node_threshold"] = self.node_threshold
        state = {
            "pinnedIds": [*self.pins], "supernodes": [[name, *ids] for name, ids in self.supernodes.items()],
            "linkType": "both", "clickedId": "", "sg_pos": "",
        }  # fmt: skip
        best = max((node.probability or 0.0 for node in self.nodes), default=0.0)
        return {
            "metadata": metadata,
            "qParams": state,
            "nodes": [neuronpedia.written(node, best) for node in self.nodes],
            "links": [link._asdict() for link in self.links],
        }

    def to_neuronpedia(self, directory: str | os.PathLike[str], slug: str, scan: str) -> Path:
        """Write `slug.json` in Neuronpedia's format, and return its path.

        Args:
            directory: where it goes; made if it is not there.
            slug, scan: see `as_json`.
        """
        path = Path(directory) / f"{slug}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(path) as partial:
            partial.write_text(json.dumps(self.as_json(slug, scan)), encoding="utf-8")
        return path

    @classmethod
    def from_neuronpedia(cls, path: str | os.PathLike[str]) -> "PrunedGraph":
        """Read what `to_neuronpedia`, circuit-tracer or Neuronpedia wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if a part is missing, a node is of an unknown type, two have one name, or a link has an end that
                is no node.
        """
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        for name in ("metadata", "qParams", "nodes", "links"):
            if name not in data:
                raise ValueError(
                    f"a graph must have metadata, qParams, nodes and links; {path} has no {name}"
                )
        metadata, state = dict(data["metadata"]), data["qParams"]
        tokens = metadata.pop("prompt_tokens")
        nodes = [neuronpedia.read(each, tokens) for each in data["nodes"]]
        # circuit-tracer names an error `0_layer_pos`, as it would a feature of layer 0.
        names = {each["node_id"]: node.id for each, node in zip(data["nodes"], nodes, strict=True)}
        if len(names) < len(nodes):
            raise ValueError(
                f"each node must have a name of its own; {path} has {len(nodes) - len(names)} names twice"
            )
        links = []
        for each in data["links"]:
            ends = [each["source"], each["target"]]
            if unknown := [end for end in ends if end not in names]:
                raise ValueError(
                    f"links must join nodes; {path} has one of {unknown[0]!r}, which is none"
                )
            links.append(Link(names[ends[0]], names[ends[1]], each["weight"]))
        threshold = metadata.pop("node_threshold", None)
        groups = {
            name: [names.get(each, each) for each in ids]
            for name, *ids in state.get("supernodes", ())
        }
        pins = [names.get(each, each) for each in state.get("pinnedIds", ())]
        return cls(nodes, links, tokens, {}, threshold, groups, pins, metadata)


def _strongest(ends: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(ends, key=lambda end: -abs(end[1]))
