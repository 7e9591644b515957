"""Nodes and links of an attribution graph."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

NodeKind = Literal["feature", "error", "token", "position", "bias", "logit"]


class Node(NamedTuple):
    """A node of an attribution graph.

    Attributes:
        id: the name of the node: `layer_feature_pos` for a feature, `layer_-1_pos` for an error,
            `E_token_pos` for a token, `P_pos_pos` for a position embedding (the position twice),
            `B_0_0` for the sum of all constants. The name of a logit is `n_token_pos`, where n is
            the number of layers plus 1, as in circuit-tracer.
        kind: the kind of node.
        layer: the index of the layer of a feature or an error; -1 for embeddings and the sum of all
            constants. For a logit it is the number of layers, which is not the number in its `id`.
        pos: the position.
        number: the index of a feature, the id of a token, or the position of a position embedding;
            -1 for an error and 0 for the sum of all constants. For a difference of logits, it is
            the size of the vocabulary plus the index of the node among the logits and differences;
            the label describes the difference.
        label: a text that describes the node. At a position of an answer, the label names the
            answer, as in `'p' of ' the part'`. Default: empty.
        activation: the value of a feature. Default: None.
        probability: the probability of the token of a logit. Default: None.
        influence: the share of the total influence that this node and all stronger nodes have.
            Default: None.
        raises: the tokens whose logits the decoder of a feature raises most. Default: empty.

    >>> from interp import attribution_graph, load_transcoders
    >>> from models import load
    >>> model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    >>> graph = attribution_graph(model, "part KV8 and part K", transcoders, max_features=10)
    >>> node = graph.logits[0]
    >>> node.id, node.kind, node.layer, node.pos, node.label
    ('5_54_18', 'logit', 4, 18, 'V')
    """

    id: str
    kind: NodeKind
    layer: int
    pos: int
    number: int
    label: str = ""
    activation: float | None = None
    probability: float | None = None
    influence: float | None = None
    raises: Sequence[str] = ()


class AttentionCell(NamedTuple):
    """An attention score that decides a target.

    Attributes:
        layer, head, query, key: the layer, the head, and the positions of the query and the key.
        target: the name of the target node.
        weight: `gradient · (score - mean)`, an estimate to first order of the effect of the score
            on the target, in the unit of the target. The gradient is the derivative of the target
            with respect to the score. The mean is the mean score of the query over all keys,
            weighted by the attention pattern.
        score: the score.
        size: the sum of the absolute effects of all pairs of sources on the score.
        pattern: the attention weights of the head at all keys for this query.
        pairs: the pairs of sources with the largest effects on the score. Each entry contains the
            name of the source that acts through the query, the name of the source that acts through
            the key, and the effect of the pair.

    >>> from interp import attribution_graph, load_transcoders
    >>> from models import load
    >>> model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    >>> text = "part KV8 and part K"
    >>> graph = attribution_graph(model, text, transcoders, max_features=10, attention=True)
    >>> cell = graph.cells()[0]
    >>> cell.layer, cell.head, text[cell.query], text[cell.key]  # it attends to the first V
    (3, 3, 'K', '8')
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
    """The direct effect of a source on a target.

    The weight is in the unit of the target: its pre-activation if the target is a feature, and its
    logit otherwise.

    >>> Link(source="E_54_6", target="5_54_18", weight=4.2)
    Link(source='E_54_6', target='5_54_18', weight=4.2)
    """

    source: str
    target: str
    weight: float


def sources(
    run: Any,
    words: Sequence[str],
    influence: Sequence[float],
    answers: Mapping[int, str] | None = None,
) -> Iterator[Node]:
    """Yield a node for each source of a frozen run, in the order that `FrozenRun` states.

    Args:
        run: the frozen run.
        words: the text of each token.
        influence: the attribute `influence` of each node.
        answers: the answer of each position of an answer. A label at such a position names the
            answer, as in `'p' of ' the part'`. Default: no answers.
    """
    of_answers = {pos: f"{words[pos]!r} of {answer}" for pos, answer in (answers or {}).items()}
    numbers = run.tokens.tolist()
    n_pos = len(run.tokens)
    features = (facts.tolist() for facts in (run.layer, run.pos, run.feature, run.activation))
    nodes = [
        Node(
            id=f"{layer}_{feature}_{pos}",
            kind="feature",
            layer=layer,
            pos=pos,
            number=feature,
            activation=value,
        )
        for layer, pos, feature, value in zip(*features, strict=True)
    ]
    for layer in run.errors:
        nodes += _errors(layer, n_pos)
    # The model first adds the token embeddings. All other embeddings are position embeddings.
    for embedding in run.embeddings:
        is_token = embedding == run.embeddings[0]
        nodes += _tokens(numbers, words) if is_token else _positions(run.branches.columns)
    nodes.append(Node(id="B_0_0", kind="bias", layer=-1, pos=0, number=0, label="all constants"))
    for node, share in zip(nodes, influence, strict=True):
        label = node.label
        place = "" if node.kind == "bias" else of_answers.get(node.pos, "")
        if place:
            # A feature has no label, so that its tokens are shown instead.
            label = {"feature": "", "token": place}.get(node.kind, f"{label}, {place}")
        yield node._replace(influence=share, label=label)


def _errors(layer: int, n_pos: int) -> list[Node]:
    """Return the nodes of a layer's errors."""
    return [
        Node(
            id=f"{layer}_-1_{pos}",
            kind="error",
            layer=layer,
            pos=pos,
            number=-1,
            label=f"error of layer {layer}",
        )
        for pos in range(n_pos)
    ]


def _tokens(numbers: Sequence[int], words: Sequence[str]) -> list[Node]:
    """Return the nodes of the embeddings of tokens."""
    return [
        Node(id=f"E_{number}_{pos}", kind="token", layer=-1, pos=pos, number=number, label=text)
        for pos, (number, text) in enumerate(zip(numbers, words, strict=True))
    ]


def _positions(columns: Sequence[int]) -> list[Node]:
    """Return the nodes of the embeddings of positions.

    Args:
        columns: the place of each position in its text.
    """
    return [
        Node(
            id=f"P_{pos}_{pos}",
            kind="position",
            layer=-1,
            pos=pos,
            number=pos,
            label=f"position {column}",
        )
        for pos, column in enumerate(columns)
    ]
