"""Build attribution graphs: effects on the logits of one text (Ameisen et al. 2025).

1. Compute the rows of effects on the chosen logits (`FrozenRun.rows`).
2. Compute rows of effects on features, starting with the features that have the most influence on
   the logits. Compute the influence again after each batch of rows.
3. Stop after `max_features` rows. Features without a row remain sources, so each row still contains
   all effects on its node.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import (
    Texts,
    progress_bar,
    require_integer,
    require_kind,
    shows_progress,
    sum_rounding,
    without_gradients,
)
from interp.attribution_graphs import influence
from interp.attribution_graphs.descent import TARGETS_AT_ONCE, Descent, Targets
from interp.attribution_graphs.frozen import FrozenRun, require_one_text
from interp.attribution_graphs.targets import (
    AnswersOfTargets,
    ChosenTargets,
    answers_of_targets,
    chosen_targets,
    targets_of_answer,
    targets_of_contrast,
)
from interp.attribution_graphs.traced import AttributionGraph
from interp.attribution_graphs.transcoders import AnyTranscoders
from interp.inputs.texts import text_for
from interp.numbers.precision import finite

# A graph with a larger gap is an error. Rounding causes smaller gaps, even in half precision.
_LARGEST_GAP = 0.05
# An estimate of memory: each target of a batch needs 8 tensors of the shape [pos, d_model].
_TENSORS = 8


@shows_progress
@without_gradients
def attribution_graph(
    model: nn.Module,
    text: "Texts",
    transcoders: AnyTranscoders,
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
    """Trace the effects of features, errors and embeddings on the logits of a text.

    The method is Ameisen et al. 2025, "Circuit Tracing". Attention patterns and the scales of norms
    are frozen at the values of the run, and MLPs are replaced by transcoders and their errors. The
    rest of the model is linear, so the effects on a node add up to its value. In a layer without a
    transcoder, the whole output of the MLP is an error.

    Args:
        model: a plain or an attached model in evaluation mode; see `FrozenRun`.
        text: a single text, or its tokens.
        transcoders: the transcoders that `load_transcoders` returns, or dictionaries by
            `blocks.L.mlp_out`. They must be on the device of the logits.
        targets: the maximum number of likely tokens, an answer, a tuple of two answers, or a list
            of targets. An answer is a text of one or several tokens, such as `" Paris, the city"`;
            the run then reads the text and the answer, and the targets are the logit of each token
            at the position that predicts it, and the sum of these logits. The tokens of one answer
            are a tuple, such as `(torch.tensor([5, 3]),)`. A tuple `(right, wrong)`
            of answers of any lengths is one target, the metric of `Pairs`: log p(right) - log
            p(wrong), which is the difference of two logits if the answers differ in their last
            token only. In a list, a text of one token or a number is a token, a pair of tokens is
            the difference of their logits, and three numbers are a feature, (layer, feature, pos).
            The mean over the vocabulary is subtracted from single logits. A text without a space at
            its beginning is read like an answer of `Pairs`: as a new word or the rest of a word.
            Default: 10.
        desired_prob: likely tokens are chosen until the sum of their probabilities reaches this
            value. Default: 0.95.
        pos: the position of the logits. Default: -1.
        max_features: the maximum number of features whose inputs are traced, starting with the most
            influential features. Default: 4096.
        first: the first position with features. Use 1 to leave out the features of a first token
            that all texts share. Default: 0.
        attention: whether to estimate also the effects through changes of attention patterns; see
            `AttributionGraph.by_attention`. Default: False.
        max_bytes: a bound of the memory beyond the model, its run and the rows of the graph.
            Default: 2³⁰.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    If `targets` is a tuple, the model reads the text once with each answer. The positions of the
    graph are the positions of the text and of the tokens with which both answers begin, then of the
    rest of the right answer, then of the rest of the wrong answer. Each answer attends only to the
    text and to itself. The softmax after the first different token is replaced by its tangent, so
    effects are exact to first order, and the constant of the tangent is part of the node of all
    constants.

    Returns:
        The graph, with the effects [row, source] in the unit of the row's logit or pre-activation,
        or in nats for two answers.

    Raises:
        ValueError: for the same reasons as in `FrozenRun`; if an answer is empty or could be both a
            new word and the rest of a word, a text in a list of targets is several tokens, a
            feature is not active, there are no targets, the position is outside the text, a number
            is not finite, or effects do not add up.
        TypeError: for the same reasons as in `Graph`.

    Warns:
        UserWarning: for the same reasons as in `FrozenRun`.

    >>> from interp.features import load_transcoders
    >>> from models import load
    >>> model, transcoders = load("pydoc-4l"), load_transcoders("pydoc-4l/transcoders")
    >>> graph = attribution_graph(model, "part KV8 and part K", transcoders)
    >>> graph.logits[0].label, graph.gap < 1e-5
    ('V', True)
    >>> graph = attribution_graph(model, "part KV8 and part", transcoders, targets=(" KV", " A"))
    >>> graph.logits[0].label, f"{graph.totals[0]:.2f}", f"{graph.metric:.2f}"
    (' KV -  A', '2.41', '2.41')
    """
    one_text = text_for(model, text)
    require_one_text(one_text)
    n_pos = one_text.tokens.shape[1]
    require_integer("pos", pos, least=-n_pos, most=n_pos - 1)
    require_integer("max_features", max_features, least=0)
    require_kind("max_bytes", max_bytes, (int, float), "a number of bytes")
    require_kind("desired_prob", desired_prob, (int, float), "a number from 0 to 1")
    if not 0 <= desired_prob <= 1:
        raise ValueError(f"desired_prob must be a number from 0 to 1; got {desired_prob}")
    answers = answers_of_targets(model, one_text, targets, pos=pos)
    if _are_several(answers) and pos != -1:
        raise ValueError(f"pos must be left out if targets are answers; got {pos}")
    run = FrozenRun(
        model=model,
        text=answers.after(one_text),
        transcoders=transcoders,
        first=first,
        answers=answers.rest,
    )
    if not _are_several(answers):
        # An answer of one token is a list of one target.
        listed = [token for (token,) in answers.rest] or targets
        chosen = chosen_targets(
            model, run, targets=listed, desired_prob=desired_prob, pos=pos % n_pos
        )
    elif len(answers.rest) == 2:
        chosen = targets_of_contrast(run, answers)
    else:
        chosen = targets_of_answer(run, answers)
    if not chosen.logits and not chosen.features:
        raise ValueError("targets must contain at least one target; got none")
    n_features = max(len(chosen.features), min(max_features, len(run.layer)))
    table = _Table(run=run, targets=chosen, n_features=n_features, attention=attention)
    table.fill_all(max_bytes)
    graph = table.graph()
    if not (gap := max(graph.gap, graph.attention_gap if attention else 0.0)) <= _LARGEST_GAP:
        raise ValueError(
            f"effects must add up to the value of their target; {gap:.0%} is missing, because a "
            "part of the model is not supported"
        )
    return graph


def _are_several(answers: AnswersOfTargets) -> bool:
    """Return whether the run reads answers: two answers, or one answer of several tokens."""
    return len(answers.rest) == 2 or any(len(tokens) > 1 for tokens in answers.rest)


class _Table:
    """Rows of effects, which are filled in batches: first the rows of logits, then the rows of
    features.

    Args:
        run: the frozen run.
        targets: the chosen targets.
        n_features: the number of features that get a row.
        attention: whether to estimate also, in a second table, the effects of the sources through
            changes of attention patterns.

    Attributes:
        rows: the effect of each source on each target.
        n_filled: the number of rows that are filled.
    """

    def __init__(
        self, run: FrozenRun, targets: ChosenTargets, n_features: int, attention: bool
    ) -> None:
        self._run = run
        self._targets = targets
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

    def fill_all(self, max_bytes: int) -> None:
        """Fill all rows, in batches of at most this many bytes, but of at least one row."""
        config = self._run.model.config
        bytes_each = _TENSORS * self._run.tokens.numel() * config.d_model * self.rows.itemsize
        batch = max(1, min(TARGETS_AT_ONCE, max_bytes // bytes_each))
        with progress_bar("rows of effects", total=len(self.rows)) as count:
            while self.n_filled < len(self.rows):
                count(self.fill(*self.next_targets(batch)))

    def next_targets(self, batch: int) -> tuple[Targets, Int[Tensor, " target"] | None]:
        """Return the targets that the next rows of the table explain, at most `batch` rows.

        Returns:
            The targets, and for each target the number of its row, counted from the first of these
            rows. Targets of one row are added up. The numbers are None if each target has a row.
        """
        if self.n_filled < len(self._targets.logits):
            terms = self._targets.terms.of(self.n_filled, self.n_filled + batch)
            return terms.in_run(self._run), terms.node
        if not len(self._waiting):
            self._waiting = self._most_influential()
        features, self._waiting = self._waiting[:batch], self._waiting[batch:]
        self._has_row[features] = True
        self._column[self.n_filled : self.n_filled + len(features)] = features
        return self._run.of_features(features), None

    def _most_influential(self) -> Int[Tensor, " feature"]:
        """Return the features that get the next rows: the features with the most influence.

        The influence is computed from the rows that are filled. Features with a row are left out.
        """
        filled = slice(self.n_filled)
        shares = influence.shares_of_rows(self.rows[filled])
        scores = influence.influence(shares, self._weights[filled], self._column[filled])
        of_features = scores[: len(self._run.layer)].masked_fill(self._has_row, -1)
        order = of_features.argsort(descending=True, stable=True)
        return order[: min(TARGETS_AT_ONCE, len(self.rows) - self.n_filled)]

    def fill(self, targets: Targets, row: Int[Tensor, " target"] | None) -> int:
        """Fill the next rows with the effects on some targets, and return the number of rows.

        Args:
            targets: the targets.
            row: the row of each target, counted from the first of these rows; see `next_targets`.

        Raises:
            ValueError: if an effect is not finite.
        """
        rows = finite(self._run.rows(targets, row=row), "effects")
        place = slice(self.n_filled, self.n_filled + len(rows))
        self.rows[place] = rows
        if row is None:
            self._totals[place] = targets.total
        else:
            self._totals[place].index_add_(0, row, targets.total)
        if self._by_attention is not None:
            live = Descent(self._run, targets, attention=True, row=row)
            extra = finite(live.rows, "effects by attention") - rows
            size = extra.abs().sum(1)
            missed = (extra.sum(1) - live.moved).abs() / size.clamp(min=1e-30)
            # If no score of attention matters, the difference of the two rows is only rounding.
            missed[size <= sum_rounding(rows.dtype) * rows.abs().sum(1)] = 0
            self._by_attention[place] = extra
            self._attention_gap = max(float(missed.max()), self._attention_gap)
        self.n_filled = place.stop
        return len(rows)

    def graph(self) -> AttributionGraph:
        """Return the attribution graph with these rows."""
        return AttributionGraph(
            run=self._run,
            rows=self.rows,
            column=self._column,
            weights=self._weights,
            logits=self._targets.logits,
            terms=self._targets.terms,
            answers=self._targets.answers,
            totals=self._totals,
            tokens=self._run.write(self._run.tokens.tolist()),
            by_attention=self._by_attention,
            attention_gap=self._attention_gap,
        )
