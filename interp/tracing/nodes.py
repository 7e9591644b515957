"""Nodes and links of an attribution graph."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

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
        raises: the tokens whose logits a feature's decoder raises most.
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
    raises: Sequence[str] = ()


class AttentionCell(NamedTuple):
    """A score of a head, through which a target is decided.

    Attributes:
        layer, head, query, key: where it is.
        target: the name of the node that is decided.
        weight: `gradient · (score - mean)`, in the unit of the target; an estimate to first order.
        score: the score.
        size: the summed sizes of all pairs of sources that make it.
        pattern: how the head weighs all positions there.
        pairs: the largest pairs: source of the query, source of the key, and what they add to the score.
    """

    layer: int
    head: int
    query: int
    key: int
    target: str
    weight: float
    score: float
    size: float
    pattern: Sequence[float]
    pairs: Sequence[tuple[str, str, float]]


class Link(NamedTuple):
    """What one node adds to another, in the unit of that: of pre-activations or logits."""

    source: str
    target: str
    weight: float


def sources(run: Any, words: Sequence[str], influence: Sequence[float]) -> Iterator[Node]:
    """Yield the nodes of a frozen run's sources, in the order of columns, each with its influence."""
    numbers, n_pos = run.tokens.tolist(), len(run.tokens)
    features = (each.tolist() for each in (run.layer, run.pos, run.feature, run.activation))
    nodes = [
        Node(f"{layer}_{feature}_{pos}", "feature", layer, pos, feature, activation=value)
        for layer, pos, feature, value in zip(*features, strict=True)
    ]
    nodes += [
        Node(f"{n}_-1_{pos}", "error", n, pos, -1, f"error of layer {n}")
        for n in run.errors
        for pos in range(n_pos)
    ]
    for n in run.embeddings:
        for pos, (number, text) in enumerate(zip(numbers, words, strict=True)):
            if n == run.embeddings[0]:
                nodes.append(Node(f"E_{number}_{pos}", "token", -1, pos, number, text))
            else:
                nodes.append(Node(f"P_{pos}_{pos}", "position", -1, pos, pos, f"position {pos}"))
    nodes.append(Node("B_0_0", "bias", -1, 0, 0, "all constants"))
    for node, share in zip(nodes, influence, strict=True):
        yield node._replace(influence=share)
