"""Words as tokens of a model.

There are two ways to read a word:

1. Without a text (`token_ids`): the word must be one token. `require_clear_words` checks that the
   word has the same token after every text.
2. After a text (`tokens_of_answers`, `tokens_of_words`): a word without a space before it may be a
   new word or the rest of the last word of the text.

Tokens are returned unchanged, and lists of words give lists of tokens.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from hooks.base import Text, is_integer, name_of_parts, shown
from interp.protocol import of

AnswerTokens = tuple[int, ...]
"""The tokens of one answer."""

AnswerPlace = Literal["answers", "tuple", "metric"]
"""Where a caller writes an answer: in the answers of `Pairs`, in a tuple that has one answer, or in
a metric such as `log_prob`. Errors need it to say how to write the tokens of the answer there.
"""


def is_worded(tokens: Any) -> bool:
    """Return True if at least one token is a string."""
    if isinstance(tokens, str):
        return True
    return isinstance(tokens, Sequence) and any(map(is_worded, tokens))


def token_ids(model: nn.Module, tokens: Any) -> Any:
    """Return tokens as numbers, in the form in which they were given.

    Args:
        model: the model whose tokenizer converts strings. A string must be one token.
        tokens: a token, or a list of tokens, which may contain lists.

    Raises:
        ValueError: if a string is several tokens. The error lists these tokens.
        TypeError: if the model cannot read text.
    """
    if isinstance(tokens, str):
        return of(model, "to_id").to_id(tokens)
    return [token_ids(model, part) for part in tokens] if is_worded(tokens) else tokens


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


def require_clear_words(model: nn.Module, words: Any) -> None:
    """Check that words have the same tokens after every text.

    After a text, a word without a space before it may be a new word or the rest of a word.

    Args:
        model: the model whose tokenizer converts strings.
        words: a word, or a list of words, which may contain lists. Tokens need no check.

    Raises:
        ValueError: if a word without a space before it is one token with a space.
    """
    if not isinstance(words, str):
        for part in words if is_worded(words) else ():
            require_clear_words(model, part)
        return
    if words[:1].isspace():
        return
    language = of(model, "to_id")
    rest, new = (_token_or_none(language, form) for form in (words, f" {words}"))
    if new is not None and new != rest:
        call = f"{name_of_parts(language)}.to_id({words!r})"
        raise ValueError(
            f"a word must begin with a space if the texts are unknown; got {words!r}: write "
            f"{' ' + words!r} for a new word"
            + ("" if rest is None else f", or pass {call} for the rest of a word")
        )


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


def tokens_of_answers(
    model: nn.Module, text: Text, answers: Any, place: AnswerPlace = "answers"
) -> tuple[tuple[AnswerTokens, ...], ...]:
    """Return the tokens of the right answer of each text, or of its right and its wrong answer.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts that the answers continue.
        answers: the answer of each text, or its right and its wrong answer; or one for all texts.
        place: where the caller writes the answers, for errors. Default: the answers of `Pairs`.
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
        answer_tokens.append(tuple(tokens_of_answer(model, tokens, part, place) for part in parts))
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
    forms = [_continuation(language, tokens, form) for form in (answer, f" {answer}")]
    if not any(form is not None and len(form) == 1 for form in forms):
        return None
    chosen = tokens_of_answer(model, tokens, answer)
    return chosen[0] if len(chosen) == 1 else None


