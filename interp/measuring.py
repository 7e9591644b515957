"""Measurement with a metric: from the logits that the metric reads to one number per example."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    HasLogits,
    Text,
    as_text,
    at_least_float32,
    explains_calls,
    logits_in,
    model_of_logits,
    padding_messages,
    padding_of,
    require_kind,
    shown,
    to_device,
    writer_of,
)
from interp.inputs.token_positions import (
    Mask,
    Position,
    last_real,
    require_real_columns,
    short,
)
from interp.inputs.words import require_clear_words, tokens_of_words
from interp.numbers.precision import has_nan

Metric = Callable[[Float[Tensor, "batch pos vocab"]], Shaped[Tensor, " batch"]]
"""A function of logits. Any function of your own is a metric.

For example, `lambda logits: logits[:, -1].logsumexp(-1)` is a number for each example.

If the function has an attribute `last`, it reads that many of the last real positions. Analyses
then compute only the logits of these positions, and call the function with logits [batch, last,
vocab]. Without the attribute, or if it is 0, they call the function with all positions. If texts
are padded on the right, `logits[:, -1]` is then padding, and an error says to set `last`. An
attribute `unit` names the unit; see `unit_of`. If the function contains data of single examples, a
method `rows(numbers)` returns the metric of some examples; `Pairs[...]` and `over_examples` call
it.
"""

Writer = Callable[[Any], Any]
"""A function that returns the text of each token, such as `model.to_pieces`."""


_LOGITS_HINT = "model(texts) gives them"
_MASK = "model.to_tokens(texts) contains the mask"
_ADDRESS = re.compile(" at 0x[0-9a-f]+")


def name_of(metric: Metric) -> str:
    """Return the name of a function, or the description of another metric.

    The name is the same in every process, so it contains no address of an object in memory.

    >>> def first_logit(logits):
    ...     return logits[:, -1, 0]
    >>> name_of(first_logit)
    'first_logit'
    """
    if inspect.isfunction(metric):
        return metric.__name__
    return _ADDRESS.sub("", repr(metric))


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric: its attribute `unit`, or the name of the function.

    >>> def first_logit(logits):
    ...     return logits[:, -1, 0]
    >>> unit_of(first_logit)
    'values of first_logit'
    >>> first_logit.unit = "logits"
    >>> unit_of(first_logit)
    'logits'
    """
    return getattr(metric, "unit", "") or f"values of {name_of(metric)}"


