"""Measures of a circuit: faithfulness, completeness, minimality, and the AUROC of scores."""

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
    """Measure the share of a behaviour that a circuit keeps: (m(C) - m(∅)) / (m(M) - m(∅)).

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
        Shares [circuit, example]. The labels of `circuit` are `circuit` and `random`.

    Raises:
        ValueError: if the circuit belongs to another model, or the metric is the same for M and ∅.

    Warns:
        UserWarning: if some of the texts were used to find the circuit.

    >>> from interp.graph import Graph
    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> every_edge = Circuit(Graph(model), Graph(model).edges)
    >>> faithfulness(model, pairs, every_edge).mean()
    tensor([1., 1.])
    """
    runs = CircuitRuns(model, pairs, circuit, source, max_bytes)
    metrics = torch.stack([runs(circuit), runs(random(circuit.graph, len(circuit), seed))])
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
    """Compare model and circuit after the same nodes are removed from both (Wang et al. 2022).

    The difference for a set K of nodes is F(M without K) - F(C without K), where F is the
    faithfulness. All differences are near 0 if the circuit is complete. Each set K is one node of
    the circuit. The last set, with the label `circuit`, is the whole circuit: its difference shows
    how much the rest of the model does alone.

    Returns:
        Shares [without, example]. See `faithfulness` for the arguments, errors and the warning.

    >>> from interp.graph import Graph
    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> circuit = Circuit(Graph(model), ["input->m0", "m0->logits"])
    >>> completeness(model, pairs, circuit).labels["without"]
    ('input', 'm0', 'circuit')
    """
    runs, whole = CircuitRuns(model, pairs, circuit, source, max_bytes), circuit | ~circuit
    nodes = _inner(circuit)
    rest = [(whole.without(node), circuit.without(node)) for node in nodes]
    rest.append((whole - circuit, circuit - circuit))
    pairs_of_circuits = progress_of(rest, "nodes", len(rest))
    differences = torch.stack([runs(other) - runs(less) for other, less in pairs_of_circuits])
    return runs.shares(differences, "without", (*nodes, "circuit"))


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
    """Measure the loss without each node of a circuit: F(C) - F(C without the node).

    See Wang et al. 2022, "Interpretability in the Wild". If the interval of a node contains
    0, the circuit may not need the node.

    Returns:
        Shares [node, example]. See `faithfulness` for the arguments, errors and the warning.

    >>> from interp.graph import Graph
    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> every_edge = Circuit(Graph(model), Graph(model).edges)
    >>> minimality(model, pairs, every_edge).select(node="input").mean().round(decimals=4)
    tensor(1.)
    """
    runs, nodes = CircuitRuns(model, pairs, circuit, source, max_bytes), _inner(circuit)
    with_all = runs(circuit)
    each = progress_of(nodes, "nodes", len(nodes))
    losses = torch.stack([with_all - runs(circuit.without(node)) for node in each])
    return runs.shares(losses, "node", nodes)


def circuit_auroc(scores: Result, known: Circuit, signed: bool = False) -> float:
    """Return the area under the ROC curve of scores as a test for the edges of a known circuit.

    The area is the probability that a random edge of the circuit has a higher score than a random
    edge outside the circuit; equal scores count half.

    Args:
        scores: effects [edge, example] of the edges of the circuit's graph.
        known: the true circuit.
        signed: whether to rank the edges by their effects with signs. Default: by absolute effects.

    Raises:
        ValueError: if all edges are in the circuit, or no edge is.

    >>> from interp.graph import Graph
    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> graph = Graph(model)
    >>> known = Circuit(graph, ["input->m0", "m0->logits"])
    >>> values = known.kept[graph.allowed].float()[:, None]
    >>> circuit_auroc(Result(values, ("edge", "example"), labels={"edge": graph.edges}), known)
    1.0
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


def _inner(circuit: Circuit) -> tuple[str, ...]:
    if len(circuit) == 0:
        raise ValueError("the circuit must have at least one edge; got none")
    return tuple(node for node in circuit.nodes if node != "logits")
