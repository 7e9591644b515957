"""Measures of a circuit: faithfulness, completeness, minimality, curves over sizes, and known circuits."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.shared import without_gradients
from interp.graph import Graph
from interp.graph.circuit import Circuit
from interp.graph.circuits import random, strengths, top
from interp.inputs.pairs import Pairs, of_pairs, pairs_for
from interp.numbers.ranks import area_under_curve
from interp.results.result import Result
from interp.runs.masked import CircuitSource, MaskedRuns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges at which the MIB benchmark runs circuits (Mueller et al. 2025)."""


@of_pairs
def faithfulness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    seed: int = 0,
    max_bytes: int = 2**30,
) -> Result:
    """Measure the share of the model's behaviour that a circuit keeps: (m(C) - m(∅)) / (m(M) - m(∅)).

    m is the metric on the clean texts. M is the whole model, and in ∅ every edge carries values of the source.
    A share is a ratio of means over examples; see `Result.normalized`.

    Args:
        model: the model of the circuit's graph.
        pairs: other texts than those that the circuit was found on.
        circuit: the edges that stay.
        source: where replaced values come from, by default the corrupted texts; see `run_circuit`.
        seed: draws a random circuit of as many edges, to compare with.
        max_bytes: see `run_circuit`.

    Returns:
        Shares [circuit, example], of the `circuit` and of the `random` one.

    Raises:
        ValueError: if the circuit is of another model, or the metric is the same for M and ∅.

    Warns:
        UserWarning: if texts are among those that the circuit was found on.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> every_edge = Circuit(Graph(model), Graph(model).edges)
    >>> faithfulness(model, pairs, every_edge).mean()
    tensor([1., 1.])
    """
    runs = _Runs(model, pairs, circuit, source, max_bytes)
    metrics = torch.stack([runs(circuit), runs(random(circuit.graph, len(circuit), seed))])
    return runs.shares(metrics - runs.none, "circuit", ("circuit", "random"))


@of_pairs
def completeness(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    max_bytes: int = 2**30,
) -> Result:
    """Compare model and circuit after the same nodes are removed from both (Wang et al. 2022).

    For each set K of nodes this is F(M without K) - F(C without K), with F the faithfulness. All are near 0 if the
    circuit is complete. K is each node of the circuit alone. The last label, `circuit`, removes the whole circuit,
    and says how much the rest of the model does alone.

    Returns:
        Shares [without, example]. For arguments, errors and the warning see `faithfulness`.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> circuit = Circuit(Graph(model), ["input->m0", "m0->logits"])
    >>> completeness(model, pairs, circuit).labels["without"]
    ('input', 'm0', 'circuit')
    """
    runs, whole = _Runs(model, pairs, circuit, source, max_bytes), _whole(circuit)
    nodes = _inner(circuit)
    rest = [(whole.without(node), circuit.without(node)) for node in nodes]
    rest.append((whole - circuit, circuit - circuit))
    differences = torch.stack([runs(other) - runs(reduced) for other, reduced in rest])
    return runs.shares(differences, "without", (*nodes, "circuit"))


@of_pairs
def minimality(
    model: nn.Module,
    pairs: Pairs,
    circuit: Circuit,
    source: CircuitSource = "pair",
    *,
    max_bytes: int = 2**30,
) -> Result:
    """Measure the loss of a circuit without each of its nodes: F(C) - F(C without the node) (Wang et al. 2022).

    A node whose interval has 0 inside may not be needed.

    Returns:
        Shares [node, example]. For arguments, errors and the warning see `faithfulness`.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> every_edge = Circuit(Graph(model), Graph(model).edges)
    >>> minimality(model, pairs, every_edge).select(node="input").mean().round(decimals=4)
    tensor(1.)
    """
    runs, nodes = _Runs(model, pairs, circuit, source, max_bytes), _inner(circuit)
    with_all = runs(circuit)
    losses = torch.stack([with_all - runs(circuit.without(node)) for node in nodes])
    return runs.shares(losses, "node", nodes)