@dataclass(frozen=True, eq=False)
class MetricCall:
    """The call that makes a metric, to make it again for some examples or in another process.

    Attributes:
        make: the function that makes the metric, such as `log_prob`.
        arguments: its arguments by name. A tensor with axes has a row for each example.
    """

    make: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Return the metric."""
        return self.make(**self.arguments)

    def rows(self, numbers: Int[Tensor, " row"]) -> "MetricCall | None":
        """Return the call that makes the metric of some examples.

        The result is None if the arguments are the same for all examples.
        """
        rows = {}
        for name, value in self.arguments.items():
            if isinstance(value, Tensor) and value.ndim:
                rows[name] = value[numbers.to(value.device)]
        return MetricCall(self.make, {**self.arguments, **rows}) if rows else None


class _WithoutArithmetic:
    """A function without sums and products. The error shows the function that the user writes."""

    def _refused(self, other: Any = None) -> NoReturn:
        raise TypeError(
            f"{self!r} is a function, which has no sum or product: write a function of the logits, "
            "such as lambda logits: measure(first, logits, model=model) + measure(second, logits, "
            "model=model); if it reads only the last position, set its attribute last = 1"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = _refused
    __mul__ = __rmul__ = __truediv__ = __neg__ = _refused


@dataclass(frozen=True, eq=False)
class TokenMetric(_WithoutArithmetic):
    """A metric of `interp.metrics`. Its `repr` is the call that created it.

    Attributes:
        call: the call that created the metric.
        last: the number of last real positions that the metric reads; 0 for all positions.
        unit: the unit of the metric.
        function: the function of the logits.
        unmasked: True if the metric was created without a mask, and is wrong for padded texts.
        with_mask: a function that makes the metric again with the mask of its texts; None if the
            metric has a mask, or needs none.
        at: the position that the metric reads; None if it reads several positions.
        call_in_words: a function that takes `write`, and returns `call` with the text of each token
            in place of its number; None if the call contains no tokens.
        write: the function that returns the text of each token; None to print numbers of tokens.
        made_by: the call that makes the metric again. None for the metric of the answers of pairs,
            because the pairs make it again.
        masks: a function that returns the masks of the texts that the metric belongs to, if some
            texts are padded. A call with the logits of whole texts and without a mask uses them.
            None if the metric is not from pairs.
        n_texts: the number of texts, if their answers are several tokens. The metric returns a
            number for each answer, in the order of `Pairs.rows`, and `measure` adds up the numbers
            of a text. Otherwise None.
    """

    call: str
    last: int
    unit: str
    function: Callable[[Tensor], Tensor]
    unmasked: bool = False
    with_mask: "Callable[[Tensor], TokenMetric] | None" = None
    at: Position | None = None
    call_in_words: Callable[[Writer], str] | None = None
    write: Writer | None = None
    made_by: MetricCall | None = None
    masks: Callable[[], Sequence[Tensor]] | None = None
    n_texts: int | None = None

    def rows(self, numbers: Int[Tensor, " row"]) -> "TokenMetric":
        """Return the metric of some examples."""
        call = None if self.made_by is None else self.made_by.rows(numbers)
        if call is None:
            return self
        metric = call()
        assert isinstance(metric, TokenMetric)
        return replace(metric, write=self.write)

    def __reduce__(self) -> Any:
        """Return the call that makes the metric again, for another process."""
        return super().__reduce__() if self.made_by is None else (self.made_by, ())

    def __call__(
        self,
        logits: Float[Tensor, "batch pos vocab"] | HasLogits,
        attention_mask: Shaped[Tensor, "batch _column"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """Return the metric of each example, in `unit`.

        Args:
            logits: the logits of whole texts, or of the `last` real positions; or the output of a
                model of `transformers`, which contains the logits.
            attention_mask: the mask of the texts. Default: see `measure`.

        Raises:
            TypeError: if the logits are not a tensor.
            ValueError: if the logits are not [batch, pos, vocab], if the mask contains other
                numbers than 0 and 1, or if the metric reads padding.
        """
        scores = logits_in(logits)
        require_kind("logits", scores, Tensor, "a tensor [batch, pos, vocab]", _LOGITS_HINT)
        if scores.ndim != 3:
            rule = "logits must be [batch, pos, vocab], of whole texts"
            raise ValueError(f"{rule}; got {shown(scores)}; {_LOGITS_HINT}")
        metric = self.masked_by_run(scores)
        mask = mask_of_logits(metric, scores, attention_mask)
        if mask is not None:
            scores = last_real(scores, last_of(metric, mask), mask)
        return metric.function(scores)

    def masked_by_run(self, logits: Float[Tensor, "batch pos vocab"]) -> "TokenMetric":
        """Return the metric with the mask of the run that computed some logits.

        A metric that has a mask or needs none, or whose run is unknown, is returned unchanged.

        Args:
            logits: the logits of whole texts.
        """
        mask = None if self.with_mask is None else padding_of(logits)
        if self.with_mask is None or mask is None:
            return self
        return replace(self.with_mask(mask), write=self.write)

    def __repr__(self) -> str:
        if self.call_in_words is None or self.write is None:
            return self.call
        return self.call_in_words(self.write)


@dataclass(frozen=True, eq=False)
class WordedMetric(_WithoutArithmetic):
    """A metric with tokens as text, which an analysis converts with the model's tokenizer.

    Attributes:
        call: the call that created the metric.
        last: the number of last real positions that the metric reads; 0 for all positions.
        unit: the unit of the metric.
        read: a function that returns the metric with tokens of a model.
        answers: the texts, if they are answers that may be several tokens each. Answers continue
            the text that the model reads. None if each text must be one token.
        score: the name of the function that scores the answers: `log_prob` or `accuracy`.
        is_at_last: whether the metric reads the last position, where texts are read like answers of
            pairs.
        made_by: the call that makes the metric again.
    """

    call: str
    last: int
    unit: str
    read: Callable[[nn.Module], Metric]
    answers: Any = None
    score: str = ""
    is_at_last: bool = False
    made_by: MetricCall | None = None

    def __reduce__(self) -> Any:
        """Return the call that makes the metric again, for another process."""
        return super().__reduce__() if self.made_by is None else (self.made_by, ())

    def read_alone(self, model: nn.Module) -> Metric:
        """Return the metric with tokens of a model, without the texts of the logits.

        Args:
            model: the model whose tokenizer converts the words.

        Raises:
            ValueError: if an analysis could read a word in another way, because it knows the texts.
        """
        if self.is_at_last and self.made_by is not None:
            for value in self.made_by.arguments.values():
                require_clear_words(model, value)
        return in_words(self.read(model), writer_of(model))

    def read_after(self, model: nn.Module, text: Text) -> Metric:
        """Return the metric with tokens of a model.

        At the last position, a word is read like an answer that continues its text.

        Args:
            model: the model whose tokenizer converts the words.
            text: the texts of the examples.

        Raises:
            ValueError: if a word is empty, is several tokens, or could be both a new word and the
                rest of a word.
        """
        if not self.is_at_last or self.made_by is None:
            metric = self.read(model)
        else:
            texts = text.of_logits.listed()
            arguments = {}
            for name, value in self.made_by.arguments.items():
                arguments[name] = tokens_of_words(model, texts, value)
            metric = MetricCall(self.made_by.make, arguments)()
        assert isinstance(metric, TokenMetric)
        return replace(metric, call=self.call)

    def read_by_model_of(self, logits: Tensor, has_mask: bool) -> Metric:
        """Return the metric with tokens of the model that computed some logits.

        Args:
            logits: the logits.
            has_mask: whether the caller gives a mask. An error then shows a call with a mask.

        Raises:
            ValueError: if the logits do not tell their model; see also `read_alone`.
        """
        model = model_of_logits(logits)
        if model is None:
            mask = "attention_mask, " if has_mask else ""
            is_known = has_mask or padding_of(logits) is not None
            advice = "" if is_known else "; padded texts also need attention_mask=attention_mask"
            raise ValueError(
                f"{self.call} has tokens as text, and a copy of logits does not tell its model: "
                f"measure(metric, logits, {mask}model=model) converts them{advice}"
            )
        return self.read_alone(model)

    def __call__(
        self,
        logits: Float[Tensor, "batch pos vocab"] | HasLogits,
        attention_mask: Shaped[Tensor, "batch _column"] | None = None,
    ) -> Float[Tensor, " batch"]:
        """Return the metric of each example, with tokens of the model that computed the logits.

        Args:
            logits, attention_mask: see `TokenMetric.__call__`.

        Raises:
            TypeError: if the logits are not a tensor.
            ValueError: if the logits do not tell their model, or if a word without a space before
                it could be a new word or the rest of a word.
        """
        scores = logits_in(logits)
        require_kind("logits", scores, Tensor, "a tensor [batch, pos, vocab]", _LOGITS_HINT)
        metric = self.read_by_model_of(scores, has_mask=attention_mask is not None)
        assert isinstance(metric, TokenMetric)
        return metric(scores, attention_mask)

    def __repr__(self) -> str:
        return self.call


def in_words(metric: Metric, write: Writer | None) -> Metric:
    """Return a metric that prints its tokens as text.

    The metric is returned unchanged if `write` is None, or if the metric is a function of the user.

    Args:
        metric: the metric.
        write: the function that returns the text of each token.
    """
    if write is None or not isinstance(metric, TokenMetric):
        return metric
    return replace(metric, write=write)


def last_of(metric: Metric, attention_mask: Mask | None = None) -> int:
    """Return the number of last real positions that a metric reads; 0 for all positions.

    Args:
        metric: the metric.
        attention_mask: the mask of the texts, for the checks. Default: no padding.

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
            raise ValueError(padding_messages.mask_unknown(f"{metric!r}"))
        if isinstance(metric, TokenMetric) and metric.at is not None:
            metric.at.columns(attention_mask.shape[1], len(attention_mask), attention_mask)
    return int(getattr(metric, "last", 0))


