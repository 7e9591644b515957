"""Pairs of strings: convert their texts, answers and spans to tokens with a model's tokenizer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import Text, Texts, named_spans
from interp.inputs.texts import text_for
from interp.inputs.token_positions import is_worded
from interp.protocol import of


def tokens_of_pairs(
    model: nn.Module,
    clean: Texts,
    corrupted: Texts | None,
    answers: Any,
    spans: Mapping[str, Any] | Sequence[str],
) -> tuple[Text, Text | None, Any, Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the texts, the answers, the clean spans and the corrupted spans of pairs as tokens and
    positions; see `Pairs`.

    Raises:
        ValueError: if an answer is several tokens or ambiguous, if a span does not occur exactly
            once in its text, or if texts without spans have different numbers of tokens. The last
            error shows the tokens of both texts.
        UnknownNameError: if a chat has no span with a given name.
        TypeError: if the model cannot read text.
    """
    texts = (clean,) if corrupted is None else (clean, corrupted)
    read = [text_for(model, each) for each in texts]
    if len(read) == 2 and not spans:
        _require_same_lengths(model, *read)
    if answers is not None and not isinstance(answers, Tensor):
        several = [answers] * len(read[0].tokens) if _is_one(answers) else answers
        answers = _answers(model, read[0].of_logits, several)
    if isinstance(spans, Mapping):
        columns = [
            {name: _columns(model, text, name, span, side) for name, span in spans.items()}
            for side, text in enumerate(read)
        ]
    else:
        columns = [named_spans(text, spans) for text in read]
    return read[0], read[1] if read[1:] else None, answers, columns[0], columns[-1]


def answer_positions(
    model: nn.Module, clean: Text, corrupted: Text | None
) -> int | Int[Tensor, " batch"] | None:
    """Return the positions of the answers of pairs, counted from the end of each text.

    None means the last position.

    A causal model answers after the last token. A model that reads texts in both directions answers
    at the mask token.

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
    for text in (clean, corrupted):
        for number, row in enumerate([] if text is None else text.listed()):
            if row.count(mask_token) != 1:
                raise ValueError(f"{rule}; text {number} has {row.count(mask_token)} mask tokens")
            positions.append(row.index(mask_token) - len(row))
    n_texts = len(clean.tokens)
    if positions[:n_texts] != positions[-n_texts:]:
        raise ValueError(
            "the mask token must be equally far from the end in clean and corrupted texts; got "
            f"{positions[:n_texts]} and {positions[-n_texts:]}"
        )
    return torch.tensor(positions[:n_texts])


def _mask_token(language: Any) -> int | None:
    """Return the token at which a masked language model predicts, or None if the model has no such
    token.
    """
    try:
        return getattr(language, "mask_token", None)
    # The files of the tokenizer cannot be read.
    except (ImportError, ValueError):
        return None


def _is_one(answers: Any) -> bool:
    """Return whether the same answers are used for every text: a token, or a tuple
    (right, wrong).
    """
    return isinstance(answers, (str, int, tuple))


def _require_same_lengths(model: nn.Module, one: Text, other: Text) -> None:
    for row, another in zip(one.listed(), other.listed(), strict=False):
        if len(row) != len(another):
            shown = ["|".join(of(model).to_pieces(tokens)) for tokens in (row, another)]
            raise ValueError(
                "clean and corrupted texts must have equally many tokens, unless spans are "
                "given; got "
                f"{len(row)}, {shown[0]!r}, and {len(another)}, {shown[1]!r}"
            )


def _answers(model: nn.Module, text: Text, answers: Sequence[Any]) -> Tensor:
    """Return the right token of each text, [batch], or the right and the wrong token,
    [batch, 2].
    """
    rows = text.listed()
    if len(answers) != len(rows):
        raise ValueError(
            f"answers must be a list with one answer for each of {len(rows)} texts, or a tuple "
            f"(right, wrong); got {len(answers)} answers"
        )
    read = [
        [_answer(model, row, a) for a in answer]
        if isinstance(answer, (tuple, list))
        else _answer(model, row, answer)
        for row, answer in zip(rows, answers, strict=True)
    ]
    return torch.tensor(read, device=text.tokens.device)


def _answer(model: nn.Module, row: list[int], answer: str | int) -> int:
    """Return the token of an answer that continues a text.

    Raises:
        ValueError: if the answer is several tokens, or if it is ambiguous: a new word, or the rest
            of the last word.
    """
    if isinstance(answer, int):
        return answer
    language = of(model, "to_id")
    text = language.to_text(row)
    plain, spaced = (_one_token(language, written) for written in (answer, f" {answer}"))
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
    try:
        return int(language.to_id(text))
    except ValueError:
        return None


def _columns(model: nn.Module, text: Text, name: str, span: Any, side: int) -> Any:
    """Return the columns of a span in each text.

    A tuple contains the clean part and the corrupted part.
    """
    if not is_worded(span):
        return span
    each = [span] * len(text.tokens) if _is_one(span) else span
    if len(each) != len(text.tokens):
        raise ValueError(
            f"span {name!r} must be one part, or a part for each of {len(text.tokens)} texts; got "
            f"{len(each)}"
        )
    columns = [kept.nonzero().flatten().tolist() for kept in text.real]
    return [
        [places[n] for n in _tokens_inside(model, row, name, s if isinstance(s, str) else s[side])]
        for row, places, s in zip(text.listed(), columns, each, strict=True)
    ]


def _tokens_inside(model: nn.Module, row: list[int], name: str, part: str) -> list[int]:
    """Return the indices of the tokens of a text that overlap a part of the text.

    Raises:
        ValueError: if the part does not occur exactly once in the text.
    """
    written = [of(model).to_text(row[:n]) if n else "" for n in range(len(row) + 1)]
    if (count := written[-1].count(part)) != 1:
        raise ValueError(
            f"span {name!r} must occur once in the text; got {part!r} {count} times in "
            f"{written[-1]!r:.100}"
        )
    start = written[-1].index(part)
    stop = start + len(part)
    # If the bytes of a character are incomplete, the text ends with U+FFFD instead of the
    # character.
    starts = [len(before.rstrip("\ufffd")) for before in written[:-1]]
    ends = [max(len(after), 1) for after in written[1:]]
    return [n for n, (a, b) in enumerate(zip(starts, ends, strict=True)) if a < stop and b > start]
