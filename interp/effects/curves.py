"""Faithfulness of circuits over their sizes, as the MIB benchmark measures it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from hooks.base import number_of, progress_bar, shows_progress
from interp.effects.evaluation import NOTHING
from interp.graph import Graph
from interp.graph.circuit import Circuit
from interp.graph.circuits import REMEDY, random, random_pool, strengths, strongest
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.numbers.intervals import interval_text
from interp.pairs.pairs import Pairs, of_pairs
from interp.results.result import Result
from interp.runs.circuit_runs import CircuitRuns
from interp.runs.masked import CircuitSource

if TYPE_CHECKING:
    from interp.plots.figure import Picture

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of edges at which the MIB benchmark runs circuits (Mueller et al. 2025)."""


class Area(NamedTuple):
    """An area under a curve, with its 95% interval over examples.

    Attributes:
        value: the area.
        low, high: the ends of the interval. For a single example, they are NaN and are not printed.

    >>> Area(0.25, 0.125, 0.5), Area(0.25, float("nan"), float("nan"))
    (0.250  [0.125, 0.500], 0.250)
    """

    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"{self.value:.3f} {interval_text(self.low, self.high, '.3f')}".rstrip()


@dataclass(frozen=True, eq=False, repr=False)
class Curve:
    """Faithfulness as a function of the share of edges in the circuit; returned by `circuit_curve`.

    An edge helps if, on average, replacing it moves the metric towards the metric of the other
    text.

    Attributes:
        signed: faithfulness [edges, example] of circuits of the edges that help most.
        absolute: faithfulness of circuits of the edges with the largest effects of either sign.
        random: faithfulness of circuits of random edges, which are on paths from the input to the
            logits. Circuits of n edges are drawn from the 2n strongest edges; see `faithfulness`.
    """

    signed: Result
    absolute: Result
    random: Result

    @property
    def cpr(self) -> Area:
        """MIB's circuit performance ratio: the area under `signed`.

        Higher is better. The ratio can be larger than 1.
        """
        return _area(self.signed)

    @property
    def cmd(self) -> Area:
        """MIB's circuit-model distance: the area between `absolute` and 1. Lower is better."""
        return _area(self.absolute, from_one=True)

    def as_json(self) -> dict[str, Any]:
        """Return the three curves and the two areas, with their intervals, in the JSON form of all
        results; see `interp.json_form`.
        """
        tables: dict[str, Table] = {}
        for name in ("signed", "absolute", "random"):
            tables |= getattr(self, name).tables(name)
        for name in ("cpr", "cmd"):
            for part, number in getattr(self, name)._asdict().items():
                tables[f"{name}.{part}"] = Table(number, unit="area")
        return form("Curve", tables, self.signed.about)

    def plot(self) -> "Picture":
        """Plot the three curves with 95% intervals. It needs the extra `plots`."""
        from interp.plots.matplotlib_figures import curves

        kinds = {"signed": self.signed, "absolute": self.absolute, "random": self.random}
        heights = {name: (kind.mean(), *kind.interval()) for name, kind in kinds.items()}
        title = "\n".join(repr(self).split("\n  ")[1:])
        return curves(self.signed.labels["edges"], heights, title)

    def __repr__(self) -> str:
        cpr_of_random = _area(self.random)
        cmd_of_random = _area(self.random, from_one=True)
        circuits = number_of(len(self.signed.labels["edges"]), "circuit")
        lines = [
            f"Curve of {circuits}, areas with 95% intervals",
            f"CPR {self.cpr!r}, of random edges {cpr_of_random!r}",
            f"CMD {self.cmd!r}, of random edges {cmd_of_random!r}",
        ]
        # The whole model is usually the last circuit.
        smaller = self.signed.mean()[:-1]
        n_idle = int((smaller.abs() < NOTHING).sum())
        if 2 * n_idle > len(smaller):
            lines.append(f"{n_idle} of {circuits} of the edges that help do nothing: {REMEDY}")
        return "\n  ".join(lines)


