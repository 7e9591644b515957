"""Influence in an attribution graph, and what is kept of it, as circuit-tracer defines them (Ameisen et al. 2025).

1. Each row of effects is taken by size and divided by its sum.
2. The influence of a node is the sum, over all paths from it to the targets, of the products of these shares, times the
   weight of the target: `w (A + A² + ...)`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.numbers.precision import finite

Rows = Float[Tensor, "row source"]


def shares(rows: Rows) -> Rows:
    """The sizes of effects as shares of their row."""
    sizes = rows.abs()
    return sizes / finite(sizes.sum(1, keepdim=True), "summed effects").clamp(min=1e-10)


def influence(
    shares: Rows, weights: Float[Tensor, " row"], column: Int[Tensor, " row"]
) -> Float[Tensor, " source"]:
    """The influence of each source on the targets.

    Args:
        shares: of each row; see `shares`.
        weights: of each row as a target; 0 if it is none.
        column: which source each row explains; -1 for a logit.

    Raises:
        ValueError: if effects are not finite, or go in a circle.
    """
    total = shares.new_zeros(shares.shape[1])
    # Each step goes down by at least one layer, so it ends; with NaN it would not.
    for _ in range(len(total) + 1):
        if not weights.any():
            return total
        step = finite(weights @ shares, "influence")
        total += step
        weights = torch.where(column >= 0, step[column], 0)
    raise ValueError("effects must lead from earlier nodes to later ones; they go in a circle")


def scores(
    rows: Rows,
    weights: Float[Tensor, " row"],
    column: Int[Tensor, " row"],
    is_error: Bool[Tensor, " source"],
    is_input: Bool[Tensor, " source"],
) -> dict[str, float]:
    """How much of a graph is explained, as circuit-tracer defines it.

    `replacement` is the share of influence that begins in inputs, not in errors; `completeness` the share of the inputs of
    all nodes, weighted by influence, that are not errors. Nodes without inputs count as complete.
    """
    of_row = shares(rows)
    reached = influence(of_row, weights, column)
    errors, inputs = reached[is_error].sum(), reached[is_input].sum()
    explained = torch.where(column >= 0, reached[column], 0) + weights
    missed = of_row[:, is_error].sum(1) @ explained
    return {
        "replacement": float(inputs / (inputs + errors)),
        "completeness": float(1 - missed / (reached.sum() + weights.sum())),
    }


def threshold(scores: Float[Tensor, " score"], share: float) -> Float[Tensor, ""]:
    """The score from which on the largest scores make up this share of the sum."""
    ordered = scores.sort(descending=True).values
    reached = ordered.cumsum(0) / ordered.sum()
    return ordered[min(int(torch.searchsorted(reached, share)), len(ordered) - 1)]


def cumulative(scores: Float[Tensor, " node"]) -> Float[Tensor, " node"]:
    """For each score the share of the sum that it and all larger ones make up."""
    ordered, order = scores.sort(descending=True)
    return torch.empty_like(scores).scatter(0, order, ordered.cumsum(0) / ordered.sum())


def pruned(
    rows: Rows,
    weights: Float[Tensor, " row"],
    column: Int[Tensor, " row"],
    is_kept: Bool[Tensor, " source"],
    node: float,
    edge: float,
) -> tuple[Bool[Tensor, " source"], Bool[Tensor, "row source"]]:
    """The sources and edges that carry most influence.

    A source that no kept edge leaves goes, and so does one with a row that no kept edge enters.

    Args:
        rows, weights, column: as for `influence`.
        is_kept: sources that stay.
        node, edge: the shares of the influence of nodes, and of edges, that stay.
    """
    scores = influence(shares(rows), weights, column)
    stays = is_kept | (scores >= threshold(scores, node))
    # A row goes with the source that it explains; rows of logits stay.
    has_row = torch.where(column >= 0, stays[column], True)
    inner = shares(rows * stays * has_row[:, None])
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