class Area(NamedTuple):
    """An area under a curve, with its 95% interval over examples."""

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{self.value:.3f}  [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, eq=False, repr=False)
class Curve:
    """Faithfulness over the share of edges that circuits keep; made by `curve`.

    Attributes:
        signed: shares [edges, example] of circuits of the edges that help most.
        absolute: the same of the edges with the largest effects of either sign.
        random: the same of random edges.
    """

    signed: Result
    absolute: Result
    random: Result

    @property
    def cpr(self) -> Area:
        """MIB's circuit performance ratio: the area under `signed`. More is better; it can exceed 1."""
        return _area(self.signed)

    @property
    def cmd(self) -> Area:
        """MIB's circuit-model distance: the area between `absolute` and 1. Less is better."""
        return _area(self.absolute, from_one=True)

    def plot(self) -> "Figure":
        """The three curves with 95% intervals. It needs the extra `plots`."""
        from interp.pictures.plots import curves

        kinds = {"signed": self.signed, "absolute": self.absolute, "random": self.random}
        heights = {name: (kind.mean(), *kind.interval()) for name, kind in kinds.items()}
        title = "\n".join(repr(self).split("\n  ")[1:])
        return curves(self.signed.labels["edges"], heights, title)

    def __repr__(self) -> str:
        random = _area(self.random)
        apart = _area(self.random, from_one=True)
        lines = [
            f"Curve of {len(self.signed.labels['edges'])} circuits",
            f"CPR {self.cpr!r}, of random edges {random!r}",
            f"CMD {self.cmd!r}, of random edges {apart!r}",
        ]
        return "\n  ".join(lines)


@of_pairs
def curve(
    model: nn.Module,
    pairs: Pairs,
    graph: Graph,
    scores: Result,
    source: CircuitSource = "pair",
    *,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    max_bytes: int = 2**30,
) -> Curve:
    """Measure the faithfulness of circuits of several sizes, as the MIB benchmark does (Mueller et al. 2025).

    For each share p, the int(p · edges) edges that matter most are kept, and then pruned to what is connected.

    Args:
        model, pairs, source, max_bytes: see `faithfulness`.
        graph: the graph of the scores.
        scores: effects [edge, example], as `edge_attribution` gives them.
        shares: the shares, rising, the last at most 1.
        seed: draws the random edges.

    Raises:
        ValueError: as for `faithfulness`, or if shares do not rise from above 0 to at most 1.

    Warns:
        UserWarning: if texts are among those that the scores are from.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> pairs = Pairs(torch.tensor([[3, 1, 4]]), torch.tensor([[2, 1, 5]]), torch.tensor([[6, 0]]))
    >>> from interp import edge_attribution
    >>> scores = edge_attribution(model, pairs)
    >>> others = Pairs(torch.tensor([[5, 2, 6]]), torch.tensor([[1, 2, 0]]), torch.tensor([[4, 3]]))
    >>> curve(model, others, Graph(model), scores, shares=(0.5, 1.0)).signed.select(edges=1.0).mean()
    tensor(1.)
    """
    points = torch.tensor([0, *shares], dtype=torch.float64)
    if len(points) < 3 or not (points.diff() > 0).all() or points[-1] > 1:
        raise ValueError(f"shares must be at least 2, and rise from above 0 to 1; got {[*shares]}")
    every = int(graph.allowed.sum())
    counts = [int(share * every) for share in shares]
    runs = _Runs(model, pairs, top(graph, scores, every), source, max_bytes)

    def measured(chosen: Callable[[int], Circuit]) -> Result:
        gains = torch.stack([runs(chosen(n)) - runs.none for n in counts])
        return runs.shares(gains, "edges", shares)

    return Curve(
        measured(partial(top, graph, scores, signed=True)),
        measured(partial(top, graph, scores)),
        measured(lambda n: random(graph, n, seed)),
    )