@shows_progress
@of_pairs
def circuit_curve(
    model: nn.Module,
    pairs: Pairs,
    graph: Graph,
    scores: Result,
    source: CircuitSource = "pair",
    *,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Curve:
    """Return the faithfulness of circuits of several sizes, as the MIB benchmark measures it.

    See Mueller et al. 2025, "MIB: A Mechanistic Interpretability Benchmark".

    For each share p, the circuit keeps the int(p · edges) most important edges. Then edges of
    unconnected nodes are pruned; see `Circuit.pruned`.

    Args:
        model: the model of the circuit's graph.
        pairs: texts that were not used to find the circuits.
        source: the source of the replaced values; see `run_circuit`. Default: the corrupted texts.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        graph: the graph of the scores.
        scores: effects [edge, example], such as a result of `edge_attribution`.
        shares: the shares of edges, in increasing order; the last share is at most 1. Default: the
            shares of the MIB benchmark.
        seed: the seed of the random edges. One random circuit of each size is drawn.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Three curves of faithfulness [edges, example]: of the edges that help most, of the edges
        with the largest effects of either sign, and of random edges. `cpr` and `cmd` are the areas
        that MIB reports. They are printed as shares of target - base; see `faithfulness`.

    Raises:
        ValueError: for the reasons of `faithfulness`, or if shares do not increase from above 0 to
            at most 1.

    Warns:
        UserWarning: if some of the texts were used to compute the scores.

    >>> from interp import edge_attribution
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> scores = edge_attribution(model, Pairs("def __ini", "def __nam", ("t", "e")))
    >>> other_pairs = Pairs("    def __ini", "    def __nam", ("t", "e"))
    >>> curve = circuit_curve(model, other_pairs, Graph(model), scores, shares=(0.02, 0.1, 1.0))
    >>> curve.absolute.mean()  # with 2%, 10% and all of the edges
    tensor([0.3533, 0.9029, 1.0000])
    """
    require_made("graph", graph, Graph)
    points = torch.tensor([0, *shares], dtype=torch.float64)
    if len(points) < 3 or not (points.diff() > 0).all() or points[-1] > 1:
        raise ValueError(
            "shares must be at least two numbers that increase from above 0 to at most 1; "
            f"got {[*shares]}"
        )
    n_edges = int(graph.allowed.sum())
    counts = [int(share * n_edges) for share in shares]
    strength = strengths(graph, scores, signed=False)
    whole = strongest(graph, scores, n_edges)
    runs = CircuitRuns(model, pairs, whole, source=source, max_bytes=max_bytes)

    def measured(circuit_of: Callable[[int], Circuit]) -> Result:
        gains = []
        for n in counts:
            gains.append(runs(circuit_of(n)) - runs.none)
            count()
        return runs.shares(torch.stack(gains), "edges", shares)

    def of_random_edges(n: int) -> Circuit:
        pool = random_pool(graph, strength, n)
        return random(graph, n, seed, connected=True, among=pool)

    with progress_bar("circuits", total=3 * len(counts)) as count:
        return Curve(
            signed=measured(partial(strongest, graph, scores, signed=True)),
            absolute=measured(partial(strongest, graph, scores)),
            random=measured(of_random_edges),
        )


def _area(result: Result, *, from_one: bool = False) -> Area:
    """Return the area under a faithfulness curve, or between the curve and 1.

    The area is computed with the trapezoid rule over the shares that were asked for, not the shares
    after pruning. It is a mean over examples, and so is each height of the curve. The distance of
    the mean height from 1 is an absolute value. To write it as a mean over examples, the difference
    between 1 and the height of each example is multiplied by the sign of the mean difference.

    Args:
        result: faithfulness [edges, example].
        from_one: whether to return the area between the curve and 1.
    """
    shares = torch.tensor(result.labels["edges"], dtype=torch.float64)
    heights = result.values.cpu().double()
    if from_one and result.target is not None:
        distance = result.target.cpu().double() - heights
        heights = distance.mean(-1, keepdim=True).sign() * distance
    areas = torch.trapezoid(heights.mT, shares).to(result.values)
    (area,) = replace(result, values=areas[None], axes=("area", "example"), labels={}).top(1)
    return Area(area.effect, area.low, area.high)
