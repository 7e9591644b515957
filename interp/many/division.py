"""The division of examples into parts: pairs or texts, with arguments that belong to examples.

1. The model reads all examples once, so that every part has the same columns.
2. Part n contains the examples from n * at_once on. A metric with a token for each example, and
   arguments that `by_example` names, are divided in the same way.
3. A metric of the user's own must return equal numbers for examples with equal logits, whatever the
   logits of other examples are. Otherwise it contains data of single examples, and needs a method
   `rows`, or it compares examples.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import (
    Text,
    Texts,
    each_text,
    require_integer,
    shown,
    sum_rounding,
    without_gradients,
    writer_of,
)
from interp.inputs.texts import text_for
from interp.inputs.token_positions import last_real, short
from interp.measuring import (
    Metric,
    TokenMetric,
    WordedMetric,
    Writer,
    in_words,
    last_of,
)
from interp.pairs.pairs import Pairs
from interp.protocol import logits_of

ReadExamples = Pairs | Text | list[Any]
"""Examples: pairs, texts with the same columns, or a list of texts."""


@dataclass(frozen=True, eq=False)
class PartOfExamples:
    """The examples and the arguments of one part.

    Attributes:
        number: the number of the part.
        first: the number of its first example.
        examples: the pairs or texts.
        args: the arguments of the analysis after the examples.
        options: the keyword arguments of the analysis.
        words: texts in which results describe arguments, such as the metric, for this part.
        is_whole: whether the part contains all examples.
        name: the hash of all values; empty if parts are not stored.
    """

    number: int
    first: int
    examples: ReadExamples
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    words: tuple[str, ...]
    is_whole: bool = False
    name: str = ""

    @property
    def last(self) -> int:
        """The number of the last example."""
        return self.first + len(self.rows) - 1

    @property
    def rows(self) -> Any:
        """The examples in a form that has a length."""
        return self.examples.tokens if isinstance(self.examples, Text) else self.examples

    def __str__(self) -> str:
        return f"part {self.number} (examples {self.first} to {self.last})"


@dataclass(frozen=True, eq=False)
class Whole:
    """All examples of a call of `over_examples`, as tokens, with all arguments.

    Attributes:
        examples: the pairs or texts.
        args, options: the arguments of the analysis.
        by_example: the names of options with an entry for each example.
        columns: the words of all columns, by the direction of a result.
        write: the function that returns the text of each token; None without a tokenizer.
    """

    examples: ReadExamples
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    by_example: Sequence[str]
    columns: Mapping[str | None, list[str]] = field(default_factory=dict)
    write: Writer | None = None

    def __len__(self) -> int:
        examples = self.examples
        return len(examples.tokens if isinstance(examples, Text) else examples)

    @property
    def words(self) -> tuple[str, ...]:
        """The texts in which results describe arguments, such as the metric, for all examples."""
        return _words(self.examples, self.args, self.options, self.by_example, self.write)

    def part(self, number: int, at_once: int) -> PartOfExamples:
        """Return part `number`: the examples from `number * at_once` on, with their arguments.

        Args:
            number: the number of the part, from 0.
            at_once: the largest number of examples in a part.
        """
        first = number * at_once
        rows = torch.arange(first, min(len(self), first + at_once))
        options = dict(self.options)
        for name in self.by_example:
            options[name] = _rows_of(options[name], rows)
        options = {name: _metric_rows(value, rows) for name, value in options.items()}
        args = tuple(_metric_rows(value, rows) for value in self.args)
        examples = _examples_rows(self.examples, rows)
        words = _words(examples, args, options, self.by_example, self.write)
        return PartOfExamples(
            number,
            first,
            examples,
            args=args,
            options=options,
            words=words,
            is_whole=len(rows) == len(self),
        )


def read_examples(model: nn.Module, examples: Pairs | Texts, as_list: bool) -> ReadExamples:
    """Return the examples, read with the model.

    Args:
        model: the model.
        examples: see `over_examples`.
        as_list: whether the texts are returned as a list, for an analysis that pads batches itself.

    Raises:
        TypeError, ValueError: if the model cannot read the examples.
    """
    if isinstance(examples, Pairs):
        return examples.read_by(model)
    return [*each_text(examples)] if as_list else text_for(model, examples)


def whole_call(
    analysis: Callable[..., Any],
    model: nn.Module,
    read: ReadExamples,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    by_example: Sequence[str],
    at_once: int,
) -> Whole:
    """Return all examples with the arguments, after a check that they can be divided.

    Args:
        analysis: the analysis.
        model: the model.
        read: the examples; see `read_examples`.
        args, options, by_example, at_once: see `over_examples`.

    Raises:
        ValueError: if there are no examples, an option does not have an entry for each example, or
            a metric cannot be divided.
    """
    require_integer("at_once", at_once)
    args = tuple(_read_metric(model, value, read) for value in args)
    options = {name: _read_metric(model, value, read) for name, value in options.items()}
    write = writer_of(model)
    all_examples = Whole(
        read,
        args,
        options,
        by_example,
        columns=_columns(model, read),
        write=write,
    )
    if not len(all_examples):
        raise ValueError(
            "examples must contain at least one text; got none (a generator is empty after its "
            "first use: give a list)"
        )
    for name in by_example:
        value = options.get(name)
        if not isinstance(value, Sized) or len(value) != len(all_examples):
            raise ValueError(
                f"{name}= is named in by_example, so it must have an entry for each of the "
                f"{len(all_examples)} examples; got {shown(value)}"
            )
    if (metric := _own_metric(analysis, read, args, options)) is not None:
        text = read.text if isinstance(read, Pairs) else read
        assert isinstance(text, Text)
        _require_divisible(metric, model, text, min(at_once, len(all_examples)))
    return all_examples


def _examples_rows(examples: ReadExamples, rows: Tensor) -> ReadExamples:
    """Return some examples, in a form that can be sent to another process."""
    if isinstance(examples, list):
        return [examples[number] for number in rows.tolist()]
    if isinstance(examples, Text):
        return examples.rows(rows.to(examples.tokens.device))
    part = copy.copy(examples[rows])
    # This function belongs to the tokenizer. The worker's model provides the same function.
    part._write = None
    return part


def _rows_of(value: Any, rows: Tensor) -> Any:
    """Return the entries of some examples of an option."""
    if isinstance(value, Tensor):
        return value[rows.to(value.device)]
    return [value[number] for number in rows.tolist()]


def _read_metric(model: nn.Module, value: Any, examples: ReadExamples) -> Any:
    """Return a metric with tokens in place of texts; other values are returned unchanged."""
    if not isinstance(value, WordedMetric):
        return value
    text = examples.text if isinstance(examples, Pairs) else text_for(model, examples)
    return value.read_after(model, text)


def _metric_rows(value: Any, rows: Tensor) -> Any:
    """Return a metric of some examples; other values are returned unchanged."""
    return value.rows(rows) if isinstance(value, TokenMetric) else value


def _words(
    examples: ReadExamples,
    args: Sequence[Any],
    options: Mapping[str, Any],
    by_example: Sequence[str],
    write: Writer | None,
) -> tuple[str, ...]:
    """Return the texts in which results describe the metric and the options of examples."""
    words = []
    if isinstance(examples, Pairs) and examples.has_metric:
        words.append(repr(in_words(examples.rows().metric, write)))
    metrics = [value for value in (*args, *options.values()) if isinstance(value, TokenMetric)]
    words += [repr(in_words(metric, write)) for metric in metrics]
    words += [short(options[name]) for name in by_example]
    return tuple(words)


def _columns(model: nn.Module, examples: ReadExamples) -> dict[str | None, list[str]]:
    """Return the words of all columns, for each direction of the pairs and for texts alone."""
    if isinstance(examples, list):
        return {}
    if isinstance(examples, Text):
        texts_of: dict[str | None, tuple[Text, ...]] = {None: (examples,)}
    else:
        texts_of = {None: (examples.text,)}
        if examples.other is not None:
            both = (examples.text, examples.other)
            texts_of |= {"noising": both, "denoising": both}
    words = {key: texts[0].words(model, *texts[1:]) for key, texts in texts_of.items()}
    return {key: columns for key, columns in words.items() if columns}


def _own_metric(
    analysis: Callable[..., Any],
    examples: ReadExamples,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Metric | None:
    """Return the metric of the call if it is a function of the user without a method `rows`."""
    metric: Any = examples._metric if isinstance(examples, Pairs) else None
    try:
        bound = inspect.signature(analysis).bind(None, None, *args, **options)
    # The analysis itself raises a better error.
    except (TypeError, ValueError):
        return None
    metric = bound.arguments.get("metric", metric)
    if not callable(metric) or hasattr(metric, "rows") or isinstance(examples, list):
        return None
    return metric


@without_gradients
def _require_divisible(metric: Metric, model: nn.Module, text: Text, at_once: int) -> None:
    """Check that a metric contains no data of single examples, and compares no examples.

    1. All examples get the logits of the first example. Then a metric without data of examples
       returns equal numbers for all examples, and for the examples of a part.
    2. One example of a part keeps these logits, and the others get other logits; then the other way
       round. The examples with the same logits must keep their number.

    Raises:
        ValueError: if the numbers differ, or the metric does not accept a part.
    """
    n = len(text.tokens)
    first = text.rows(slice(0, 1))
    mask = first.of_logits.attention_mask
    logits = logits_of(model(first.tokens, **first.arguments(model)))
    logits = last_real(logits, last_of(metric, mask), mask)
    cause = None
    try:
        values = [metric(logits.expand(size, -1, -1)) for size in (n, at_once)]
        is_divisible = [*map(len, values)] == [n, at_once] and _are_close(values, values[0][0])
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        is_divisible, cause = False, error
    if not is_divisible:
        raise ValueError(
            "a metric with data of single examples must have a method rows(numbers), which returns "
            f"the metric of some examples, so that it can be divided; got {metric!r}"
        ) from cause
    is_first = torch.arange(min(n, max(2, at_once)), device=logits.device) == 0
    for is_same in (is_first, ~is_first):
        # The other examples get logits with another sum and another maximum: half of each logit, at
        # another token.
        mixed = torch.where(is_same[:, None, None], logits, logits.roll(1, -1) / 2)
        if not _are_close([metric(mixed)[is_same]], values[0][0]):
            raise ValueError(
                "a metric must compute the number of an example from the logits of this example, "
                f"so that it can be divided; the numbers of {metric!r} depend on other examples: "
                "compare examples in the joined result"
            )


def _are_close(values: Sequence[Tensor], expected: Tensor) -> bool:
    """Return whether all numbers of a metric are equal to an expected number, up to rounding."""
    rounding = sum_rounding(torch.float32)
    # A probability may be small, so the limit is a share of the number and not of the largest.
    return all(torch.allclose(part.double(), expected.double(), rtol=rounding) for part in values)
