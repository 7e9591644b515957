"""Scores of pairs: their answers, and the words of their metric, as tokens of a model.

1. Convert the answers to tokens. Each answer continues its text.
2. Convert the words of the metric by the same rules. If the metric is a score of answers, such as
   `log_prob`, and one of them is several tokens, these answers replace the metric.
3. Find the position at which the model answers (`answer_positions`). Answers of several tokens
   always follow the text (`require_causal`). Their score is the score of their rows; see `answers`.

`scoring_of` does these steps.
"""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import Text
from interp.inputs.token_positions import short
from interp.inputs.words import has_several_tokens, tokens_of_answers
from interp.measuring import Metric, WordedMetric
from interp.pairs.answers import AnswerScore, Continuations
from interp.protocol import of


@dataclass(frozen=True, eq=False)
class Scoring:
    """The answers and the metric of pairs, as tokens of a model.

    Attributes:
        answers: the right tokens [batch], or the right and the wrong tokens [batch, 2];
            `Continuations` if an answer is several tokens; None if the pairs have no answers.
        continuations: the answers of several tokens that are scored; None if there are none.
        metric: the metric; None if the answers define it.
        pos: the position of the answers; None for the last real token.
    """

    answers: Tensor | Continuations | None
    continuations: Continuations | None
    metric: Metric | None
    pos: int | Int[Tensor, " batch"] | None


def scoring_of(
    model: nn.Module,
    clean: Text,
    corrupted: Text | None,
    *,
    answers: Any,
    metric: Metric | None,
    pos: int | Int[Tensor, " batch"] | None,
    per_token: bool,
) -> Scoring:
    """Return the answers and the metric of pairs, as tokens of a model.

    Args:
        model: the model whose tokenizer converts strings.
        clean, corrupted: the texts of the pairs as tokens; None if there are no corrupted texts.
        answers: the answer of each text, or its right and its wrong answer; or one for all texts.
            Answers that are tokens already are returned unchanged.
        metric, pos, per_token: see `Pairs`.

    Raises:
        ValueError: see `Pairs.read_by`.
    """
    if not isinstance(answers, Tensor | Continuations | None):
        tokens = tokens_of_answers(model, clean, answers)
        if any(len(answer) > 1 for answers_of_text in tokens for answer in answers_of_text):
            answers = Continuations(tokens)
        else:
            answers = torch.tensor(tokens, device=clean.tokens.device)[..., 0]
            answers = answers[:, 0] if answers.shape[1] == 1 else answers
    continuations = answers if metric is None and isinstance(answers, Continuations) else None
    if isinstance(metric, WordedMetric):
        if has_several_tokens(model, metric.answers):
            tokens = tokens_of_answers(model, clean, metric.answers, "metric")
            continuations = Continuations(tokens, score=cast(AnswerScore, metric.score))
            metric = None
        else:
            metric = metric.read_after(model, clean)
    if continuations is not None:
        require_causal(model, pos)
        continuations = replace(continuations, per_token=per_token)
    elif metric is None and answers is not None and pos is None:
        pos = answer_positions(model, clean, corrupted)
    return Scoring(answers, continuations, metric, pos)


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
    if pos is not None and not bool((torch.as_tensor(pos) == -1).all()):
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