def per_example(
    metric: Metric, logits: Float[Tensor, "rows pos vocab"], batch: int
) -> Float[Tensor, " batch"]:
    """Return the metric of each example, in float32 if it is an integer or in half precision.

    Args:
        metric: a function from logits to one number for each example.
        logits: the logits that the metric reads.
        batch: the number of examples.

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


def per_run(
    metric: Metric, logits: Float[Tensor, "rows pos vocab"], batch: int
) -> Float[Tensor, "run batch"]:
    """Return the metric of each example in each of several runs of one batch.

    A metric of `interp.metrics` is computed for all runs at once. Any other function is called once
    for each run, with the rows of this run.

    Args:
        metric: a function from logits to one number for each example.
        logits: the logits that the metric reads. The rows of a run follow the rows of the run
            before it.
        batch: the number of examples.

    Raises:
        ValueError: if the metric does not return one number for each of the `batch` examples.
    """
    if has_batched_runs(metric):
        return at_least_float32(torch.vmap(metric)(logits.unflatten(0, (-1, batch))))
    values = [per_example(metric, logits_of_run, batch) for logits_of_run in logits.split(batch)]
    return torch.stack(values)


def has_batched_runs(metric: Metric) -> bool:
    """Return True if one call computes the metric for several runs of a batch.

    This is true for the metrics of `interp.metrics`. Any other function is called once for each
    run; see `per_run` in this file.
    """
    return isinstance(metric, TokenMetric)


def mask_of_logits(
    metric: Metric,
    logits: Float[Tensor, "batch pos vocab"],
    attention_mask: Shaped[Tensor, "_batch _column"] | None,
) -> Shaped[Tensor, "_batch _column"] | None:
    """Return the mask of the texts of some logits.

    It is the given mask; or else the mask of the run that computed the logits, if it is known; or
    else the mask of the metric. A single column of logits is the last column of the texts, so its
    mask is the last column of the given mask.

    Args:
        metric: a metric. Only a metric of pairs has masks; see `TokenMetric.masks`.
        logits: the logits. If they are only the last real positions, no mask is needed.
        attention_mask: the mask that the caller gives, or None.

    Raises:
        ValueError: if the given mask contains other numbers than 0 and 1, or if no mask is given
            and both texts of the pairs have masks of the shape of the logits. If the logits have no
            column at a real token of a text.
    """
    if attention_mask is not None:
        is_binary = (attention_mask == 0) | (attention_mask == 1)
        if attention_mask.dtype != torch.bool and not is_binary.all():
            numbers = attention_mask[~is_binary].unique().tolist()
            raise ValueError(padding_messages.mask_numbers("attention_mask", short(numbers)))
        known: Tensor | None = attention_mask[:, -1:] if logits.shape[1] == 1 else attention_mask
    else:
        known = padding_of(logits)
    if known is not None:
        require_real_columns(known)
        return known
    if not isinstance(metric, TokenMetric) or metric.masks is None:
        return None
    if metric.last in (0, logits.shape[1]):
        return None
    masks = [mask for mask in metric.masks() if mask.shape == logits.shape[:2]]
    if len(masks) > 1:
        raise ValueError(padding_messages.two_masks())
    return masks[0] if masks else None


def metric_of_examples(
    metric: Metric,
    logits: Float[Tensor, "rows pos vocab"],
    batch: int,
    attention_mask: Shaped[Tensor, "_batch _column"] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the metric of each example, after a check for NaN.

    Args:
        metric, logits, batch: see `per_example`.
        attention_mask: the mask of the texts. A function of the user must then return the same
            numbers if the logits at padding change. Default: no check.

    Raises:
        ValueError: if the metric does not return one number for each example, if the metric of an
            example is NaN, or if a function of the user reads the logits at padding.
    """
    values = per_example(metric, logits, batch)
    if has_nan(values):
        example = int(values.isnan().nonzero()[0])
        raise ValueError(
            f"a metric must return numbers; got NaN for example {example} from {metric!r}"
        )
    if attention_mask is not None and not isinstance(metric, TokenMetric):
        _require_no_padding_read(metric, logits, values, attention_mask)
    return values


