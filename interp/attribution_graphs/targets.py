"""Targets of an attribution graph: tokens, differences of logits, answers and features.

`promoted_tokens` returns the tokens that features promote.
"""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import Text, require_integer, require_kind, shown
from interp.attribution_graphs.branches import common_start
from interp.attribution_graphs.descent import Targets
from interp.attribution_graphs.frozen import FrozenRun
from interp.attribution_graphs.nodes import Node
from interp.inputs.words import (
    AnswerTokens,
    is_worded,
    token_of_answer,
    tokens_of_answer,
    tokens_of_answers,
)
from interp.pairs.answers import Continuations, rows_of_answers
from interp.pairs.scoring import require_causal


class LogitTerms(NamedTuple):
    """Weighted sums of logits, each at one position. The value of a node is the sum of its terms.

    Attributes:
        weights: the weight of each token's logit in each term: 1 at the token of a logit, and 1 and
            -1 at the two tokens of a difference.
        pos: the position of each term.
        node: the index of the node of each term. Terms are in the order of their nodes.
        constant: a number that is added to each term; None for 0.
    """

    weights: Float[Tensor, "term vocab"]
    pos: Int[Tensor, " term"]
    node: Int[Tensor, " term"]
    constant: Float[Tensor, " term"] | None = None

    def of(self, start: int, stop: int) -> "LogitTerms":
        """Return the terms of some nodes, which are counted from 0 again."""
        is_chosen = (self.node >= start) & (self.node < stop)
        return LogitTerms(
            weights=self.weights[is_chosen],
            pos=self.pos[is_chosen],
            node=self.node[is_chosen] - start,
            constant=None if self.constant is None else self.constant[is_chosen],
        )

    def in_run(self, run: FrozenRun) -> Targets:
        """Return the terms as targets of a frozen run."""
        targets = run.of_logits(self.weights, self.pos)
        if self.constant is None:
            return targets
        return targets._replace(
            bias=targets.bias + self.constant, total=targets.total + self.constant
        )


class ExplainedAnswers(NamedTuple):
    """The answers of an attribution graph, and the number that the graph explains.

    Attributes:
        number: the explained number in words: the sum of the logits of one answer, or the contrast
            of two answers.
        unit: the unit of the number.
        metric: the value of the metric of `Pairs` for the answers, in nats.
        of_position: the answer to which each position of an answer belongs: its text in quotes, or
            `both answers`. Positions of the text are left out.
    """

    number: str
    unit: str
    metric: float
    of_position: Mapping[int, str]


class ChosenTargets(NamedTuple):
    """The targets of an attribution graph.

    Attributes:
        logits: the nodes of logits, differences of logits, the sum of the logits of an answer, and
            the contrast of two answers.
        terms: the logits of these nodes.
        features: the indices of the chosen features among the active features.
        answers: an answer of several tokens or two answers; None for other targets.
    """

    logits: list[Node]
    terms: LogitTerms
    features: list[int]
    answers: ExplainedAnswers | None = None


class AnswersOfTargets(NamedTuple):
    """The answers that `attribution_graph(targets=)` names.

    Attributes:
        start: the tokens with which all answers begin, if there are two answers.
        rest: the other tokens of each answer.
    """

    start: AnswerTokens
    rest: tuple[AnswerTokens, ...]

    @property
    def whole(self) -> list[AnswerTokens]:
        """All tokens of each answer."""
        return [self.start + tokens for tokens in self.rest]

    def after(self, text: Text) -> Text:
        """Return a text with the tokens with which all answers begin."""
        if not self.start:
            return text
        # A row has all tokens of an answer except the last, so any token may be the last.
        return rows_of_answers(text, Continuations((((*self.start, 0),),)))