def tokens_of_answer(
    model: nn.Module, tokens: list[int], answer: str | int | Tensor, place: AnswerPlace = "answers"
) -> AnswerTokens:
    """Return the tokens of an answer that continues a text.

    Args:
        model: the model whose tokenizer converts strings.
        tokens: the text.
        answer: the answer as a string, a token, or a tensor of tokens [n].
        place: where the caller writes the answer, for an error. Default: the answers of `Pairs`.

    Raises:
        ValueError: if the answer is empty; if it could be both a new word and the rest of the
            text's last word; or if an answer of several tokens, after the tokens of the text,
            becomes another string than the text followed by the answer.
        TypeError: if the answer is none of these.
    """
    if isinstance(answer, Tensor):
        if answer.ndim > 1 or not answer.numel() or answer.is_floating_point():
            raise ValueError(f"an answer must be a tensor of tokens [n]; got {shown(answer)}")
        return tuple(answer.reshape(-1).tolist())
    if is_integer(answer):
        return (int(answer),)
    if not isinstance(answer, str):
        raise TypeError(
            f"an answer must be a string, a token or a tensor of tokens [n]; got {shown(answer)}"
        )
    _require_words(answer)
    language = of(model, "to_id")
    text = language.to_text(tokens)
    chosen = _new_word_or_rest(language, tokens, answer, place)
    joined = language.to_text([*tokens, *chosen])
    wanted = [text + answer] if answer[:1].isspace() else [text + answer, f"{text} {answer}"]
    if len(chosen) > 1 and joined not in wanted:
        raise ValueError(
            f"the tokens of an answer must continue its text; after {text[-20:]!r}, the model "
            f"reads the tokens of {answer!r} as {joined[len(text) :]!r}"
        )
    return chosen


def _new_word_or_rest(
    language: Any, tokens: list[int], answer: str, place: AnswerPlace
) -> AnswerTokens:
    """Return the tokens of an answer as a new word after a text, or as the rest of its last word.

    For example, after "the", the answer "m" could be a new word " m", or the end of "them".

    Raises:
        ValueError: if the answer could be both.
    """
    text = language.to_text(tokens)
    plain = _continuation(language, tokens, answer)
    if answer[:1].isspace() or text[-1:].isspace():
        return _tokens(language, answer) if plain is None else plain
    spaced = _continuation(language, tokens, f" {answer}")
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
        f"write {' ' + answer!r} for a new word; for the rest of a word, pass "
        f"{_as_tokens(language, plain, answer, place)}"
    )


def _continuation(language: Any, tokens: list[int], words: str) -> AnswerTokens | None:
    """Return the tokens of some words after a text; None if the tokenizer has none.

    Some tokenizers, such as the tokenizers of Llama 2 and T5, put a space before each text. The
    tokens of the words alone are then other words. So the words are also read after the text, and
    after a line break, and the first tokens that write exactly these words are returned. If no
    tokens do, because the tokenizer does not keep all characters, the words are read alone.

    Args:
        language: the object with the tokenizer.
        tokens: the text.
        words: the words, with a space at the start if they are a new word.
    """
    alone = _tokens_if_any(language, words)
    text = language.to_text(tokens)
    wanted = text + words
    if alone is not None and language.to_text([*tokens, *alone]) == wanted:
        return alone
    for before in (text, "\n"):
        first, both = (_tokens_if_any(language, part) for part in (before, before + words))
        if first and both and both[: len(first)] == first:
            added = both[len(first) :]
            if added and language.to_text([*tokens, *added]) == wanted:
                return added
    return alone


def _as_tokens(language: Any, tokens: AnswerTokens, answer: str, place: AnswerPlace) -> str:
    """Return an expression for the tokens of an answer, which an error tells the user to write.

    Args:
        language: the object with the tokenizer.
        tokens: the tokens.
        answer: the answer.
        place: where the caller writes the answer.
    """
    call = f"{name_of_parts(language)}.to_id({answer!r})"
    if len(tokens) == 1 and _token_or_none(language, answer) != tokens[0]:
        call = str(tokens[0])
    if len(tokens) > 1:
        call = f"torch.tensor({[*tokens]})"
        if place == "metric":
            # In a metric, a tensor has one token for each text.
            return f"Pairs(..., answers=[{call}, ...]) instead of a metric"
    return f"({call},)" if place == "tuple" else call


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


def _token_or_none(language: Any, text: str) -> int | None:
    """Return the token of a text, or None if the text is not one token."""
    try:
        token: int = language.to_id(text)
    except ValueError:
        return None
    return token
