"""Steering: measure the effect of a direction on a score, and the cost for other texts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from hooks.base import (
    Index,
    Texts,
    library,
    named_spans,
    number_of,
    require_kind,
    shows_progress,
    without_gradients,
)
from interp import edits, plots
from interp.directions.direction import Direction
from interp.edits import Edit
from interp.effects.patching import sweep
from interp.inputs.texts import text_for
from interp.json_form import form
from interp.kinds import require_made
from interp.measuring import Metric
from interp.metrics import kl_divergence
from interp.numbers.intervals import interval_text
from interp.protocol import logits_of, runner_of
from interp.results.result import Result

if TYPE_CHECKING:
    from interp.plots.figure import Picture


@dataclass(frozen=True, eq=False, repr=False)
class SteeringCurve(plots.Shown):
    """Effects of a direction for each strength; the result of `steering_curve`.

    Attributes:
        strengths: the factors of the direction.
        score: the change of the score, [strength, example].
        kl: the mean KL divergence of the predictions over the tokens of each other text, in nats,
            [strength, example]; None if there are no other texts. A mean over examples gives short
            and long texts the same weight.

    >>> from interp import log_prob
    >>> from interp.directions import difference_of_means
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> yes, no = ["part KV8", "part QX3"], ["def f(", "return x"]
    >>> v = difference_of_means(model, (yes, no), "blocks.2.resid_post")
    >>> prompts, others = ["import o", "def f("], ["class A:"]
    >>> curve = steering_curve(model, v, prompts, [0.0, 0.5, 1.0], log_prob("8"), others=others)
    >>> curve.score.mean()[2] > 0, curve.kl.mean()[2] > 0  # the effect, and its cost on other texts
    (tensor(True), tensor(True))
    >>> curve.within(0.001)  # the best strength that changes other texts by at most 0.001 nats
    0.0
    """

    strengths: tuple[float, ...]
    score: Result
    kl: Result | None

    is_plot = True

    def within(self, budget: float) -> float:
        """Return the strength with the largest mean score whose mean KL is within a budget.

        Args:
            budget: the largest allowed mean KL, in nats.

        Raises:
            ValueError: if there are no other texts, or if the mean KL of all strengths is above the
                budget.
        """
        require_kind("budget", budget, (int, float), "a number of nats")
        if self.kl is None:
            raise ValueError(
                "a budget needs the KL of other texts; call steering_curve with others="
            )
        costs = self.kl.mean().tolist()
        fits = [number for number, cost in enumerate(costs) if cost <= budget]
        if not fits:
            raise ValueError(
                f"budget must be at least the smallest mean KL, {float(self.kl.mean().min()):.3g} "
                f"nats; got {budget}"
            )
        means = self.score.mean().tolist()
        return self.strengths[max(fits, key=lambda number: means[number])]

    def as_json(self) -> dict[str, Any]:
        """Return the score and the KL at each strength, in the JSON form of all results; see
        `interp.json_form`.
        """
        tables = self.score.tables("score")
        if self.kl is not None:
            tables |= self.kl.tables("kl")
        return form("SteeringCurve", tables, self.score.about)

    def view(self) -> plots.View:
        """Return a view of the score and the KL at each strength."""
        shown = {"What the score gains": self.score}
        if self.kl is not None:
            shown["What other texts lose"] = self.kl
        page = plots.together("steering", shown)
        return plots.View(page.title, page.parts, self.plot)

    def plot(self) -> "Picture":
        """Plot the mean score over the strength, and below it the mean KL, with 95% intervals. It
        needs the extra `plots`.
        """
        from interp.plots.matplotlib_figures import below_each_other

        heights = {}
        for name, result in self._columns().items():
            label = f"{name} ({result.unit})" if result.unit else name
            heights[label] = (result.mean(), *result.interval())
        title = "mean change at each strength"
        return below_each_other(self.strengths, heights, axis="strength", title=title)

    def to_dataframe(self) -> Any:
        """Return a pandas table with a row for each strength.

        The columns are `strength`, `score` (the mean), `score_low` and `score_high` (its 95%
        interval) and, if there are other texts, `KL`, `KL_low` and `KL_high`. This needs the extra
        `tables` (pandas).

        Raises:
            ImportError: if pandas is not installed.
        """
        table = library("pandas", extra="tables").DataFrame({"strength": self.strengths})
        for name, result in self._columns().items():
            low, high = result.interval()
            numbers = {name: result.mean(), f"{name}_low": low, f"{name}_high": high}
            table = table.assign(**{column: part.tolist() for column, part in numbers.items()})
        return table

    def _columns(self) -> dict[str, Result]:
        """Return the score and, if there are other texts, their KL, by name."""
        return {"score": self.score} if self.kl is None else {"score": self.score, "KL": self.kl}

    def __repr__(self) -> str:
        """Return the mean change of the score at each strength, and the KL if it is known."""
        columns = self._columns()
        means = {name: result.mean() for name, result in columns.items()}
        intervals = {name: result.interval() for name, result in columns.items()}
        title = f"SteeringCurve of {number_of(len(self.strengths), 'strength')}, means over texts"
        change = f"change of score in {self.score.unit}" if self.score.unit else "change of score"
        if self.score.base is not None:
            change += f", base {self.score.base.mean().item():+.4g}"
        lines = [f"{title}; {change}" if self.kl is None else f"{title}; {change}; KL in nats"]
        for number, strength in enumerate(self.strengths[:38]):
            cells = []
            for name, interval in intervals.items():
                low, high = float(interval.low[number]), float(interval.high[number])
                mean = float(means[name][number])
                cells.append(f"{name} {mean:+.4g}{interval_text(low, high, '+.3g')}")
            lines.append(f"  {strength:<8g} {'  '.join(cells)}")
        return "\n".join(lines)


@shows_progress
@without_gradients
def steering_curve(
    model: nn.Module,
    vectors: Direction,
    prompts: "Texts",
    strengths: Sequence[float],
    score: "Metric",
    *,
    others: "Texts | None" = None,
    pos: "Index | str | None" = None,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> SteeringCurve:
    """Add a direction at each strength, and return the change of a score and the change of the
    predictions on other texts.

    The second change is the cost of steering, measured as a KL divergence. The direction is added
    at all of its points together.

    Args:
        model: the model, in evaluation mode.
        vectors: the direction to add. `vectors.at(2)` selects the vector of layer 2.
        prompts: the texts that are scored.
        strengths: the factors of the direction.
        score: the score, see `interp.metrics`.
        others: texts whose predictions should not change. For each text, KL(unsteered || steered)
            is the mean over tokens. Default: no other texts.
        pos: the positions where the direction is added, in prompts and other texts. For chats
            (`models.chat`), it can be the name of a span. Default: all positions.
        max_bytes: a bound on the memory of the runs in bytes, not counting the model; see `sweep`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The gain of the score over the unsteered model, [strength, example], in the unit of the
        score, and the KL of the other texts, [strength, example], in nats. `score.base` is the
        score of each text without steering. The printed numbers are means over texts: a short text
        counts as much as a long one, also if the score is a loss per token.

    Raises:
        ValueError: as in `sweep`, or if a chat does not contain the span.
        EditError: if a vector does not fit the values.
        UnknownNameError: if the span is unknown.
        ModeError: if the model is in training mode.

    >>> from interp import log_prob
    >>> from models import load
    >>> from interp.directions import difference_of_means
    >>> model, point = load("pydoc-4l"), "blocks.2.resid_post"
    >>> v = difference_of_means(model, (["part KV8", "part QX3"], ["def f(", "return x"]), point)
    >>> steering_curve(model, v, ["impor", "def __ini"], [0.5, 1.0], log_prob("8"))
    SteeringCurve of 2 strengths, means over texts; change of score in nats, base -14.3
      0.5      score +9.101
      1        score +9.874
    """

    require_made("vectors", vectors, Direction)
    require_kind(
        "strengths", strengths, kind=Iterable, words="a list of numbers", call="for example [1.0]"
    )

    def edits_of(texts: Texts) -> list[dict[str, Edit]]:
        """Return the edits of each strength."""
        positions = named_spans(texts, [pos])[pos] if isinstance(pos, str) else pos
        where = {} if positions is None else {"pos": positions}
        by_strength = []
        for strength in strengths:
            by_strength.append(
                {name: edits.add(vectors, strength, **where) for name in vectors.vectors}
            )
        return by_strength

    labels = {"edit": [*strengths]}
    effects = sweep(model, prompts, edits=edits_of(prompts), metric=score, max_bytes=max_bytes)
    kl = None
    if others is not None:
        text = text_for(model, others)
        reference = logits_of(runner_of(model).model(text.tokens, **text.arguments(model)))
        metric = kl_divergence(reference, None, attention_mask=text.attention_mask)
        lost = sweep(
            model,
            text.tokens,
            edits=edits_of(others),
            metric=metric,
            attention_mask=text.attention_mask,
            max_bytes=max_bytes,
        )
        kl = replace(_by_strength(lost, labels), bounds=(0.0, math.inf))
    return SteeringCurve(tuple(strengths), _by_strength(effects, labels), kl)


def _by_strength(result: Result, labels: dict[str, list[float]]) -> Result:
    """Return the result of a sweep with the axis `strength` in place of `edit`."""
    axes = ("strength", *result.axes[1:])
    return Result(
        values=result.values,
        axes=axes,
        base=result.base,
        target=result.target,
        labels={"strength": labels["edit"]},
        unit=result.unit,
        about=result.about,
        groups=result.groups,
    )
