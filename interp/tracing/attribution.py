"""Attribution graphs: how features, errors and embeddings make the logits of one text (Ameisen et al. 2025).

1. Rows of effects on the chosen logits come first (`FrozenRun.rows`).
2. Then features get rows of their own, the most influential first; after each batch influence is computed anew.
3. Active features without a row stay as sources, so no row loses a part.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import Texts, progress_bar, require_integer, shows_progress, without_gradients
from interp.numbers.precision import finite
from interp.tracing import influence
from interp.tracing.descent import TARGETS_AT_ONCE, Descent, Targets
from interp.tracing.frozen import FrozenRun
from interp.tracing.targets import ChosenTargets, chosen_targets
from interp.tracing.traced import AttributionGraph
from interp.tracing.transcoders import Transcoders

_LARGEST_GAP = 0.05  # above what rounding in half precision makes
_TENSORS = 8  # of the size of the stream, for each target


@shows_progress
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
    attention: bool = False,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> AttributionGraph:
    """Trace which features, errors and embeddings make the logits of a text (Ameisen et al. 2025, "Circuit Tracing").

    Patterns and scales of norms are frozen at the run's values, and MLPs are replaced by transcoders and their errors.
    The rest of the model is linear, so what acts on a node adds up to it. A layer without a transcoder has errors alone.

    Args:
        model: a plain or an attached model in evaluation mode; see `FrozenRun`.
        text: one text, or its tokens.
        transcoders: by `blocks.L.mlp_out`, or one across layers, as `load_sae` gives them; on the device of the logits.
        targets: the most tokens, a token's text, or a list. In it a text or a number is a token, two of them are the
            difference of their logits, and three numbers are a feature, (layer, feature, pos).
        desired_prob: likely tokens are targets until their probabilities add up to this.
        pos: the position of the logits.
        max_features: how many features have their own inputs traced, the most influential first.
        first: the first position with features: 1 leaves out a first token that all texts have.
        attention: whether to estimate, beside these effects, those of attention that moves: see `AttributionGraph.by_attention`.
        max_bytes: bounds the memory beyond the model, its run and the rows.
        progress: whether to show a bar after two seconds.

    Raises:
        ValueError: as for `FrozenRun`; if a text is several tokens, a feature is not active, there is no target or no such position,
            a number is not finite, or effects do not add up.
        TypeError: as for `Graph`.

    Warns:
        UserWarning: as for `FrozenRun`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> graph = attribution_graph(load("pydoc-4l"), "part KV8 and part K", load_sae("pydoc-4l/transcoders"))
    >>> graph.logits[0].label, graph.gap < 1e-5
    ('V', True)
    """
    run = FrozenRun(model, text, transcoders, first)
    n_pos = len(run.tokens)
    require_integer("pos", pos, -n_pos, n_pos - 1)
    pos %= n_pos
    chosen = chosen_targets(model, run, targets, desired_prob, pos)
    if not chosen.logits and not chosen.features:
        raise ValueError("targets must be at least one; got none")
    n_features = max(len(chosen.features), min(max_features, len(run.layer)))
    table = _Table(run, chosen, pos, n_features, attention)
    bytes_each = _TENSORS * run.tokens.numel() * run.model.config.d_model * table.rows.itemsize
    batch = max(1, min(TARGETS_AT_ONCE, max_bytes // bytes_each))
    with progress_bar("rows of effects", total=len(table.rows)) as count:
        while table.n_filled < len(table.rows):
            next_targets = table.next_targets(batch)
            table.fill(next_targets)
            count(len(next_targets.pos))
    graph = table.graph()
    if not (gap := max(graph.gap, graph.attention_gap if attention else 0.0)) <= _LARGEST_GAP:
        raise ValueError(
            f"effects must add up to what they explain; they miss {gap:.0%}: a part of the model does something else"
        )
    return graph


class _Table:
    """Rows of effects, which are filled a few at a time: first those of logits, then those of features.

    Args:
        run: the frozen run.
        targets: the chosen targets.
        pos: the position of the logits.
        n_features: how many features get a row.
        attention: whether to estimate effects by attention too.

    Attributes:
        rows: what each source adds to each node that is explained.
        n_filled: how many rows are filled.
    """

    def __init__(
        self, run: FrozenRun, targets: ChosenTargets, pos: int, n_features: int, attention: bool
    ) -> None:
        self._run = run
        self._targets = targets
        self._pos = pos
        n_logits, n_named = len(targets.logits), len(targets.features)
        device = run.logits.device
        self.rows = run.logits.new_zeros(n_logits + n_features, run.n_sources)
        self.n_filled = 0
        self._column = torch.full((len(self.rows),), -1, device=device)
        self._totals = self.rows.new_zeros(len(self.rows))
        self._weights = self.rows.new_zeros(len(self.rows))
        chances = [1.0 if node.probability is None else node.probability for node in targets.logits]
        self._weights[:n_logits] = self.rows.new_tensor(chances)
        self._weights[n_logits : n_logits + n_named] = 1
        self._by_attention = torch.zeros_like(self.rows) if attention else None
        self._attention_gap = 0.0 if attention else math.nan
        self._has_row = torch.zeros(len(run.layer), dtype=torch.bool, device=device)
        self._waiting = torch.tensor(targets.features, dtype=torch.long, device=device)

    def next_targets(self, batch: int) -> Targets:
        """Return the next targets, at most a batch of them."""
        if self.n_filled < len(self._targets.logits):
            directions = self._targets.directions[self.n_filled : self.n_filled + batch]
            return self._run.of_logits(directions, self._pos)
        if not len(self._waiting):
            self._waiting = self._most_influential()
        features, self._waiting = self._waiting[:batch], self._waiting[batch:]
        self._has_row[features] = True
        self._column[self.n_filled : self.n_filled + len(features)] = features
        return self._run.of_features(features)

    def _most_influential(self) -> Int[Tensor, " feature"]:
        """The features with the most influence, by the filled rows, that have no row yet."""
        filled = slice(self.n_filled)
        shares = influence.shares(self.rows[filled])
        scores = influence.influence(shares, self._weights[filled], self._column[filled])
        of_features = scores[: len(self._run.layer)].masked_fill(self._has_row, -1)
        order = of_features.argsort(descending=True, stable=True)
        return order[: min(TARGETS_AT_ONCE, len(self.rows) - self.n_filled)]

    def fill(self, targets: Targets) -> None:
        """Fill the next rows with the effects on some targets.

        Raises:
            ValueError: if an effect is not finite.
        """
        place = slice(self.n_filled, self.n_filled + len(targets.pos))
        self.rows[place] = finite(self._run.rows(targets), "effects")
        self._totals[place] = targets.total
        if self._by_attention is not None:
            live = Descent(self._run, targets, attention=True)
            extra = finite(live.rows, "effects by attention") - self.rows[place]
            missed = (extra.sum(1) - live.moved).abs() / extra.abs().sum(1).clamp(min=1e-30)
            self._by_attention[place] = extra
            self._attention_gap = max(float(missed.max()), self._attention_gap)
        self.n_filled = place.stop

    def graph(self) -> AttributionGraph:
        """The graph of the rows."""
        return AttributionGraph(
            run=self._run,
            rows=self.rows,
            column=self._column,
            weights=self._weights,
            logits=self._targets.logits,
            directions=self._targets.directions,
            totals=self._totals,
            tokens=self._run.write(self._run.tokens.tolist()),
            by_attention=self._by_attention,
            attention_gap=self._attention_gap,
        )
