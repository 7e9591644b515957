"""Score an explanation of a feature by asking a judge, such as another language model.

The two tests are detection and fuzzing (Paulo et al. 2024, "Automatically Interpreting Millions of
Features in Large Language Models", arXiv 2410.13928).

1. Run the model on the texts, and cut each text into contexts (`_contexts`).
2. Draw contexts where the feature is active; random contexts where it is not; and near contexts,
   where it is not active, but a feature with a similar decoder row is (`_drawn`).
3. Detection shows a context, and asks whether the feature is active in it. Fuzzing marks the tokens
   where the feature is active, and asks whether the marks fit. In random contexts, fuzzing marks
   random tokens; in near contexts, it marks the tokens of the similar feature (`_questions`).
4. The score is the balanced accuracy: the mean of the share of active contexts that the judge
   accepts, and the share of other contexts that it rejects. A judge that guesses has a score of
   0.5.
5. Ask the same questions with the explanation of another feature, and with no explanation. An
   explanation is informative only if its score is higher than both of these scores.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    Texts,
    progress_of,
    require_integer,
    require_kind,
    shows_progress,
    without_gradients,
    writer_of,
)
from hooks.shared import with_parts
from interp.features.cards import nearest_features, require_features, rows_of
from interp.features.splicing import Dictionaries, placed
from interp.inputs.copies import unseen
from interp.inputs.texts import batches
from interp.json_form import columns, form
from interp.numbers.intervals import share_interval
from interp.protocol import runner_of

Judge = Callable[[str], str | float]
"""A function from a prompt to an answer: a text that begins with yes or no, or the probability of
yes."""

_Test = Literal["detection", "fuzzing"]
_Kind = Literal["active", "random", "near"]
_Whose = Literal["given", "another feature's", "none"]
_TESTS: tuple[_Test, ...] = ("detection", "fuzzing")
# In fuzzing, a token is marked if the feature has at least this share of its largest value in the
# context.
_MARKED = 0.3
_ANSWER = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class JudgedExample:
    """A question and the answer of the judge.

    Attributes:
        test: `detection` or `fuzzing`.
        kind: the kind of context: `active`, `random` or `near`.
        whose: the explanation in the prompt: `given`, `another feature's` or `none`.
        prompt: the whole prompt.
        reply: the answer of the judge.
        says: True for yes, False for no, None if the answer is neither. An answer that is neither
            counts as wrong.

    >>> answer = JudgedExample("detection", "random", "given", "Is a digit here? cat", "yes", True)
    >>> answer.is_right  # the feature is not active here
    False
    """

    test: _Test
    kind: _Kind
    whose: _Whose
    prompt: str
    reply: str | float
    says: bool | None

    @property
    def is_right(self) -> bool:
        """Whether the answer is yes for an active context, or no for another context."""
        return self.says is (self.kind == "active")


class BalancedAccuracy(NamedTuple):
    """The share of right answers, as a mean over active and other contexts.

    Attributes:
        value: the balanced accuracy, between 0 and 1; NaN if there are no contexts of a kind.
        low, high: the ends of its 95% interval over contexts; NaN for fewer than three contexts of
            a kind.
        n_active, n_other: the number of contexts where the feature is active, and of others.

    >>> answers = [
    ...     JudgedExample("fuzzing", kind, "given", "?", "", says)
    ...     for kind, says in [("active", True)] * 4 + [("random", False)] * 3 + [("random", True)]
    ... ]
    >>> share = ExplanationScore(7, "digits", "commas", answers).of("fuzzing", "random")
    >>> share.value  # all 4 active contexts and 3 of 4 random contexts are judged rightly
    0.875
    """

    value: float
    low: float
    high: float
    n_active: int
    n_other: int


@dataclass(frozen=True)
class ExplanationScore:
    """The scores of an explanation, returned by `score_explanation`.

    Attributes:
        feature: the index of the feature.
        says: the explanation.
        another: the explanation of another feature, which is the control.
        answers: all questions and answers.

    >>> answers = [
    ...     JudgedExample("detection", kind, "given", "?", "yes", True)
    ...     for kind in ("active", "active", "active", "random", "random", "random")
    ... ]
    >>> score = ExplanationScore(7, "digits", "commas", answers)
    >>> score.of("detection", "random").value  # a judge that always says yes
    0.5
    """

    feature: int
    says: str
    another: str
    answers: Sequence[JudgedExample]

    def of(
        self,
        test: _Test,
        against: Literal["random", "near"] = "random",
        whose: _Whose = "given",
    ) -> BalancedAccuracy:
        """Return the balanced accuracy of one test.

        The interval joins the intervals of the two shares (Wilson's, and then the method of
        Zou and Donner 2008, which needs no normal distribution).

        Args:
            test: `detection` or `fuzzing`.
            against: the kind of the other contexts: `random` or `near`. Default: `random`.
            whose: the explanation: `given`, `another feature's` or `none`. Default: `given`.
        """
        shares, lows, highs, counts = [], [], [], []
        for kind in ("active", against):
            right = [
                answer.is_right
                for answer in self.answers
                if (answer.test, answer.kind, answer.whose) == (test, kind, whose)
            ]
            ends = share_interval(torch.tensor([right], dtype=torch.float64), (0.0, 1.0))
            shares.append(sum(right) / len(right) if right else math.nan)
            lows.append(ends.low.item() if right else math.nan)
            highs.append(ends.high.item() if right else math.nan)
            counts.append(len(right))
        value = sum(shares) / 2
        below = math.dist(shares, lows) / 2
        above = math.dist(shares, highs) / 2
        return BalancedAccuracy(value, value - below, value + above, *counts)

    @property
    def unclear(self) -> int:
        """The number of answers that are neither yes nor no."""
        return sum(answer.says is None for answer in self.answers)

    def _rows(self) -> list[tuple[_Test, Literal["random", "near"], _Whose, BalancedAccuracy]]:
        """Return all scores with their test, other contexts and explanation."""
        against: tuple[Literal["random", "near"], ...] = ("random", "near")
        whose: tuple[_Whose, ...] = ("given", "another feature's", "none")
        product = itertools.product(_TESTS, against, whose)
        return [(*row, self.of(*row)) for row in product]

    def as_json(self) -> dict[str, Any]:
        """Return the scores and all answers, in the JSON form of all results; see
        `interp.json_form`.

        Each row of `score` is a test with the kind of the other contexts and the explanation.
        """
        rows = self._rows()
        labels = [f"{test}, {against}, {whose}" for test, against, whose, _ in rows]
        scores = [score for *_, score in rows]
        names = " ".join(BalancedAccuracy._fields)
        units = dict.fromkeys(("value", "low", "high"), "balanced accuracy")
        units |= dict.fromkeys(("n_active", "n_other"), "contexts")
        fields = "test kind whose prompt reply says is_right"
        tables = columns("score", scores, names, units, labels)
        tables |= columns("answer", self.answers, fields)
        about = {"feature": self.feature, "says": self.says, "another": self.another}
        return form("ExplanationScore", tables, about)

    def __repr__(self) -> str:
        another = "another feature's"
        lines = [
            f"feature {self.feature}: {self.says!r:.80}",
            "balanced accuracy of the judge, 0.5 for guessing [95% interval over contexts]",
            f"{'explanation:':22}{'this':24}{another:24}none",
        ]
        for (test, against), row in itertools.groupby(self._rows(), key=lambda row: row[:2]):
            cells = [f"{score.value:.2f} [{score.low:.2f}, {score.high:.2f}]" for *_, score in row]
            scores = "".join(f"{cell:24}" for cell in cells)
            lines.append(f"{f'{test}, {against}':22}{scores}".rstrip())
        counts = (self.of("detection", "random"), self.of("detection", "near"))
        lines.append(
            f"contexts: {counts[0].n_active} active, {counts[0].n_other} random, "
            f"{counts[1].n_other} near; {self.unclear} of {len(self.answers)} answers are unclear"
        )
        return "\n".join(lines)


class _Context(NamedTuple):
    """A piece of a text.

    Attributes:
        words: its tokens as text.
        values: the values of the features at its tokens, [pos feature].
    """

    words: list[str]
    values: Tensor


@shows_progress
@without_gradients
def score_explanation(
    model: nn.Module,
    dictionary: "Dictionaries",
    feature: int,
    says: str,
    texts: "Texts",
    judge: Judge,
    *,
    another: str | None = None,
    reads: str | None = None,
    n: int = 20,
    context: int = 32,
    near: int = 10,
    batch: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> ExplanationScore:
    """Score an explanation of a feature by the answers of a judge.

    Args:
        model: any model in evaluation mode.
        dictionary, reads: a single dictionary, and the point that it reads; see `splice`.
        feature: the index of the feature.
        says: the explanation.
        texts: the texts from which contexts are drawn. Copies of a text are read once.
        judge: a function that gets a prompt and returns a text that begins with yes or no, or the
            probability of yes. It is called for every question. This package sends nothing
            anywhere: the function decides which model answers.
        another: the explanation of another feature, as a control. Default: the tokens where a
            random other feature is largest.
        n: the largest number of contexts of each kind. There are 18 questions for each n.
            Default: 20.
        context: the number of tokens in a context. Default: 32.
        near: the number of features with the most similar decoder rows, for near contexts.
            Default: 10.
        batch: the number of texts in a batch. Default: 16.
        seed: the seed of all draws. Default: 0.
        progress: whether to show a bar or, outside a terminal, lines of progress. Default: True.

    Returns:
        The balanced accuracy of detection and fuzzing against random and near contexts, for this
        explanation, another one and none, with every prompt and answer.

    Raises:
        ValueError: if there are several dictionaries, the feature does not exist or is active in no
            context, or a probability is not between 0 and 1.
        TypeError: if the judge returns neither a text nor a number.
        UnknownNameError, HookError, ModeError: for the same reasons as in `splice`.

    >>> from interp.features import load_sae
    >>> from models import load
    >>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
    >>> texts = ["def f(x): return x", "part KV8 of 3", "class A: pass", "x = f(x) + 1"]
    >>> def judge(prompt):  # it says yes if the text contains an x
    ...     return "yes" if "x" in prompt.split("Text:")[1] else "no"
    >>> score = score_explanation(model, sae, 332, "the letter x", texts, judge, context=8)
    >>> score.of("detection").value
    0.875
    """
    part, point = _single(model, dictionary, reads)
    require_features([feature], part.dictionary.n_features)
    for name, number in (("n", n), ("context", context)):
        require_integer(name, number)
    require_kind("says", says, kind=str, words="a text", call="'digits after KV8' is one")
    similar = [index for index, _ in nearest_features(part.dictionary.W_dec, feature, near)]
    draws = np.random.default_rng(seed)
    others = [n for n in range(part.dictionary.n_features) if n not in (feature, *similar)]
    other_features = draws.permutation(others)[:64].tolist()
    features = [feature, *similar, *other_features]
    contexts = _contexts(model, {point: part}, texts, features, size=context, batch=batch)
    kinds = _drawn(contexts, n_similar=len(similar), n=n, draws=draws)
    if not kinds["active"]:
        raise ValueError(
            f"feature must be active in a context of the texts; feature {feature} is active in "
            f"none of {len(contexts)}"
        )
    if another is None:
        another = _tokens_of_another(contexts, first=1 + len(similar))
    questions = [*_questions(kinds, says, another, n_similar=len(similar), draws=draws)]
    answers = []
    for test, kind, whose, prompt in progress_of(questions, "questions", len(questions)):
        reply, meaning = _understood(judge(prompt))
        answers.append(JudgedExample(test, kind, whose, prompt, reply, meaning))
    return ExplanationScore(feature, says, another, answers)


def _single(model: nn.Module, dictionary: "Dictionaries", reads: str | None) -> tuple[Any, str]:
    """Return the only dictionary, as a part of the model, and the point that it reads.

    Raises:
        ValueError: if there are several dictionaries.
    """
    parts = placed(runner_of(model), dictionary, error="live", reads=reads)
    if len(parts) != 1:
        raise ValueError(
            f"score_explanation needs a single dictionary; got {len(parts)}; choose one by its "
            f"point, such as dictionary[{next(iter(parts), None)!r}]"
        )
    ((point, part),) = parts.items()
    return part, point


def _contexts(
    model: nn.Module,
    parts: Mapping[str, Any],
    texts: "Texts",
    features: Sequence[int],
    size: int,
    batch: int,
) -> list[_Context]:
    """Return different contexts of the texts, with the values of the features.

    The model reads whole texts, so a feature can depend on tokens before its context.
    """
    (point,) = parts
    write = writer_of(model) or (lambda tokens: [f"{token} " for token in tokens])
    seen: set[str] = set()
    contexts: dict[str, _Context] = {}
    with with_parts(model, runner_of(model).points, parts):
        runner = HookedRunner(model)
        name = f"{point}.features"
        for _, text in batches(texts, model, batch):
            cache = runner.capture(text.tokens, names=name, **text.arguments(model))
            values = cache[name][..., [*features]].float()
            for row in rows_of(text, values, counts=text.real, is_new=unseen(text, seen)):
                words = [*write(row.tokens)] if row.is_new else []
                for start in range(0, len(words), size):
                    inside = slice(start, start + size)
                    piece = _Context(words[inside], row.values[inside])
                    contexts.setdefault("".join(piece.words), piece)
    return [*contexts.values()]


def _drawn(
    contexts: Sequence[_Context], n_similar: int, n: int, draws: np.random.Generator
) -> dict[_Kind, list[_Context]]:
    """Return at most `n` contexts of each kind.

    Args:
        contexts: the contexts. Column 0 of their values is the feature, and the next `n_similar`
            columns are the similar features.
        n_similar: the number of similar features.
        n: the number of contexts of each kind.
        draws: the source of random numbers.
    """
    kinds: dict[_Kind, list[_Context]] = {"active": [], "random": [], "near": []}
    for number in draws.permutation(len(contexts)).tolist():
        context = contexts[number]
        is_near = bool((context.values[:, 1 : 1 + n_similar] > 0).any())
        if (context.values[:, 0] > 0).any():
            kinds["active"].append(context)
        elif is_near and len(kinds["near"]) <= len(kinds["random"]):
            kinds["near"].append(context)
        else:
            kinds["random"].append(context)
    return {kind: members[:n] for kind, members in kinds.items()}


def _tokens_of_another(contexts: Sequence[_Context], first: int) -> str:
    """Return an explanation of another feature: the tokens where it is largest.

    Args:
        contexts: the contexts.
        first: the first column of random features.
    """
    largest = torch.stack([context.values.amax(0) for context in contexts]).amax(0)
    active = [*range(first, len(largest))]
    column = max(active, key=lambda column: (float(largest[column]) > 0, -column), default=0)
    values = torch.cat([context.values[:, column] for context in contexts])
    words = [word for context in contexts for word in context.words]
    order = values.argsort(descending=True).tolist()
    different = dict.fromkeys(words[number] for number in order if values[number] > 0)
    tokens = ", ".join(repr(word) for word in [*different][:5])
    return f"the tokens {tokens}" if tokens else "no token"


def _questions(
    kinds: Mapping[_Kind, Sequence[_Context]],
    says: str,
    another: str,
    n_similar: int,
    draws: np.random.Generator,
) -> "list[tuple[_Test, _Kind, _Whose, str]]":
    """Return all questions: the test, the kind of context, the explanation and the prompt.

    Args:
        kinds: the contexts of each kind.
        says, another: the explanation, and the explanation of another feature.
        n_similar: the number of similar features.
        draws: the source of random numbers.
    """
    explanations: list[tuple[_Whose, str]] = [
        ("given", says),
        ("another feature's", another),
        ("none", ""),
    ]
    counts = [int(_is_marked(context.values[:, 0]).sum()) for context in kinds["active"]]
    typical = max(1, round(sum(counts) / len(counts)))
    questions: list[tuple[_Test, _Kind, _Whose, str]] = []
    for kind, contexts in kinds.items():
        for context in contexts:
            if kind == "active":
                marked = _is_marked(context.values[:, 0])
            elif kind == "near":
                similar = context.values[:, 1 : 1 + n_similar]
                marked = _is_marked(similar[:, int(similar.amax(0).argmax())])
            else:
                size = len(context.words)
                chosen = draws.choice(size, min(typical, size), replace=False)
                marked = torch.zeros(size, dtype=torch.bool)
                marked[torch.from_numpy(chosen)] = True
            plain = "".join(context.words)
            with_marks = "".join(
                f"<<{word}>>" if is_marked else word
                for word, is_marked in zip(context.words, marked.tolist(), strict=True)
            )
            for whose, explanation in explanations:
                questions.append(("detection", kind, whose, _asks_text(explanation, plain)))
                questions.append(("fuzzing", kind, whose, _asks_marks(explanation, with_marks)))
    return questions


def _is_marked(values: Tensor) -> Tensor:
    """Return True at the tokens that fuzzing marks."""
    return values >= _MARKED * values.max()


def _about(explanation: str) -> str:
    """Return the first lines of each prompt."""
    known = f"Explanation of the feature: {explanation}" if explanation else "It is not explained."
    return f"A feature of a language model is active at some tokens of some texts.\n{known}\n"


def _asks_text(explanation: str, text: str) -> str:
    """Return the prompt of detection."""
    return (
        f"{_about(explanation)}Is the feature active in the following text? Answer yes or no.\n\n"
        f"Text: {text}\n\nAnswer:"
    )


def _asks_marks(explanation: str, text: str) -> str:
    """Return the prompt of fuzzing."""
    return (
        f"{_about(explanation)}In the following text, some tokens stand between << and >>. Is the "
        f"feature active at these tokens? Answer yes or no.\n\nText: {text}\n\nAnswer:"
    )


def _understood(reply: Any) -> tuple[str | float, bool | None]:
    """Return a reply as a text or a float, and its meaning.

    The meaning is True for yes, False for no, and None for a text that is neither.

    Raises:
        ValueError: if a probability is not between 0 and 1.
        TypeError: if the reply is neither a text nor a number.
    """
    if isinstance(reply, str):
        matched = _ANSWER.match(reply)
        return reply, None if matched is None else matched[1].lower() == "yes"
    try:
        probability = float(reply)
    except (TypeError, ValueError):
        raise TypeError(
            "judge must return a text that begins with yes or no, or the probability of yes; got "
            f"{type(reply).__name__}"
        ) from None
    if not 0 <= probability <= 1:
        raise ValueError(f"judge must return a probability between 0 and 1; got {probability:g}")
    return probability, probability > 0.5
