"""Metrics: callables from logits [batch, pos, vocab] to a number per row, [batch], or to a scalar."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

Metric = Callable[[Float[Tensor, "batch pos vocab"]], Float[Tensor, "*batch"]]


def logit_diff(right: int, wrong: int, pos: int = -1) -> Metric:
    """The logit of token `right` minus that of token `wrong` at a position, in logits: [batch]."""

    def metric(logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return logits[:, pos, right] - logits[:, pos, wrong]

    return metric


def log_prob(token: int, pos: int = -1) -> Metric:
    """The log-probability of a token at a position, in nats: [batch]."""

    def metric(logits: Float[Tensor, "batch pos vocab"]) -> Float[Tensor, " batch"]:
        return logits[:, pos].log_softmax(-1)[:, token]

    return metric
