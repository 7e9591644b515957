"""Pairs of strings: convert their answers and spans to tokens with a model's tokenizer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import Text, named_spans
from interp.inputs.token_positions import is_worded
from interp.protocol import of


def tokens_of_pairs(
    model: nn.Module,
    clean: Text,
    corrupted: Text | None,
    answers: Any,
    spans: Mapping[str, Any] | Sequence[str],
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the answers of pairs as tokens, and their spans as positions.

    Args:
        model: the model whose tokenizer converts strings.
        clean, corrupted: the texts as tokens.
        answers, spans: see `Pairs`.

    Returns:
        The answers, the spans of the clean texts and the spans of the corrupted texts.

    Raises:
        ValueError: if an answer is several tokens or ambiguous, if a span does not occur exactly
            once in its text, or if texts without spans have different numbers of tokens. The last
            error shows the tokens of both texts.
        UnknownNameError: if a chat has no span with a given name.
        TypeError: if the model cannot read text.
    """
    if corrupted is not None and not spans:
        _require_same_lengths(model, clean, corrupted)
    if answers is not None and not isinstance(answers, Tensor):
        is_shared = _is_one_answer(answers)
        answers_of_texts = [answers] * len(clean.tokens) if is_shared else answers
        answers = _answers(model, clean.of_logits, answers_of_texts)
    clean_spans = _spans(model, clean, spans, side=0)
    if corrupted is None:
        return answers, clean_spans, None
    return answers, clean_spans, _spans(model, corrupted, spans, side=1)


def _is_one_answer(answers: Any) -> bool:
    """Return True for one answer to every text: a token, or a tuple (right, wrong)."""
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


def _answers(model: nn.Module, text: Text, answers: Sequence[Any]) -> Tensor:
    """Return the right tokens of texts, [batch], or the right and the wrong tokens, [batch, 2].

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts that the answers continue.
        answers: the answer of each text, or its right and its wrong answer.
    """
    texts = text.listed()
    if len(answers) != len(texts):
        raise ValueError(
            f"answers must be a list with one answer for each of {len(texts)} texts, or a tuple "
            f"(right, wrong); got {len(answers)} answers"
        )
    answer_tokens: list[Any] = []
    for tokens, answer in zip(texts, answers, strict=True):
        if isinstance(answer, (tuple, list)):
            answer_tokens.append([_answer(model, tokens, part) for part in answer])
        else:
            answer_tokens.append(_answer(model, tokens, answer))
    return torch.tensor(answer_tokens, device=text.tokens.device)


def _answer(model: nn.Module, tokens: list[int], answer: str | int) -> int:
    """Return the token of an answer that continues a text.

    Args:
        model: the model whose tokenizer converts strings.
        tokens: the text.
        answer: the answer as a string or a token.

    Raises:
        ValueError: if the answer is several tokens, or if it is ambiguous: a new word, or the rest
            of the last word.
    """
    if isinstance(answer, int):
        return answer
    language = of(model, "to_id")
    text = language.to_text(tokens)
    plain = _one_token(language, answer)
    spaced = _one_token(language, f" {answer}")
    if answer[:1].isspace() or text[-1:].isspace() or spaced is None:
        return int(language.to_id(answer))
    # If the text contains the answer as a word, the answer is a new word and not the rest of the
    # last word.
    if plain in (None, spaced) or re.search(rf"\b{re.escape(answer)}\b", text):
        return spaced
    raise ValueError(
        f"an answer must be a new word or the rest of a word; after {text[-20:]!r} got {answer!r}: "
        f"write {' ' + answer!r} for a new word, or pass model.to_id({answer!r}) for the rest of a "
        "word"
    )


def _one_token(language: Any, text: str) -> int | None:
    """Return the token of a text, or None if the text is several tokens."""
    try:
        return int(language.to_id(text))
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
        span: a part for all texts, or a part for each text, or columns. A part is a string, or a
            tuple (clean part, corrupted part).
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
    # The text up to each token.
    prefixes = [""]
    for n in range(1, len(tokens) + 1):
        prefixes.append(of(model).to_text(tokens[:n]))
    text = prefixes[-1]
    if (count := text.count(part)) != 1:
        raise ValueError(
            f"span {name!r} must occur once in the text; got {part!r} {count} times in "
            f"{text!r:.100}"
        )
    part_start = text.index(part)
    part_end = part_start + len(part)
    # If the bytes of a character are incomplete, the text ends with U+FFFD instead of the
    # character.
    starts = [len(prefix.rstrip("\ufffd")) for prefix in prefixes[:-1]]
    ends = [max(len(prefix), 1) for prefix in prefixes[1:]]
    tokens_in_text = enumerate(zip(starts, ends, strict=True))
    return [n for n, (start, end) in tokens_in_text if start < part_end and end > part_start]
