"""The printed text of pairs: their number, whether a model has read them, and the first pair."""

from typing import Any

from torch import Tensor

from hooks.base import each_text, shown
from interp.inputs.token_positions import short
from interp.measuring import Writer, name_of
from interp.pairs.answers import Continuations

_ROLES = ("right", "wrong")
_MOST_SPANS = 8


def title(pairs: Any) -> str:
    """Return the first line: the number of pairs, whether they are read, their sizes and spans.

    Args:
        pairs: the pairs.
    """
    parts = [f"Pairs: {len(pairs)}"]
    if pairs.solved_of is not None:
        parts[0] += f" of {pairs.solved_of} solved"
    if not pairs.is_read:
        parts.append("not read by a model yet")
    else:
        parts[0] += f", read: clean {list(pairs.clean.shape)}"
        if pairs.corrupted is not None:
            parts.append(f"corrupted {list(pairs.corrupted.shape)}")
    if names := [*pairs.spans]:
        parts.append(f"spans {', '.join(names) if len(names) <= _MOST_SPANS else short(names)}")
    return ", ".join(parts)


def printed(pairs: Any, write: Writer | None) -> str:
    """Return the printed text: the title, and the texts and answers of the first pair.

    Args:
        pairs: the pairs.
        write: a function that returns the texts of tokens; None if it is unknown.
    """
    first = "first " if len(pairs) > 1 else ""
    lines = [title(pairs)]
    for name in ("clean", "corrupted"):
        texts = getattr(pairs, name)
        # An image or a sound has no short text.
        is_other = isinstance(texts, Tensor) and (texts.ndim > 2 or texts.is_floating_point())
        if texts is not None and not is_other:
            lines.append(f"{first}{name}: {_first_text(pairs, name, write)}")
    if pairs.answers is not None:
        lines.append(f"{first}answer: {_first_answers(pairs.answers, write)}")
    elif pairs.has_metric:
        lines.append(f"metric: {name_of(pairs.metric):.80}")
    return "\n  ".join(lines)


def _first_text(pairs: Any, name: str, write: Writer | None) -> str:
    """Return the first clean or the first corrupted text, shortened.

    Args:
        pairs: the pairs.
        name: `clean` or `corrupted`.
        write: a function that returns the texts of tokens; None if it is unknown.
    """
    if pairs.is_read:
        text = pairs.text if name == "clean" else pairs.other
        return _words(text.listed()[0], write)
    return _words(next(each_text(getattr(pairs, name)), None), write)


def _first_answers(answers: Any, write: Writer | None) -> str:
    """Return the right answer of the first pair, and the wrong answer if there is one.

    Args:
        answers: the answers of all pairs.
        write: a function that returns the texts of tokens; None if it is unknown.
    """
    if isinstance(answers, Continuations):
        of_first: Any = answers.tokens[0]
    else:
        listed = answers.tolist() if isinstance(answers, Tensor) else answers
        # One answer, or a tuple (right, wrong), belongs to all pairs.
        of_first = listed[0] if isinstance(listed, list) else listed
        if not isinstance(of_first, (list, tuple)):
            of_first = (of_first,)
    words = []
    for role, answer in zip(_ROLES, of_first, strict=False):
        words.append(f"{role} {_words(answer, write)}")
    return ", ".join(words)


def _words(text: Any, write: Writer | None) -> str:
    """Return a text as one short string: its words or, without a tokenizer, its tokens.

    Args:
        text: a string, or its tokens.
        write: a function that returns the texts of tokens; None if it is unknown.
    """
    # `shown` shortens a long text in its middle.
    if isinstance(text, str):
        return shown(text)
    tokens = text.tolist() if isinstance(text, Tensor) else text
    if isinstance(tokens, int):
        return str(tokens) if write is None else shown(write(tokens))
    if not isinstance(tokens, (list, tuple)):
        return shown(text)
    return short([*tokens]) if write is None else shown("".join(write([*tokens])))
