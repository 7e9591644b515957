"""Attribution graphs: how features, errors and embeddings make the logits of one text (Ameisen et al. 2025).

1. Rows of effects on the chosen logits come first (`FrozenRun.rows`).
2. Then features get rows of their own, the most influential first; after each batch influence is computed anew.
3. Active features without a row stay as sources, so no row loses a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.shared import progress_bar, unknown_name, without_gradients
from interp.inputs.texts import Texts
from interp.numbers.precision import finite
from interp.results.result import Result
from interp.tracing import influence, intervention
from interp.tracing.frozen import FrozenRun, Targets
from interp.tracing.intervention import Intervention
from interp.tracing.nodes import Link, Node
from interp.tracing.pruned import PrunedGraph
from interp.tracing.targets import chosen
from interp.tracing.transcoders import Transcoders

_BATCH = 256  # more targets at once are no faster
_LARGEST_GAP = 0.05  # above what rounding in half precision makes
_TENSORS = 8  # of the size of the stream, for each target


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
            self.run.rows(Targets(*(part[n : n + _BATCH] for part in repeated)), cut[n : n + _BATCH])[:, column]
            for n in range(0, len(cut), _BATCH)
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


@without_gradients
def attribution_graph(
    model: nn.Module,
    text: Texts,
    transcoders: Transcoders,
    *,
    targets: int | str | Sequence[Any] = 10,
    desired_prob: float = 0.95,
    pos: int = -1,
    max_features: int = 4096,
    first: int = 0,
    max_bytes: int = 2**30,
) -> AttributionGraph:
    """Trace which features, errors and embeddings make the logits of a text (Ameisen et al. 2025, "Circuit Tracing").

    Patterns and scales of norms are frozen at the run's values, and MLPs are replaced by transcoders and their errors.
    The rest of the model is linear, so what acts on a node adds up to it. A layer without a transcoder has errors alone.

    Args:
        model: a plain or an attached model in evaluation mode; see `FrozenRun`.
        text: one text, or its tokens.
        transcoders: by `blocks.L.mlp_out`, or one across layers, as `load_sae` gives them.
        targets: the most tokens, a token's text, or a list. In it a text or a number is a token, two of them are the
            difference of their logits, and three numbers are a feature, (layer, feature, pos).
        desired_prob: likely tokens are targets until their probabilities add up to this.
        pos: the position of the logits.
        max_features: how many features have their own inputs traced, the most influential first.
        first: the first position with features: 1 leaves out a first token that all texts have.
        max_bytes: bounds the memory beyond the model, its run and the rows.

    Raises:
        ValueError: as for `FrozenRun`; if a text is several tokens, a feature is not active, there is no target or no such position,
            a number is not finite, or effects do not add up.
        TypeError: as for `Graph`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> graph = attribution_graph(load("pydoc-4l"), "part KV8 and part K", load_sae("pydoc-4l/transcoders"))
    >>> graph.logits[0].label, graph.gap < 1e-5
    ('V', True)
    """
    run = FrozenRun(model, text, transcoders, first)
    n_pos = len(run.tokens)
    if not -n_pos <= pos < n_pos:
        raise ValueError(f"pos must be {-n_pos} to {n_pos - 1}; got {pos}")
    pos %= n_pos
    logits, directions, named = chosen(model, run, targets, desired_prob, pos)
    if not logits and not named:
        raise ValueError("targets must be at least one; got none")
    chances = [1.0 if node.probability is None else node.probability for node in logits]
    device, most = run.logits.device, max(len(named), min(max_features, len(run.layer)))
    rows = run.logits.new_zeros(len(logits) + most, run.n_sources)
    column = torch.full((len(rows),), -1, device=device)
    weights, totals = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    weights[: len(logits)] = rows.new_tensor(chances)
    weights[len(logits) : len(logits) + len(named)] = 1
    bytes_each = _TENSORS * run.tokens.numel() * run.model.config.d_model * rows.itemsize
    batch = max(1, min(_BATCH, max_bytes // bytes_each))
    done, is_done = 0, torch.zeros(len(run.layer), dtype=torch.bool, device=device)
    waiting = torch.tensor(named, dtype=torch.long, device=device)
    with progress_bar(total=len(rows), desc="attribution", delay=1) as bar:
        while done < len(rows):
            if done < len(logits):
                made = run.of_logits(directions[done : done + batch], pos)
            else:
                if not len(waiting):
                    scores = influence.influence(
                        influence.shares(rows[:done]), weights[:done], column[:done]
                    )
                    waiting = (
                        scores[: len(run.layer)].masked_fill(is_done, -1).argsort(descending=True)
                    )
                    waiting = waiting[: min(_BATCH, len(rows) - done)]
                now, waiting = waiting[:batch], waiting[batch:]
                made, is_done[now] = run.of_features(now), True
                column[done : done + len(now)] = now
            place = slice(done, done + len(made.pos))
            rows[place], totals[place] = finite(run.rows(made), "effects"), made.total
            done = place.stop
            bar.update(len(made.pos))
    graph = AttributionGraph(
        run, rows, column, weights, logits, directions, totals, run.write(run.tokens.tolist())
    )
    if not graph.gap <= _LARGEST_GAP:
        raise ValueError(
            f"effects must add up to what they explain; they miss {graph.gap:.0%}: a part of the model does something else"
        )
    return graph
