"""Pairs of strings: convert their answers and spans to tokens with a model's tokenizer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import Text, named_spans, shown
from interp.inputs.offsets import offsets_of
from interp.inputs.token_positions import is_worded
from interp.pairs.answers import AnswerTokens, Continuations
from interp.protocol import of


def tokens_of_pairs(
    model: nn.Module,
    clean: Text,
    corrupted: Text | None,
    answers: Any,
    spans: Mapping[str, Any] | Sequence[str],
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the answers of pairs as tokens, and their spans as columns.

    Args:
        model: the model whose tokenizer converts strings.
        clean, corrupted: the texts as tokens.
        answers, spans: see `Pairs`.

    Returns:
        The answers, the spans of the clean texts and the spans of the corrupted texts.

    Raises:
        ValueError: if an answer is empty or ambiguous, if a span does not occur exactly
            once in its text, or if there are no spans and the two texts of a pair have different
            numbers of tokens.
        UnknownNameError: if a chat has no span with a given name.
        TypeError: if the model cannot read text.
    """
    if corrupted is not None and not spans:
        _require_same_lengths(model, clean, corrupted)
    if answers is not None and not isinstance(answers, Tensor):
        answers = answers_of_texts(model, clean, answers)
    clean_spans = _spans(model, clean, spans, side=0)
    if corrupted is None:
        return answers, clean_spans, None
    return answers, clean_spans, _spans(model, corrupted, spans, side=1)


def _is_one_answer(answers: Any) -> bool:
    """Return True if answers are one value for all texts: a string, a token, or a tuple."""
    return isinstance(answers, (str, int, tuple))


def _require_same_lengths(model: nn.Module, clean: Text, corrupted: Text) -> None:
    """Check that the two texts of each pair have equally many tokens."""
    for tokens, corrupted_tokens in zip(clean.listed(), corrupted.listed(), strict=False):
        if len(tokens) != len(corrupted_tokens):
            pieces = "|".join(of(model).to_pieces(tokens))
            corrupted_pieces = "|".join(of(model).to_pieces(corrupted_tokens))
            raise ValueError(
                "clean and corrupted texts must have equally many tokens, unless spans are "
                f"given; got {len(tokens)}, {pieces!r}, and {len(corrupted_tokens)}, "
                f"{corrupted_pieces!r}"
            )


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
    answer_tokens = tokens_of_answers(model, text, answers)
    if any(len(tokens) > 1 for parts in answer_tokens for tokens in parts):
        return Continuations(answer_tokens)
    ids = torch.tensor(answer_tokens, device=text.tokens.device)[..., 0]
    return ids[:, 0] if ids.shape[1] == 1 else ids


def tokens_of_answers(
    model: nn.Module, text: Text, answers: Any
) -> tuple[tuple[AnswerTokens, ...], ...]:
    """Return the tokens of the right answer of each text, or of its right and its wrong answer.

    Args:
        model, text, answers: see `answers_of_texts`.
    """
    texts = text.of_logits.listed()
    answers = [answers] * len(texts) if _is_one_answer(answers) else answers
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


def _require_words(answer: str) -> None:
    """Check that an answer is not empty."""
    if not answer:
        raise ValueError(
            "an answer must have at least one token; got '': write the text that follows the prompt"
        )


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
        f"write {' ' + answer!r} for a new word, or pass {_as_tokens(plain, answer, in_tuple)} for "
        "the rest of a word"
    )


def _as_tokens(tokens: AnswerTokens, answer: str, in_tuple: bool) -> str:
    """Return an expression for the tokens of an answer, which an error tells the user to write."""
    call = f"model.to_id({answer!r})" if len(tokens) == 1 else f"torch.tensor({[*tokens]})"
    return f"({call},)" if in_tuple else call


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


def _spans(
    model: nn.Module, text: Text, spans: Mapping[str, Any] | Sequence[str], side: int
) -> Mapping[str, Any]:
    """Return the columns of each span, by the name of the span.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts.
        spans: the spans by name, or the names of spans of chats.
        side: 0 for clean texts, 1 for corrupted texts.
    """
    if not isinstance(spans, Mapping):
        return named_spans(text, spans)
    return {name: _columns(model, text, name, span, side=side) for name, span in spans.items()}


def _columns(model: nn.Module, text: Text, name: str, span: Any, side: int) -> Any:
    """Return the columns of a span in each text.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts.
        name: the name of the span.
        span: one part for all texts, or a list with a part for each text. A part is a string, or a
            tuple of strings (clean part, corrupted part). Positions that contain no string are
            returned unchanged.
        side: 0 for clean texts, 1 for corrupted texts.
    """
    if not is_worded(span):
        return span
    n_texts = len(text.tokens)
    parts = [span] * n_texts if _is_one_answer(span) else span
    if len(parts) != n_texts:
        raise ValueError(
            f"span {name!r} must be one part, or a part for each of {n_texts} texts; got "
            f"{len(parts)}"
        )
    columns = []
    for tokens, is_real, part in zip(text.listed(), text.real, parts, strict=True):
        part_of_side = part if isinstance(part, str) else part[side]
        real_columns = is_real.nonzero().flatten().tolist()
        inside = _tokens_inside(model, tokens, name, part_of_side)
        columns.append([real_columns[n] for n in inside])
    return columns


def _tokens_inside(model: nn.Module, tokens: list[int], name: str, part: str) -> list[int]:
    """Return the indices of the tokens of a text that overlap a part of the text.

    Args:
        model: the model whose tokenizer converts tokens.
        tokens: the text.
        name: the name of the span, for the error.
        part: the part of the text.

    Raises:
        ValueError: if the part does not occur exactly once in the text.
    """
    text, starts, ends = offsets_of(model, tokens)
    if (count := text.count(part)) != 1:
        raise ValueError(
            f"span {name!r} must occur once in the text; got {part!r} {count} times in "
            f"{text!r:.100}"
        )
    part_start = text.index(part)
    part_end = part_start + len(part)
    tokens_in_text = enumerate(zip(starts, ends, strict=True))
    return [n for n, (start, end) in tokens_in_text if start < part_end and end > part_start]
