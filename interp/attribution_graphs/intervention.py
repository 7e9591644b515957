"""Interventions on features: compare predictions of a graph with changes in the model.

1. A changed feature changes a target by `change * effect / activation` if all other features are
   frozen. These are the direct changes.
2. The other features change too, and change further targets. The prediction assumes frozen gates:
   an active feature stays active and follows its pre-activation, and an inactive feature stays
   inactive. With the matrix A of the effects of features on features for each unit of activation,
   the direct changes are multiplied by `I + A + A² + ... = (I - A)⁻¹`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks import Point
from hooks.base import at_least_float32, number_of, require_kind, to_device, without_gradients
from interp import edits
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.targets import LogitTerms
from interp.json_form import Table, form
from interp.numbers.intervals import interval_text
from interp.numbers.precision import finite, like

_SHOWN = 12
_SMALL = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Intervention:
    """Predicted and true changes of nodes after features were set to values, returned by
    `AttributionGraph.intervene`.

    Attributes:
        changed: the features that were set, with their values before and after.
        nodes: the nodes that were not set: logits, features with a row, and supernodes. The change
            of a supernode is the sum over its features.
        direct: the predicted changes if all other features are frozen.
        predicted: the predicted changes over all paths, with frozen norms and gates. Patterns are
            frozen too, unless the graph was made with `attention=True`.
        by_attention: the part of `predicted` that is due to changes of attention.
        true: the changes in the model, with nothing frozen. For two answers of several tokens, it
            is the change of the target with the tangent of the softmax; see `attribution_graph`.
        patterns_held: the changes in the model with frozen attention patterns, so
            `true - patterns_held` is the effect of attention.
        scales_held: the changes in the model with frozen patterns and scales of norms. The
            difference from `predicted - by_attention` is due to MLPs: features become active or
            inactive, features without a row change, and the errors of transcoders change.
    """

    changed: Mapping[str, tuple[float, float]]
    nodes: Sequence[str]
    direct: Float[Tensor, " node"]
    predicted: Float[Tensor, " node"]
    by_attention: Float[Tensor, " node"]
    true: Float[Tensor, " node"]
    patterns_held: Float[Tensor, " node"]
    scales_held: Float[Tensor, " node"]

    @property
    def correlation(self) -> float:
        """Pearson's correlation of the predicted and true changes, over nodes with a predicted
        change; NaN for fewer than two nodes.
        """
        return float(torch.corrcoef(self._pairs)[0, 1]) if self._pairs.shape[1] > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Fisher's 95 % interval of the correlation.

        It is NaN for fewer than four nodes or if the correlation is NaN.
        """
        n = self._pairs.shape[1]
        if n < 4 or math.isnan(self.correlation):
            return math.nan, math.nan
        middle = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, self.correlation)))
        half = 1.96 / math.sqrt(n - 3)
        return math.tanh(middle - half), math.tanh(middle + half)

    @property
    def _pairs(self) -> Float[Tensor, "two _node"]:
        """The predicted and the true change of each node with a predicted change."""
        moved = self.predicted != 0
        return torch.stack([self.predicted[moved], self.true[moved]]).cpu()

    def as_json(self) -> dict[str, Any]:
        """Return all changes and the correlation, in the JSON form of all results; see
        `interp.json_form`.
        """
        labels = {"node": self.nodes, "changed": [*self.changed], "value": ["before", "after"]}
        changed = [[*values] for values in self.changed.values()]
        low, high = self.interval
        tables = {"changed": Table(changed, "changed value", "value of the feature", labels)}
        for name in ("direct", "predicted", "by_attention", "true", "patterns_held", "scales_held"):
            tables[name] = Table(getattr(self, name), "node", "unit of the node", labels)
        for name, number in (("mean", self.correlation), ("low", low), ("high", high)):
            tables[f"correlation.{name}"] = Table(number, unit="correlation")
        return form("Intervention", tables)

    def __repr__(self) -> str:
        low, high = self.interval
        lines = [
            f"  {name}: {before:.4g} -> {after:.4g}"
            for name, (before, after) in self.changed.items()
        ]
        columns = {
            "direct": self.direct,
            "predicted": self.predicted,
            "by attention": self.by_attention,
            "true": self.true,
            "true by attention": self.true - self.patterns_held,
        }
        sizes = torch.stack([self.predicted, self.true]).abs().amax(0)
        order = sizes.argsort(descending=True)[:_SHOWN].tolist()
        # Changes that are small next to the largest change are mostly rounding.
        order = [node for node in order if sizes[node] > _SMALL * sizes.max()]
        width = max([4, *(len(self.nodes[node]) for node in order)])
        rows = []
        for node in order:
            cells = [
                f"  {column[node]:>+{max(10, len(name))}.4g}" for name, column in columns.items()
            ]
            rows.append(f"  {self.nodes[node]:{width}}{''.join(cells)}")
        names = [f"  {name:>10}" for name in columns]
        correlation = self.correlation
        of_nodes = ""
        if not math.isnan(correlation):
            of_nodes = f"; correlation {correlation:.3f}{interval_text(low, high, '.3f')}"
        n_hidden = len(self.nodes) - len(order)
        changed = number_of(len(self.changed), "feature")
        others = number_of(len(self.nodes), "other")
        return "\n".join(
            [
                f"Intervention on {changed}, {others}{of_nodes}",
                *lines[:10],
                f"  {'node':{width}}{''.join(names)}",
                *rows,
                *([f"  {n_hidden} nodes with smaller changes"] if n_hidden else []),
            ]
        )


