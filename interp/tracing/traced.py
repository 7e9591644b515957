"""AttributionGraph: direct effects of features, errors and embeddings on each other, and what follows from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import unknown_name, without_gradients
from interp import pictures
from interp.reading.attending import AskedPlace
from interp.results.result import Result
from interp.tracing import influence, intervention
from interp.tracing.attention import largest_cells, why, without_each_head
from interp.tracing.descent import Targets
from interp.tracing.frozen import FrozenRun
from interp.tracing.intervention import Intervention
from interp.tracing.nodes import AttentionCell, Link, Node, sources
from interp.tracing.pruned import PrunedGraph
from interp.tracing.targets import promoted_tokens


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph(pictures.Shown):
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
        by_attention: what each source adds to each of these by moving attention, an estimate to first order. It is no part of
            `rows`; None if it was not asked for.
        attention_gap: the largest difference between the sum of a row of `by_attention` and `gradient · score` on both sides,
            which it should be, as a share of the row's summed sizes.
    """

    run: FrozenRun
    rows: Float[Tensor, "row source"]
    column: Int[Tensor, " row"]
    weights: Float[Tensor, " row"]
    logits: Sequence[Node]
    directions: Float[Tensor, "logit vocab"]
    totals: Float[Tensor, " row"]
    tokens: Sequence[str]
    by_attention: Float[Tensor, "row source"] | None = None
    attention_gap: float = math.nan

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
        unexplained = torch.zeros(self.rows.shape[1], dtype=torch.bool, device=self.rows.device)
        unexplained[: n + n_errors] = True
        unexplained[self.column[self.column >= 0]] = False
        return unexplained

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
        shares = influence.cumulative(self.influence).tolist()
        return [*sources(self.run, self.tokens, shares), *self.logits]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node.id: n for n, node in enumerate(self.nodes)}

    def place(self, name: str) -> int:
        """The number of a node.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
        """
        if name not in self._places:
            raise unknown_name(name, self._places, "node of this graph")
        return self._places[name]

    @cached_property
    def explained(self) -> list[int]:
        """The number of the node that each row explains."""
        logits = torch.arange(len(self.column), device=self.column.device) + self.rows.shape[1]
        return torch.where(self.column >= 0, self.column, logits).tolist()

    def _row(self, name: str) -> int:
        """The row of a node that is explained."""
        place = self.place(name)
        rows = [row for row, explained in enumerate(self.explained) if explained == place]
        if not rows:
            raise ValueError(
                f"{name} must be a logit or a feature with a row of its own; it has none: raise max_features"
            )
        return rows[0]

    def effect(self, source: str, target: str, by_attention: bool = False) -> float:
        """What one node adds to another, in logits or in the unit of the pre-activation.

        Args:
            source, target: names of nodes.
            by_attention: give the estimate of what it adds by moving attention instead.

        Raises:
            UnknownNameError: if there is no such node; it has close matches.
            ValueError: if the target has no row, or the graph was made without `attention=True`.
        """
        rows = self.by_attention if by_attention else self.rows
        if rows is None:
            raise ValueError("effects by attention need attribution_graph(..., attention=True)")
        return float(rows[self._row(target), self.place(source)])

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
            Link(self.nodes[column].id, self.nodes[self.explained[row]].id, weight)
            for row, column, weight in zip(
                rows.tolist(), columns.tolist(), self.rows[rows, columns].tolist(), strict=True
            )
        ]
        left = stays.nonzero()[:, 0]
        raised = promoted_tokens(self.run, left[left < len(self.run.layer)])
        kept = [self.nodes[n] for n in left.tolist()]
        kept[: len(raised)] = [
            node._replace(raises=words) for node, words in zip(kept, raised, strict=False)
        ]
        scores = {name: getattr(self, name) for name in ("replacement", "completeness", "gap")}
        cells = [] if self.by_attention is None else self.cells()
        return PrunedGraph([*kept, *self.logits], links, self.tokens, scores, node, cells=cells)

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
        row, column = self._row(target), self.place(source)
        lost = self.rows[row, column] - without_each_head(self.run, self._targets(row), column)
        about = {"source": source, "target": target}
        return Result(
            lost[..., None].cpu(), ("layer", "head", "example"), unit="effect", about=about
        )

    @without_gradients
    def attention(
        self,
        head: tuple[int, int],
        query: int = -1,
        key: int | None = None,
        against: int | Literal["mean"] | None = None,
        *,
        through: Literal["paths", "writers"] = "paths",
        k: int = 30,
    ) -> Result:
        """Find which pairs of sources make a head look where it looks; see `interp.why_attends`.

        Args:
            head: the layer and the head.
            query, key, against, k: see `why_attends`; key is where the head looks most, by default.
            through: `paths` has the graph's own sources, by all their frozen paths to the query and to the key; `writers` has
                heads and MLPs, by what they wrote there.

        Returns:
            A result as that of `why_attends`. Sources by paths are named as nodes, and their words are labels of nodes.

        Raises:
            ValueError: if there is no such head or position, `through` is something else, or k is below 1.
        """
        return why(self.run, self.nodes, AskedPlace(head, query, key, against), through, k)

    @without_gradients
    def cells(self, target: str | None = None, k: int = 8) -> list[AttentionCell]:
        """The scores through which most of a target's attention is decided: the largest `gradient · (score - mean)`.

        The gradient of a score says what the target gains if the head looks more at that key; the mean is that of the
        query's scores, as the pattern weighs them.

        Args:
            target: the name of a node with a row; the first one by default.
            k: how many.

        Raises:
            UnknownNameError, ValueError: as for `effect`.
        """
        row = 0 if target is None else self._row(target)
        name = self.nodes[self.explained[row]].id
        return largest_cells(self.run, self.nodes, self._targets(row), name, k)

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
        return intervention.intervened(self, values, supernodes or {})

    def view(self) -> pictures.View:
        """What is left of it after `pruned()`."""
        return self.pruned().view()

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