def _require_no_padding_read(
    metric: Metric,
    logits: Float[Tensor, "rows pos vocab"],
    values: Float[Tensor, " batch"],
    attention_mask: Shaped[Tensor, "_batch _column"],
) -> None:
    """Check that the values of a metric stay the same if the logits at padding change.

    Logits of some positions, or of a classifier, are not checked.

    Raises:
        ValueError: if the values change.
    """
    if logits.shape[:2] != attention_mask.shape or attention_mask.bool().all():
        return
    real = to_device(attention_mask.bool(), logits.device)[..., None]
    with torch.no_grad():
        # An entropy or a margin does not change if logits only swap places, so change their scale
        # too.
        ramp = torch.linspace(-3, 3, logits.shape[-1], dtype=logits.dtype, device=logits.device)
        changed = torch.where(real, logits, logits.roll(1, -1) / 2 + ramp)
        others = per_example(metric, changed, len(values))
    if not torch.allclose(others, values.detach(), equal_nan=True):
        raise ValueError(padding_messages.metric_reads_padding(metric))


@explains_calls
def measure(
    metric: Metric,
    logits: Float[Tensor, "_row pos vocab"] | HasLogits,
    attention_mask: Shaped[Tensor, "_row _column"] | Text | Mapping[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
) -> Float[Tensor, " batch"]:
    """Return the metric of each example of a run, from the logits of whole texts.

    Most metrics of `interp.metrics` read, by default, the last real position of each text.
    `measure` finds this position with the mask. An analysis measures its runs in the same way.

    Args:
        metric: a metric of `interp.metrics`, or any function from logits to one number for each
            example.
        logits: the logits of the model for whole texts, or the output of a model of `transformers`.
        attention_mask: True or 1 at real tokens, [batch, pos]; or a `Text`, the cache of the run or
            the output of a tokenizer of `transformers`, which contain the mask. Default: the mask
            of the run that computed the logits, if they are the logits of a model of this package
            or of an attached model, or a view of them, such as `logits[:3]`. The mask is lost in a
            copy (`logits.float()` of half precision, `logits.cpu()`) and in arithmetic: pass it
            then. Without a mask of the run, the default is the mask of the texts of the pairs, if
            the metric is from pairs (`pairs.metric`); otherwise no padding. If the logits have a
            single column, it is the last column of the texts. For a classifier, pass no mask.
        model: the model whose tokenizer reads the words of the metric, such as `" Mary"`; a model
            of `transformers` must be attached. Default: the model that computed the logits, which
            is known in the same cases as the mask of the run, while the model exists. The logits do
            not tell which word a text ends with, so write the space before a new word.

    Returns:
        One number for each example, [batch], in the metric's unit: logits for `logit_diff`, nats
        for `log_prob`. The dtype is float32 or float64.

    Raises:
        ValueError: if the metric does not return one number for each example, if it returns NaN, if
            it reads padding, or if it was created without the mask of padded texts. If the columns
            of the logits are all padding in a text, as with `logits_to_keep=1` and padding on the
            right. If the mask contains other numbers than 0 and 1, or is missing for pairs whose
            texts have different padding. If the metric contains words, and neither the argument nor
            the logits tell the model; or if a word without a space before it could be a new word or
            the rest of a word.
        TypeError: if the arguments are not a metric and logits, in this order.

    >>> from interp import log_prob
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> text = model.to_tokens(["def __ini", "self"])  # The second text is padded.
    >>> logits = model(text.tokens, attention_mask=text.attention_mask).detach()
    >>> metric = log_prob([model.to_id("t"), model.to_id(".")])
    >>> measure(metric, logits, text.attention_mask).exp()  # the probabilities of "t" and "."
    tensor([0.8722, 0.4660])
    >>> metric = log_prob(["t", "."])
    >>> measure(metric, logits).exp()  # The logits tell their model and their mask.
    tensor([0.8722, 0.4660])
    """
    whole = logits_in(logits)
    if isinstance(metric, Tensor | nn.Module) or not isinstance(whole, Tensor):
        raise TypeError(
            "measure needs a metric and the logits of a run, as in "
            "measure(logit_diff(right, wrong), model(texts)); "
            f"got {shown(metric)} and {shown(logits)}"
        )
    padding = _mask_in(attention_mask)
    require_kind("attention_mask", padding, (Tensor, type(None)), "a tensor [batch, pos]", _MASK)
    if isinstance(metric, WordedMetric):
        if model is None:
            metric = metric.read_by_model_of(whole, has_mask=padding is not None)
        else:
            metric = metric.read_alone(model)
    if isinstance(metric, TokenMetric):
        metric = metric.masked_by_run(whole)
    # Read the mask once: each look at a mask on a device waits for the device.
    mask = mask_of_logits(metric, whole, None if padding is None else padding.cpu())
    logits_read = last_real(whole, last_of(metric, mask), mask)
    values = metric_of_examples(metric, logits_read, len(whole), mask)
    if isinstance(metric, TokenMetric) and metric.n_texts is not None:
        return values.unflatten(0, (-1, metric.n_texts)).sum(0)
    return values


def _mask_in(texts: Any) -> Any:
    """Return the mask of a cache or of texts. A mask, and anything else, is returned unchanged."""
    if isinstance(texts, ActivationCache):
        return texts.real()
    text = as_text(texts) if isinstance(texts, Mapping) else texts
    return text.of_logits.attention_mask if isinstance(text, Text) else texts
