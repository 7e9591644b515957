"""Attention in an attribution graph: sources of a head's scores, and scores that decide a target.

The query and the key of a head are targets. Each component of a query or a key is a direction of
the stream that attention reads, so a frozen run yields the effect of each source on the component.
A score is the product of a query and a key, and therefore a sum over pairs of sources.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import Text, require_choice
from interp.attribution_graphs.descent import TARGETS_AT_ONCE, Descent, Targets
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.nodes import AttentionCell, Node
from interp.attribution_graphs.readings import LinearReads
from interp.attribution_graphs.targets import promoted_tokens
from interp.numbers.ranks import largest_rows
from interp.reading.attending import (
    AskedPlace,
    PartOfScore,
    asked_score,
    attention_attribution,
    checked_head,
    pair_table,
)
from interp.results.result import Result


def why(
    run: FrozenRun,
    nodes: Sequence[Node],
    place: AskedPlace,
    through: Literal["paths", "writers"],
    k: int,
) -> Result:
    """Return the effects of pairs of sources on a score; see `AttributionGraph.attention`.

    Args:
        run: the frozen run.
        nodes: all nodes of the graph.
        place: the head, the query and the keys.
        through: `paths` or `writers`.
        k: the number of sources on each side.
    """
    require_choice("through", through, ("paths", "writers"))
    if through == "writers":
        if not run.branches.is_single:
            raise ValueError(
                "through must be 'paths' in a graph of two answers of several tokens; got 'writers'"
            )
        return attention_attribution(run.graph.model, run.cache, *place, k=k)
    layer, _ = checked_head(run.graph, place.head)
    scores = run.scores_of(layer)
    words = Text(run.tokens[None]).words(run.graph.model)
    asked = asked_score(scores, place, words)
    of_query, *of_keys = (
        _rows_of_head(run, side, head=place.head, weights=run.like(weights[0])).mT[:, None]
        for side, weights in asked.weights.items()
    )
    names = [node.id for node in nodes[: run.n_sources]]
    table = pair_table(
        scores.scale * of_query, of_keys, asked=asked, names=names, k=k, dtype=run.dtype
    )
    axes = table.axes[:2]
    labels = _labels_of_sources(run, nodes, {*table.labels[axes[0]], *table.labels[axes[1]]})
    words_of_axes = {}
    for axis in axes:
        words_of_axes[axis] = [labels.get(name, "") for name in table.labels[axis]]
    return replace(table, words=words_of_axes)


def _labels_of_sources(run: FrozenRun, nodes: Sequence[Node], names: set[str]) -> dict[str, str]:
    """Return the labels of some sources of the graph, by the id of their nodes.

    The label of a feature lists the tokens whose logits it raises most, such as `raises def class`.
    Any other source, such as an embedding, has the label of its node.

    Args:
        run: the run.
        nodes: the nodes of the graph, the sources first.
        names: the ids of the nodes. Nodes that are not sources get no label.
    """
    chosen = {
        node.id: place for place, node in enumerate(nodes[: run.n_sources]) if node.id in names
    }
    features = [place for place in chosen.values() if place < len(run.layer)]
    raised = promoted_tokens(run, torch.tensor(features, dtype=torch.long, device=run.layer.device))
    labels = {name: nodes[place].label for name, place in chosen.items()}
    return labels | {
        nodes[place].id: f"raises {' '.join(tokens)}"
        for place, tokens in zip(features, raised, strict=True)
    }


def _rows_of_head(
    run: FrozenRun, side: PartOfScore, head: tuple[int, int], weights: Float[Tensor, " pos"]
) -> Float[Tensor, "d_head source"]:
    """Return the effect of each source on a weighted sum of the queries or keys of a head.

    Args:
        run: the frozen run.
        side: the queries or the keys.
        head: the layer and the head.
        weights: the weight of each position in the sum.
    """
    layer, number = head
    pos = weights.nonzero()[:, 0]
    readings, number = run.scores_of(layer).part(side, number)
    directions = weights[pos, None, None] * run.like(readings.directions(number)[0, pos])
    offset = weights[pos, None] * run.like(readings.constant[0, pos, number])
    d_head = directions.shape[1]
    reading = run.attention(layer).reading
    places = pos.repeat_interleave(d_head)
    flat = directions.flatten(0, 1)
    targets = run.targets(
        LinearReads(
            reading=reading, stage=2 * layer, pos=places, direction=flat, offset=offset.flatten()
        )
    )
    row_of_target = torch.arange(d_head, device=pos.device).repeat(len(pos))
    return Descent(run, targets, row=row_of_target).rows


def without_each_head(run: FrozenRun, targets: Targets, source: int) -> Float[Tensor, "layer head"]:
    """Return, for each head, the effect of a source on a node if the paths through the head are
    cut.

    Args:
        run: the frozen run.
        targets: the targets that add up to the node.
        source: the index of the source.
    """
    layers = len(run.graph.layers)
    n_heads = run.n_heads
    cut = run.logits.new_ones(layers * n_heads, layers, n_heads)
    cut.view(layers * n_heads, -1).fill_diagonal_(0)
    effects = []
    n_targets = len(targets.pos)
    for part in cut.split(TARGETS_AT_ONCE):
        copies = (field.repeat(len(part), *[1] * (field.ndim - 1)) for field in targets)
        row = torch.arange(len(part), device=part.device).repeat_interleave(n_targets)
        effects.append(run.rows(Targets(*copies), part, row))
    return torch.cat(effects)[:, source].view(layers, n_heads)


def largest_cells(
    run: FrozenRun, nodes: Sequence[Node], targets: Targets, name: str, k: int
) -> list[AttentionCell]:
    """Return the scores that decide a target most; see `AttributionGraph.cells`.

    Args:
        run: the frozen run.
        nodes: all nodes of the graph.
        targets: the targets that add up to the node.
        name: the name of the node.
        k: the number of scores.
    """
    one_row = torch.zeros_like(targets.pos)
    effects_by_layer = Descent(run, targets, attention=True, keep=True, row=one_row).cells
    largest = []
    for layer, effects in effects_by_layer.items():
        flat = effects.flatten()
        for place in largest_rows(flat.abs(), k).tolist():
            largest.append((float(flat[place]), layer, place))
    cells = []
    for weight, layer, place in sorted(largest, key=lambda cell: -abs(cell[0]))[:k]:
        head, query, key = map(int, np.unravel_index(place, effects_by_layer[layer].shape))
        table = why(run, nodes, place=AskedPlace((layer, head), query, key), through="paths", k=6)
        pattern = run.scores_of(layer).pattern[0, head, query].tolist()
        pairs = [(*entry.where.values(), entry.effect) for entry in table.top(6)]
        facts = table.about["score"], table.about["summed sizes of all pairs"]
        cells.append(AttentionCell(layer, head, query, key, name, weight, *facts, pattern, pairs))
    return cells
