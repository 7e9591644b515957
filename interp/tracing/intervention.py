"""Interventions on features: what an attribution graph predicts, and what the model does.

A changed feature moves a target by `change * effect / activation`, if all else is held. Features that are not held pass
their own change on, with their gates as they were; so over all paths the changes are those of `(I - A)⁻¹`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks import Point
from hooks.shared import without_gradients
from interp.numbers.precision import at_least_float32, finite, like
from interp.results.places import written
from interp.tracing.frozen import FrozenRun


@dataclass(frozen=True, eq=False, repr=False)
class Intervention:
    """Predicted and true changes of nodes after features were set to values; made by `AttributionGraph.intervene`.

    Attributes:
        changed: the features that were set, with their values before and after.
        nodes: the nodes that were not: logits, features with a row, and supernodes, whose features are added up.
        direct: the changes while all other features are held.
        predicted: the changes over all paths, with patterns, norms and gates held.
        true: the changes in the model, of which nothing is held.
    """

    changed: Mapping[str, tuple[float, float]]
    nodes: Sequence[str]
    direct: Float[Tensor, " node"]
    predicted: Float[Tensor, " node"]
    true: Float[Tensor, " node"]

    @property
    def correlation(self) -> float:
        """Pearson's, of predicted and true changes of the nodes that were predicted to change; NaN below two."""
        return float(torch.corrcoef(self._pairs)[0, 1]) if self._pairs.shape[1] > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Fisher's 95 % interval of the correlation; NaN below four nodes, or without one."""
        n = self._pairs.shape[1]
        if n < 4 or math.isnan(self.correlation):
            return math.nan, math.nan
        middle, half = (
            math.atanh(max(-1 + 1e-15, min(1 - 1e-15, self.correlation))),
            1.96 / math.sqrt(n - 3),
        )
        return math.tanh(middle - half), math.tanh(middle + half)

    @property
    def _pairs(self) -> Float[Tensor, "two _node"]:
        moved = self.predicted != 0
        return torch.stack([self.predicted[moved], self.true[moved]]).cpu()

    def __repr__(self) -> str:
        low, high = self.interval
        lines = [
            f"  {name}: {before:.4g} -> {after:.4g}"
            for name, (before, after) in self.changed.items()
        ]
        order = self.predicted.abs().argsort(descending=True)[:12].tolist()
        width = max(map(len, self.nodes), default=4)
        return "\n".join([
            f"Intervention on {len(self.changed)} features, {len(self.nodes)} others; "
            f"correlation {self.correlation:.3f}{written(low, high, '.3f')}",
            *lines[:10],
            f"  {'node':{width}} {'direct':>10} {'predicted':>10} {'true':>10}",
            *(
                f"  {self.nodes[n]:{width}} {self.direct[n]:>+10.4g} {self.predicted[n]:>+10.4g} {self.true[n]:>+10.4g}"
                for n in order
            ),
        ])  # fmt: skip


def predicted(
    rows: Float[Tensor, "row source"],
    column: Int[Tensor, " row"],
    activation: Float[Tensor, " feature"],
    change: Float[Tensor, " feature"],
    is_set: Bool[Tensor, " feature"],
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Changes of what the rows explain: direct ones, and those over all paths.

    Args:
        rows, column: of the graph.
        activation: of the active features, the first sources.
        change: of those that are set.
        is_set: which features are set; no change passes through their rows.
    """
    per_unit = rows[:, : len(activation)] / activation
    direct = finite(per_unit @ change, "predicted changes")
    total, step = direct, direct
    passes = (column >= 0) & ~is_set[column]
    # Each step goes up by at least one layer, so it ends; with NaN it would not.
    while step[passes].any():
        passed = torch.zeros_like(change).index_put((column[passes],), step[passes])
        step = finite(per_unit @ passed, "predicted changes")
        total = total + step
    return direct, total


@without_gradients
def true_values(
    run: FrozenRun, values: Mapping[int, float], directions: Float[Tensor, "logit vocab"], pos: int
) -> tuple[Float[Tensor, " feature"], Float[Tensor, " logit"]]:
    """Active features, and sums of logits, in a run of the model in which features are set to values.

    A feature is set by adding what it writes, times its change in that run, where MLPs write.

    Args:
        run: the frozen run.
        values: of features, by their numbers among the active ones.
        directions, pos: see `FrozenRun.of_logits`.
    """
    read: dict[str, Tensor] = {}

    def see(value: Tensor, point: Point) -> None:
        read[point.name] = at_least_float32(value[0])

    def write(value: Tensor, point: Point) -> Tensor:
        here, value = point.layer, value.clone()
        for number, wanted in values.items():
            layer, at, feature = (int(each[number]) for each in (run.layer, run.pos, run.feature))
            dictionary, decoders = run.transcoders[layer]
            if here is None or not 0 <= here - layer < len(decoders):
                continue
            now = dictionary.encode(read[run.readings[layer].name])[at, feature]
            value[0, at] += like((wanted - now) * decoders[here - layer][feature], value)
        return value

    runner, names = run.graph.runner(), run.graph.names
    hooks = [(name, see) for name in {*(r.name for r in run.readings.values()), run.final.name}]
    written = [(names[layer.mlp.branch.added], write) for layer in run.graph.layers if layer.mlp]
    runner.run_with_hooks(run.tokens[None], hooks=[*hooks, *written])
    features = run.activation.clone()
    for n, (dictionary, _) in run.transcoders.items():
        here = run.layer == n
        made = dictionary.encode(read[run.readings[n].name])
        features[here] = like(made[run.pos[here], run.feature[here]], features)
    direction, offset = run.of_vocabulary(directions)
    return features, like(read[run.final.name][pos], direction) @ direction.mT + offset