@without_gradients
def intervened(
    graph: Any, values: Mapping[str, float], groups: Mapping[str, Sequence[str]]
) -> Intervention:
    """Return the changes after features are set; see `AttributionGraph.intervene`.

    Args:
        graph: the attribution graph.
        values: the new values, by the names of features or groups.
        groups: the names of the features in each group.
    """
    call = f"for example {{{next(iter(groups), 'L0.F323.P4')!r}: 0.0}}"
    require_kind("values", values, Mapping, "a mapping from names of features to numbers", call)
    n_features = len(graph.run.layer)
    wanted: dict[int, float] = {}
    for name, value in values.items():
        wanted |= {_feature(graph, member): float(value) for member in groups.get(name, [name])}
    if not wanted:
        raise ValueError("values must name at least one feature; got none")
    change = torch.zeros_like(graph.run.activation)
    old = graph.run.activation
    numbers = torch.tensor([*wanted], device=change.device)
    # A number that is too large for the dtype becomes infinite.
    new = change.new_tensor([*wanted.values()])
    change[numbers] = finite(new, f"values of {', '.join(values)}") - old[numbers]
    is_set = torch.zeros_like(change, dtype=torch.bool)
    is_set[numbers] = True
    direct, predicted = predicted_changes(
        graph.rows, graph.column, activation=old, change=change, is_set=is_set
    )
    by_values = predicted
    if graph.by_attention is not None:
        effects = graph.rows + graph.by_attention
        direct, predicted = predicted_changes(
            effects, graph.column, activation=old, change=change, is_set=is_set
        )
    true = [
        _true_changes(graph, wanted, fixed) for fixed in ((), ("pattern",), ("pattern", "scale"))
    ]
    shown_rows = [
        row for row, place in enumerate(graph.explained) if place >= n_features or not is_set[place]
    ]
    names = [graph.nodes[graph.explained[row]].id for row in shown_rows]
    changes = torch.stack([direct, predicted, predicted - by_values, *true])[:, shown_rows].cpu()
    names, changes = _with_groups(names, changes, groups)
    changed = {
        graph.nodes[number].id: (float(old[number]), value) for number, value in wanted.items()
    }
    return Intervention(changed, names, *changes)


def _with_groups(
    names: Sequence[str], changes: Float[Tensor, "kind _node"], groups: Mapping[str, Sequence[str]]
) -> tuple[list[str], Float[Tensor, "kind _place"]]:
    """Return the names and changes of nodes, and then of groups: the sums over their nodes.

    Args:
        names: the names of the nodes.
        changes: the changes of the nodes.
        groups: the names of the nodes in each group. Groups without one of these nodes are left
            out.
    """
    all_names = [*names]
    all_changes = [changes]
    for name, members in groups.items():
        inside = [number for number, node in enumerate(names) if node in members]
        if inside:
            all_names.append(name)
            all_changes.append(changes[:, inside].sum(1, keepdim=True))
    return all_names, torch.cat(all_changes, 1)


def _true_changes(
    graph: Any, values: Mapping[int, float], fixed: Sequence[str]
) -> Float[Tensor, " row"]:
    """Return the changes of all explained nodes in the model after features are set.

    Args:
        graph: the attribution graph.
        values: the new values of features, by their indices among the active features.
        fixed: the last parts of the names of points whose values are frozen.
    """
    features, logits = true_values(graph.run, values, terms=graph.terms, fixed=fixed)
    of_logits = logits - graph.totals[: len(logits)]
    of_features = (features - graph.run.activation)[graph.column[len(logits) :]]
    return finite(torch.cat([of_logits, of_features]), "changes in the model")


