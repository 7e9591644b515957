"""Measures of a circuit: faithfulness, completeness, minimality, and the AUROC of scores.

All measures but the AUROC are shares of a behaviour: 0 is the run in which every edge carries
values of the source, and 1 is the whole model.
"""

import itertools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from hooks.base import aligned_rows, number_of, progress_of, shows_progress
from interp import plots
from interp.graph.circuit import Circuit
from interp.graph.circuits import random, strengths
from interp.inputs.parts import finished
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.numbers.ranks import area_under_curve
from interp.pairs.pairs import Pairs, of_pairs
from interp.results.entries import Entries, sizes_in_words
from interp.results.result import Result
from interp.runs.circuit_runs import CircuitRuns, as_shares
from interp.runs.masked import CircuitSource

_MOST_NODES = 20
"""The number of nodes in the printed table of criteria."""


@shows_progress
@of_pairs
def faithfulness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    seed: int = 0,
    connected: bool = False,
    among: Circuit | None = None,
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
        connected: whether all edges of the random circuit are on a path from the input to the
            logits. Default: any edges.
        among: the circuit whose edges the random circuit is drawn from. In a large graph, the share
            of random edges is usually 0, also if they are connected. Connected edges of the
            strongest edges are a comparison that a circuit can lose: `connected=True,
            among=circuits.greedy(graph, scores, 2 * len(circuit), exact=True)`, with several seeds.
            Default: all edges of the graph.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Shares [circuit, example], without a unit: 1 if the circuit does as well as the whole model.
        The labels of `circuit` are `circuit` and `random`. They are printed as shares of target -
        base: `base` is the metric of ∅, whose share is 0, and `target` is the metric of M, whose
        share is 1.

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
    random_circuit = random(circuit.graph, len(circuit), seed, connected=connected, among=among)
    metrics = torch.stack([runs(circuit), runs(random_circuit)])
    return runs.shares(metrics - runs.none, "circuit", ("circuit", "random"))


@dataclass(frozen=True, eq=False, repr=False)
class CircuitScores(plots.Shown):
    """The three criteria of a circuit, returned by `evaluate_circuit`.

    F is the faithfulness of a circuit: its share of the behaviour of the whole model.

    Attributes:
        faithfulness: F(C) [circuit, example], where C is the circuit. The only label is `circuit`.
        completeness: F(M without K) - F(C without K) [without, example], where M is the whole
            model, and K is a set of nodes. All differences are near 0 if the
            circuit is complete. A large difference shows that other parts of the model can do the
            work of the nodes, and that the circuit lacks these parts. The labels of `without` are
            the nodes of the circuit except `logits`, one in each set K, and then `circuit`. For
            this last label, K is the whole circuit. The difference is then the share of the
            behaviour that the model keeps without the circuit.
        minimality: the loss F(C) - F(C without v) for each node v except `logits` [node, example].
            If the interval of a node contains 0, the circuit may not need the node.
    """

    faithfulness: Result
    completeness: Result
    minimality: Result

    def results(self) -> dict[str, Result]:
        """Return the three results by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_json(self) -> dict[str, Any]:
        """Return the three results in the JSON form of all results; see `interp.json_form`."""
        tables: dict[str, Table] = {}
        for name, result in self.results().items():
            tables |= result.tables(name)
        return form("CircuitScores", tables, self.faithfulness.about)

    def view(self) -> plots.View:
        """Draw the three results as bars."""
        return plots.together("criteria of a circuit", self.results())

    def __repr__(self) -> str:
        n_nodes = len(self.minimality.labels["node"])
        # The nodes that the circuit needs most come first, and then the whole circuit.
        losses = self.minimality.mean()
        order = losses.argsort(descending=True, stable=True).tolist()[:_MOST_NODES]
        faithful = self.faithfulness.places([0])
        complete = self.completeness.places([*order, n_nodes])
        minimal = self.minimality.places(order)
        rows = [("without", "completeness", "minimality")]
        for difference, loss in itertools.zip_longest(complete, minimal):
            name = str(difference.where["without"])
            rows.append((name, difference.numbers, loss.numbers if loss else ""))
        size = sizes_in_words(("node", "example"), self.minimality.shape)
        lines = [
            f"CircuitScores: {size}, in {self.faithfulness.unit}",
            "0 is the base: no edge; 1 is the target: the whole model",
            f"faithfulness {faithful[0].numbers}",
            *aligned_rows(rows),
        ]
        if n_nodes > len(order):
            lines.append(f"… {number_of(n_nodes - len(order), 'more node')}: .minimality.top(n)")
        lines += Entries([*faithful, *complete, *minimal]).notes()
        return "\n  ".join(lines)


@shows_progress
@of_pairs
def evaluate_circuit(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> CircuitScores:
    """Return the faithfulness, the completeness and the minimality of a circuit.

    These are the three criteria of Wang et al. 2022, "Interpretability in the Wild". A circuit is
    faithful if it does as well as the whole model, complete if it contains all parts that do the
    work, and minimal if it needs each of its nodes. The evaluation removes each node from the
    circuit and from the whole model, so it runs the model two times for each node of the circuit.
    `faithfulness` measures the first criterion alone, and compares it with random edges.

    Args:
        model: the model of the circuit's graph.
        pairs: texts that were not used to find the circuit.
        circuit: the edges that are not replaced.
        source: the source of the replaced values; see `run_circuit`. Default: the corrupted texts.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The three criteria, as shares of target - base without a unit. The base is the run in which
        every edge carries values of the source, and the target is the whole model.

    Raises:
        ValueError: if the circuit has no edge, or for the reasons of `faithfulness`.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> circuit = circuits.greedy(Graph(model), scores, 10)
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> evaluate_circuit(model, other_pairs, circuit)  # doctest: +ELLIPSIS
    CircuitScores: 6 nodes x 1 example, in shares of target - base
      0 is the base: no edge; 1 is the target: the whole model
      faithfulness +0.6262
      without  completeness  minimality
      input    ...e-08    +0.6262
      m0       -0.01226      +0.6262
      m1       +0.1507       +0.5545
      a0.h3    +0.4898       +0.4298
      m3       +0.3944       +0.2729
      m2       +0.2616       +0.1801
      circuit  -0.01918

    The circuit keeps a share of 0.63, and loses all of it without `m0`. Without `m3`, the whole
    model keeps a share that is 0.39 larger than the share of the circuit: the circuit lacks paths
    that replace `m3`.
    """
    runs = CircuitRuns(model, pairs, circuit, source=source, max_bytes=max_bytes)
    whole = circuit | ~circuit
    nodes = _inner_nodes(circuit)
    metric = runs(circuit)
    losses = []
    differences = []
    for node in progress_of(nodes, "nodes", len(nodes)):
        without_node = runs(circuit.without(node))
        losses.append(metric - without_node)
        differences.append(runs(whole.without(node)) - without_node)
    differences.append(runs(whole - circuit) - runs.none)
    effects = CircuitScores(
        faithfulness=runs.effects((metric - runs.none)[None], "circuit", ["circuit"]),
        completeness=runs.effects(torch.stack(differences), "without", (*nodes, "circuit")),
        minimality=runs.effects(torch.stack(losses), "node", nodes),
    )
    return finished(effects, scores_as_shares)


def scores_as_shares(effects: CircuitScores) -> CircuitScores:
    """Return the three criteria as shares of the whole model's difference; see `as_shares`."""
    return CircuitScores(**{name: as_shares(result) for name, result in effects.results().items()})


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