def answers_of_targets(model: nn.Module, text: Text, targets: Any, pos: int) -> AnswersOfTargets:
    """Return the tokens of the answers that `targets` names; no answers for other targets.

    A text is an answer, and a tuple is one answer, or a right and a wrong answer.

    Args:
        model: the model.
        text: one text without padding, which the answers continue.
        targets, pos: see `attribution_graph`.

    Raises:
        ValueError: if a tuple contains more than two answers, one answer begins with the other, or
            an answer does not fit the text; see `Pairs`.
    """
    if isinstance(targets, str):
        targets = (targets,)
    if not isinstance(targets, tuple):
        return AnswersOfTargets((), ())
    if len(targets) not in (1, 2):
        raise ValueError(
            f"targets must be a tuple (right, wrong) or a list of targets; got {shown(targets)}"
        )
    if len(targets) == 1:
        (tokens,) = text.listed()
        before = tokens[: pos % len(tokens) + 1]
        answer = tokens_of_answer(model, before, targets[0], "tuple")
        return AnswersOfTargets((), (answer,))
    (answers,) = tokens_of_answers(model, text, targets)
    n = common_start(answers)
    if n:
        require_causal(model, None)
    rest = tuple(tokens[n:] for tokens in answers)
    if not all(rest):
        raise ValueError(
            "no answer of targets may begin with the other answer, because the other answer then "
            f"has nothing to compare; got {shown(targets)}"
        )
    return AnswersOfTargets(answers[0][:n], rest)


def chosen_targets(
    model: nn.Module,
    run: FrozenRun,
    targets: int | str | Sequence[Any],
    desired_prob: float,
    pos: int,
) -> ChosenTargets:
    """Return the targets that a caller of `attribution_graph` chose.

    Args:
        model: the model.
        run: the frozen run.
        targets, desired_prob, pos: see `attribution_graph`.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if a text is several tokens, a token does not exist, a feature is not active, or
            two targets are the same.
    """
    require_kind(
        "targets", targets, kind=(int, Sequence, Tensor), words="a number, or a list of tokens"
    )
    chances = run.logits[pos].softmax(-1)
    if isinstance(targets, int):
        targets = _likely_tokens(chances, targets, desired_prob)
    vocab = run.logits.shape[1]
    logits: list[Node] = []
    features: list[int] = []
    directions = run.logits.new_zeros(len(targets), vocab)
    # A text in a list continues the tokens up to the position of the logits.
    before = run.tokens[: pos + 1].tolist()
    for target in targets:
        if isinstance(target, (tuple, list)) and len(target) == 3 and not is_worded(target):
            features.append(_active_feature(run, *target))
            continue
        ids = _tokens_of_target(model, before, target, vocab=vocab)
        directions[len(logits), ids[0]] += 1
        for token in ids[1:]:
            directions[len(logits), token] -= 1
        # A difference of logits has no token id. Number it after the last id of the vocabulary, as
        # circuit-tracer does.
        number = ids[0] if len(ids) == 1 else vocab + len(logits)
        chance = float(chances[ids[0]]) if len(ids) == 1 else None
        label = " - ".join(run.write(ids))
        logits.append(_logit_node(run, number, pos, label=label, probability=chance))
    if len({node.id for node in logits}) < len(logits) or len({*features}) < len(features):
        raise ValueError(f"targets must differ from each other; got {targets}")
    directions = directions[: len(logits)]
    numbers = torch.arange(len(logits), device=directions.device)
    terms = LogitTerms(directions, torch.full_like(numbers, pos), numbers)
    return ChosenTargets(logits, terms, features)


def targets_of_answer(run: FrozenRun, answers: AnswersOfTargets) -> ChosenTargets:
    """Return the targets of an answer: the logits of its tokens, and the sum of these logits.

    The logit of a token is read at the position that predicts the token.

    Args:
        run: the frozen run of the prompt and all tokens of the answer except the last.
        answers: the answer.
    """
    (answer,) = answers.rest
    n_pos, vocab = run.logits.shape
    n = len(answer)
    positions = range(n_pos - n, n_pos)
    logits = _nodes_of_answer(run, answer, positions)
    weights = run.logits.new_zeros(n, vocab)
    device = weights.device
    weights[torch.arange(n), torch.tensor(answer)] = 1
    numbers = torch.arange(n, device=device)
    terms = LogitTerms(
        weights=weights.repeat(2, 1),
        pos=torch.tensor([*positions], device=device).repeat(2),
        node=torch.cat([numbers, torch.full_like(numbers, n)]),
    )
    label = logits[-1].label
    explained = ExplainedAnswers(
        number=f"the sum of the {n} logits of {label!r}, each minus the mean over the vocabulary",
        unit="logits",
        metric=_log_probs(run, answer, positions),
        of_position=_answer_of_positions(run, answers),
    )
    return ChosenTargets(logits, terms, [], answers=explained)


