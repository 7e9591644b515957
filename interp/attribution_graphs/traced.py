"""The class AttributionGraph: direct effects of features on logits, and their analyses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import number_of, unknown_name, without_gradients
from interp import plots
from interp.attribution_graphs import influence, intervention
from interp.attribution_graphs.attention import largest_cells, why, without_each_head
from interp.attribution_graphs.descent import Targets
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.intervention import Intervention
from interp.attribution_graphs.nodes import AttentionCell, Link, Node, sources
from interp.attribution_graphs.pruned import PrunedGraph
from interp.attribution_graphs.targets import ExplainedAnswers, LogitTerms, promoted_tokens
from interp.json_form import json_value
from interp.reading.attending import AskedPlace
from interp.results.result import Result


@dataclass(frozen=True, eq=False, repr=False)
class AttributionGraph(plots.Shown):
    """The direct effects of nodes on each other in one text, returned by `attribution_graph`.

    Attributes:
        run: the frozen run.
        rows: the effect of each source on each explained node. The rows of logits come first, then
            the rows of features.
        column: the column of the feature that each row explains: the index of this feature among
            the sources. It is -1 if the row explains a logit.
        weights: the weight of each row as a target: the probability of a token, 1 for any other
            target, and 0 if the row is no target.
        logits: the logits that the first rows explain, as nodes.
        terms: the weighted sums of logits that each node of `logits` adds up.
        totals: the value of each explained node.
        tokens: the tokens of the text.
        by_attention: the effect that each source has on each explained node because it changes
            attention patterns, estimated to first order. These effects are not included in `rows`.
            None if the graph was made without `attention=True`.
        attention_gap: a check of `by_attention`. Multiply each attention score of the run with the
            gradient of the row's node with respect to the score, and add up the products. The sum
            of the row should equal twice this number, because the query and the key of a score
            each get the whole effect of the score. The gap is the largest difference, as a share of
            the sum of absolute values in the row. NaN without `by_attention`.
        answers: if the targets are an answer of several tokens or two answers, the number that the
            graph explains in words, and the answer of each position; None for other targets.

    >>> from interp import attribution_graph, load_transcoders
    >>> from models import load
    >>> model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    >>> graph = attribution_graph(model, "part KV8 and part K", transcoders, max_features=100)
    >>> graph.logits[0].label, graph.gap < 1e-5
    ('V', True)
    >>> graph.pruned().inputs(graph.logits[0].id)[0][0]  # the embedding of the V of KV8
    'E_54_6'
    >>> 0.5 < graph.replacement < graph.completeness < 1
    True
    """

    run: FrozenRun
    rows: Float[Tensor, "row source"]
    column: Int[Tensor, " row"]
    weights: Float[Tensor, " row"]
    logits: Sequence[Node]
    terms: LogitTerms
    totals: Float[Tensor, " row"]
    tokens: Sequence[str]
    by_attention: Float[Tensor, "row source"] | None = None
    attention_gap: float = math.nan
    answers: ExplainedAnswers | None = None

    @property
    def metric(self) -> float | None:
        """The metric of `Pairs` for an answer of several tokens or two answers, in nats.

        It is the log-probability of the right answer, minus the log-probability of the wrong answer
        if there is one. It is None for other targets.

        A graph of two answers explains this number, unless the model caps its logits. A graph of
        one answer explains another number, the sum of the logits of its tokens.
        """
        return None if self.answers is None else self.answers.metric

    @property
    def gap(self) -> float:
        """The largest difference between the sum of a row and the value of the explained node, as a
        share of the sum of absolute values in the row.
        """
        missed = (self.rows.sum(1) - self.totals).abs()
        return float((missed / self.rows.abs().sum(1).clamp(min=1e-30)).max())

    @cached_property
    def influence(self) -> Float[Tensor, " source"]:
        """The influence of each source on the targets; see `influence.influence`."""
        return influence.influence(influence.shares_of_rows(self.rows), self.weights, self.column)

    @cached_property
    def _is_unexplained(self) -> Tensor:
        """The mask of the sources that nothing explains: errors, and features without a row."""
        n = len(self.run.layer)
        n_errors = len(self.run.tokens) * len(self.run.errors)
        unexplained = torch.zeros(self.rows.shape[1], dtype=torch.bool, device=self.rows.device)
        unexplained[: n + n_errors] = True
        unexplained[self.column[self.column >= 0]] = False
        return unexplained

    @cached_property
    def _scores(self) -> dict[str, float]:
        """The scores `replacement` and `completeness`."""
        is_input = torch.arange(self.rows.shape[1], device=self.rows.device)
        is_input = is_input >= len(self.run.layer) + len(self.run.tokens) * len(self.run.errors)
        return influence.scores_of_graph(
            self.rows,
            self.weights,
            column=self.column,
            is_error=self._is_unexplained,
            is_input=is_input,
        )

    @property
    def replacement(self) -> float:
        """The share of influence that comes from embeddings and constants, and not from errors.

        Features without a row count as errors, so the share can only rise with `max_features`.
        """
        return self._scores["replacement"]

    @property
    def completeness(self) -> float:
        """The share of the effects on nodes that does not come from errors.

        It is a mean over all nodes, weighted by the influence of each node on the targets. Features
        without a row count as errors.
        """
        return self._scores["completeness"]

    @cached_property
    def nodes(self) -> list[Node]:
        """All nodes: the sources in the order of columns, followed by the logits."""
        shares = influence.cumulative(self.influence).tolist()
        answers = {} if self.answers is None else self.answers.of_position
        return [*sources(self.run, self.tokens, shares, answers=answers), *self.logits]

    @cached_property
    def _places(self) -> dict[str, int]:
        """The index of each node in `nodes`, by name."""
        return {node.id: place for place, node in enumerate(self.nodes)}

    def place(self, name: str) -> int:
        """Return the index of a node in `nodes`.

        Raises:
            UnknownNameError: if there is no node with this name. The error lists close matches.
        """
        if name not in self._places:
            raise unknown_name(name, self._places, "node of this graph")
        return self._places[name]

    @cached_property
    def explained(self) -> list[int]:
        """The index of the node that each row explains."""
        logits = torch.arange(len(self.column), device=self.column.device) + self.rows.shape[1]
        return torch.where(self.column >= 0, self.column, logits).tolist()

    def _row(self, name: str) -> int:
        """Return the index of the row that explains a node."""
        place = self.place(name)
        rows = [row for row, explained in enumerate(self.explained) if explained == place]
        if not rows:
            raise ValueError(
                f"{name} must be a logit or a feature with a row; it has no row: increase "
                "max_features"
            )
        return rows[0]

    def effect(self, source: str, target: str, by_attention: bool = False) -> float:
        """Return the direct effect of one node on another node.

        The unit is the unit of the target: its logit, or its pre-activation if it is a feature.

        Args:
            source, target: the names of the nodes.
            by_attention: whether to return the effect through changes of attention patterns
                instead, from the attribute `by_attention`. Default: False.

        Raises:
            UnknownNameError: if there is no node with one of the names. The error lists close
                matches.
            ValueError: if the target has no row, or the graph was made without `attention=True`.
        """
        rows = self.by_attention if by_attention else self.rows
        if rows is None:
            raise ValueError("effects by attention need attribution_graph(..., attention=True)")
        return float(rows[self._row(target), self.place(source)])

    def pruned(self, node: float = 0.8, edge: float = 0.98) -> PrunedGraph:
        """Return the graph of the strongest nodes and links, and of all tokens and targets.

        Args:
            node: the share of influence that the remaining nodes carry. Default: 0.8.
            edge: the share of influence that the remaining links carry. Default: 0.98.

        Raises:
            ValueError: if a share is not between 0 and 1.
        """
        for name, share in (("node", node), ("edge", edge)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be between 0 and 1; got {share}")
        kinds = [source.kind for source in self.nodes[: self.rows.shape[1]]]
        is_kept = torch.tensor([kind == "token" for kind in kinds], device=self.rows.device)
        is_kept[self.column[(self.weights > 0) & (self.column >= 0)]] = True
        stays, edges = influence.pruned(
            self.rows, self.weights, column=self.column, is_kept=is_kept, node=node, edge=edge
        )
        rows, columns = edges.nonzero().T
        links = [
            Link(self.nodes[column].id, self.nodes[self.explained[row]].id, weight)
            for row, column, weight in zip(
                rows.tolist(), columns.tolist(), self.rows[rows, columns].tolist(), strict=True
            )
        ]
        left = stays.nonzero()[:, 0]
        raised = promoted_tokens(self.run, left[left < len(self.run.layer)])
        nodes = [self.nodes[place] for place in left.tolist()]
        nodes[: len(raised)] = [
            node._replace(raises=words) for node, words in zip(nodes, raised, strict=False)
        ]
        scores = {name: getattr(self, name) for name in ("replacement", "completeness", "gap")}
        cells = () if self.by_attention is None else self.cells()
        return PrunedGraph(
            nodes=[*nodes, *self.logits],
            links=links,
            tokens=self.tokens,
            scores=scores,
            node_threshold=node,
            cells=cells,
        )

    @without_gradients
    def heads(self, source: str, target: str) -> Result:
        """Return, for each head, how much of an effect is lost if all paths through the head are
        cut.

        A path through several heads counts for each of these heads, so the losses need not add up
        to the effect.

        Args:
            source, target: the names of the nodes.

        Returns:
            The lost effects with the axes `layer` and `head`, in the unit of the target.

        Raises:
            UnknownNameError, ValueError: for the same reasons as in `effect`.
        """
        row = self._row(target)
        column = self.place(source)
        lost = self.rows[row, column] - without_each_head(self.run, self._targets(row), column)
        about = {"source": source, "target": target}
        return Result(
            lost[..., None].cpu(),
            ("layer", "head", "example"),
            unit="unit of the target",
            about=about,
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
        """Return a head's attention score to a key as a sum over pairs of sources.

        `interp.attention_attribution` does this without a graph: its sources are always heads and
        MLPs.

        Args:
            head: the layer and the head.
            query: the position that attends. Default: the last position.
            key: the position that is attended to. Default: the position with the largest attention
                weight.
            against: another key, to explain the difference of the two scores; or `mean`, the mean
                of all keys, weighted by the pattern. Default: explain the score itself.
            k: the number of the largest pairs whose sources are listed. Default: 30.
            through: with `paths`, the sources are the sources of the graph, and their effects on
                the query and the key include all frozen paths. With `writers`, the sources are
                heads and MLPs, and their effects are their outputs at these positions. Default:
                `paths`.

        Returns:
            A result like the result of `attention_attribution`. With `paths`, the sources have the
            names of nodes, and their words are the labels of nodes.

        Raises:
            ValueError: if the head or a position does not exist, `through` has another value, k is
                below 1, or `through` is `writers` in a graph of two answers of several tokens.
        """
        return why(
            self.run,
            self.nodes,
            place=AskedPlace(head=head, query=query, key=key, against=against),
            through=through,
            k=k,
        )

    @without_gradients
    def cells(self, target: str | None = None, k: int = 8) -> list[AttentionCell]:
        """Return the attention scores that decide a target most: the scores with the largest
        absolute `gradient · (score - mean)`.

        The gradient is the derivative of the target with respect to the score. It is positive if
        the target increases when the head attends more to that key. The mean is the mean score of
        the query over all keys, weighted by the attention pattern.

        Args:
            target: the name of a node with a row. Default: the node of the first row.
            k: the number of scores. Default: 8.

        Raises:
            UnknownNameError, ValueError: for the same reasons as in `effect`.
        """
        row = 0 if target is None else self._row(target)
        name = self.nodes[self.explained[row]].id
        return largest_cells(self.run, self.nodes, targets=self._targets(row), name=name, k=k)

    @without_gradients
    def intervene(
        self, values: Mapping[str, float], supernodes: Mapping[str, Sequence[str]] | None = None
    ) -> Intervention:
        """Set features to values, and return the changes of all other nodes: the changes that the
        graph predicts, and the changes in the model.

        Args:
            values: the new activations by the names of features. The name of a supernode sets all
                of its features.
            supernodes: the names of the features in each group, for example the supernodes of a
                pruned graph. The changes of the features in a group are added up. Default: no
                groups.

        Raises:
            UnknownNameError: if there is no node with one of the names. The error lists close
                matches.
            ValueError: if a node is no feature, no values are given, or a value or a change is not
                finite.
        """
        return intervention.intervened(self, values, supernodes or {})

    def view(self) -> plots.View:
        """Return a view of `pruned()`."""
        return self.pruned().view()

    def _targets(self, row: int) -> Targets:
        """Return the node that a row explains, as the targets that add up to the node."""
        if self.column[row] >= 0:
            return self.run.of_features(self.column[row : row + 1])
        return self.terms.of(row, row + 1).in_run(self.run)

    def as_json(self) -> dict[str, Any]:
        """Return the nodes and links of `pruned()`, and the scores of the whole graph, in the JSON
        form of all results; see `interp.json_form`.
        """
        about = {
            "features": len(self.run.layer),
            "explained": int((self.column >= 0).sum()),
            "gap": self.gap,
            "attention_gap": self.attention_gap,
        }
        pruned = self.pruned().as_json()
        return {
            **pruned,
            "kind": "AttributionGraph",
            "about": json_value({**pruned["about"], **about}),
        }

    def __repr__(self) -> str:
        explained = int((self.column >= 0).sum())
        lines = [
            f"AttributionGraph of {number_of(len(self.tokens), 'token')}: "
            f"{len(self.run.layer)} active features, {explained} explained",
            f"  shares: replacement {self.replacement:.3f}, completeness {self.completeness:.3f}, "
            f"gap {self.gap:.1e}",
        ]
        if self.answers is not None:
            # The last row of the logits is the sum, or the contrast.
            value = float(self.totals[len(self.logits) - 1])
            lines.append(f"  explains {self.answers.number}: {value:.4g} {self.answers.unit}")
            lines.append(f"  metric of Pairs: {self.answers.metric:.4g} nats")
            lines += self._lines_of_positions(self.answers)
        for node in self.logits[:10]:
            chance = "" if node.probability is None else f"  probability {node.probability:.3f}"
            lines.append(f"  {node.id} {node.label!r}{chance}")
        return "\n".join(lines)

    def _lines_of_positions(self, answers: ExplainedAnswers) -> list[str]:
        """Return a line for each answer with the positions and the tokens that the run reads."""
        positions_by_answer: dict[str, list[int]] = {}
        for pos, answer in answers.of_position.items():
            positions_by_answer.setdefault(answer, []).append(pos)
        lines = []
        for answer, positions in positions_by_answer.items():
            read = "".join(self.tokens[pos] for pos in positions)
            first, last = positions[0], positions[-1]
            places = f"position {first} reads"
            if first < last:
                places = f"positions {first} to {last} read"
            lines.append(f"  {places} {read!r} of {answer}")
        return lines
