"""Metrics: functions from logits [batch, pos, vocab] to one number for each example [batch].

The numbers are in float32 when the logits are in half precision.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import (
    Bool,
    Float,
    Int,
)
from torch import Tensor, nn

from hooks.base import (
    Index,
    Selection,
    Text,
    Texts,
    as_text,
    at_least_float32,
    explains_calls,
    padding_messages,
    padding_of,
    real_of,
    require_kind,
    shown,
    to_device,
)
from interp.inputs.texts import text_for
from interp.inputs.token_positions import (
    Mask,
    Position,
    SeveralTokens,
    Tokens,
    as_positions,
    fitting,
    last_real,
    short,
    tokens_of,
)
from interp.inputs.words import is_worded, token_ids
from interp.measuring import Metric, MetricCall, TokenMetric, WordedMetric, Writer
from interp.numbers.precision import divergence

_LAST = Selection(-1)


@explains_calls
def logit_diff(right: "SeveralTokens", wrong: "SeveralTokens", pos: "Tokens" = -1) -> Metric:
    """Return a metric: the logit of the right token minus the logit of the wrong token, in logits.

    Args:
        right, wrong: one token, or one for each example. For several tokens per example, [batch,
            n], the metric uses the mean of their logits. A token may be a text, such as `" Mary"`,
            which analyses convert with the model's tokenizer. If `pos` is -1, a text without a
            space at its beginning is read like an answer of `Pairs`: as a new word or the rest of a
            word.
        pos: one position, or a list or tensor with one position for each example. (In `edits`, a
            list selects the same columns in every example.) -1 is an example's last real token.
            Positions from 0 count columns, and must not be padding.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], in logits. It is positive if the right token has the larger logit.

    Raises:
        ValueError: if a token is negative, if the right and the wrong tokens of an example are the
            same, or if positions count from both ends. When called, if the logits have another
            number of examples, a vocabulary that is too small, or too few positions.

    >>> logits = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, 2.0, 2.0]]])  # [batch, pos, vocab]
    >>> logit_diff(right=2, wrong=0)(logits)
    tensor([3., 0.])
    """

    def score(logits: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
        return logits.gather(1, right).mean(1) - logits.gather(1, wrong).mean(1)

    tokens = {"right": right, "wrong": wrong}
    return _of_tokens(_Score(logit_diff, "logits", score, most=2), tokens, pos)


@explains_calls
def log_prob(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric: the log-probability of a token, in nats.

    Args:
        token: one token, or one for each example: `log_prob([" a", " b"])` with two prompts is the
            log-probability of " a" after the first prompt, and of " b" after the second. For
            several words after every prompt, measure each word: `[measure(log_prob(word), logits,
            model=model) for word in words]`. For analyses, a text may be several tokens, such as
            `" Paris, the city"`: the metric is then the log-probability of the whole text after the
            prompt; see `Pairs`.
        pos: one position, or one for each example, as in `logit_diff`, with the same errors. -1 is
            the last real token of an example.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], in nats. It is at most 0.

    >>> log_prob(1)(torch.zeros(1, 3, 5)).exp()  # [batch, pos, vocab]: five equally likely tokens
    tensor([0.2000])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(1, token).squeeze(1)

    return _of_tokens(_Score(log_prob, "nats", score), {"token": token}, pos)


@explains_calls
def accuracy(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric that is 1 if the token is the likeliest token, and 0 otherwise.

    Of several equally likely tokens, the token with the lowest number counts as the likeliest.

    Args:
        token: one token, or one for each example. For analyses, a text may be several tokens: the
            metric is then 1 if greedy decoding after the prompt returns the whole text.
        pos: one position, or one for each example, as in `logit_diff`, with the same errors. -1 is
            the last real token of an example.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], 0 or 1. Its mean over examples is the share of right answers.

    >>> accuracy([2, 0])(torch.tensor([[[0.0, 1.0, 3.0]], [[1.0, 2.0, 0.0]]]))
    tensor([1., 0.])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return _unless_nan(logits.argmax(-1) == token[:, 0], logits)

    return _of_tokens(_Score(accuracy, "accuracy", score), {"token": token}, pos)


@explains_calls
def rank(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric: the number of tokens with a larger logit, 0 for the likeliest token.

    Tokens with an equal logit are not counted.

    Args:
        token: one token, or one for each example.
        pos: one position, or one for each example, as in `logit_diff`, with the same errors. -1 is
            the last real token of an example.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], a number of tokens from 0 to vocab - 1.

    >>> rank([2, 0])(torch.tensor([[[0.0, 1.0, 3.0]], [[1.0, 2.0, 1.0]]]))
    tensor([0., 1.])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return _unless_nan((logits > logits.gather(1, token)).sum(-1), logits)

    return _of_tokens(_Score(rank, "ranks", score), {"token": token}, pos)


@explains_calls
def cross_entropy(
    tokens: Texts, pos: Index | None = None, *, attention_mask: Mask | None = None
) -> Metric:
    """Return a metric: the mean negative log-probability of each example's next tokens, in nats.

    Args:
        tokens: the texts that the model reads, [batch, pos] or, for analyses, in any form. In an
            encoder-decoder model, these are the texts of the decoder.
        pos: the positions whose predictions are used; None for all positions. The prediction at a
            position is about the next token, so the last real token, -1, has no prediction, and
            -2 predicts the last real token. `slice(-4, None)` or a mask [pos] is for all examples.
            A list or tensor has one position for each example, or [batch, n] several, or a mask
            [batch, pos]. Positions from 0 count columns, and must not be padding.
        attention_mask: True or 1 at real tokens of a tensor [batch, pos]; other forms contain their
            masks. Only predictions of a real token from a real token are used. Padded texts need
            the mask both here and in the analysis. Without a mask here, `measure` uses the mask of
            the run that computed the logits, if it is known and `pos` is not a mask.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], in nats per token.

    Raises:
        ValueError: if an example has no prediction, or the mask has another shape. When called,
            if the logits have another shape.

    >>> tokens = torch.tensor([[3, 0, 4]])
    >>> cross_entropy(tokens)(torch.zeros(1, 3, 5)).exp()  # five equally likely tokens
    tensor([5.])
    >>> logits = torch.tensor([[[0.0, 0, 0, 0, 0], [0, 0, 0, 0, 9], [0, 0, 0, 0, 0]]])
    >>> cross_entropy(tokens, pos=-2)(logits).exp()  # only the prediction of token 4
    tensor([1.0005])
    """
    text = as_text(tokens)
    if not isinstance(text, Text):
        if attention_mask is not None:
            raise ValueError(padding_messages.second_mask(f"a {type(tokens).__name__}"))
        return _cross_entropy_of_words(tokens, pos)
    text = _masked(text.of_logits, attention_mask)
    predicted = text.tokens
    if predicted.ndim != 2:
        raise ValueError(f"tokens must be [batch, pos]; got {list(predicted.shape)}")
    is_selected = None if pos is None else _positions_of_metric(pos).inside(text.real, "pos")
    is_prediction = _are_predictions(text.real, pos, is_selected)
    next_tokens = predicted[:, 1:].where(is_prediction, 0)

    def metric(logits: Tensor) -> Tensor:
        if logits.shape[:2] != predicted.shape:
            shape = tuple(predicted.shape)
            raise ValueError(
                f"logits must be [batch, pos, vocab] with the tokens' shape {shape}; "
                f"got {tuple(logits.shape)}"
            )
        mask = to_device(is_prediction, logits.device)
        index = to_device(next_tokens.long(), logits.device)[..., None]
        log_probs = at_least_float32(logits[:, :-1]).log_softmax(-1).gather(-1, index)[..., 0]
        return -log_probs.where(mask, 0).sum(1) / mask.sum(1)

    def with_mask(mask: Tensor) -> TokenMetric:
        metric = cross_entropy(predicted, pos, attention_mask=mask)
        assert isinstance(metric, TokenMetric)
        return metric

    # `MetricCall.rows` gives a mask of positions, which counted padding as real.
    is_mask = isinstance(pos, Tensor) and pos.dtype == torch.bool
    return TokenMetric(
        call=f"cross_entropy(tokens {list(predicted.shape)}{_pos_in_call(pos)})",
        last=0,
        unit="nats",
        function=metric,
        unmasked=text.attention_mask is None,
        with_mask=None if text.attention_mask is not None or is_mask else with_mask,
        made_by=MetricCall(
            cross_entropy,
            {"tokens": predicted, "pos": is_selected, "attention_mask": text.attention_mask},
        ),
    )


def _cross_entropy_of_words(tokens: Texts, pos: Index | None) -> Metric:
    """Return `cross_entropy` of texts that a model must first convert to tokens."""

    def read(model: nn.Module) -> Metric:
        return cross_entropy(text_for(model, tokens), pos)

    return WordedMetric(
        call=f"cross_entropy(texts{_pos_in_call(pos)})",
        last=0,
        unit="nats",
        read=read,
        made_by=MetricCall(cross_entropy, {"tokens": tokens, "pos": pos}),
    )


def _masked(text: Text, attention_mask: Mask | None) -> Text:
    """Return a text with a mask.

    Raises:
        ValueError: if the text has a mask already.
    """
    if attention_mask is None:
        return text
    if text.attention_mask is not None:
        raise ValueError(padding_messages.second_mask("texts with a mask"))
    return replace(text, attention_mask=attention_mask)


def _are_predictions(
    is_real: Bool[Tensor, "batch pos"],
    pos: Index | None,
    is_selected: Bool[Tensor, "batch pos"] | None,
) -> Bool[Tensor, "batch _next"]:
    """Return whether each position but the last has a prediction that `cross_entropy` uses.

    A prediction is of a real token, from a selected real token.

    Args:
        is_real: True at real tokens.
        pos: the selection, for the error.
        is_selected: True at the selected positions; None if all are selected.

    Raises:
        ValueError: if an example has no prediction.
    """
    is_prediction = is_real[:, 1:] & is_real[:, :-1]
    if is_selected is not None:
        is_prediction = is_prediction & is_selected[:, :-1]
    if not is_prediction.any(1).all():
        example = int((~is_prediction.any(1)).nonzero()[0])
        where = "" if pos is None else f" at pos={_positions_of_metric(pos)}"
        raise ValueError(
            f"a text must have a next token to predict; got none in example {example}{where}"
        )
    return is_prediction


def _positions_of_metric(pos: Index) -> Selection:
    """Return the positions of a metric. A list of integers has one position for each example."""
    chosen = Selection(pos)
    is_listed = isinstance(chosen.index, list) and all(type(at) is int for at in chosen.index)
    return Selection([[at] for at in chosen.index]) if is_listed else chosen


def _pos_in_call(pos: Index | None) -> str:
    """Return the argument `pos` of a call in words, or an empty text for None."""
    return "" if pos is None else f", pos={Selection(pos)}"


@explains_calls
def kl_divergence(
    reference: Float[Tensor, "batch pos vocab"],
    pos: Tokens | None = -1,
    *,
    attention_mask: Mask | None = None,
) -> Metric:
    """Return a metric: the divergence KL(reference ‖ model) of next-token predictions, in nats.

    The divergence is the mean of log(p_reference / p_model) over tokens that are drawn from
    p_reference. It is 0 for equal predictions.

    Args:
        reference: the logits of the run to compare with.
        pos: one position, or one for each example, as in `logit_diff`; None for the mean over all
            real positions.
        attention_mask: True or 1 at real tokens. Padded texts need the mask both here and in the
            analysis. Default: the mask of the run that computed the reference, if it is known; see
            `measure`.

    Returns:
        The metric, a function from logits [batch, pos, vocab] to one number for each example
        [batch], in nats, at least 0 up to rounding.

    Raises:
        ValueError: if positions count from both ends, or are outside the reference. When called, if
            the logits do not have the shape of the reference.

    >>> reference = torch.tensor([[[0.5, 0.5]]]).log()  # [batch, pos, vocab]
    >>> metric = kl_divergence(reference)
    >>> metric(reference), metric(torch.tensor([[[0.25, 0.75]]]).log())
    (tensor([0.]), tensor([0.1438]))
    """
    require_kind("reference", reference, Tensor, "the logits of a run", "model(texts) gives them")
    if attention_mask is None:
        attention_mask = _padding_of_run(reference)
    is_real = real_of(attention_mask, reference.shape[:2])
    at = None if pos is None else Position(pos)
    if at is not None:
        reference_read = at(last_real(reference, at.last, attention_mask))
    else:
        reference_read = reference
    expected = at_least_float32(reference_read).log_softmax(-1)

    def metric(logits: Tensor) -> Tensor:
        logits_read = at_least_float32(logits) if at is None else at(logits)
        if logits_read.shape != expected.shape:
            raise ValueError(
                f"logits must have the shape of the reference {tuple(reference.shape)}; "
                f"got {tuple(logits.shape)}"
            )
        expected_here = to_device(expected, logits_read.device)
        divergences = divergence(expected_here, logits_read.log_softmax(-1))
        if at is not None:
            return divergences
        mask = to_device(is_real, logits_read.device)
        return divergences.where(mask, 0).sum(1) / mask.sum(1)

    last = 0 if at is None else at.last
    where = None if pos is None else as_positions(pos)
    arguments = {"reference": reference, "pos": where, "attention_mask": attention_mask}
    return TokenMetric(
        call=f"kl_divergence(reference, pos={short(pos)})",
        last=last,
        unit="nats",
        function=metric,
        unmasked=attention_mask is None and (at is None or last > 0),
        at=at,
        made_by=MetricCall(kl_divergence, arguments),
    )


def _padding_of_run(logits: Tensor) -> Mask | None:
    """Return the mask of the run that computed some logits.

    The result is None if the mask is unknown or has no padding.
    """
    mask = padding_of(logits) if logits.ndim == 3 else None
    return None if mask is None or bool(mask.all()) else mask


@dataclass(frozen=True)
class _Score:
    """A score of some tokens by the logits at one position.

    Attributes:
        make: the function that creates the metric.
        unit: the unit of the metric.
        function: a function of the logits [batch, vocab] and the tokens [batch, n] of each
            argument.
        most: the largest number of axes of the tokens of an argument: 1 for one token for each
            example, 2 for several tokens for each example.
    """

    make: Callable[..., Metric]
    unit: str
    function: Callable[..., Tensor]
    most: int = 1


def _of_tokens(score: _Score, tokens: Mapping[str, SeveralTokens], pos: Tokens) -> Metric:
    """Return a metric that scores some tokens by the logits at one position.

    Args:
        score: the score.
        tokens: the tokens of each argument of `score.function`, by the name of the argument of
            `score.make`.
        pos: the position; see `logit_diff`.

    Raises:
        TypeError: if `pos` is a text.
    """
    if is_worded(pos):
        name = score.make.__name__
        advice = (
            "" if score.make is logit_diff else f" ({name} has no wrong answer; logit_diff has)"
        )
        raise TypeError(f"pos must be a position, or one for each example; got {pos!r}{advice}")
    if any(map(is_worded, tokens.values())):
        return _of_words(score, tokens, pos)
    at = Position(pos)
    ids_by_argument = {argument: tokens_of(value, score.most) for argument, value in tokens.items()}
    ids = [*ids_by_argument.values()]
    if score.make is logit_diff:
        _require_different(*ids)
    with_largest = [(argument, int(argument.max())) for argument in ids]

    def metric(logits: Tensor) -> Tensor:
        logits_read = at(logits)
        tokens_read = [
            fitting(argument, largest, logits_read) for argument, largest in with_largest
        ]
        return score.function(logits_read, *tokens_read)

    return TokenMetric(
        call=_call(score, tokens, pos),
        last=at.last,
        unit=score.unit,
        function=metric,
        at=at,
        call_in_words=lambda write: _call_in_words(score, ids, pos, write),
        made_by=MetricCall(score.make, {**ids_by_argument, "pos": as_positions(pos)}),
    )


def _require_different(right: Int[Tensor, "..."], wrong: Int[Tensor, "..."]) -> None:
    """Check that no example has the same right and wrong tokens, whose metric would always be 0.

    Raises:
        ValueError: naming the first such example.
    """
    rows = [ids.reshape(-1, 1) if ids.ndim < 2 else ids.sort(1).values for ids in (right, wrong)]
    sizes = {len(ids) for ids in rows} - {1}
    # The call of the metric raises an error for other numbers of examples.
    if rows[0].shape[1] != rows[1].shape[1] or len(sizes) > 1:
        return
    equal = (rows[0] == rows[1]).all(1).tolist()
    if any(equal):
        example = equal.index(True)
        ids = rows[0][example % len(rows[0])].tolist()
        of_example = "" if len(equal) == 1 else f" in example {example}"
        raise ValueError(
            f"right and wrong must be different tokens; got {shown(ids)} for both{of_example}: the "
            "metric would be 0 in every run (for a control, take another wrong token)"
        )


def _of_words(score: _Score, tokens: Mapping[str, SeveralTokens], pos: Tokens) -> Metric:
    """Return the metric of tokens that are texts, which a model must first convert to tokens.

    Args:
        score, tokens, pos: see `_of_tokens`.
    """
    at = Position(pos)
    name = score.make.__name__
    is_at_last = at.where == _LAST
    continues = name in ("log_prob", "accuracy") and is_at_last

    def read(model: nn.Module) -> Metric:
        ids = {argument: token_ids(model, value) for argument, value in tokens.items()}
        return _of_tokens(score, ids, pos)

    return WordedMetric(
        call=_call(score, tokens, pos),
        last=at.last,
        unit=score.unit,
        read=read,
        answers=next(iter(tokens.values())) if continues else None,
        score=name,
        is_at_last=is_at_last,
        made_by=MetricCall(score.make, {**tokens, "pos": pos}),
    )


def _call(score: _Score, tokens: Mapping[str, SeveralTokens], pos: Tokens) -> str:
    """Return the call that creates a metric, such as `rank(5, pos=-1)`."""
    return f"{score.make.__name__}({', '.join(map(short, tokens.values()))}, pos={short(pos)})"


def _call_in_words(score: _Score, ids: Sequence[Tensor], pos: Tokens, write: Writer) -> str:
    """Return the call that creates a metric, with tokens as texts, such as `rank(' the')`.

    Args:
        score: the score.
        ids: the tokens of each argument.
        pos: the position. The last position, -1, is left out.
        write: a function that returns the text of each token.
    """
    arguments = []
    for argument in ids:
        # If all examples have the same token, write it once.
        is_same = argument.ndim and bool((argument == argument[0]).all())
        argument = argument[0] if is_same else argument
        arguments.append(short(write(argument.tolist())))
    if Position(pos).where != _LAST:
        arguments.append(f"pos={short(pos)}")
    return f"{score.make.__name__}({', '.join(arguments)})"


def _unless_nan(values: Tensor, logits: Tensor) -> Tensor:
    """Return values in the dtype of logits, and NaN for examples whose logits contain NaN.

    Comparisons with NaN are False, so the values do not show it.
    """
    return values.to(logits.dtype).where(~logits.isnan().any(-1), torch.nan)
