"""Run pairs with a part of a value at one point taken from the other text."""

from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from hooks import Point
from hooks.base import Selection, Text, to_device, unknown_name
from interp.alignment.featurizers import Featurizer
from interp.inputs.token_positions import Position, last_real
from interp.measuring import Metric, last_of, metric_of_examples
from interp.pairs.answers import prompts_of_rows, score_of_rows, summed_by_example
from interp.runs.gradients import Gradients
from interp.runs.runs import Runs


class Scores(NamedTuple):
    """Scores of an interchanged part, for each pair.

    Attributes:
        effect: the change of the metric by the interchange, in the unit of the metric.
        right: 1 if the right answer has a larger logit than all other tokens, otherwise 0. If pairs
            have a right and a wrong answer, only these two logits are compared. The tensor is empty
            if the pairs have no answers.
    """

    effect: Float[Tensor, " example"]
    right: Float[Tensor, " answered"]


class InterchangeRuns:
    """Pairs at one point and position: the base texts to run, and the values of the source texts.

    Args:
        runs: the pairs and their direction.
        name: the name of the point.
        pos: a position, or the name of a span of the pairs.
        head: the head, if the point has heads.
        batch: the number of pairs in a run.

    Attributes:
        source: the values of the source texts, [batch, pos, d].
        size: the size of a value.

    Raises:
        ValueError: if the point does not have a vector at each position, or if it has heads and
            `head` is missing.
        UnknownNameError: if the span is unknown.
    """

    def __init__(self, runs: Runs, name: str, pos: int | str, head: int | None, batch: int) -> None:
        self.runs = runs
        self.name = name
        self.batch = batch
        points = runs.runner.points
        axes = points[name].axes if name in points else ()
        has_heads = "head" in axes or "kv_head" in axes
        needs_head = len(axes) == 4
        if len(axes) - has_heads > 3 or (axes and needs_head != (head is not None)):
            raise ValueError(
                "a value must be a vector at each position, and head= is needed if the point has "
                f"heads; got {name} [{' '.join(axes)}] and head={head}"
            )
        self._head = () if head is None else (head,)
        self._columns = _columns(runs.text, pos, runs.prompts)
        source = runs.other
        source_prompts = prompts_of_rows(runs.other_prompts, source)
        self.source = self._values(source, _columns(source, pos, source_prompts))
        self.size: int = self.source.shape[-1]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.runs.pairs)

    def base_values(self) -> Float[Tensor, "batch pos d"]:
        """Return the values of the base texts."""
        return self._values(self.runs.text, self._columns)

    def gradients(self) -> Float[Tensor, "batch pos d"]:
        """Return the gradients of the metric at the values of the base texts."""
        gradients: dict[str, Tensor] = {}
        runs = self.runs
        start = Gradients(runs.runner, runs.text, metric=runs.metric, names=[self.name])
        start.backward(gradients.__setitem__)
        value = gradients.get(self.name, torch.zeros_like(start.values[self.name]))
        return value[self._at(slice(None), self._columns)]

    def _values(self, text: Text, columns: Tensor) -> Float[Tensor, "batch pos d"]:
        """Return the values of a run on texts at some columns.

        Raises:
            ValueError: if the point does not have a vector at each position.
        """
        value = self.runs.capture(text, self.name)[self.name]
        if value.shape[:2] != text.tokens.shape:
            raise ValueError(
                "a value must have a vector at each position, [batch, pos], "
                f"{[*text.tokens.shape]}; got {[*value.shape]} at {self.name}"
            )
        return value[self._at(slice(None), columns)]

    def _at(self, rows: Any, columns: Tensor) -> tuple[Any, ...]:
        """Return the index of some positions of some texts, for a value [batch, pos, ...].

        Args:
            rows: the texts.
            columns: the positions in each text.
        """
        chosen = columns[rows]
        return (torch.arange(len(chosen))[:, None], chosen, *self._head)

    def _logits(self, part: Featurizer | None, rows: Any) -> Float[Tensor, "rows pos vocab"]:
        """Return the logits of some base texts after an interchange.

        Args:
            part: the part of the value that comes from the source texts. None changes nothing.
            rows: the numbers of the base texts.
        """
        index = self._at(rows, self._columns)

        def interchanged(value: Tensor, point: Point) -> Tensor:
            """Return the value with the part from the source texts."""
            new = value.clone()
            if part is not None:
                new[index] = part.interchanged(value[index], self.source[rows])
            return new

        return self.runs.logits({self.name: interchanged}, rows)

    def loss(self, part: Featurizer, rows: Int[Tensor, " pair"]) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the right answers.

        The choices are all tokens or, if each pair has a right and a wrong answer, these two. For
        right answers of several tokens, it is minus the log-probability of the answer.

        Args:
            part: the part that is interchanged.
            rows: the numbers of the pairs.
        """
        continuations = self.runs.pairs.continuations
        if continuations is None:
            return cross_entropy(*self._choices(self._logits(part, rows), rows))
        answers = continuations.changed(lambda numbers: numbers[rows])
        starts = torch.arange(continuations.n_answers)[:, None] * len(self)
        rows_of_answers = (starts + rows).flatten()
        metric = score_of_rows(answers, self.runs.text.rows(rows_of_answers))
        logits = self._read(self._logits(part, rows_of_answers), rows_of_answers, metric)
        scores = summed_by_example(metric(logits), len(rows))
        losses = softplus(-scores) if continuations.n_answers == 2 else -scores
        return losses.mean()

    @cached_property
    def base(self) -> Float[Tensor, " example"]:
        """The metric without an interchange."""
        return self._measured(None)[0]

    def scores(self, part: Featurizer) -> Scores:
        """Return the scores of runs with a part from the source texts."""
        values, right = self._measured(part)
        return Scores(values - self.base, right)

    def _measured(self, part: Featurizer | None) -> tuple[Tensor, Tensor]:
        """Return the metric, with or without an interchanged part, and a mask of right answers."""
        pairs = self.runs.pairs
        metric = self.runs.metric
        greedy: Metric | None = None
        if pairs.continuations is not None and pairs.continuations.n_answers == 1:
            greedy = score_of_rows(replace(pairs.continuations, score="accuracy"), self.runs.text)
        n_rows = len(self.runs.text.tokens)
        outputs, right = [], []
        for start in range(0, n_rows, self.batch):
            rows = slice(start, start + self.batch)
            logits = self._logits(part, rows)
            outputs.append(self._read(logits, rows, metric))
            if pairs.continuations is None and pairs.answers is not None:
                choices, wanted = self._choices(logits, rows)
                right.append(_is_largest(choices, wanted))
        read = torch.cat(outputs)
        mask = self.runs.text.of_logits.mask_on_cpu()
        values = self.runs.per_example(metric_of_examples(metric, read, n_rows, mask))
        if greedy is not None:
            return values, greedy(read).to(values)
        if pairs.continuations is not None:
            return values, (values > 0).to(values)
        return values, torch.cat(right).to(values) if right else values.new_empty(0)

    def _read(self, logits: Tensor, rows: Any, metric: Metric) -> Float[Tensor, "rows _pos vocab"]:
        """Return the logits of some rows at the positions that a metric reads."""
        mask = self.runs.text.rows(rows).of_logits.attention_mask
        last = last_of(metric, self.runs.text.of_logits.attention_mask)
        return last_real(logits, last, mask)

    def _choices(self, output: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        """Return the logits of all tokens or of two answers, and the index of the right answer."""
        pos = self.runs.pairs.pos
        if pos is None:
            pos = -1
        position = Position(pos[rows] if isinstance(pos, Tensor) else pos)
        mask = self.runs.text.rows(rows).of_logits.attention_mask
        logits = position(last_real(output, position.last, mask))
        # `align` raises an error if pairs have no answers.
        answers = to_device(self.runs.pairs.answers[rows], logits.device)
        if answers.ndim == 1:
            return logits, answers
        return logits.gather(1, answers), torch.zeros_like(answers[:, 0])


def _is_largest(logits: Float[Tensor, "row choice"], place: Tensor) -> Bool[Tensor, " row"]:
    """Return whether the logit at a place is larger than all others; equal logits are not larger.

    Args:
        logits: the logits of the choices.
        place: the index of a choice in each row.
    """
    logit = logits.gather(1, place[:, None])
    return (logits >= logit).sum(1) == 1


def _columns(
    text: Text, pos: int | str, prompts: Bool[Tensor, "batch column"]
) -> Int[Tensor, "batch n"]:
    """Return the columns of a position or a span in each text.

    Args:
        text: the texts.
        pos: the position, or the name of a span.
        prompts: True at the tokens of the prompts. `pos` counts these tokens only.

    Raises:
        UnknownNameError: if the span is unknown.
    """
    if isinstance(pos, str):
        if pos not in text.spans:
            raise unknown_name(pos, text.spans, "span of the pairs")
        return text.spans[pos].cpu()
    n_texts, n_pos = text.tokens.shape
    columns = Selection.one_each(pos).columns(n_pos, "pos", batch=n_texts, real=prompts)
    return columns.expand(n_texts, -1)