def _nodes_of_answer(run: FrozenRun, answer: Sequence[int], positions: range) -> list[Node]:
    """Return the node of the logit of each token, and then the node of the sum of these logits.

    Args:
        run: the frozen run.
        answer: the tokens of the answer.
        positions: the position that predicts each token.
    """
    logits = []
    for token, pos in zip(answer, positions, strict=True):
        chance = float(run.logits[pos].softmax(-1)[token])
        label = run.write([token])[0]
        logits.append(_logit_node(run, token, pos, label=label, probability=chance))
    # As in a difference of logits, the number follows the ids of the vocabulary.
    number = run.logits.shape[1] + len(answer)
    label = "".join(run.write([*answer]))
    return [*logits, _logit_node(run, number, positions[-1], label=label)]


def _logit_node(
    run: FrozenRun, number: int, pos: int, *, label: str, probability: float | None = None
) -> Node:
    """Return the node of a logit, or of a sum of logits.

    Args:
        run: the frozen run.
        number: the token of a logit; the number of a sum, after the last token of the vocabulary.
        pos: the position of the logits.
        label: the text of the node.
        probability: the probability of the token; None for a sum.
    """
    layer = len(run.graph.layers)
    return Node(
        id=f"{layer + 1}_{number}_{pos}",
        kind="logit",
        layer=layer,
        pos=pos,
        number=number,
        label=label,
        probability=probability,
    )


def targets_of_contrast(run: FrozenRun, answers: AnswersOfTargets) -> ChosenTargets:
    """Return the contrast of two answers as the only target.

    The contrast is log p(right answer) - log p(wrong answer), as in `Pairs`. A log-probability is
    the logit of the token minus `log sum exp` of all logits:

    1. The logits of tokens with which both answers begin cancel, so they are left out.
    2. At the next position, both answers have the same `log sum exp`, which cancels. The difference
       of two logits is left.
    3. At all later positions, `log sum exp` is replaced by its tangent at the run: the sum of the
       logits weighted by their probabilities, plus the entropy of the prediction. The entropy is a
       constant of the target. So the target is linear in the logits, equals the contrast in the
       run, and has the same gradient.

    Args:
        run: the frozen run of the text, the common tokens and both answers.
        answers: the right and the wrong answer.
    """
    vocab = run.logits.shape[1]
    # Both answers begin after this position, so it predicts the first token of each.
    pos = run.branches.n_shared - 1
    logits = run.logits_before_cap[pos:]
    log_probs = logits.log_softmax(-1)
    # Tangents of log p of the tokens that the run reads after `pos`; the sign of the second answer
    # is -1. At `pos` itself, the tangents of the two answers cancel.
    signs = logits.new_tensor([1.0 if row == 0 else -1.0 for row in run.branches.rows[pos:]])
    signs[0] = 0
    chances = log_probs.exp()
    weights = -signs[:, None] * chances
    entropy = -(chances * log_probs).sum(-1)
    metric = 0.0
    for row, (sign, tokens) in enumerate(zip((1, -1), answers.rest, strict=True)):
        positions = run.branches.of_row(row)[pos:]
        weights[[place - pos for place in positions], [*tokens]] += sign
        metric += sign * _log_probs(run, tokens, positions)
    terms = LogitTerms(
        weights=weights,
        pos=torch.arange(pos, len(run.tokens), device=weights.device),
        node=torch.zeros(len(weights), dtype=torch.long, device=weights.device),
        constant=-signs * entropy,
    )
    right, wrong = ("".join(run.write([*tokens])) for tokens in answers.whole)
    node = _logit_node(run, vocab, pos, label=f"{right} - {wrong}")
    explained = ExplainedAnswers(
        number=f"log p({right!r}) - log p({wrong!r})",
        unit="nats",
        metric=metric,
        of_position=_answer_of_positions(run, answers),
    )
    return ChosenTargets([node], terms, [], answers=explained)


