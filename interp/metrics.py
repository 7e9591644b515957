"""Metrics: functions from logits [batch, pos, vocab] to one number for each example [batch]."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import Texts, at_least_float32, real_of, require_kind, to_device
from interp.inputs.texts import text_for
from interp.inputs.token_positions import (
    Mask,
    Position,
    SeveralTokens,
    Tokens,
    fitting,
    is_worded,
    last_real,
    short,
    token_ids,
    tokens_of,
)
from interp.measuring import Metric, TokenMetric, WordedMetric, Writer
from interp.numbers.precision import divergence


def logit_diff(right: SeveralTokens, wrong: SeveralTokens, pos: Tokens = -1) -> Metric:
    """Return a metric: the logit of the right token minus the logit of the wrong token.

    All metrics of this file are in float32 when the logits are in half precision.

    Args:
        right, wrong: one token, or one for each example. For several tokens per example, [batch,
            n], the metric uses the mean of their logits. A token may be a text, such as `" Mary"`,
            which analyses convert with the model's tokenizer.
        pos: one position, or one for each example (for `edits`, a list means all of its columns).
            -1 is an example's last real token. Positions from 0 count columns, and must not be
            padding.

    Raises:
        ValueError: if a token is negative, or positions count from both ends. When called, if the
            logits have another number of examples, a vocabulary that is too small, or too few
            positions.

    >>> logits = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, 2.0, 2.0]]])  # [batch, pos, vocab]
    >>> logit_diff(right=2, wrong=0)(logits)
    tensor([3., 0.])
    """

    def score(logits: Tensor, right: Tensor, wrong: Tensor) -> Tensor:
        return logits.gather(1, right).mean(1) - logits.gather(1, wrong).mean(1)

    return _of_tokens("logit_diff", "logits", (right, wrong), pos, score, most=2)


def log_prob(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric: the log-probability of a token, in nats.

    Args:
        token: one token, or one for each example.
        pos: see `logit_diff`, also for the errors.

    >>> log_prob(1)(torch.zeros(1, 3, 5)).exp()  # [batch, pos, vocab]: five equally likely tokens
    tensor([0.2000])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(1, token)[:, 0]

    return _of_tokens("log_prob", "nats", (token,), pos, score)


def accuracy(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric:

    1 if the token is the likeliest, and 0 otherwise. Of equally likely tokens, the lowest is the
    likeliest.

    Args:
        token: one token, or one for each example.
        pos: see `logit_diff`, also for the errors.

    >>> accuracy([2, 0])(torch.tensor([[[0.0, 1.0, 3.0]], [[1.0, 2.0, 0.0]]]))
    tensor([1., 0.])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return _unless_nan(logits.argmax(-1) == token[:, 0], logits)

    return _of_tokens("accuracy", "", (token,), pos, score)


def rank(token: Tokens, pos: Tokens = -1) -> Metric:
    """Return a metric: the number of tokens with a larger logit;

    0 for the likeliest token. Equal logits are not counted.

    Args:
        token: one token, or one for each example.
        pos: see `logit_diff`, also for the errors.

    >>> rank([2, 0])(torch.tensor([[[0.0, 1.0, 3.0]], [[1.0, 2.0, 1.0]]]))
    tensor([0., 1.])
    """

    def score(logits: Tensor, token: Tensor) -> Tensor:
        return _unless_nan((logits > logits.gather(1, token)).sum(-1), logits)

    return _of_tokens("rank", "ranks", (token,), pos, score)


def cross_entropy(tokens: Texts, *, attention_mask: Mask | None = None) -> Metric:
    """Return a metric: the mean negative log-probability of each example's next tokens, in nats.

    Args:
        tokens: the texts that the model reads, [batch, pos] or, for analyses, in any form.
        attention_mask: True or 1 at real tokens. Only predictions of a real token from a real token
            are used. Padded texts need the mask both here and in the analysis.

    Raises:
        ValueError: if an example has no prediction, or the mask has another shape. When called,
            if the logits have another shape.

    >>> cross_entropy(torch.tensor([[3, 0, 4]]))(torch.zeros(1, 3, 5)).exp()
    tensor([5.])
    """
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:

        def read(model: nn.Module) -> Metric:
            text = text_for(model, tokens, attention_mask)
            return cross_entropy(text.tokens, attention_mask=text.attention_mask)

        return WordedMetric("cross_entropy(texts)", 0, "nats", read)
    real = real_of(attention_mask, tokens.shape).to(tokens.device)
    counted = real[:, 1:] & real[:, :-1]
    if not counted.any(1).all():
        example = int((~counted.any(1)).nonzero()[0])
        raise ValueError(f"a text must have a next token to predict; got none in example {example}")
    following = tokens[:, 1:].where(counted, 0)

    def metric(logits: Tensor) -> Tensor:
        if logits.shape[:2] != tokens.shape:
            raise ValueError(
                f"logits must be [batch, pos, vocab] with the tokens' shape {tuple(tokens.shape)}; "
                f"got {tuple(logits.shape)}"
            )
        here = to_device(counted, logits.device)
        index = to_device(following.long(), logits.device)[..., None]
        log_probs = at_least_float32(logits[:, :-1]).log_softmax(-1).gather(-1, index)[..., 0]
        return -log_probs.where(here, 0).sum(1) / here.sum(1)

    return TokenMetric(
        call=f"cross_entropy(tokens {list(tokens.shape)})",
        last=0,
        unit="nats",
        function=metric,
        unmasked=attention_mask is None,
    )


def kl_divergence(
    reference: Float[Tensor, "batch pos vocab"],
    pos: Tokens | None = -1,
    *,
    attention_mask: Mask | None = None,
) -> Metric:
    """Return a metric:

    KL(reference ‖ model), the divergence of the next-token predictions, in nats.

    It is the mean of log(p_reference / p_model) under p_reference: the loss when the model's
    prediction replaces the reference's prediction.

    Args:
        reference: the logits of the run to compare with.
        pos: see `logit_diff`; None for the mean over all real positions.
        attention_mask: True or 1 at real tokens. Padded texts need the mask both here and in the
            analysis.

    Raises:
        ValueError: as for `logit_diff`.

    >>> kl_divergence(torch.tensor([[[0.0, 0.0]]]))(torch.tensor([[[0.0, 0.0]]]))
    tensor([0.])
    """
    require_kind("reference", reference, Tensor, "the logits of a run", "model(texts) gives them")
    real = real_of(attention_mask, reference.shape[:2])
    at = None if pos is None else Position(pos)
    kept = reference if at is None else at(last_real(reference, at.last, attention_mask))
    expected = at_least_float32(kept).log_softmax(-1)

    def metric(logits: Tensor) -> Tensor:
        chosen = at_least_float32(logits) if at is None else at(logits)
        if chosen.shape != expected.shape:
            raise ValueError(
                f"logits must have the shape of the reference {tuple(reference.shape)}; "
                f"got {tuple(logits.shape)}"
            )
        wanted = to_device(expected, chosen.device)
        divergences = divergence(wanted, chosen.log_softmax(-1))
        if at is not None:
            return divergences
        here = to_device(real, chosen.device)
        return divergences.where(here, 0).sum(1) / here.sum(1)

    last = 0 if at is None else at.last
    return TokenMetric(
        call=f"kl_divergence(reference, pos={short(pos)})",
        last=last,
        unit="nats",
        function=metric,
        unmasked=attention_mask is None and (at is None or last > 0),
        at=at,
    )


def _of_tokens(
    name: str,
    unit: str,
    tokens: Sequence[SeveralTokens],
    pos: Tokens,
    score: Callable[..., Tensor],
    most: int = 1,
) -> Metric:
    """Return a metric that scores tokens [batch, n] by the logits [batch, vocab] at one
    position.
    """
    at = Position(pos)
    call = f"{name}({', '.join(map(short, tokens))}, pos={short(pos)})"
    if is_worded(tokens):

        def read(model: nn.Module) -> Metric:
            return _of_tokens(name, unit, token_ids(model, tokens), pos, score, most)

        return WordedMetric(call, at.last, unit, read)
    ids = [tokens_of(one, most) for one in tokens]

    def said(write: Writer) -> str:
        same = [one[0] if one.ndim and bool((one == one[0]).all()) else one for one in ids]
        arguments = [short(write(one.tolist())) for one in same]
        if pos != -1:
            arguments.append(f"pos={short(pos)}")
        return f"{name}({', '.join(arguments)})"

    def metric(logits: Tensor) -> Tensor:
        chosen = at(logits)
        return score(chosen, *(fitting(one, chosen) for one in ids))

    return TokenMetric(call, at.last, unit, metric, at=at, said=said)


def _unless_nan(values: Tensor, logits: Tensor) -> Tensor:
    """Return values in the dtype of logits, with NaN if logits are NaN, because comparisons with
    NaN are False.
    """
    return values.to(logits.dtype).where(~logits.isnan().any(-1), torch.nan)
