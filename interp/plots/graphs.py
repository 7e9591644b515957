"""Pictures of graphs: circuits, attribution graphs, and cards of their features."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hooks.base import explains_calls
from interp.plots.parts import axis_part, thinned
from interp.plots.view import View, limit_of, visible, visible_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The largest numbers that a browser draws without a pause.
_MOST_EDGES = 400
_MOST_CARDS = 12
_MOST_NODES = 800
_MOST_LINKS = 8000


_SHARED_KEYS = (
    "Heads of a group share keys and values: an edge to a key head ends at each head that uses it."
)


@explains_calls
def circuit(circuit: Any, curve: Any = None) -> View:
    """Draw a circuit, with layers upward and edges by score.

    A slider chooses the number of edges. Of the strongest edges, only the edges on a path from the
    input to the output are drawn. The figure, for `.png`, `.pdf` and `.svg`, has no slider.

    Solid edges help the metric, and dashed edges harm it. Only connected nodes are drawn.

    Args:
        circuit: a `Circuit`.
        curve: the result of `interp.circuit_curve`. The slider then shows the faithfulness of the
            nearest measured size.

    Returns:
        The page, for `.save()`, `.show()` and notebooks. Edges have the unit of the scores that the
        circuit was found with.

    >>> from interp import Circuit, graph
    >>> from models import load
    >>> edges = ["input->a0.h1<v>", "a0.h1->logits"]
    >>> circuit(Circuit(graph.Graph(load("pydoc-4l")), edges))
    View of Circuit: 2 of 479 edges, 3 of 22 nodes: .save("x.html") writes it, .show() opens it
    """
    rows, edges = circuit.drawn()
    order = sorted(edges, key=lambda edge: -abs(edge.score))
    drawn = order[:_MOST_EDGES]
    notes = [thinned(len(order), len(drawn), "edges")]
    readers = {edge.split("->")[1] for edge in circuit}
    if any(len(circuit.graph.query_heads_of(reader)) > 1 for reader in readers):
        notes.append(_SHARED_KEYS)
    note = " ".join(filter(None, notes))
    # The first line of a printed circuit counts its edges and nodes.
    title = repr(circuit).splitlines()[0]
    part = {
        "kind": "network",
        "title": "circuit",
        "rows": rows,
        "edges": [edge[:3] for edge in drawn],
        "names": _meanings(rows),
        "scores": torch.tensor([edge.score for edge in drawn], dtype=torch.float64),
        "note": note,
    }
    if curve is not None:
        n_edges = int(circuit.graph.allowed.sum())
        means = curve.absolute.mean().tolist()
        sizes = (int(share * n_edges) for share in curve.absolute.labels["edges"])
        part["faithfulness"] = [*zip(sizes, means, strict=True)]

    def plot() -> "Figure":
        from interp.plots import matplotlib_figures

        lines = [title, *notes]
        if any(edge.score for edge in drawn):
            lines.insert(1, "blue: the edge helps the metric; red, dashed: the edge harms it")
        return matplotlib_figures.network(rows, drawn, title="\n".join(filter(None, lines)))

    return View(title, [part], plot=plot)


def _meanings(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return an example of a head's name and an example of an MLP's name, with their meanings."""
    names: list[str] = []
    for nodes in reversed(rows):
        names += map(str, nodes)
    head = next(filter(None, (re.fullmatch(r"a(\d+)\.h(\d+)", name) for name in names)), None)
    mlp = next(filter(None, (re.fullmatch(r"m(\d+)", name) for name in names)), None)
    meanings = []
    if head is not None:
        meanings.append(f"{head[0]}: head {head[2]} of layer {head[1]}")
    if mlp is not None:
        meanings.append(f"{mlp[0]}: MLP of layer {mlp[1]}")
    return meanings


@explains_calls
def features(cards: Sequence[Any]) -> View:
    """Draw cards of features: texts where a feature is active, the histogram of its size, and the
    tokens whose logits it changes.

    Args:
        cards: the cards, from `interp.features.feature_cards`.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, with one card for each feature, in the
        given order.

    >>> from interp.features import FeatureCard
    >>> features([FeatureCard(7, 0.25, top=[("a", 1.5)])])
    View of feature 7: .save("x.html") writes it, .show() opens it
    """
    shown = cards[:_MOST_CARDS]
    parts: list[dict[str, Any]] = []
    for card in shown:
        parts += _parts_of_card(card)
    numbers = ", ".join(str(card.index) for card in shown)
    note = thinned(len(cards), len(shown), "features")
    if note and parts:
        parts[0]["note"] = note
    return View(f"feature{'s' * (len(shown) > 1)} {numbers}", parts)