def _answer_of_positions(run: FrozenRun, answers: AnswersOfTargets) -> dict[int, str]:
    """Return the answer to which each position of an answer belongs.

    Args:
        run: the frozen run of the text and the answers.
        answers: the answers.
    """
    n_shared = run.branches.n_shared
    of_position = dict.fromkeys(range(n_shared - len(answers.start), n_shared), "both answers")
    for row, tokens in enumerate(answers.whole):
        text = "".join(run.write([*tokens]))
        for pos in run.branches.of_row(row)[n_shared:]:
            of_position[pos] = repr(text)
    return of_position


def _log_probs(run: FrozenRun, tokens: AnswerTokens, positions: Sequence[int]) -> float:
    """Return the sum of the log-probabilities of tokens, in nats.

    Args:
        run: the frozen run.
        tokens: the tokens.
        positions: the position that predicts each token.
    """
    log_probs = run.logits[[*positions]].log_softmax(-1)
    return float(log_probs[[*range(len(tokens))], [*tokens]].sum())


def _likely_tokens(chances: Float[Tensor, " vocab"], most: int, share: float) -> list[int]:
    """Return the likeliest tokens, starting with the likeliest.

    Args:
        chances: the probability of each token.
        most: the maximum number of tokens.
        share: tokens are returned until the sum of their probabilities reaches this number.

    Raises:
        ValueError: if `most` is below 1.
    """
    require_integer("targets", most)
    likely = chances.sort(descending=True)
    needed = int((likely.values.cumsum(0) < share).sum()) + 1
    tokens: list[int] = likely.indices[: min(most, needed)].tolist()
    return tokens


def _active_feature(run: FrozenRun, layer: int, feature: int, pos: int) -> int:
    """Return the index of a feature among the active features."""
    at = (run.layer == layer) & (run.feature == feature) & (run.pos == pos % len(run.tokens))
    if not at.any():
        raise ValueError(
            f"a target (layer, feature, pos) must be an active feature; got {(layer, feature, pos)}"
        )
    return int(at.nonzero()[0])


def _tokens_of_target(model: nn.Module, before: list[int], target: Any, vocab: int) -> list[int]:
    """Return the token of a target, or the two tokens of a difference.

    Args:
        model: the model.
        before: the tokens that a text continues, as an answer of `Pairs` does.
        target: the target.
        vocab: the size of the vocabulary.

    Raises:
        ValueError: if a text is several tokens or could be both a new word and the rest of a word,
            a token does not exist, or the target is neither a token nor two different tokens.
    """
    ids = []
    for token in target if isinstance(target, (tuple, list)) else [target]:
        number = token_of_answer(model, before, token)
        if number is None:
            raise ValueError(
                f"a text in a list of targets must be one token; got {token!r}; for answers of "
                f"several tokens, use targets={target!r} without a list"
            )
        ids.append(index(number))
    known = all(0 <= token < vocab for token in ids)
    if len(ids) not in (1, 2) or len({*ids}) < len(ids) or not known:
        raise ValueError(
            f"a target must be a token in [0, {vocab}), two different tokens or (layer, feature, "
            f"pos); got {shown(target)}"
        )
    return ids


def promoted_tokens(run: FrozenRun, sources: Int[Tensor, " source"], k: int = 3) -> list[list[str]]:
    """Return, for each feature, the tokens whose logits the feature raises most by its direct path.

    A feature of a cross-layer transcoder writes to several layers. The sum of its decoder rows for
    all layers is used.

    Args:
        run: the frozen run.
        sources: the indices of the features among the active features.
        k: the number of tokens for each feature. Default: 3.
    """
    if not len(sources):
        return []
    written = []
    for layer, feature in zip(
        run.layer[sources].tolist(), run.feature[sources].tolist(), strict=True
    ):
        rows = [decoder[feature] for decoder in run.transcoders[layer].decoders]
        written.append(run.like(torch.stack(rows).sum(0)))
    logits = run.final.linear.after(torch.stack(written)) @ run.like(run.model.W_U)
    return [run.write(tokens) for tokens in logits.topk(k).indices.tolist()]
