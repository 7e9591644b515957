"""Attribution graphs: how features, errors and embeddings make the logits of one text (Ameisen et al. 2025).

1. Rows of effects on the chosen logits come first (`FrozenRun.rows`).
2. Then features get rows of their own, the most influential first; after each batch influence is computed anew.
3. Active features without a row stay as sources, so no row loses a part.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hooks.base import Texts, progress_bar, require_integer, shows_progress, without_gradients
from interp.numbers.precision import finite
from interp.tracing import influence
from interp.tracing.descent import TARGETS_AT_ONCE, Descent
from interp.tracing.frozen import FrozenRun
from interp.tracing.targets import chosen
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
    logits, directions, named = chosen(model, run, targets, desired_prob, pos)
    if not logits and not named:
        raise ValueError("targets must be at least one; got none")
    chances = [1.0 if node.probability is None else node.probability for node in logits]
    device, most = run.logits.device, max(len(named), min(max_features, len(run.layer)))
    rows = run.logits.new_zeros(len(logits) + most, run.n_sources)
    column = torch.full((len(rows),), -1, device=device)
    weights, totals = rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    by_attention, attention_gap = (
        torch.zeros_like(rows) if attention else None,
        0.0 if attention else math.nan,
    )
    weights[: len(logits)] = rows.new_tensor(chances)
    weights[len(logits) : len(logits) + len(named)] = 1
    bytes_each = _TENSORS * run.tokens.numel() * run.model.config.d_model * rows.itemsize
    batch = max(1, min(TARGETS_AT_ONCE, max_bytes // bytes_each))
    done, is_done = 0, torch.zeros(len(run.layer), dtype=torch.bool, device=device)
    waiting = torch.tensor(named, dtype=torch.long, device=device)
    with progress_bar("rows of effects", total=len(rows)) as count:
        while done < len(rows):
            if done < len(logits):
                made = run.of_logits(directions[done : done + batch], pos)
            else:
                if not len(waiting):
                    scores = influence.influence(
                        influence.shares(rows[:done]), weights[:done], column[:done]
                    )
                    waiting = (
                        scores[: len(run.layer)]
                        .masked_fill(is_done, -1)
                        .argsort(descending=True, stable=True)
                    )
                    waiting = waiting[: min(TARGETS_AT_ONCE, len(rows) - done)]
                now, waiting = waiting[:batch], waiting[batch:]
                made, is_done[now] = run.of_features(now), True
                column[done : done + len(now)] = now
            place = slice(done, done + len(made.pos))
            rows[place], totals[place] = finite(run.rows(made), "effects"), made.total
            if by_attention is not None:
                live = Descent(run, made, attention=True)
                extra = finite(live.rows, "effects by attention") - rows[place]
                missed = (extra.sum(1) - live.moved).abs() / extra.abs().sum(1).clamp(min=1e-30)
                by_attention[place] = extra
                attention_gap = max(float(missed.max()), attention_gap)
            done = place.stop
            count(len(made.pos))
    graph = AttributionGraph(
        run,
        rows,
        column,
        weights,
        logits,
        directions,
        totals,
        run.write(run.tokens.tolist()),
        by_attention,
        attention_gap,
    )
    if not (gap := max(graph.gap, attention_gap if attention else 0.0)) <= _LARGEST_GAP:
        raise ValueError(
            f"effects must add up to what they explain; they miss {gap:.0%}: a part of the model does something else"
        )
    return graph