def auroc(scores: Result, known: Circuit, signed: bool = False) -> float:
    """Return the area under the ROC curve of scores that should tell the edges of a known circuit from all others.

    It is the chance that an edge of the circuit matters more than another edge; equal ones count half.

    Args:
        scores: effects [edge, example] of the circuit's graph.
        known: the true circuit.
        signed: whether the edges are ranked by how much they help, or by the size of their effects.

    Raises:
        ValueError: if all edges are in the circuit, or none.

    >>> from models import Transformer, TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=4)
    >>> model = Transformer(config).eval()
    >>> graph = Graph(model)
    >>> known = Circuit(graph, ["input->m0", "m0->logits"])
    >>> values = known.kept[graph.allowed].float()[:, None]
    >>> auroc(Result(values, ("edge", "example"), labels={"edge": graph.edges}), known)
    1.0
    """
    graph = known.graph
    strength = strengths(graph, scores, signed)[graph.allowed].double()
    is_in = known.kept[graph.allowed]
    n_in = int(is_in.sum())
    if not 0 < n_in < len(is_in):
        raise ValueError(
            f"some edges must be in the circuit and some not; got {n_in} of {len(is_in)}"
        )
    return area_under_curve(strength, is_in)


class _Runs:
    """Runs of circuits on the same texts, of which the empty and the whole one are the ends of a scale."""

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs,
        circuit: Circuit,
        source: CircuitSource,
        max_bytes: int,
    ) -> None:
        pairs = pairs_for(model, pairs)
        seen = sum(digest in circuit.found_on for digest in pairs.digests())
        if seen:
            warnings.warn(
                f"the circuit was found on {seen} of these {len(pairs)} pairs: others show how good it is",
                stacklevel=3,
            )
        self._metric = pairs.metric
        graph = circuit.graph
        split_embeddings = "input" not in graph.writers
        self._masked = MaskedRuns(
            model, pairs, source, split_embeddings=split_embeddings, max_bytes=max_bytes
        )
        whole = _whole(circuit)
        self.none, self.whole = self(whole - whole), self(whole)
        gap, size = self.whole - self.none, torch.maximum(self.whole.abs(), self.none.abs())
        if gap.mean().abs() <= 100 * torch.finfo(gap.dtype).eps * size.mean():
            raise ValueError("the metric must differ between the whole model and none of it")

    @without_gradients
    def __call__(self, circuit: Circuit) -> Float[Tensor, " example"]:
        """The metric of a run in which only the circuit's edges have their own values."""
        return self._masked.metric(circuit)

    def shares(self, values: Tensor, axis: str, labels: Iterable[object]) -> Result:
        """Differences of the metric as shares of the whole scale."""
        about, named = {"metric": repr(self._metric)}, {axis: tuple(labels)}
        effects = Result(values, (axis, "example"), self.none, self.whole, named, about=about)
        return effects.normalized()


def _whole(circuit: Circuit) -> Circuit:
    return circuit | ~circuit


def _inner(circuit: Circuit) -> tuple[str, ...]:
    if len(circuit) == 0:
        raise ValueError("the circuit must have an edge; got none")
    return tuple(node for node in circuit.nodes if node != "logits")


def _area(result: Result, *, from_one: bool = False) -> Area:
    """The area under faithfulness, by trapezoids over the nominal shares, or between it and 1.

    It is a mean over examples, as each height is. The distance of a mean to 1 has no sign, so the distances of
    all examples are multiplied by the sign of their mean.
    """
    shares = torch.tensor(result.labels["edges"], dtype=torch.float64)
    heights = result.values.cpu().double()
    if from_one and result.target is not None:
        distance = result.target.cpu().double() - heights
        heights = distance.mean(-1, keepdim=True).sign() * distance
    areas = torch.trapezoid(heights.mT, shares).to(result.values)
    (area,) = replace(result, values=areas[None], axes=("area", "example"), labels={}).top(1)
    return Area(area.effect, area.low, area.high)
