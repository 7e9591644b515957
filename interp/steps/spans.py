"""Spans of a text: the characters at which sentences, words and turns begin, and their tokens.

1. `sentence_starts`, `word_starts` and `part_starts` return the first character of each span.
2. `spans_of_tokens` assigns each token to the span in which the text of the token begins, which is
   known from `interp.inputs.offsets`.
"""

import itertools
import re
from collections.abc import Iterable, Sequence

# Closing quotes and brackets, which belong to the sentence before them.
_CLOSING = "\"'\u201d\u2019)\\]»*"

# The end of a sentence: marks and closing quotes before white space or the end of the text, or a
# line end; with all white space up to the last line end. Group 1 is the word before the marks.
_END = re.compile(rf"(\S*?)(?:[.!?…]+[{_CLOSING}]*(?=\s|$)(?:\s*\n)?|\s*\n)")

_ABBREVIATION = re.compile(
    "al|approx|ca|cf|ch|dr|e.g|eqs?|etc|figs?|i.e|inc|jr|ltd|mrs?|ms|prof|resp|sec|sr|st|vol|vs",
    re.IGNORECASE,
)


def sentence_starts(text: str) -> list[int]:
    """Return the first character of each sentence of a text.

    A sentence ends after `.`, `!`, `?` or `…` and closing quotes or brackets, if white space or the
    end of the text follows, and at the end of a line. White space before the next sentence is a
    part of the next sentence, but line ends are a part of the sentence before them. So a decimal
    point ends no sentence. The point of an abbreviation (`Dr.`, `e.g.`), of an initial (`J.`) and
    of a number that begins a line (`2.`) ends no sentence either. The list of abbreviations is
    English.

    >>> text = 'Dr. No paid 3.50 (e.g. in coins). "Why?" he asked.'
    >>> [text[i:j] for i, j in itertools.pairwise([*sentence_starts(text), len(text)])]
    ['Dr. No paid 3.50 (e.g. in coins).', ' "Why?"', ' he asked.']
    """
    ends = [match.end() for match in _END.finditer(text) if not _is_abbreviated(text, match)]
    return _beginnings(text, ends)


def _is_abbreviated(text: str, match: re.Match[str]) -> bool:
    """Return True if the mark of a match is the point of an abbreviation, an initial or a number.

    Args:
        text: the text.
        match: a match of `_END`.
    """
    if "\n" in match[0] or text[match.end(1) : match.end()] != ".":
        return False
    word = match[1].lstrip("([{\"'\u201c\u2018")
    begins_line = not text[: match.start(1)].rpartition("\n")[2].strip()
    if word.isdigit():
        return begins_line
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return is_initial or _ABBREVIATION.fullmatch(word) is not None


def word_starts(text: str) -> list[int]:
    """Return the first character of each word of a text, with the white space before it.

    >>> word_starts("The red box.")
    [0, 3, 7]
    """
    return _beginnings(text, [match.end() for match in re.finditer(r"\S+", text)])


def _beginnings(text: str, ends: Iterable[int]) -> list[int]:
    """Return the beginnings of spans that end at some characters. No span is only white space."""
    starts = [0]
    for end in ends:
        if text[starts[-1] : end].strip() and text[end:].strip():
            starts.append(end)
    return starts


def part_starts(text: str, parts: Sequence[str]) -> list[int]:
    """Return the first character of each of the caller's parts of a text.

    The parts occur in the text in this order, the first at its beginning. Text between two parts
    belongs to the earlier part.

    Args:
        text: the text.
        parts: the parts.

    Raises:
        ValueError: if a part does not occur after the part before it, or if the text does not begin
            with the first part.

    >>> part_starts("If x is 3, then y is 4.", ["If x is 3", " then y"])
    [0, 10]
    """
    starts: list[int] = []
    place = 0
    for number, part in enumerate(parts):
        start = text.find(part, place)
        if not part or start < 0 or (not starts and start):
            where = "begin the text" if not starts else "occur after the part before it"
            raise ValueError(
                f"part {number} of by must {where}; got {part!r:.60} for {text[place:]!r:.60}"
            )
        starts.append(start)
        place = start + len(part)
    return starts


def spans_of_tokens(
    token_starts: Sequence[int], span_starts: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the first token and the end of each span, in order, without spans without a token.

    A token belongs to the span in which its text begins.

    Args:
        token_starts: the first character of each token.
        span_starts: the first character of each span; the first is 0.

    >>> spans_of_tokens([0, 2, 3, 7], [0, 3, 5, 7])
    [(0, 2), (2, 3), (3, 4)]
    """
    firsts = []
    for start in span_starts:
        firsts.append(sum(token_start < start for token_start in token_starts))
    firsts = sorted({first for first in firsts if first < len(token_starts)})
    return [*itertools.pairwise([*firsts, len(token_starts)])]
