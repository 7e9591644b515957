"""Influence of nodes in an attribution graph, and pruning, as circuit-tracer defines them.

The definitions are in Ameisen et al. 2025.

1. Take the absolute values of each row of effects, and divide the row by its sum. The results are
   the shares of the sources in the explained node.
2. The influence of a node is a sum over all paths from the node to the targets. Each path
   contributes the product of the shares along the path and of the weight of the target. With the
   weights w of the targets and the matrix A of shares, the influences are `w (A + A² + ...)`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.numbers.precision import finite

InfluenceRows = Float[Tensor, "row source"]


def shares_of_rows(rows: InfluenceRows) -> InfluenceRows:
    """Return the absolute values of effects, divided by the sum of the absolute values in their
    row.
    """
    sizes = rows.abs()
    return sizes / finite(sizes.sum(1, keepdim=True), "summed effects").clamp(min=1e-10)


def influence(
    shares: InfluenceRows, weights: Float[Tensor, " row"], column: Int[Tensor, " row"]
) -> Float[Tensor, " source"]:
    """Return the influence of each source on the targets.

    Args:
        shares: the shares of each row; see `shares_of_rows`.
        weights: the weight of each row as a target, or 0 if the row is no target.
        column: the index of the source that each row explains, or -1 for a logit.

    Raises:
        ValueError: if an effect is not finite, or a path leads from a node back to the same node.
    """
    total = shares.new_zeros(shares.shape[1])
    # Each step goes down by at least one layer, so the loop ends. With NaN, it would not end.
    for number in range(len(total) + 1):
        if not weights.any():
            return total
        step = weights @ shares
        if number == 0:
            # The product with 0 is NaN too, so the first step shows every number that is not
            # finite.
            finite(step, "influence")
        total += step
        weights = torch.where(column >= 0, step[column], 0)
    raise ValueError("effects must lead from earlier nodes to later nodes; they form a cycle")


def scores_of_graph(
    rows: InfluenceRows,
    weights: Float[Tensor, " row"],
    column: Int[Tensor, " row"],
    is_error: Bool[Tensor, " source"],
    is_input: Bool[Tensor, " source"],
) -> dict[str, float]:
    """Return the `replacement` and the `completeness` of a graph, as circuit-tracer defines them.

    `replacement` is the influence of inputs, divided by the influence of inputs and errors.
    `completeness` is the share of the effects on a node that does not come from errors, as a mean
    over all nodes, weighted by the influence of the nodes. The share is 1 for a node without
    effects on it.

    Args:
        rows: the effects, one row for each explained node.
        weights: the weight of each row as a target, or 0 if the row is no target.
        column: the index of the source that each row explains, or -1 for a logit.
        is_error: True for errors, and for features without a row.
        is_input: True for embeddings and constants.
    """
    of_row = shares_of_rows(rows)
    reached = influence(of_row, weights, column)
    errors, inputs = reached[is_error].sum(), reached[is_input].sum()
    explained = torch.where(column >= 0, reached[column], 0) + weights
    missed = of_row[:, is_error].sum(1) @ explained
    return {
        "replacement": float(inputs / (inputs + errors)),
        "completeness": float(1 - missed / (reached.sum() + weights.sum())),
    }


def threshold(scores: Float[Tensor, " score"], share: float) -> Float[Tensor, ""]:
    """Return the smallest score that is needed to reach a share of the sum of all scores.

    Add up the scores, the largest first, until the sum reaches the share. The last added score is
    returned.

    Args:
        scores: the scores.
        share: the share of the sum, 0 to 1.

    >>> threshold(torch.tensor([5.0, 1.0, 3.0, 1.0]), 0.8)
    tensor(3.)
    """
    ordered = scores.sort(descending=True).values
    reached = ordered.cumsum(0) / ordered.sum()
    return ordered[min(int(torch.searchsorted(reached, share)), len(ordered) - 1)]


def cumulative(scores: Float[Tensor, " node"]) -> Float[Tensor, " node"]:
    """Return, for each score, the share of the sum that this score and all larger scores make up.

    >>> cumulative(torch.tensor([1.0, 3.0]))
    tensor([1.0000, 0.7500])
    """
    ordered, order = scores.sort(descending=True)
    return torch.empty_like(scores).scatter(0, order, ordered.cumsum(0) / ordered.sum())


def pruned(
    rows: InfluenceRows,
    weights: Float[Tensor, " row"],
    column: Int[Tensor, " row"],
    is_kept: Bool[Tensor, " source"],
    node: float,
    edge: float,
) -> tuple[Bool[Tensor, " source"], Bool[Tensor, "row source"]]:
    """Return the sources and edges that carry most influence, as two masks.

    A source is removed if none of the remaining edges begins at this source. A source with a row is
    also removed if none of the remaining edges ends at it.

    Args:
        rows: the effects, one row for each explained node.
        weights: the weight of each row as a target, or 0 if the row is no target.
        column: the index of the source that each row explains, or -1 for a logit.
        is_kept: the sources that are never removed.
        node, edge: the strongest nodes and edges with these shares of the influence remain.
    """
    influences = influence(shares_of_rows(rows), weights, column)
    stays = is_kept | (influences >= threshold(influences, node))
    # The row of a removed feature is removed too. Rows of logits are never removed.
    has_row = torch.where(column >= 0, stays[column], True)
    inner = shares_of_rows(rows * stays * has_row[:, None])
    through = influence(inner, weights, column)
    edge_scores = inner * (torch.where(column >= 0, through[column], 0) + weights)[:, None]
    edges = edge_scores >= threshold(edge_scores.flatten(), edge)
    explained = column[column >= 0]
    before = torch.zeros_like(stays)
    while not torch.equal(before, stays):
        before = stays
        edges = edges & stays & torch.where(column >= 0, stays[column], True)[:, None]
        has_input = torch.ones_like(stays)
        has_input[explained] = edges[column >= 0].any(1)
        stays = stays & (is_kept | (edges.any(0) & has_input))
    return stays, edges
