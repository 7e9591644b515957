"""A graph of two layers, and random scores of its edges."""

from dataclasses import replace

import torch

from interp import Result
from interp.graph import Graph
from tests.reference import variant

GRAPH = Graph(variant("grouped"))  # 2 layers, 6 heads, 3 or 2 key heads
EDGES = GRAPH.edges


def scored(seed=0, target=-1.0, **about):
    values = torch.randn(len(EDGES), 3, generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([target, 0.4, target])
    return Result(values, ("edge", "example"), *ends, {"edge": EDGES}, about=about)


def without_input(scores):
    """Return scores in which the edges from the input are weaker than all others."""
    values = scores.values.clone()
    values[[edge.startswith("input->") for edge in EDGES]] = 1e-9
    return replace(scores, values=values)


def by_edge(scores):
    return dict(zip(EDGES, scores.values.mean(-1).tolist(), strict=True))
