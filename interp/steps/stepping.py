"""Steps: one text, divided into sentences, words, turns of a chat or the caller's own spans.

1. Read the prompt and the answer as tokens. Without an answer, the model writes it (`_read`).
2. Find the characters at which steps begin (`spans`), and the tokens of each step. A step also
   begins where the answer begins (`_spans`).
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from hooks.base import (
    Text,
    Texts,
    explains_calls,
    is_one_text,
    number_of,
    require_kind,
    shown,
    writer_of,
)
from interp import plots
from interp.inputs.offsets import Offsets, offsets_of
from interp.inputs.texts import padded, text_for
from interp.json_form import Table, form
from interp.protocol import of
from interp.results.result import Result
from interp.steps.spans import (
    part_starts,
    sentence_starts,
    spans_of_tokens,
    word_starts,
)
from interp.steps.writing import writer

_RULES = {"sentence": sentence_starts, "word": word_starts}

By = Literal["sentence", "word", "turn"] | Sequence[str] | Sequence[range]
"""`sentence`, `word` or `turn`, or the text or the token positions of each step."""

# The largest number of steps that are printed.
_MOST = 40


class Steps:
    """One text, divided into steps: sentences, words, turns of a chat, or your own spans.

    The steps contain all tokens of the text in order. A token belongs to the step in which the text
    of the token begins, so the space before a word belongs to the step of the word. The first token
    of the answer always begins a step.

    Sentences end after `.`, `!`, `?` or `…` and closing quotes, if white space follows, and at line
    ends. Decimal points, the points of common English abbreviations, of initials and of numbers
    that begin a line end no sentence; see `interp.steps.spans.sentence_starts`.

    A turn is a message of a chat with the part of the template before it. The part after the last
    message belongs to the last turn.

    Args:
        model: the model whose tokenizer reads the text.
        prompt: the text before the answer: a string, a list of tokens, or a chat from
            `models.chat`.
        answer: the text that follows the prompt, as a string or a list of tokens; "" for no answer.
            Two strings are read together, as one text. Default: None; the model writes the most
            probable answer.
        by: `sentence`, `word` or `turn`; or the texts of your own steps, in order; or their token
            positions, as ranges. Text between two of your texts belongs to the earlier step.
        max_new_tokens: the largest number of tokens of an answer that the model writes. Default:
            200.

    Attributes:
        text: the tokens of the whole text, a `Text` of one row.
        tokens: the same tokens as a list.
        spans: the token positions of each step.
        words: the text of each step.
        first_answer: the number of the first step of the answer; the number of steps if there is no
            answer.
        by: the kind of the steps: `sentence`, `word`, `turn` or `span`.

    Raises:
        TypeError: if the model cannot write text, or cannot generate the answer.
        ValueError: if the prompt is several texts or has no tokens, if your spans do not contain
            all tokens in order or the answer does not begin one of them, or if `turn` is chosen for
            a text that is not a chat.

    >>> from models import load
    >>> Steps(load("pydoc-4l"), "Open the file. Read it.", " Return the text.")
    Steps [3 sentences, 40 tokens], answer from 2
      0  'Open the file.'
      1  ' Read it.'
      2  ' Return the text.'
    """

    text: Text
    tokens: list[int]
    spans: list[range]
    words: list[str]
    first_answer: int
    by: str

    @explains_calls
    def __init__(
        self,
        model: nn.Module,
        prompt: Texts,
        answer: Any = None,
        by: By = "sentence",
        *,
        max_new_tokens: int = 200,
    ) -> None:
        tokens, first, turns = _read(model, prompt, "" if answer is None else answer)
        if answer is None:
            [added] = writer(model)([tokens], max_new_tokens=max_new_tokens)
            tokens = [*tokens, *added]
        self.tokens = tokens
        self.text = padded([tokens], model, range(1))
        self.by = by if isinstance(by, str) else "span"
        if writer_of(model) is None and _are_ranges(by):
            spans = _own_spans(by, len(tokens))
            _require_answer(spans, first, len(tokens))
            self.words = [" ".join(map(str, tokens[slice(*span)])) for span in spans]
        else:
            offsets = offsets_of(model, tokens)
            spans = _spans(offsets, first, by=by, turns=turns)
            self.words = _words(offsets, spans)
        self.spans = [range(*span) for span in spans]
        self.first_answer = sum(span.start < first for span in self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def view(self, result: Result) -> plots.View:
        """Return a picture of the text, with a colour for each step; see `interp.plots.steps`.

        Args:
            result: the result of `suppressed`, or an importance of `resampled`, such as
                `effects.select(importance="resampling")`.

        Raises:
            ValueError: if the result is not of these steps.
        """
        return plots.steps(self.words, result)

    def as_json(self) -> dict[str, Any]:
        """Return the text and the first token of each step, in the JSON form of all results; see
        `interp.json_form`.
        """
        starts = Table([span.start for span in self.spans], "step", "token")
        about = {"by": self.by, "first_answer": self.first_answer, "tokens": len(self.tokens)}
        return form("Steps", {"words": Table(self.words, "step"), "start": starts}, about)

    def __repr__(self) -> str:
        answer = f", answer from {self.first_answer}" if self.first_answer < len(self) else ""
        lines = [f"Steps [{len(self)} {self.by}s, {number_of(len(self.tokens), 'token')}]{answer}"]
        width = len(str(min(len(self), _MOST) - 1))
        for number, word in enumerate(self.words[:_MOST]):
            lines.append(f"{number:>{width}}  {word!r:.90}")
        if len(self) > _MOST:
            lines.append(f"... and {len(self) - _MOST} more")
        return "\n  ".join(lines)


class _Read(NamedTuple):
    """The tokens of a text.

    Attributes:
        tokens: the tokens of the prompt and the answer.
        first: the position of the first token of the answer.
        turns: the position after the last token of each message of a chat; empty for other texts.
    """

    tokens: list[int]
    first: int
    turns: list[int]


def _read(model: nn.Module, prompt: Any, answer: Any) -> _Read:
    """Return the tokens of a prompt and its answer.

    Raises:
        ValueError: if the prompt is several texts.
    """
    if isinstance(prompt, str) and isinstance(answer, str):
        tokens = text_for(model, prompt + answer).listed()[0]
        offsets = offsets_of(model, tokens)
        first_character = len(offsets.text) - len(answer)
        if offsets.text.endswith(answer):
            first = sum(start < first_character for start in offsets.starts)
            return _Read(tokens, first, [])
    text = prompt if isinstance(prompt, Text) else text_for(model, prompt)
    is_batch = isinstance(prompt, Tensor) and prompt.ndim == 2
    is_one = isinstance(prompt, Text) or is_one_text(prompt) or is_batch
    if len(text.tokens) != 1 or not is_one:
        raise ValueError(f"prompt must be one text; got {len(text.tokens)} texts, {shown(prompt)}")
    tokens = text.listed()[0]
    turns = _turns(text)
    if not len(answer):
        return _Read(tokens, len(tokens), turns)
    added = answer
    if isinstance(answer, str):
        added = of(model, "to_tokens").to_tokens(answer, bos=False).listed()[0]
    return _Read([*tokens, *map(int, added)], len(tokens), turns)


def _turns(text: Text) -> list[int]:
    """Return the position after the last token of each message; empty without messages.

    The spans of a chat are the positions of each message, by its number and by its role.
    """
    ends = []
    for name in filter(str.isdecimal, text.spans):
        last = max(text.spans[name][0])
        ends.append(int(text.positions[0, last]) + 1)
    return sorted(ends)


def _spans(offsets: Offsets, first: int, by: By, turns: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first token and the end of each step.

    Args:
        offsets: the text, and the first character of each token.
        first: the position of the first token of the answer.
        by: see `Steps`.
        turns: see `_Read`.

    Raises:
        ValueError: see `Steps`.
    """
    n_tokens = len(offsets.starts)
    if isinstance(by, str):
        if by == "turn":
            if not turns:
                raise ValueError(
                    "by='turn' needs a chat from models.chat; got a text without turns"
                )
            starts = [0, *turns[:-1]]
        elif by in _RULES:
            characters = _RULES[by](offsets.text)
            starts = [start for start, _ in spans_of_tokens(offsets.starts, characters)]
        else:
            raise ValueError(f"by must be 'sentence', 'word', 'turn' or spans; got {by!r}")
        firsts = sorted({*starts, first} - {n_tokens})
        return [*itertools.pairwise([*firsts, n_tokens])]
    require_kind("by", by, Sequence, "'sentence', 'word', 'turn', or a list of spans")
    if _are_ranges(by):
        spans = _own_spans(by, n_tokens)
    elif by and all(isinstance(part, str) for part in by):
        spans = spans_of_tokens(offsets.starts, part_starts(offsets.text, [*map(str, by)]))
    else:
        raise ValueError(f"by must contain only strings or only ranges; got {shown(by)}")
    _require_answer(spans, first, n_tokens)
    return spans


