"""Measurement with a metric: the logits that the metric reads, with or without padding, and one
number for each example.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hooks.base import at_least_float32, require_kind, shown
from interp.inputs.token_positions import Mask, Position, last_real

Metric = Callable[[Float[Tensor, "batch pos vocab"]], Shaped[Tensor, " batch"]]
"""A function of logits. Any function of your own is a metric.

If the function has an attribute `last`, it reads that many of the last real positions. Analyses
then compute only the logits of these positions, and call the function with logits [batch, last,
vocab]. Without the attribute, or if it is 0, they call the function with all positions. An
attribute `unit` names the unit.
"""

Writer = Callable[[Any], Any]
"""A function that returns the text of each token, such as `model.to_pieces`."""


_LOGITS = "model(texts) gives them"


@dataclass(frozen=True, eq=False)
class TokenMetric:
    """A metric of `interp.metrics`. Its `repr` is the call that created it."""

    call: str
    last: int
    unit: str
    function: Callable[[Tensor], Tensor]
    # Whether the metric assumes that all columns of its texts are real.
    unmasked: bool = False
    at: Position | None = None
    # A function that returns the call with tokens as text.
    said: Callable[[Writer], str] | None = None
    write: Writer | None = None

    def __call__(
        self, logits: Float[Tensor, "batch pos vocab"], attention_mask: Mask | None = None
    ) -> Float[Tensor, " batch"]:
        """Return the metric of each example. Logits of whole padded texts need the mask.

        Raises:
            TypeError: if the logits are not a tensor.
            ValueError: if the logits are not [batch, pos, vocab].
        """
        require_kind("logits", logits, Tensor, "a tensor [batch, pos, vocab]", _LOGITS)
        if logits.ndim != 3:
            rule = "logits must be [batch, pos, vocab], of whole texts"
            raise ValueError(f"{rule}; got {shown(logits)}; {_LOGITS}")
        return self.function(
            logits if attention_mask is None else last_real(logits, self.last, attention_mask)
        )

    def __repr__(self) -> str:
        return self.call if self.said is None or self.write is None else self.said(self.write)


@dataclass(frozen=True, eq=False)
class WordedMetric:
    """A metric with tokens as text, which an analysis converts with the model's tokenizer."""

    call: str
    last: int
    unit: str
    read: Callable[[nn.Module], Metric]

    def __call__(self, logits: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Raise an error, because texts cannot be converted to tokens without a model."""
        raise ValueError(
            f"{self.call} has tokens as text, which only analyses can convert; "
            "to call it with logits, give tokens, such as model.to_id(' Mary')"
        )

    def __repr__(self) -> str:
        return self.call


def in_words(metric: Metric, write: Writer | None) -> Metric:
    """Return the metric, which prints its tokens as text if `write` is given."""
    return replace(metric, write=write) if write and isinstance(metric, TokenMetric) else metric


def metric_for(model: nn.Module, metric: Metric) -> Metric:
    """Return the metric with tokens instead of text.

    Raises:
        ValueError: if a text is several tokens. The error lists the tokens.
    """
    if not isinstance(metric, WordedMetric):
        return metric
    made = metric.read(model)
    assert isinstance(made, TokenMetric)
    return replace(made, call=metric.call)


def last_of(metric: Metric, attention_mask: Mask | None = None) -> int:
    """Return the number of last real positions that a metric reads; 0 for all positions.

    Raises:
        ValueError: if the metric reads padding, or was created without the mask of padded texts.
        TypeError: if the metric is not a function.

    >>> from interp import log_prob
    >>> last_of(log_prob(3, pos=-2)), last_of(lambda logits: logits[:, 4, 3])
    (2, 0)
    """
    if not callable(metric):
        raise TypeError(
            "a metric must be a function of logits, such as logit_diff(right, wrong); "
            f"got {shown(metric)}"
        )
    if attention_mask is not None and not attention_mask.bool().all():
        if getattr(metric, "unmasked", False):
            raise ValueError(f"{metric!r} needs the attention_mask of padded texts; got none")
        if isinstance(metric, TokenMetric) and metric.at is not None:
            metric.at.columns(attention_mask.shape[1], len(attention_mask), attention_mask)
    return int(getattr(metric, "last", 0))


def per_example(
    metric: Metric, logits: Float[Tensor, "rows pos vocab"], batch: int
) -> Float[Tensor, " batch"]:
    """Return the metric of each example, in float32 if it is an integer or in half precision.

    Raises:
        ValueError: if the metric does not return one number for each of the `batch` examples.
    """
    values = metric(logits)
    if not isinstance(values, Tensor) or values.shape != (batch,):
        got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else shown(values)
        raise ValueError(
            f"a metric must return a tensor [{batch}], a number for each example; got {got} "
            f"from {metric!r}"
        )
    return at_least_float32(values)


def evaluate(
    metric: Metric, logits: Float[Tensor, "rows pos vocab"], batch: int
) -> Float[Tensor, " batch"]:
    """Return the metric of each example, after a check for NaN.

    Raises:
        ValueError: as for `per_example`, or if the metric of an example is NaN.
    """
    values = per_example(metric, logits, batch)
    if bool(values.isnan().any()):
        example = int(values.isnan().nonzero()[0])
        raise ValueError(
            f"a metric must return numbers; got NaN for example {example} from {metric!r}"
        )
    return values


def measure(
    metric: Metric,
    logits: Float[Tensor, "batch pos vocab"],
    attention_mask: Shaped[Tensor, "batch _column"] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the metric of a run, from its whole logits.

    Padding is ignored when `last` positions are counted.

    Raises:
        ValueError: as for `last_of`, `last_real` and `evaluate`.
        TypeError: if the arguments are not a metric and logits, in this order.

    >>> import torch
    >>> from interp import logit_diff
    >>> logits = torch.tensor([[[0.0, 1.0, 3.0], [9.0, 9.0, 9.0]]])
    >>> measure(logit_diff(right=2, wrong=0), logits, torch.tensor([[1, 0]]))
    tensor([3.])
    """
    if isinstance(metric, Tensor | nn.Module) or not isinstance(logits, Tensor):
        raise TypeError(
            "measure needs a metric and the logits of a run, as in "
            "measure(logit_diff(right, wrong), model(texts)); "
            f"got {shown(metric)} and {shown(logits)}"
        )
    require_kind("attention_mask", attention_mask, (Tensor, type(None)), "a tensor [batch, pos]")
    read = last_real(logits, last_of(metric, attention_mask), attention_mask)
    return evaluate(metric, read, len(logits))
