"""Measures of a circuit: faithfulness, completeness, minimality, and the AUROC of scores.

All measures but the AUROC are shares of a behaviour: 0 is the run in which every edge carries
values of the source, and 1 is the whole model.
"""

import torch
from torch import nn

from hooks.base import progress_of, shows_progress
from interp.graph.circuit import Circuit
from interp.graph.circuits import random, strengths
from interp.kinds import require_made
from interp.numbers.ranks import area_under_curve
from interp.pairs.pairs import Pairs, of_pairs
from interp.results.result import Result
from interp.runs.circuit_runs import CircuitRuns
from interp.runs.masked import CircuitSource


@shows_progress
@of_pairs
def faithfulness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    seed: int = 0,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the share of a behaviour that a circuit keeps: (m(C) - m(∅)) / (m(M) - m(∅)).

    m is the metric on the clean texts. M is the whole model, and in ∅ every edge carries values of
    the source. A share is a ratio of means over examples; see `Result.normalized`.

    Args:
        model: the model of the circuit's graph.
        pairs: texts that were not used to find the circuit.
        circuit: the edges that are not replaced.
        source: the source of the replaced values; see `run_circuit`. Default: the corrupted texts.
        seed: the seed of a random circuit with the same number of edges, for comparison.
        max_bytes: see `run_circuit`.
        progress: whether to show a bar after two seconds.

    Returns:
        Shares [circuit, example], without a unit: 1 if the circuit does as well as the whole model.
        The labels of `circuit` are `circuit` and `random`.

    Raises:
        ValueError: if the circuit belongs to another model, or the metric is the same for M and ∅.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> circuit = circuits.greedy(Graph(model), scores, 20)  # 20 of 479 edges
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> shares = faithfulness(model, other_pairs, circuit).mean()
    >>> [round(share, 3) for share in shares.tolist()]  # the circuit, random edges
    [0.797, 0.0]
    """
    runs = CircuitRuns(model, pairs, circuit, source=source, max_bytes=max_bytes)
    random_circuit = random(circuit.graph, len(circuit), seed)
    metrics = torch.stack([runs(circuit), runs(random_circuit)])
    return runs.shares(metrics - runs.none, "circuit", ("circuit", "random"))


@shows_progress
@of_pairs
def completeness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the difference between model and circuit after the same nodes are removed from both.

    For a set K of nodes, the difference is F(M without K) - F(C without K), where F is the
    faithfulness (Wang et al. 2022, "Interpretability in the Wild"). All differences are near 0 if
    the circuit is complete. A large difference shows that other parts of the model can do the work
    of the nodes, and that the circuit lacks these parts.

    Args:
        model, pairs, circuit, source, max_bytes, progress: see `faithfulness`.

    Returns:
        Differences of shares [without, example], without a unit; see `faithfulness`. The labels of
        `without` are the nodes of the circuit except `logits`, one in each set K, and then
        `circuit`. For this last label, K is the whole circuit. The difference is then the share of
        the behaviour that the model keeps without the circuit.

    Raises:
        ValueError: if the circuit has no edge or belongs to another model, or the metric is the
            same for the whole model and for the empty circuit.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> circuit = circuits.greedy(Graph(model), scores, 10)
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> completeness(model, other_pairs, circuit).top(2)
    without a0.h3  +0.4898
    without m3     +0.3944

    Without `m3`, the model keeps a share of the behaviour that is 0.39 larger than the circuit's
    share: the circuit lacks paths that replace `m3`.
    """
    runs = CircuitRuns(model, pairs, circuit, source=source, max_bytes=max_bytes)
    whole = circuit | ~circuit
    nodes = _inner_nodes(circuit)
    reduced = [(whole.without(node), circuit.without(node)) for node in nodes]
    reduced.append((whole - circuit, circuit - circuit))
    differences = []
    for reduced_model, reduced_circuit in progress_of(reduced, "nodes", len(reduced)):
        differences.append(runs(reduced_model) - runs(reduced_circuit))
    return runs.shares(torch.stack(differences), "without", (*nodes, "circuit"))


@shows_progress
@of_pairs
def minimality(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the share of a behaviour that a circuit loses without each of its nodes.

    For a node v, this is F(C) - F(C without v), where F is the faithfulness (Wang et al. 2022,
    "Interpretability in the Wild"). If a circuit is minimal, it loses something whenever one of its
    nodes is removed. If the interval of a node contains 0, the circuit may not need the node.

    Args:
        model, pairs, circuit, source, max_bytes, progress: see `faithfulness`.

    Returns:
        Differences of shares [node, example], without a unit; see `faithfulness`. The labels of
        `node` are the nodes of the circuit except the logits.

    Raises:
        ValueError: for the same reasons as in `completeness`.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> circuit = circuits.greedy(Graph(model), scores, 10)
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> minimality(model, other_pairs, circuit).select(node=["m0", "m1", "m2"]).top()
    node m0  +0.6262
    node m1  +0.5545
    node m2  +0.1801

    The circuit keeps a share of 0.63, and loses all of it without `m0`.
    """
    runs = CircuitRuns(model, pairs, circuit, source=source, max_bytes=max_bytes)
    nodes = _inner_nodes(circuit)
    with_all_nodes = runs(circuit)
    losses = []
    for node in progress_of(nodes, "nodes", len(nodes)):
        losses.append(with_all_nodes - runs(circuit.without(node)))
    return runs.shares(torch.stack(losses), "node", nodes)


def circuit_auroc(scores: Result, known: Circuit, signed: bool = False) -> float:
    """Return how well scores separate the edges of a known circuit from all others: the AUROC.

    This area under the ROC curve is the probability that a random edge of the circuit has a higher
    score than a random edge outside the circuit; equal scores count half.

    Args:
        scores: effects [edge, example] of the edges of the circuit's graph.
        known: the true circuit, whose graph has these edges.
        signed: whether edges that help more rank higher; see `circuits.above`. Default: edges with
            larger absolute effects rank higher.

    Returns:
        A number from 0 to 1: 1 if all edges of the circuit have the highest scores, and about 0.5
        for random scores.

    Raises:
        ValueError: if all edges are in the circuit, or no edge is.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> better_scores = edge_attribution(model, pairs, "eap_ig_inputs")
    >>> known = circuits.greedy(Graph(model), better_scores, 10)
    >>> round(circuit_auroc(edge_attribution(model, pairs), known), 3)
    0.992
    """
    require_made("known", known, Circuit)
    graph = known.graph
    strength = strengths(graph, scores, signed)[graph.allowed].double()
    is_in = known.kept[graph.allowed]
    n_in = int(is_in.sum())
    if not 0 < n_in < len(is_in):
        raise ValueError(
            f"the circuit must contain some edges but not all; got {n_in} of {len(is_in)}"
        )
    return area_under_curve(strength, is_in)


def _inner_nodes(circuit: Circuit) -> tuple[str, ...]:
    """Return the nodes of a circuit except the logits.

    Raises:
        ValueError: if the circuit has no edge.
    """
    if len(circuit) == 0:
        raise ValueError("the circuit must have at least one edge; got none")
    return tuple(node for node in circuit.nodes if node != "logits")
