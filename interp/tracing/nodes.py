"""Nodes of an attribution graph, and a pruned graph: what is drawn, written and read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from hooks.errors import unknown_name

Kind = Literal["feature", "error", "token", "position", "bias", "logit"]


class Node(NamedTuple):
    """One node.

    Attributes:
        id: its name. A feature is `layer_feature_pos`, an error `layer_-1_pos`, a token `E_token_pos`, a position
            `P_pos_pos`, all constants `B_0_0`, and a logit `layers+1_token_pos`.
        kind: what it is.
        layer: -1 for embeddings, the number of layers for logits.
        pos: its position.
        number: of the feature, or of the token.
        label: a text for the reader.
        activation: of a feature.
        probability: of a logit's token.
        influence: the share of all influence that it and all stronger nodes have.
    """

    id: str
    kind: Kind
    layer: int
    pos: int
    number: int
    label: str = ""
    activation: float | None = None
    probability: float | None = None
    influence: float | None = None


class Link(NamedTuple):
    """What one node adds to another, in the unit of that: of pre-activations or logits."""

    source: str
    target: str
    weight: float


@dataclass
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
        return _strongest(
            (link.source, link.weight) for link in self.links if link.target == self[name].id
        )

    def outputs(self, name: str) -> list[tuple[str, float]]:
        """What a node acts on, the strongest first."""
        return _strongest(
            (link.target, link.weight) for link in self.links if link.source == self[name].id
        )


def _strongest(ends: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(ends, key=lambda end: -abs(end[1]))
