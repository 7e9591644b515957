"""Answers of pairs, and metrics with words: convert the words to tokens of a model.

1. Convert the answers to tokens (`answers_of_texts`). Each answer continues its text.
2. Find the answers of several tokens, in the pairs or in the metric (`answers_of_metric`). Such
   answers replace the metric by the score of their rows; see `answers`.
3. Otherwise, convert the words of the metric by the same rules (`metric_of_texts`), or find the
   position at which the model answers (`answer_positions`).

`scoring_of` does steps 2 and 3.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks.base import Text, name_of_parts, shown
from interp.inputs.token_positions import is_worded, short, token_ids
from interp.measuring import Metric, MetricCall, TokenMetric, WordedMetric
from interp.pairs.answers import AnswerScore, AnswerTokens, Continuations
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


def tokens_of_answers(
    model: nn.Module, text: Text, answers: Any
) -> tuple[tuple[AnswerTokens, ...], ...]:
    """Return the tokens of the right answer of each text, or of its right and its wrong answer.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts that the answers continue.
        answers: the answer of each text, or its right and its wrong answer; or one for all texts.
    """
    texts = text.of_logits.listed()
    is_one = isinstance(answers, (str, int, tuple))
    answers = [answers] * len(texts) if is_one else answers
    if len(answers) != len(texts):
        raise ValueError(
            f"answers must be a list with one answer for each of {len(texts)} texts, or a tuple "
            f"(right, wrong); got {len(answers)} answers"
        )
    answer_tokens = []
    for tokens, answer in zip(texts, answers, strict=True):
        parts = answer if isinstance(answer, (tuple, list)) else [answer]
        answer_tokens.append(tuple(tokens_of_answer(model, tokens, part) for part in parts))
    counts = {len(parts) for parts in answer_tokens}
    if counts not in ({1}, {2}):
        raise ValueError(
            "each text must have a right answer, or each text a right and a wrong answer; got "
            f"{sorted(counts)} answers"
        )
    return tuple(answer_tokens)


def token_of_answer(model: nn.Module, tokens: list[int], answer: Any) -> Any:
    """Return the token of an answer after a text, or None if the answer is several tokens.

    Args:
        model: the model whose tokenizer converts strings.
        tokens: the text.
        answer: a string, or a token, which is returned unchanged.

    Raises:
        ValueError: see `tokens_of_answer`.
    """
    if not isinstance(answer, str):
        return answer
    _require_words(answer)
    language = of(model, "to_id")
    forms = [_tokens_if_any(language, form) for form in (answer, f" {answer}")]
    if not any(form is not None and len(form) == 1 for form in forms):
        return None
    chosen = tokens_of_answer(model, tokens, answer)
    return chosen[0] if len(chosen) == 1 else None


def tokens_of_answer(
    model: nn.Module, tokens: list[int], answer: str | int | Tensor, in_tuple: bool = False
) -> AnswerTokens:
    """Return the tokens of an answer that continues a text.

    Args:
        model: the model whose tokenizer converts strings.
        tokens: the text.
        answer: the answer as a string, a token, or a tensor of tokens [n].
        in_tuple: whether a caller passes the tokens of one answer in a tuple, for an error.
            Default: False.

    Raises:
        ValueError: if the answer is empty; if it could be both a new word and the rest of the
            text's last word; or if an answer of several tokens, after the tokens of the text,
            becomes another string than the text followed by the answer.
    """
    if isinstance(answer, Tensor):
        if answer.ndim > 1 or not answer.numel() or answer.is_floating_point():
            raise ValueError(f"an answer must be a tensor of tokens [n]; got {shown(answer)}")
        return tuple(answer.reshape(-1).tolist())
    if isinstance(answer, int):
        return (answer,)
    _require_words(answer)
    language = of(model, "to_id")
    text = language.to_text(tokens)
    chosen = _new_word_or_rest(language, text, answer, in_tuple=in_tuple)
    joined = language.to_text([*tokens, *chosen])
    if len(chosen) > 1 and joined not in (text + answer, f"{text} {answer}"):
        raise ValueError(
            f"the tokens of an answer must continue its text; after {text[-20:]!r}, the model "
            f"reads the tokens of {answer!r} as {joined[len(text) :]!r}"
        )
    return chosen


def _new_word_or_rest(language: Any, text: str, answer: str, in_tuple: bool) -> AnswerTokens:
    """Return the tokens of an answer as a new word after a text, or as the rest of its last word.

    For example, after "the", the answer "m" could be a new word " m", or the end of "them".

    Raises:
        ValueError: if the answer could be both.
    """
    is_separate = answer[:1].isspace() or text[-1:].isspace()
    plain = None if is_separate else _tokens_if_any(language, answer)
    spaced = None if is_separate else _tokens_if_any(language, f" {answer}")
    if plain is None:
        return _tokens(language, answer) if spaced is None else spaced
    if spaced is None or (len(plain) == 1 and len(spaced) > 1):
        return plain
    # An answer that occurs in the text as a word is probably meant as this word again, and not as
    # the rest of the last word.
    is_word = answer[:1].isalnum() and len(spaced) == 1
    is_word_of_text = is_word and re.search(rf"\b{re.escape(answer)}\b", text)
    is_only_spaced = len(spaced) == 1 and len(plain) > 1
    if is_word_of_text or is_only_spaced or plain == spaced:
        return spaced
    is_inside_word = answer[:1].isalnum() and text[-1:].isalnum()
    if len(plain) > 1 and not is_inside_word:
        return plain
    raise ValueError(
        f"an answer must be a new word or the rest of a word; after {text[-20:]!r} got {answer!r}: "
        f"write {' ' + answer!r} for a new word, or pass "
        f"{_as_tokens(language, plain, answer, in_tuple)} for the rest of a word"
    )


def _as_tokens(language: Any, tokens: AnswerTokens, answer: str, in_tuple: bool) -> str:
    """Return an expression for the tokens of an answer, which an error tells the user to write.

    Args:
        language: the object with the tokenizer.
        tokens: the tokens.
        answer: the answer.
        in_tuple: whether the expression is a tuple with one answer.
    """
    call = f"{name_of_parts(language)}.to_id({answer!r})"
    if len(tokens) > 1:
        call = f"torch.tensor({[*tokens]})"
    return f"({call},)" if in_tuple else call


def _require_words(answer: str) -> None:
    """Check that an answer is not empty."""
    if not answer:
        raise ValueError(
            "an answer must have at least one token; got '': write the text that follows the prompt"
        )


def _tokens(language: Any, text: str) -> AnswerTokens:
    """Return the tokens of a text, without the tokens that begin or end a text."""
    (tokens,) = language.to_tokens(text, bos=False).listed()
    return tuple(tokens)


def _tokens_if_any(language: Any, text: str) -> AnswerTokens | None:
    """Return the tokens of a text, or None if the tokenizer has no tokens for the text."""
    try:
        return _tokens(language, text)
    except ValueError:
        return None


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
    tokens = tokens_of_answers(model, text, metric.answers)
    return Continuations(tokens, score=cast(AnswerScore, metric.score))


def has_several_tokens(model: nn.Module, texts: Any) -> bool:
    """Return True if at least one string consists of several tokens.

    Args:
        model: the model whose tokenizer converts strings.
        texts: a string or a token, or a list or tuple of them, or None.

    Raises:
        ValueError: if a string is empty.
    """
    if isinstance(texts, str):
        _require_words(texts)
        return len(_tokens(of(model, "to_id"), texts)) > 1
    is_list = isinstance(texts, (list, tuple))
    return is_list and any(has_several_tokens(model, text) for text in texts)


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


def tokens_of_words(model: nn.Module, texts: list[list[int]], words: Any) -> Any:
    """Return words that continue texts as tokens: one for all texts, or the tokens of each text.

    Args:
        model: the model whose tokenizer converts strings.
        texts: the tokens of each text.
        words: a word, or a word or a list of words for each text. A word may be a token. Anything
            without words is returned unchanged.
    """
    if not is_worded(words):
        return words
    if isinstance(words, str):
        tokens = [_token_of_word(model, text, words) for text in texts]
        return tokens[0] if len({*tokens}) == 1 else tokens
    if len(words) != len(texts):
        # The metric itself raises an error when it gets the logits.
        return token_ids(model, words)
    tokens_of_texts: list[Any] = []
    for text, part in zip(texts, words, strict=True):
        if isinstance(part, (list, tuple)):
            tokens_of_texts.append([_token_of_word(model, text, word) for word in part])
        else:
            tokens_of_texts.append(_token_of_word(model, text, part))
    return tokens_of_texts


def _token_of_word(model: nn.Module, text: list[int], word: Any) -> Any:
    """Return the token of a word after a text. A word that is a token already is returned."""
    token = token_of_answer(model, text, word)
    return token_ids(model, word) if token is None else token


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