def _parts_of_card(card: Any) -> list[dict[str, Any]]:
    """Return the examples of a feature, the tokens that it promotes, and its histogram, to draw."""
    parts: list[dict[str, Any]] = []
    for number, example in enumerate(card.examples):
        values = torch.tensor(example.activations)
        parts.append(
            {
                "kind": "text",
                "title": "" if number else f"feature {card.index}",
                "values": values,
                "first": 0,
                "tokens": [visible(token) for token in example.tokens],
                "unit": "",
                "signed": False,
                "limit": card.largest or limit_of(values),
                "note": "",
            }
        )
    tokens_moved = [*card.top, *card.bottom[::-1]]
    if tokens_moved and not math.isnan(tokens_moved[0][1]):
        title = "logits that a feature of 1 adds"
        parts.append(_chart(title, "token", bars=tokens_moved, unit="logits"))
    if any(card.histogram):
        parts.append(
            {
                "kind": "histogram",
                "title": "how many positions have it, by its size",
                "unit": "positions",
                "values": torch.tensor(card.histogram),
                "largest": card.largest,
                "xname": "activation",
                "note": "How many positions have it, by its size.",
            }
        )
    if parts:
        parts[0]["heading"] = f"Feature {card.index}, {card.frequency}"
    return parts


@explains_calls
def attribution(graph: Any, cards: Mapping[int, Sequence[Any]] | None = None) -> View:
    """Draw an attribution graph, with layers upward and tokens across.

    A click on a node draws and lists its links.

    Nodes can be pinned and put in groups. Pinned nodes are drawn again below, as a separate graph.
    The pins and groups are also shown as JSON below the picture, in the form in which files of
    graphs contain them.

    Circles are features, diamonds are errors, and squares are embeddings and logits. Triangles are
    heads whose attention affects a target, in a graph with `attention=True`. A click on a triangle
    shows the attention of the head, and the pairs of sources that add up to the score.

    Args:
        graph: a `PrunedGraph`.
        cards: the cards by layer, from `interp.features.feature_cards`. Each card is shown with its
            feature.

    Returns:
        The page, for `.save()`, `.show()` and notebooks. The weight of a link is in the unit of its
        target: the logit, or the pre-activation of the feature.

    >>> from interp.attribution_graphs import Link, Node, PrunedGraph
    >>> nodes = [Node("E_3_0", "token", -1, 0, 3, "a"), Node("2_5_0", "logit", 1, 0, 5, "b")]
    >>> attribution(PrunedGraph(nodes, [Link("E_3_0", "2_5_0", 1.5)], ["a"]))
    View of attribution graph of “a”: .save("x.html") writes it, .show() opens it
    """
    card_of = {}
    for layer, of_layer in (cards or {}).items():
        for card in of_layer:
            card_of[layer, card.index] = card
    nodes = sorted(graph.nodes, key=_by_influence)
    drawn = nodes[:_MOST_NODES]
    places = {node.id: place for place, node in enumerate(drawn)}
    inside = [link for link in graph.links if link.source in places and link.target in places]
    links = sorted(inside, key=lambda link: -abs(link.weight))[:_MOST_LINKS]
    tokens_by_pos = {node.pos: node.label for node in nodes if node.kind == "token"}
    shown = []
    for node in drawn:
        card = card_of.get((node.layer, node.number))
        shown.append(_shown(node, card, token=tokens_by_pos.get(node.pos, "")))
    notes = [*_notes(graph.scores, len(drawn), len(nodes))]
    notes.append(thinned(len(inside), len(links), "links"))
    tokens = [visible(token) for token in graph.tokens]
    ends = [(places[link.source], places[link.target], link.weight) for link in links]
    nodes_by_name = {node.id: node for node in nodes}
    for cell in graph.cells:
        if cell.target in places:
            ends.append((len(shown), places[cell.target], cell.weight))
            shown.append(_shown_cell(cell, tokens, nodes_by_name))
    groups = []
    for name, members in graph.supernodes.items():
        drawn_members = [places[member] for member in members if member in places]
        if drawn_members:
            groups.append((name, drawn_members))
    part = {
        "kind": "attribution",
        "title": "attribution graph",
        "nodes": shown,
        "tokens": tokens,
        "links": [(source, target) for source, target, _ in ends],
        "weights": torch.tensor([weight for *_, weight in ends], dtype=torch.float64),
        "pins": [places[name] for name in graph.pins if name in places],
        "groups": groups,
        "start": 0,
        "layers": max((node.layer for node in nodes), default=0),
        "note": " ".join(filter(None, notes)),
    }
    return View(f"attribution graph of “{''.join(tokens)[:60]}”", [part])


