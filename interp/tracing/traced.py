"""AttributionGraph: direct effects of features, errors and embeddings on each other, and what follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.shared import unknown_name, without_gradients
from interp.numbers.precision import finite
from interp.results.result import Result
from interp.tracing import influence, intervention
from interp.tracing.frozen import TARGETS_AT_ONCE, FrozenRun, Targets
from interp.tracing.intervention import Intervention
from interp.tracing.nodes import Link, Node
from interp.tracing.pruned import PrunedGraph


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph:
    """Direct effects of nodes on each other in one text; made by `attribution_graph`.

    Attributes:
        run: the frozen run.
        rows: what each source adds to each node that is explained: first the logits, then features.
        column: which source each row explains; -1 for a logit.
        weights: of each row as a target: the probability of a token, 1 for others, 0 for what is no target.
        logits: the nodes of the first rows.
        directions: weights of the vocabulary that make these rows' logits.
        totals: the value of what each row explains.
        tokens: the text, in pieces.
    """

    run: FrozenRun
    rows: Float[Tensor, "row source"]
    column: Int[Tensor, " row"]
    weights: Float[Tensor, " row"]
    logits: Sequence[Node]
    directions: Float[Tensor, "logit vocab"]
    totals: Float[Tensor, " row"]
    tokens: Sequence[str]

    @property
    def gap(self) -> float:
        """The largest difference between the sum of a row and its target, as a share of the row's summed sizes."""
        missed = (self.rows.sum(1) - self.totals).abs()
        return float((missed / self.rows.abs().sum(1).clamp(min=1e-30)).max())

    @cached_property
    def influence(self) -> Float[Tensor, " source"]:
        """Of each source on the targets; see `interp.tracing.influence`."""
        return influence.influence(influence.shares(self.rows), self.weights, self.column)

    @cached_property
    def _is_unexplained(self) -> Tensor:
        """Errors, and features without a row of their own."""
        n, n_errors = len(self.run.layer), len(self.run.tokens) * len(self.run.errors)
        found = torch.zeros(self.rows.shape[1], dtype=torch.bool, device=self.rows.device)
        found[: n + n_errors] = True
        found[self.column[self.column >= 0]] = False
        return found

    @cached_property
    def _scores(self) -> dict[str, float]:
        is_input = torch.arange(self.rows.shape[1], device=self.rows.device)
        is_input = is_input >= len(self.run.layer) + len(self.run.tokens) * len(self.run.errors)
        return influence.scores(
            self.rows, self.weights, self.column, self._is_unexplained, is_input
        )

    @property
    def replacement(self) -> float:
        """The share of influence that begins in embeddings and constants, not in errors.

        Features without a row count as errors, so more of `max_features` can only raise it.
        """
        return self._scores["replacement"]

    @property
    def completeness(self) -> float:
        """The share of the inputs of all nodes, weighted by influence, that are not errors."""
        return self._scores["completeness"]

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes: the sources in the order of columns, then the logits."""
        run, n_pos = self.run, len(self.run.tokens)
        shares = influence.cumulative(self.influence).tolist()
        nodes = [
            Node(f"{layer}_{feature}_{pos}", "feature", layer, pos, feature, activation=value)
            for layer, pos, feature, value in zip(
                *(each.tolist() for each in (run.layer, run.pos, run.feature, run.activation)),
                strict=True,
            )
        ]
        nodes += [
            Node(f"{n}_-1_{pos}", "error", n, pos, -1, f"error of layer {n}")
            for n in run.errors
            for pos in range(n_pos)
        ]
        numbers = run.tokens.tolist()
        for n in run.embeddings:
            for pos, (number, text) in enumerate(zip(numbers, self.tokens, strict=True)):
                if n == run.embeddings[0]:
                    nodes.append(Node(f"E_{number}_{pos}", "token", -1, pos, number, text))
                else:
                    nodes.append(
                        Node(f"P_{pos}_{pos}", "position", -1, pos, pos, f"position {pos}")
                    )
        nodes.append(Node("B_0_0", "bias", -1, 0, 0, "all constants"))
        return [
            node._replace(influence=share) for node, share in zip(nodes, shares, strict=True)
        ] + [*self.logits]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node.id: n for n, node in enumerate(self.nodes)}

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise unknown_name(name, self._places, "node of this graph")
        return self._places[name]

    @cached_property
    def _explained(self) -> list[int]:
        """The number of the node that each row explains."""
        logits = torch.arange(len(self.column), device=self.column.device) + self.rows.shape[1]
        return torch.where(self.column >= 0, self.column, logits).tolist()

    def _row(self, name: str) -> int:
        """The row of a node that is explained."""
        place = self._place(name)
        found = [row for row, explained in enumerate(self._explained) if explained == place]
        if not found:
            raise ValueError(
                f"{name} must be a logit or a feature with a row of its own; it has none: raise max_features"
            )
        return found[0]

    def effect(self, source: str, target: str) -> float:
        """What one node adds to another, in logits or in the unit of the pre-activation.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
            ValueError: if the target has no row.
        """
        return float(self.rows[self._row(target), self._place(source)])

    def pruned(self, node: float = 0.8, edge: float = 0.98) -> PrunedGraph:
        """The nodes and links that carry these shares of the influence. Tokens and targets stay.

        Raises:
            ValueError: if a share is not between 0 and 1.
        """
        for name, share in (("node", node), ("edge", edge)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be between 0 and 1; got {share}")
        kinds = [each.kind for each in self.nodes[: self.rows.shape[1]]]
        is_kept = torch.tensor([kind == "token" for kind in kinds], device=self.rows.device)
        is_kept[self.column[(self.weights > 0) & (self.column >= 0)]] = True
        stays, edges = influence.pruned(self.rows, self.weights, self.column, is_kept, node, edge)
        rows, columns = edges.nonzero().T
        links = [
            Link(self.nodes[column].id, self.nodes[self._explained[row]].id, weight)
            for row, column, weight in zip(
                rows.tolist(), columns.tolist(), self.rows[rows, columns].tolist(), strict=True
            )
        ]
        left = stays.nonzero()[:, 0]
        raised = self.run.promoted_tokens(left[left < len(self.run.layer)])
        kept = [self.nodes[n] for n in left.tolist()]
        kept[: len(raised)] = [
            node._replace(raises=words) for node, words in zip(kept, raised, strict=False)
        ]
        scores = {name: getattr(self, name) for name in ("replacement", "completeness", "gap")}
        return PrunedGraph([*kept, *self.logits], links, self.tokens, scores, node)

    @without_gradients
    def heads(self, source: str, target: str) -> Result:
        """How much of an effect is lost when a head's frozen paths are cut.

        A path may pass several heads, and then each counts it, so the shares need not add up to the effect.

        Args:
            source, target: names of nodes.

        Returns:
            Effects with the axes `layer` and `head`, in the unit of the target.

        Raises:
            UnknownNameError, ValueError: as for `effect`.
        """
        row, column = self._row(target), self._place(source)
        layers, n_heads = len(self.run.graph.layers), self.run.n_heads
        cut = self.rows.new_ones(layers * n_heads, layers, n_heads)
        cut.view(layers * n_heads, -1).fill_diagonal_(0)
        one = self._targets(row)
        repeated = Targets(*(part.expand(len(cut), *part.shape[1:]) for part in one))
        kept = torch.cat([
            self.run.rows(Targets(*(part[n : n + TARGETS_AT_ONCE] for part in repeated)), cut[n : n + TARGETS_AT_ONCE])[:, column]
            for n in range(0, len(cut), TARGETS_AT_ONCE)
        ])  # fmt: skip
        lost = (self.rows[row, column] - kept).view(layers, n_heads, 1).cpu()
        return Result(
            lost,
            ("layer", "head", "example"),
            unit="effect",
            about={"source": source, "target": target},
        )

    @without_gradients
    def intervene(
        self, values: Mapping[str, float], supernodes: Mapping[str, Sequence[str]] | None = None
    ) -> Intervention:
        """Set features to values, and compare what the graph predicts with what the model does.

        Args:
            values: new activations of features, by their names, or of all features of a supernode by its name.
            supernodes: names of groups of features, such as those of a pruned graph. Their changes are added up.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
            ValueError: if a node is no feature, none is given, or a value or a change is not finite.
        """
        groups, n_features = dict(supernodes or {}), len(self.run.layer)
        wanted: dict[int, float] = {}
        for name, value in values.items():
            wanted |= {self._feature(member): float(value) for member in groups.get(name, [name])}
        if not wanted:
            raise ValueError("values must name at least one feature; got none")
        change, old = torch.zeros_like(self.run.activation), self.run.activation
        numbers = torch.tensor([*wanted], device=change.device)
        new = change.new_tensor([*wanted.values()])  # too large a number is infinite there
        change[numbers] = finite(new, f"values of {', '.join(values)}") - old[numbers]
        is_set = torch.zeros_like(change, dtype=torch.bool)
        is_set[numbers] = True
        direct, predicted = intervention.predicted(self.rows, self.column, old, change, is_set)
        pos = self.logits[0].pos if self.logits else -1
        features, logits = intervention.true_values(self.run, wanted, self.directions, pos)
        changed = logits - self.totals[: len(logits)], (features - old)[self.column[len(logits) :]]
        true = finite(torch.cat(changed), "changes in the model")
        kept = [
            row
            for row, place in enumerate(self._explained)
            if place >= n_features or not is_set[place]
        ]
        names = [self.nodes[self._explained[row]].id for row in kept]
        changes = torch.stack([direct, predicted, true])[:, kept].cpu()
        for name, members in groups.items():
            inside = [n for n, member in enumerate(names[: len(kept)]) if member in members]
            if inside:
                names.append(name)
                changes = torch.cat([changes, changes[:, inside].sum(1, keepdim=True)], 1)
        set_to = {self.nodes[n].id: (float(old[n]), value) for n, value in wanted.items()}
        return Intervention(set_to, names, *changes)

    def _feature(self, name: str) -> int:
        place = self._place(name)
        if place >= len(self.run.layer):
            raise ValueError(
                f"{name} must be a feature to be set; it is a {self.nodes[place].kind}"
            )
        return place

    def _repr_html_(self) -> str:
        return self.pruned()._repr_html_()

    def _targets(self, row: int) -> Targets:
        if self.column[row] >= 0:
            return self.run.of_features(self.column[row : row + 1])
        return self.run.of_logits(self.directions[row : row + 1], self.logits[row].pos)

    def __repr__(self) -> str:
        explained = int((self.column >= 0).sum())
        lines = [
            f"AttributionGraph of {len(self.tokens)} tokens: {len(self.run.layer)} active features, {explained} explained",
            f"  replacement {self.replacement:.3f}, completeness {self.completeness:.3f}, gap {self.gap:.1e}",
        ]
        for node in self.logits[:10]:
            chance = "" if node.probability is None else f"  probability {node.probability:.3f}"
            lines.append(f"  {node.id} {node.label!r}{chance}")
        return "\n".join(lines)
