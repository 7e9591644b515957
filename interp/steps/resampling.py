"""Resampled steps: the effect on the final answer if the model writes a step again.

The algorithm (Bogdan et al. 2025, "Thought Anchors", arXiv 2506.19143, section 3):

1. The model continues the text `n` times from the beginning of each step of the answer, and from
   the end of the last step (`_Sampler`). The first step of a continuation is a rewritten step.
2. Read the final answer from each continuation (`_reader_of`).
3. The answers without step i are the answers of the continuations that rewrite step i. The answers
   with step i are the answers of the continuations after step i. The resampling importance is the
   divergence between both distributions, with a bootstrap interval (`_importance`).
4. The counterfactual importance uses only the rewritten steps that mean something else
   (`_same_meaning`).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    at_least_float32,
    generator,
    number_of,
    progress_of,
    require_callable,
    require_integer,
    shown,
    shows_progress,
    without_gradients,
)
from interp.inputs.offsets import offsets_of
from interp.inputs.texts import padded
from interp.json_form import Table, form
from interp.kinds import require_made
from interp.numbers.intervals import interval_text
from interp.protocol import of, require_one_vector, runner_of
from interp.results.entries import Entries
from interp.results.result import Result
from interp.steps.spans import sentence_starts, spans_of_tokens, word_starts
from interp.steps.stepping import Steps
from interp.steps.writing import Write, text_of_tokens, tokens_of_text, writer

IMPORTANCES = ("resampling", "counterfactual")

_STARTS = {"sentence": sentence_starts, "word": word_starts}

_REPLY = 8
"""The number of tokens that the model writes after a question."""

_DRAWS = 1000
"""The number of bootstrap draws of an interval."""

Answer = str | Callable[[str], Any]
"""A regular expression, or a function from a text to its answer."""


@dataclass(frozen=True, eq=False, repr=False)
class Resampled:
    """Effects of rewritten steps on the final answer.

    Attributes:
        effects: the divergences in nats, a `Result` with the axes `importance` (`resampling` and
            `counterfactual`), `step` and `example`. The labels of steps are their numbers in
            `steps`. A counterfactual importance is NaN if no rewritten step means something else.
        low, high: the ends of the 95% bootstrap interval of each divergence (see `resampled`),
            [importance, step].
        same: the share of rewritten steps that mean the same as the step, [step].
        rewritten: the texts of the rewritten steps, for each step.
        without: the answers of the continuations that rewrite each step.
        after: the answers of the continuations after each step.
    """

    effects: Result
    low: Float[Tensor, "importance step"]
    high: Float[Tensor, "importance step"]
    same: Float[Tensor, " step"]
    rewritten: tuple[tuple[str, ...], ...]
    without: tuple[tuple[Any, ...], ...]
    after: tuple[tuple[Any, ...], ...]

    def top(self, k: int = 10) -> Entries:
        """Return the `k` largest importances, with their bootstrap intervals.

        Args:
            k: the number of importances. Default: 10.

        Raises:
            ValueError: if `k` is below 1.
        """
        entries = []
        for entry in self.effects.top(k):
            row = IMPORTANCES.index(entry.where["importance"])
            place = self.effects.labels["step"].index(entry.where["step"])
            low, high = float(self.low[row, place]), float(self.high[row, place])
            entries.append(entry._replace(low=low, high=high))
        return Entries(entries)

    def as_json(self) -> dict[str, Any]:
        """Return the effects with their bootstrap intervals, all rewritten steps and all answers,
        in the JSON form of all results; see `interp.json_form`.
        """
        labels = self.effects.labels
        axes = "importance step"
        tables = self.effects.tables("effects")
        tables["effects.low"] = Table(self.low, axes, "nats", labels)
        tables["effects.high"] = Table(self.high, axes, "nats", labels)
        tables["same"] = Table(self.same, "step", "share of rewritten steps", labels)
        for name in ("rewritten", "without", "after"):
            tables[name] = Table(getattr(self, name), "step", labels=labels)
        return form("Resampled", tables, self.effects.about)

    def __repr__(self) -> str:
        labels = self.effects.labels["step"]
        lines = [
            f"Resampled [{number_of(len(labels), 'step')}, {self.effects.about['n']} times] in nats"
        ]
        answers = [*itertools.chain(*self.without, self.after[-1])]
        if None in answers:
            n_without = sum(answer is None for answer in answers)
            lines[0] += f", no answer in {n_without} of {len(answers)} continuations"
        means = self.effects.mean()
        for place, (label, word) in enumerate(zip(labels, self.effects.words["step"], strict=True)):
            numbers = []
            for row, name in enumerate(IMPORTANCES):
                low, high = float(self.low[row, place]), float(self.high[row, place])
                ends = interval_text(low, high, ".3g")
                numbers.append(f"{name} {float(means[row, place]):.3g}{ends}")
            numbers.append(f"same {100 * float(self.same[place]):.0f} %")
            lines.append(f"step {label} {word!r:.40}  {', '.join(numbers)}")
        return "\n  ".join(lines)


@shows_progress
@without_gradients
def resampled(
    model: nn.Module,
    steps: Steps,
    n: int = 20,
    answer: Answer = r"\d+",
    *,
    question: str = "",
    similar: Callable[[str, str], bool] | None = None,
    threshold: float | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 200,
    smoothing: float = 1.0,
    seed: int = 0,
    write: Write | None = None,
    progress: bool = True,
) -> Resampled:
    """Return the effect of each step of the answer on the final answer, in nats.

    The model continues the text `n` times before each step of the answer and after the last step.
    The effect of a step is KL(answers without the step ‖ answers with the step). Answers without
    the step are the answers of the `n` continuations that write the step again. Answers with the
    step are the answers of the `n` continuations after it. The resampling importance uses all
    rewritten steps. The counterfactual importance uses only rewritten steps that mean something
    else (Bogdan et al. 2025, "Thought Anchors", arXiv 2506.19143).

    The probability of an answer is (count + `smoothing`) / (n + `smoothing` * K) for K different
    answers in both sets (Laplace). The divergence of two finite sets is above 0 on average, even
    if both have the same distribution, so compare steps, and use a large `n`.

    The interval is a 95% bootstrap interval with a corrected bias (Efron & Tibshirani 1993, "An
    Introduction to the Bootstrap"). Its 1000 draws come from the probabilities of both sets, with 1
    added to the count of each answer. So the interval has a width even if all continuations have
    the same answer; a second answer with the count 0 is then added. Both ends, the quantiles of
    the divergences of the draws, are moved down by twice the bias of the draws. For the lower end,
    the bias is their mean minus the divergence of the probabilities from which they come. For the
    upper end, the bias is their mean minus the effect, if this is above 0. No end is below 0, and
    the interval always contains the effect.

    The interval is of the divergence that the true probabilities have after the same smoothing.
    In simulations (n of 8, 20 and 50, 2 to 8 answers, `smoothing` of 0.01 to 1), 0.92 to 1 of the
    intervals contained this divergence.

    Two steps mean the same if the cosine of their vectors is above the threshold. The vector of a
    step is the mean over its tokens of `resid_post` in the middle layer. The model reads the step
    after the first token of the text, which is not part of the mean. The paper uses a model of
    sentence embeddings and, as the threshold, the median of all cosines.

    Args:
        model: the model, in evaluation mode. It has `models.Transformer.continuations` or, if it is
            attached, a method `generate`.
        steps: the text, divided into sentences or words, with an answer.
        n: the number of continuations.
        answer: the final answer in the text of the answer: a regular expression, whose last match
            (or its first group) is the answer; or a function from the text to the answer. A text
            without a match has the answer None, which counts as an answer of its own. Default: the
            last number.
        question: a text that is added to each continuation, to make the model give an answer, such
            as `" So the answer is"`. The answer is then read from the next 8 tokens, and the first
            match is the answer. An incomplete last sentence of a continuation is left out. Default:
            no question.
        similar: a function (step, rewritten step) that returns whether both mean the same. Default:
            the cosine of their vectors is above the threshold.
        threshold: the cosine above which two steps mean the same. Default: the median of all
            cosines.
        temperature: the temperature of the continuations. Default: 1.
        max_new_tokens: the largest number of tokens of a continuation. Default: 200.
        smoothing: the number that is added to the count of each answer.
        seed: the seed of continuations and bootstrap draws.
        write: a function `write(prompts, max_new_tokens=, temperature=, seed=)` from lists of
            tokens to lists of new tokens, for example of a server. Default: the model continues.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The effects [importance, step, example] in nats, with the ends of their intervals, and the
        rewritten steps and answers; see `Resampled`.

    Raises:
        ValueError: if the steps have no answer or are not sentences or words, if a number is out of
            range, or if no continuation contains an answer.
        TypeError: if the model cannot continue texts, or `answer` is neither a regular expression
            nor a function.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> steps = Steps(model, "Return the", " sum of 2 numbers. It is 3.")
    >>> effects = resampled(model, steps, n=3, max_new_tokens=8).effects
    >>> effects.axes, effects.labels["step"]
    (('importance', 'step', 'example'), (1, 2))
    """
    require_made("steps", steps, Steps)
    require_integer("n", n)
    _require_positive(temperature=temperature, smoothing=smoothing)
    if steps.by not in _STARTS or steps.first_answer == len(steps):
        raise ValueError(
            "steps must be sentences or words with an answer; got "
            f"{len(steps)} {steps.by}s, answer from {steps.first_answer}"
        )
    read = _reader_of(answer, is_reply=bool(question))
    if similar is not None:
        require_callable("similar", similar, ("step", "rewritten"))
    runner = runner_of(model)
    sampler = _Sampler(
        model,
        steps,
        n=n,
        read=read,
        question=question,
        max_new_tokens=max_new_tokens,
        seed=seed,
        write=partial(writer(model, write), temperature=temperature),
    )
    numbers = range(steps.first_answer, len(steps) + 1)
    rollouts = []
    for number in progress_of(numbers, "steps", len(numbers)):
        rollouts.append(sampler.rollouts(number))
    _require_answers(rollouts)
    same, threshold = _same_meaning(runner, steps, rollouts, similar, threshold)
    about = {
        "kind": "resampled",
        "n": n,
        "temperature": temperature,
        "smoothing": smoothing,
        "seed": seed,
        "same": "a function" if similar else f"cosine above {threshold:.4g}",
    }
    return _table(steps, rollouts, same, smoothing=smoothing, seed=seed, about=about)


class _Continued(NamedTuple):
    """A continuation of a text.

    Attributes:
        tokens: the new tokens.
        text: their text.
        first: the number of new tokens of the first step, which is the rewritten step.
        last: the number of new tokens before the last step begins.
        rewritten: the text of the rewritten step.
    """

    tokens: list[int]
    text: str
    first: int
    last: int
    rewritten: str

    @classmethod
    def of(cls, model: nn.Module, tokens: list[int], by: str) -> "_Continued":
        """Divide new tokens into steps, and return the continuation with its first and last step.

        Args:
            model: the model whose tokenizer converts the tokens to text.
            tokens: the new tokens.
            by: the kind of the steps, such as sentences.
        """
        if not tokens:
            return cls([], "", 0, 0, "")
        offsets = offsets_of(model, tokens)
        starts = _STARTS[by](offsets.text)
        spans = spans_of_tokens(offsets.starts, starts)
        end = starts[1] if len(starts) > 1 else len(offsets.text)
        return cls(tokens, offsets.text, spans[0][1], spans[-1][0], offsets.text[:end])

    def complete(self, max_new_tokens: int) -> list[int]:
        """Return the tokens without an incomplete last step. The rewritten step always remains.

        Args:
            max_new_tokens: the largest number of new tokens. A shorter continuation is complete.
        """
        if len(self.tokens) < max_new_tokens:
            return self.tokens
        return self.tokens[: max(self.last, self.first)]


class _Rollouts(NamedTuple):
    """Continuations from the beginning of one step, and their answers."""

    continued: list[_Continued]
    answers: list[Any]


@dataclass(frozen=True)
class _Sampler:
    """The settings of all continuations.

    Attributes:
        model: the model.
        steps: the text and its steps.
        n, question, max_new_tokens, seed: see `resampled`.
        read: a function from a text to its answer.
        write: a function that continues texts; see `interp.steps.writing`.
    """

    model: nn.Module
    steps: Steps
    n: int
    read: Callable[[str], Any]
    question: str
    max_new_tokens: int
    seed: int
    write: Write

    def rollouts(self, number: int) -> _Rollouts:
        """Return the continuations from the beginning of a step, and their answers.

        Args:
            number: the step; the number of steps for the continuations after the last step.
        """
        tokens = self.steps.tokens
        starts = [*(span.start for span in self.steps.spans), len(tokens)]
        before = tokens[: starts[number]]
        draws = generator(self.seed, "resampled", number)
        seeds = torch.randint(2**31, (2,), generator=draws).tolist()
        new = self.write([before] * self.n, max_new_tokens=self.max_new_tokens, seed=seeds[0])
        continued = [_Continued.of(self.model, row, self.steps.by) for row in new]
        if self.question:
            asked = tokens_of_text(self.model, self.question)
            prompts = []
            for row in continued:
                prompts.append([*before, *row.complete(self.max_new_tokens), *asked])
            replies = self.write(prompts, max_new_tokens=_REPLY, seed=seeds[1])
            texts = [text_of_tokens(self.model, reply) for reply in replies]
        else:
            answer_so_far = text_of_tokens(self.model, before[starts[self.steps.first_answer] :])
            texts = [answer_so_far + row.text for row in continued]
        return _Rollouts(continued, [self.read(text) for text in texts])


def _require_positive(**numbers: float) -> None:
    """Check that numbers are above 0.

    Raises:
        ValueError: if one is not. The error names the number.
    """
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0; got {shown(value)}")


def _require_answers(rollouts: Sequence[_Rollouts]) -> None:
    """Check that some continuation contains an answer.

    Raises:
        ValueError: if all answers are None.
    """
    answers = [*itertools.chain(*(of_step.answers for of_step in rollouts))]
    if all(answer is None for answer in answers):
        raise ValueError(
            f"answer must be in the text of a continuation; got None for all {len(answers)}: give "
            'a pattern such as answer="yes|no", a larger max_new_tokens, or a question'
        )


def _reader_of(answer: Answer, is_reply: bool) -> Callable[[str], Any]:
    """Return a function from a text to its answer.

    Args:
        answer: a regular expression, or a function from a text to its answer; see `resampled`.
        is_reply: whether the text is the reply to a question, whose first match is the answer. The
            last match of any other text is the answer.

    Raises:
        TypeError: if `answer` is neither a regular expression nor a function.
        ValueError: if the regular expression is wrong, or matches an empty text.
    """
    if not isinstance(answer, str):
        require_callable("answer", answer, ("text",), "lambda text: text.split()[-1]")
        return answer
    try:
        pattern = re.compile(answer)
    except re.error as error:
        raise ValueError(f"answer must be a regular expression; got {answer!r}: {error}") from None
    if pattern.fullmatch(""):
        raise ValueError(
            "answer must be a regular expression that does not match an empty text; got "
            f"{answer!r}: for example, use + instead of *"
        )

    def read(text: str) -> str | None:
        matches = [*pattern.finditer(text)]
        if not matches:
            return None
        match = matches[0 if is_reply else -1]
        return match[1] if pattern.groups else match[0]

    return read


def _same_meaning(
    runner: HookedRunner,
    steps: Steps,
    rollouts: Sequence[_Rollouts],
    similar: Callable[[str, str], bool] | None,
    threshold: float | None,
) -> tuple[Bool[Tensor, "step n"], float]:
    """Return whether each rewritten step means the same as the step, and the threshold.

    Args:
        runner: the runner of the model.
        steps: the text and its steps.
        rollouts: the continuations from the beginning of each step of the answer, and after it.
        similar: a function of a step and a rewritten step that returns whether both mean the same.
            Default: the cosine of their vectors is above the threshold.
        threshold: the cosine above which two steps mean the same. Default: the median.
    """
    rows = []
    for number, of_step in enumerate(rollouts[:-1], steps.first_answer):
        if similar is None:
            rewritten = [text.tokens[: text.first] for text in of_step.continued]
            rows.append(_cosines(runner, steps, number, rewritten))
        else:
            word = steps.words[number]
            are_same = [bool(similar(word, text.rewritten)) for text in of_step.continued]
            rows.append(torch.tensor(are_same))
    table = torch.stack(rows)
    if similar is not None:
        return table, math.nan
    threshold = float(table.nanmedian()) if threshold is None else threshold
    return table > threshold, threshold


def _cosines(
    runner: HookedRunner, steps: Steps, number: int, rewritten: Sequence[list[int]]
) -> Float[Tensor, " n"]:
    """Return the cosines between the vectors of a step and of the rewritten steps.

    The cosine is NaN for a rewritten step without tokens.

    Args:
        runner: the runner of the model.
        steps: the text and its steps.
        number: the step.
        rewritten: the tokens of the rewritten steps.
    """
    span = steps.spans[number]
    first = steps.tokens[0]
    # The vector of the first token of a text is large, so the mean leaves it out.
    rows = [[first, *tokens] for tokens in (steps.tokens[span.start : span.stop], *rewritten)]
    text = padded(rows, runner.model, range(len(rows)))
    layer = of(runner.model, "config").config.n_layers // 2
    name = f"blocks.{layer}.resid_post"
    require_one_vector(runner.points[name].axes, name)
    cache = runner.capture(text.tokens, names=name, **text.arguments(runner.model))
    values = at_least_float32(cache["resid_post", layer])[:, 1:]
    mask = text.real[:, 1:].to(values.device)
    sums = (values * mask[..., None]).sum(1)
    return torch.cosine_similarity(sums[:1], sums[1:], dim=1).where(mask[1:].any(1), math.nan).cpu()


def _table(
    steps: Steps,
    rollouts: Sequence[_Rollouts],
    same: Bool[Tensor, "step n"],
    *,
    smoothing: float,
    seed: int,
    about: Mapping[str, Any],
) -> Resampled:
    """Return the importances of all steps of the answer, with their intervals.

    Args:
        steps: the text and its steps.
        rollouts: the continuations from the beginning of each step of the answer, and after it.
        same: whether each rewritten step means the same as the step.
        smoothing: the number that is added to the count of each answer.
        seed: the seed of bootstrap draws.
        about: the facts of the result.
    """
    labels = range(steps.first_answer, len(steps))
    draws = np.random.default_rng(seed)
    numbers = torch.full((len(IMPORTANCES), len(labels), 3), math.nan)
    for place, (before, after) in enumerate(itertools.pairwise(rollouts)):
        is_different = (~same[place]).tolist()
        different = [*itertools.compress(before.answers, is_different)]
        for row, without in enumerate((before.answers, different)):
            if without:
                importance = _importance(without, after.answers, smoothing, draws)
                numbers[row, place] = torch.tensor(importance)
    effects = Result(
        numbers[..., :1],
        ("importance", "step", "example"),
        labels={"importance": IMPORTANCES, "step": labels},
        words={"step": [steps.words[number] for number in labels]},
        unit="nats",
        about=about,
    )
    rewritten = []
    for of_step in rollouts[:-1]:
        rewritten.append(tuple(text.rewritten for text in of_step.continued))
    return Resampled(
        effects,
        low=numbers[..., 1],
        high=numbers[..., 2],
        same=same.float().mean(1),
        rewritten=tuple(rewritten),
        without=tuple(tuple(of_step.answers) for of_step in rollouts[:-1]),
        after=tuple(tuple(of_step.answers) for of_step in rollouts[1:]),
    )


def _importance(
    without: Sequence[Any], after: Sequence[Any], smoothing: float, draws: np.random.Generator
) -> tuple[float, float, float]:
    """Return the divergence KL(without ‖ after) of answers in nats, and its bootstrap interval.

    Args:
        without, after: the answers without and with the step.
        smoothing: the number that is added to the count of each answer.
        draws: the generator of the bootstrap draws.
    """
    answers = [*dict.fromkeys([*without, *after])]
    counts = []
    for found in (without, after):
        of_answer = Counter(found)
        counts.append(np.array([of_answer[answer] for answer in answers]))
    effect = _divergence(counts[0], counts[1], smoothing)
    return float(effect), *_interval(counts, float(effect), smoothing, draws)


def _divergence(first: Any, second: Any, smoothing: float) -> Any:
    """Return the divergence KL(first ‖ second) of smoothed counts, along the last axis."""
    p, q = _smoothed(first, smoothing), _smoothed(second, smoothing)
    return (p * np.log(p / q)).sum(-1)


def _smoothed(counts: Any, smoothing: float) -> Any:
    """Return the probabilities of counts along the last axis."""
    return (counts + smoothing) / (counts + smoothing).sum(-1, keepdims=True)


def _interval(
    counts: Sequence[Any], effect: float, smoothing: float, draws: np.random.Generator
) -> tuple[float, float]:
    """Return the bootstrap interval of the divergence of two sets of answers; see `resampled`.

    Args:
        counts: the counts of both sets.
        effect: the divergence.
        smoothing: the number that is added to the count of each answer.
        draws: the generator of the bootstrap draws.
    """
    if len(counts[0]) == 1:
        counts = [np.append(count, 0) for count in counts]
    probs = [_smoothed(count, 1) for count in counts]
    sizes = [int(count.sum()) for count in counts]
    first, second = (
        draws.multinomial(size, prob, _DRAWS) for size, prob in zip(sizes, probs, strict=True)
    )
    drawn = _divergence(first, second, smoothing)
    source = _divergence(sizes[0] * probs[0], sizes[1] * probs[1], smoothing)
    low, high = np.quantile(drawn, [0.025, 0.975])
    low -= 2 * max(0, drawn.mean() - source)
    high -= 2 * max(0, drawn.mean() - effect)
    return min(max(0.0, float(low)), effect), max(float(high), effect)