def _notes(scores: Mapping[str, float], n_drawn: int, n_nodes: int) -> Iterator[str]:
    """Yield sentences: the scores of a graph, and how many nodes are drawn if some are left out.

    Args:
        scores: the scores of the graph, by name.
        n_drawn: the number of nodes in the picture.
        n_nodes: the number of nodes of the graph.
    """
    if scores:
        listed = ", ".join(f"{name} {value:.3g}" for name, value in scores.items())
        yield f"{listed[0].upper()}{listed[1:]}."
    if n_drawn < n_nodes:
        yield f"The most influential {n_drawn} of {n_nodes} nodes are shown."


def _by_influence(node: Any) -> tuple[bool, float]:
    """Return a sort key for nodes: logits first, then by influence. NaN is last."""
    influence = 0.0 if node.influence is None else node.influence
    return node.kind != "logit", math.inf if math.isnan(influence) else influence


def _shown(node: Any, card: Any, token: str) -> dict[str, Any]:
    """Return a node of an attribution graph, with its description.

    Args:
        node: the node.
        card: the card of a feature, or None.
        token: the label of the token at the position of the node.
    """
    raises = " ".join(visible(token) for token in node.raises)
    values = {
        "activation": node.activation,
        "probability": node.probability,
        "cumulative influence": node.influence,
    }
    known = [(name, f"{value:.4g}") for name, value in values.items() if value is not None]
    place = f"{node.pos} “{visible_title(token)}”" if token else f"{node.pos}"
    about = [("kind", node.kind), ("position", place), *known]
    label = visible_title(node.label)
    if raises:
        about.append(("raises", raises))
        label = label or f"raises {raises}"
    examples = []
    if card and node.kind == "feature":
        for example in card.examples[:4]:
            tokens = [visible(token) for token in example.tokens]
            examples.append((tokens, [*example.activations]))
    return {
        "id": node.id,
        "kind": node.kind,
        "layer": node.layer,
        "pos": node.pos,
        "label": label,
        "influence": node.influence,
        "about": about,
        "examples": examples,
    }


def _shown_cell(cell: Any, tokens: Sequence[str], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head that attends to a key, with its pattern and the pairs of its score.

    Args:
        cell: the score of the head.
        tokens: the text of each token.
        nodes: the nodes by name.
    """

    def named(name: str) -> str:
        """Return the name of a node, with its label."""
        node = nodes.get(name)
        return f"{name} {visible_title(node.label or ' '.join(node.raises))}" if node else name

    facts = [
        ("looks at", f"{cell.key} “{tokens[cell.key]}”, with weight {cell.pattern[cell.key]:.3g}"),
        ("gradient · (score - mean)", f"{cell.weight:+.4g}, to first order"),
        ("score", f"{cell.score:.4g}, of pairs whose sizes add up to {cell.size:.4g}"),
    ]
    pairs = [
        (f"{value:+.3g}", f"{named(query)} with {named(key)}") for query, key, value in cell.pairs
    ]
    return {
        "id": f"{cell.layer}.{cell.head}",
        "kind": "head",
        "layer": cell.layer,
        "pos": cell.query,
        "influence": None,
        "label": f"head {cell.head} of layer {cell.layer} looks at {cell.key} “{tokens[cell.key]}”",
        "about": [("kind", "attention"), ("position", f"{cell.query}"), *facts, *pairs],
        "examples": [(tokens, [*cell.pattern])],
    }


def _chart(title: str, axis: str, bars: Sequence[tuple[str, float]], unit: str) -> dict[str, Any]:
    """Return bars without intervals."""
    values = torch.tensor([value for _, value in bars])
    unknown = torch.full_like(values, torch.nan)
    labels = [visible(label) for label, _ in bars]
    return {
        "kind": "bars",
        "title": title,
        "unit": unit,
        "values": values,
        "low": unknown,
        "high": unknown,
        "axis": axis_part(axis, range(len(labels)), words=labels, most=len(labels)),
        "note": title[0].upper() + title[1:] + ".",
    }
