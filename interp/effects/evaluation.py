"""Measures of a circuit: faithfulness, completeness, minimality, and the AUROC of scores.

All measures but the AUROC are shares of a behaviour: 0 is the run in which every edge carries
values of the source, and 1 is the whole model.
"""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hooks.base import (
    aligned_rows,
    number_of,
    progress_of,
    require_integer,
    shows_progress,
)
from interp import plots
from interp.graph.circuit import Circuit
from interp.graph.circuits import REMEDY, random, random_pool, strengths
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
_WITHOUT_EDGES = f"the circuit must have at least one edge; got none: {REMEDY}"
NOTHING = 0.005
"""A circuit does nothing if the absolute value of its share is below this number."""

Results = TypeVar("Results", bound="CircuitResults")


@dataclass(frozen=True, eq=False, repr=False)
class CircuitResults(plots.Shown):
    """Several results about one circuit. Each field of a subclass is a result."""

    title: ClassVar[str]

    def results(self) -> dict[str, Result]:
        """Return the results by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def as_json(self) -> dict[str, Any]:
        """Return the results in the JSON form of all results; see `interp.json_form`."""
        tables: dict[str, Table] = {}
        results = self.results()
        for name, result in results.items():
            tables |= result.tables(name)
        about = next(iter(results.values())).about
        return form(type(self).__name__, tables, about)

    def view(self) -> plots.View:
        """Draw the results as bars."""
        return plots.together(self.title, self.results())


@dataclass(frozen=True, eq=False, repr=False)
class Faithfulness(CircuitResults):
    """The share of a behaviour that a circuit keeps, beside random circuits.

    `faithfulness` returns this object. It is printed with the median and the range of the random
    circuits. The share of a random circuit is its mean over examples.

    Attributes:
        circuit: the share of the circuit [circuit, example]. The only label is `circuit`.
        random: the shares of the random circuits [draw, example]. The labels of `draw` are the
            seeds.
    """

    circuit: Result
    random: Result

    title: ClassVar[str] = "faithfulness of a circuit"

    @property
    def n_as_good(self) -> int:
        """The number of random circuits whose share is at least the share of the circuit."""
        return int((self.random.mean() >= self.circuit.mean()).sum())

    def __repr__(self) -> str:
        (circuit,) = self.circuit.places([0])
        about = self.random.about
        shares = self.random.mean()
        low, median, high = (float(shares.quantile(q)) for q in (0, 0.5, 1))
        rows = [
            ("circuit", circuit.numbers),
            ("random, median", f"{median:+.4g}"),
            ("random, range", f"{low:+.4g} to {high:+.4g}"),
        ]
        n_random = number_of(len(shares), "random circuit")
        sizes = about["edges of random circuits"]
        size = number_of(sizes[-1], "edge")
        if len(sizes) > 1:
            size = f"{sizes[0]} to {size}"
        examples = number_of(self.circuit.shape[-1], "example")
        edges = number_of(about["edges"], "edge")
        lines = [
            f"Faithfulness: {edges}, {examples}, in {self.circuit.unit}",
            "0 is the base: no edge; 1 is the target: the whole model",
            f"metric: {about['metric']}",
            *aligned_rows(rows),
            f"{self.n_as_good} of {n_random} of {size} do as well, drawn from "
            f"{about['drawn from']}",
        ]
        if abs(circuit.effect) < NOTHING:
            lines.append(f"the circuit does nothing: {REMEDY}")
        elif shares.abs().median() < NOTHING:
            remedy = "; pass the strongest edges as among=" if about["is_whole"] else ""
            lines.append(f"most random circuits do nothing, so this comparison says little{remedy}")
        return "\n  ".join([*lines, *Entries([circuit]).notes()])


@shows_progress
@of_pairs
def faithfulness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    n_random: int = 20,
    among: Circuit | None = None,
    seed: int = 0,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Faithfulness:
    """Return the share of a behaviour that a circuit keeps: (m(C) - m(∅)) / (m(M) - m(∅)).

    m is the metric on the clean texts. M is the whole model, and in ∅ every edge carries values of
    the source. A share is a ratio of means over examples; see `Result.normalized`.

    The circuit is compared with random circuits of the same number of edges, all of them on paths
    from the input to the logits. Random edges of a large graph do nothing, so they show little.
    Random edges of the strongest edges are a comparison that a circuit can lose.

    Args:
        model: the model of the circuit's graph.
        pairs: texts that were not used to find the circuit.
        circuit: the edges that are not replaced.
        source: the source of the replaced values; see `run_circuit`. Default: the corrupted texts.
        n_random: the number of random circuits. Each of them is one more run.
        among: the circuit whose edges the random circuits are drawn from. Default: the strongest
            edges, two times as many as the circuit has: `circuits.greedy(graph, scores, 2 *
            len(circuit), signed, exact=True)`, with the scores in the circuit. `signed` is True if
            all edges of the circuit help. If a circuit does not contain the scores of all edges,
            such as a circuit of `acdc`, the default is all edges of the graph.
        seed: the seed of the first random circuit; the next circuit has the next seed. See
            `circuits.random`.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Shares without a unit: 1 if a circuit does as well as the whole model. They are shares of
        target - base: `base` is the metric of ∅, whose share is 0, and `target` is the metric of M,
        whose share is 1.

    Raises:
        ValueError: if the circuit has no edge or belongs to another model, the metric is the same
            for M and ∅, or `among` has fewer edges than the circuit.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp import edge_attribution
    >>> from interp.graph import Graph, circuits
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> circuit = circuits.greedy(Graph(model), scores, 20)  # of 479 edges
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> found = faithfulness(model, other_pairs, circuit)
    >>> found
    Faithfulness: 19 edges, 1 example, in shares of target - base
      0 is the base: no edge; 1 is the target: the whole model
      metric: logit_diff('t', 'e')
      circuit         +0.7969
      random, median  +0.1079
      random, range   -0.08266 to +0.6493
      0 of 20 random circuits of 19 edges do as well, drawn from the 38 strongest edges
    >>> round(found.circuit.mean().item(), 3)
    0.797
    """
    require_integer("n_random", n_random, least=1)
    require_made("circuit", circuit, Circuit)
    if len(circuit) == 0:
        raise ValueError(_WITHOUT_EDGES)
    runs = CircuitRuns(model, pairs, circuit, source=source, max_bytes=max_bytes)
    if among is None:
        only_helps = bool((circuit.scores[circuit.kept] < 0).all())
        strength = -circuit.scores if only_helps else circuit.scores.abs()
        pool = random_pool(circuit.graph, strength, len(circuit))
    else:
        pool = among
    seeds = range(seed, seed + n_random)
    of_circuit = runs(circuit) - runs.none
    of_random = []
    sizes = []
    for each in progress_of(seeds, "random circuits", n_random):
        drawn = random(circuit.graph, len(circuit), each, connected=True, among=pool)
        sizes.append(len(drawn))
        of_random.append(runs(drawn) - runs.none)
    random_effects = runs.effects(torch.stack(of_random), "draw", seeds)
    facts = {
        "edges": len(circuit),
        "edges of random circuits": sorted({*sizes}),
        "drawn from": _pool_in_words(pool, among),
        "is_whole": len(pool) == int(circuit.graph.allowed.sum()),
    }
    effects = Faithfulness(
        circuit=runs.effects(of_circuit[None], "circuit", ["circuit"]),
        random=replace(random_effects, about={**random_effects.about, **facts}),
    )
    return finished(effects, results_as_shares)


def _pool_in_words(pool: Circuit, among: Circuit | None) -> str:
    """Return what the edges are that random circuits are drawn from."""
    if len(pool) == int(pool.graph.allowed.sum()):
        return f"all {len(pool):,} edges"
    if among is None:
        return f"the {len(pool):,} strongest edges"
    return number_of(len(pool), "given edge")


@dataclass(frozen=True, eq=False, repr=False)
class CircuitScores(CircuitResults):
    """The three criteria of a circuit, returned by `evaluate_circuit`.

    F is the faithfulness of a circuit: its share of the behaviour of the whole model.

    Attributes:
        faithfulness: F(C) [circuit, example], where C is the circuit. The only label is `circuit`.
        completeness: F(M without K) - F(C without K) [without, example], where M is the whole
            model, and K is a set of nodes. All differences are near 0 if the circuit is complete. A
            large difference shows that other parts of the model can do the work of the nodes, and
            that the circuit lacks these parts. The labels of `without` are the nodes of the circuit
            except `logits`, one in each set K, and then `circuit`. For this last label, all edges
            of the circuit are removed, and no node. The difference is then the share of the
            behaviour that the model keeps without these edges.
        minimality: the loss F(C) - F(C without v) for each node v except `logits` [node, example].
            If the interval of a node contains 0, the circuit may not need the node.
    """

    faithfulness: Result
    completeness: Result
    minimality: Result

    title: ClassVar[str] = "criteria of a circuit"

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
    return finished(effects, results_as_shares)


def results_as_shares(effects: Results) -> Results:
    """Return results about a circuit as shares of the whole model's difference; see `as_shares`."""
    shares = {name: as_shares(result) for name, result in effects.results().items()}
    return type(effects)(**shares)


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
        raise ValueError(_WITHOUT_EDGES)
    return tuple(node for node in circuit.nodes if node != "logits")
