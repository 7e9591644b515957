"""Answers of pairs, and metrics with words: convert the words to tokens of a model.

1. Convert the answers to tokens (`answers_of_texts`). Each answer continues its text.
2. Find the answers of several tokens, in the pairs or in the metric (`answers_of_metric`). Such
   answers replace the metric by the score of their rows; see `answers`.
3. Otherwise, convert the words of the metric by the same rules (`metric_of_texts`), or find the
   position at which the model answers (`answer_positions`).

`scoring_of` does steps 2 and 3.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks.base import Text
from interp.inputs.token_positions import short
from interp.inputs.words import has_several_tokens, tokens_of_answers, tokens_of_words
from interp.measuring import Metric, MetricCall, TokenMetric, WordedMetric
from interp.pairs.answers import AnswerScore, Continuations
from interp.protocol import of


@dataclass(frozen=True, eq=False)
class Scoring:
    """The scored answers of pairs, or their metric, as tokens of a model.

    Attributes:
        continuations: the answers of several tokens that are scored; None if there are none.
        metric: the metric; None if the answers define it.
        pos: the position of the answers; None for the last real token.
    """

    continuations: Continuations | None
    metric: Metric | None
    pos: int | Int[Tensor, " batch"] | None


def scoring_of(
    model: nn.Module,
    clean: Text,
    corrupted: Text | None,
    *,
    answers: Tensor | Continuations | None,
    metric: Metric | None,
    pos: int | Int[Tensor, " batch"] | None,
    per_token: bool,
) -> Scoring:
    """Return the scored answers and the metric of pairs, as tokens of a model.

    Args:
        model: the model whose tokenizer converts strings.
        clean, corrupted: the texts of the pairs as tokens; None if there are no corrupted texts.
        answers: the answers as tokens, from `answers_of_texts`; None if the pairs have no answers.
        metric, pos, per_token: see `Pairs`.

    Raises:
        ValueError: see `Pairs.read_by`.
    """
    continuations = answers_of_metric(model, clean, metric)
    if metric is None and isinstance(answers, Continuations):
        continuations = answers
    if continuations is not None:
        require_causal(model, pos)
        continuations = replace(continuations, per_token=per_token)
        metric = None
    elif metric is not None:
        metric = metric_of_texts(model, clean, metric)
    elif answers is not None and pos is None:
        pos = answer_positions(model, clean, corrupted)
    return Scoring(continuations, metric, pos)


def answers_of_texts(model: nn.Module, text: Text, answers: Any) -> Tensor | Continuations:
    """Return the answers of texts as tokens.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts that the answers continue.
        answers: the answer of each text, or its right and its wrong answer; or one for all texts.

    Returns:
        If each answer is one token, the right tokens [batch], or the right and the wrong tokens
        [batch, 2]. Otherwise `Continuations`.

    Raises:
        ValueError: if the number of answers does not fit the texts, or an answer does not fit its
            text; see `tokens_of_answer`.
    """
    if isinstance(answers, Tensor):
        return as_answers(answers, text.tokens)
    answer_tokens = tokens_of_answers(model, text, answers)
    if any(len(tokens) > 1 for parts in answer_tokens for tokens in parts):
        return Continuations(answer_tokens)
    ids = torch.tensor(answer_tokens, device=text.tokens.device)[..., 0]
    return ids[:, 0] if ids.shape[1] == 1 else ids


def as_answers(answers: Any, tokens: Shaped[Tensor, "batch *size"]) -> Tensor:
    """Return answers as a tensor [batch] or, with wrong answers, [batch, 2].

    Args:
        answers: the answers; see `Pairs`. One answer, or one tuple (right, wrong), is used for
            every text.
        tokens: the tokens of the texts.

    Raises:
        ValueError: if the answers are not one or two tokens for each text.
    """
    if not isinstance(answers, Tensor):
        is_shared = isinstance(answers, (int, tuple))
        answers = [answers] * len(tokens) if is_shared else answers
        answers = torch.as_tensor(answers, device=tokens.device)
    batch = len(tokens)
    if answers.shape not in ((batch,), (batch, 2)):
        raise ValueError(
            f"answers must be right tokens [{batch}], or right and wrong tokens [{batch}, 2]; "
            f"got {list(answers.shape)}"
        )
    if int(answers.min()) < 0:
        raise ValueError(f"answers must be at least 0; got {int(answers.min())}")
    return answers


def answers_of_metric(model: nn.Module, text: Text, metric: Metric | None) -> Continuations | None:
    """Return the answers that a metric scores, if one of them is several tokens; otherwise None.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts that the answers continue.
        metric: the metric of the pairs.

    Raises:
        ValueError: see `answers_of_texts`.
    """
    if not isinstance(metric, WordedMetric) or not has_several_tokens(model, metric.answers):
        return None
    tokens = tokens_of_answers(model, text, metric.answers, "metric")
    return Continuations(tokens, score=cast(AnswerScore, metric.score))


def metric_of_texts(model: nn.Module, text: Text, metric: Metric) -> Metric:
    """Return a metric with tokens in place of words.

    At the last position, a word is read like an answer that continues its text.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts of the examples.
        metric: the metric. A metric without words is returned unchanged.

    Raises:
        ValueError: if a word is empty, is several tokens, or could be both a new word and the rest
            of a word.
    """
    if not isinstance(metric, WordedMetric):
        return metric
    if metric.is_at_last and metric.made_by is not None:
        texts = text.of_logits.listed()
        arguments = {}
        for name, value in metric.made_by.arguments.items():
            arguments[name] = tokens_of_words(model, texts, value)
        read = MetricCall(metric.made_by.make, arguments)()
    else:
        read = metric.read(model)
    assert isinstance(read, TokenMetric)
    return replace(read, call=metric.call)


def require_causal(model: nn.Module, pos: Any) -> None:
    """Check that a model can read answers of several tokens after its texts.

    Args:
        model: the model.
        pos: the position of the answers; see `Pairs`.

    Raises:
        ValueError: if a position is given, or the model reads texts in both directions.
    """
    if not getattr(of(model), "is_causal", True):
        raise ValueError(
            f"answers must be single tokens, because a {type(model).__name__} reads texts in both "
            "directions; got several tokens"
        )
    if pos is not None and not (isinstance(pos, int) and pos == -1):
        raise ValueError(
            "pos must be left out for answers of several tokens, which follow the last token of a "
            f"text; got {short(pos)}"
        )


def answer_positions(
    model: nn.Module, clean: Text, corrupted: Text | None
) -> int | Int[Tensor, " batch"] | None:
    """Return the position of the answer in each text, counted from the end of the text.

    A causal model answers after the last token, so the result is None. A model that reads texts in
    both directions answers at the mask token.

    Args:
        model: the model.
        clean: the clean texts.
        corrupted: the corrupted texts; None if there are no corrupted texts.

    Raises:
        ValueError: if a model that reads texts in both directions has no mask token, if a text does
            not contain the mask token exactly once, or if the mask token has different positions in
            the clean and the corrupted text.
    """
    language = of(model)
    if getattr(language, "is_causal", True):
        return None
    rule = (
        f"pairs need pos=, the position of the answers, because a {type(model).__name__} reads "
        "texts in both directions"
    )
    if (mask_token := _mask_token(language)) is None:
        raise ValueError(f"{rule}, and its tokenizer has no mask token")
    positions = []
    for text in filter(None, (clean, corrupted)):
        for number, tokens in enumerate(text.listed()):
            count = tokens.count(mask_token)
            if count != 1:
                raise ValueError(f"{rule}; text {number} has {count} mask tokens")
            positions.append(tokens.index(mask_token) - len(tokens))
    n_texts = len(clean.tokens)
    if positions[:n_texts] != positions[-n_texts:]:
        raise ValueError(
            "the mask token must be equally far from the end in clean and corrupted texts; got "
            f"{positions[:n_texts]} and {positions[-n_texts:]}"
        )
    return torch.tensor(positions[:n_texts])


def _mask_token(language: Any) -> int | None:
    """Return the token at which a masked language model predicts, or None if it has none."""
    try:
        return getattr(language, "mask_token", None)
    # A model whose tokenizer files cannot be read still works with `pos=`.
    except (ImportError, ValueError):
        return None
