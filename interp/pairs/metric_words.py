"""Metrics with words: convert the words to tokens by the rules for answers of pairs."""

from dataclasses import replace
from typing import Any, cast

from torch import nn

from hooks.base import Text
from interp.inputs.token_positions import is_worded, token_ids
from interp.measuring import Metric, MetricCall, TokenMetric, WordedMetric, metric_for
from interp.pairs.answers import AnswerScore, Continuations
from interp.pairs.wording import has_several_tokens, token_of_answer, tokens_of_answers


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
    if not isinstance(metric, WordedMetric) or not metric.is_at_last or metric.made_by is None:
        return metric_for(model, metric)
    texts = text.of_logits.listed()
    arguments = {}
    for name, value in metric.made_by.arguments.items():
        arguments[name] = tokens_of_words(model, texts, value)
    read = MetricCall(metric.made_by.make, arguments)()
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