def _feature(graph: Any, name: str) -> int:
    """Return the index of a feature among the active features.

    Raises:
        ValueError: if the node is no feature.
    """
    place = graph.place(name)
    if place >= len(graph.run.layer):
        kind = graph.nodes[place].kind
        raise ValueError(f"only features can be set; {name} is a node of the kind {kind}")
    return int(place)


def predicted_changes(
    rows: Float[Tensor, "row source"],
    column: Int[Tensor, " row"],
    activation: Float[Tensor, " feature"],
    change: Float[Tensor, " feature"],
    is_set: Bool[Tensor, " feature"],
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Return the predicted changes of the explained nodes: the direct changes, and the changes over
    all paths.

    Args:
        rows, column: the rows of the graph and the sources that they explain.
        activation: the values of the active features, which are the first sources.
        change: the changes of the features that are set, and 0 for all other features.
        is_set: a mask of the features that are set. Other features do not change them.
    """
    per_unit = rows[:, : len(activation)] / activation
    direct = finite(per_unit @ change, "predicted changes")
    total = direct
    step = direct
    passes = (column >= 0) & ~is_set[column]
    # Each step goes up by at least one layer, so the loop ends. With NaN, it would not end.
    while step[passes].any():
        passed = torch.zeros_like(change).index_put((column[passes],), step[passes])
        step = finite(per_unit @ passed, "predicted changes")
        total = total + step
    return direct, total


@without_gradients
def true_values(
    run: FrozenRun,
    values: Mapping[int, float],
    terms: LogitTerms,
    fixed: Sequence[str] = (),
) -> tuple[Float[Tensor, " feature"], Float[Tensor, " logit"]]:
    """Run the model with features set to values.

    Return the values of the features that are active in the frozen run, and weighted sums of
    logits.

    To set a feature, the run adds the decoder rows of the feature to the outputs of the MLPs, times
    the difference between the new value and the value that the feature would have in this run.

    Args:
        run: the frozen run.
        values: the new values of features, by the indices of the features among the active
            features.
        terms: the weighted sums of logits.
        fixed: the last parts of the names of points whose values are frozen, such as `pattern`.
            Default: no points.
    """
    read: dict[str, Tensor] = {}

    def see(value: Tensor, point: Point) -> None:
        """Record a value that transcoders or the unembedding read."""
        joined = run.branches.joined(at_least_float32(value))
        read[point.name] = to_device(joined, run.logits.device)

    def write(value: Tensor, point: Point) -> Tensor:
        """Return the output of an MLP with the decoder rows of the changed features added."""
        written_layer = point.layer
        value = value.clone()
        for number, wanted in values.items():
            layer = int(run.layer[number])
            pos = int(run.pos[number])
            feature = int(run.feature[number])
            dictionary, decoders = run.transcoders[layer]
            if written_layer is None or not 0 <= written_layer - layer < len(decoders):
                continue
            now = dictionary.encode(read[run.readings[layer].name])[pos, feature]
            row = decoders[written_layer - layer][feature]
            for text_row, column in run.branches.places(pos):
                value[text_row, column] += like((wanted - now) * row, value)
        return value

    names = run.graph.names
    read_names = {reading.name for reading in run.readings.values()} | {run.final.name}
    hooks = [(name, see) for name in read_names]
    writes = [(names[layer.mlp.branch.added], write) for layer in run.graph.layers if layer.mlp]
    fixed_values = [(name, edits.replace(value)) for name, value in run.values(fixed).items()]
    run.run_with_hooks([*fixed_values, *hooks, *writes])
    features = run.activation.clone()
    for layer, (dictionary, _) in run.transcoders.items():
        in_layer = run.layer == layer
        encoded = dictionary.encode(read[run.readings[layer].name])
        features[in_layer] = like(encoded[run.pos[in_layer], run.feature[in_layer]], features)
    direction, offset = run.of_vocabulary(terms.weights)
    stream = like(read[run.final.name][terms.pos], direction)
    value_of_term = (stream * direction).sum(-1) + offset
    if terms.constant is not None:
        value_of_term = value_of_term + terms.constant
    n_nodes = int(terms.node.max()) + 1 if len(terms.node) else 0
    logits = value_of_term.new_zeros(n_nodes).index_add(0, terms.node, value_of_term)
    return features, logits