def _are_ranges(by: By) -> bool:
    """Return True for the caller's own token positions."""
    return not isinstance(by, str) and bool(by) and all(isinstance(span, range) for span in by)


def _require_answer(spans: Sequence[tuple[int, int]], first: int, n_tokens: int) -> None:
    """Check that the answer begins a step.

    Args:
        spans: the first token and the end of each step.
        first: the position of the first token of the answer.
        n_tokens: the number of tokens.

    Raises:
        ValueError: if it does not. The error names the position.
    """
    if first not in {n_tokens, *(start for start, _ in spans)}:
        raise ValueError(f"the answer must begin a step; got no step that begins at token {first}")


def _words(offsets: Offsets, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Return the text of each step. A step ends at the character where the next step begins."""
    bounds = [*(offsets.starts[start] for start, _ in spans), len(offsets.text)]
    return [offsets.text[start:end] for start, end in itertools.pairwise(bounds)]


def _own_spans(by: Any, n_tokens: int) -> list[tuple[int, int]]:
    """Return the caller's own token positions as the first token and the end of each step.

    Raises:
        ValueError: if they do not contain all tokens in order.
    """
    spans = []
    end = 0
    for number, span in enumerate(by):
        if span.step != 1 or span.start != end or not span:
            raise ValueError(
                f"span {number} of by must be a range of token positions that begins at {end}; got "
                f"{shown(span)}"
            )
        end = span.stop
        spans.append((span.start, end))
    if end != n_tokens:
        raise ValueError(f"by must contain the ranges of all {n_tokens} tokens; got {end} tokens")
    return spans
