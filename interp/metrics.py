"""Metrics: functions from logits [batch, pos, vocab] to one number per row [batch] or a scalar."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

Metric = Callable[[Float[Tensor, "batch pos vocab"]], Float[Tensor, "*batch"]]


def logit_diff(right: int, wrong: int, pos: int = -1) -> Metric:
    """A metric: the logit of token `right` minus that of token `wrong` at a position.

    All metrics here are in float32 when the logits are in half precision.

    >>> logits = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, 2.0, 2.0]]])  # [batch, pos, vocab]
    >>> logit_diff(right=2, wrong=0)(logits)
    tensor([3., 0.])
    """

    def metric(logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        at = at_least_float32(logits[:, pos])
        return at[:, right] - at[:, wrong]

    return metric


def log_prob(token: int, pos: int = -1) -> Metric:
    """A metric: the log-probability of a token at a position, in nats.

    >>> log_prob(1)(torch.zeros(1, 3, 5)).exp()  # [batch, pos, vocab]: five equally likely tokens
    tensor([0.2000])
    """

    def metric(logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return at_least_float32(logits[:, pos]).log_softmax(-1)[:, token]

    return metric


def mean_of(metric: Metric, logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, ""]:
    """The mean over rows of a metric, which may also return integers, or one number for all rows.

    Raises:
        ValueError: if the metric returns another shape.
    """
    values = torch.as_tensor(metric(logits))
    if values.shape not in ((), (1,), logits.shape[:1]):
        raise ValueError(
            f"a metric must return one number per row, [{len(logits)}], or one for all; "
            f"got the shape {tuple(values.shape)}"
        )
    return at_least_float32(values).mean()


def at_least_float32(values: Shaped[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Values in float32 if they are integers or in half precision; others do not change."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
