"""Distributed alignment search: find the part of a value that acts as a variable of a causal model.

Geiger et al. 2024, "Finding Alignments Between Interpretable Causal Variables and Distributed
Neural Representations".

1. Cache the values of the source texts at a point.
2. Run the base texts with a part of the value from their source texts. The right answer is the
   answer of the causal model on the base text, with the variable from the source text.
3. Learn the part by gradient descent. It is an orthonormal basis of k columns, or a mask of given
   features (De Cao et al. 2022). The mask has a number b for each feature, and its value is
   sigmoid(b / temperature). The temperature falls, and at the end the mask is 1 or 0: 1 where b is
   above 0.
4. Score the part on other pairs, and compare it with a random part, the same fit and score in a
   model with shuffled weights, the same fit to shuffled answers, and the whole value. Copies of a
   pair get the same shuffled answer, and count once in an interval. A search with enough freedom
   fits anything; the controls reveal this.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import progress_bar, seeded, shows_progress, without_gradients
from interp import plots
from interp.alignment.featurizers import Featurizer, neurons
from interp.alignment.fitting import Fit
from interp.alignment.runs import InterchangeRuns, Scores
from interp.features.places import warn_of_place
from interp.inputs.copies import numbered
from interp.json_form import Table, form
from interp.measuring import name_of, unit_of
from interp.numbers.intervals import interval_text
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.models import with_shuffled_weights
from interp.runs.runs import Runs
from interp.runs.sites import Choice, named


def counterfactual(
    causal: Callable[..., Mapping[str, Any]],
    base: Mapping[str, Any],
    source: Mapping[str, Any],
    *variables: str,
) -> Mapping[str, Any]:
    """Return the values of a causal model on a base input, with some variables from a source input.

    Args:
        causal: a function from inputs to values by name. The function also accepts each variable as
            a keyword, and then uses the given value of the variable.
        base, source: the inputs.
        variables: the names of the variables from the source.

    Returns:
        The value of each variable of the causal model, by name.

    >>> def add(a, b, first=None):
    ...     first = a if first is None else first
    ...     return {"first": first, "sum": first + b}
    >>> counterfactual(add, {"a": 1, "b": 2}, {"a": 5, "b": 7}, "first")
    {'first': 5, 'sum': 7}
    """
    values = causal(**source)
    return causal(**base, **{name: values[name] for name in variables})


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(plots.Shown):
    """Learned parts of values and their scores; the result of `align`.

    Attributes:
        featurizers: the learned parts, by point and position, for `edits.interchange`.
        accuracy: 1 if the answer of the interchanged run is right, otherwise 0, [control, point,
            pos, example] on the test pairs. The answer is the token with the largest logit, among
            all tokens or, if pairs have a right and a wrong answer, among these two.
        metric: the change of the pairs' metric, in its unit, with the same axes. `base` is the
            metric without an interchange.
        losses: the mean cross-entropy of each epoch, in nats, by point and position.

    >>> from hooks import HookPoint
    >>> class Copy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = nn.Embedding.from_pretrained(torch.eye(4))
    ...         self.point = HookPoint("batch pos d_model")
    ...
    ...     def forward(self, tokens):
    ...         return 10 * self.point(self.embed(tokens))
    >>> rows = torch.tensor([[a, b] for a in range(4) for b in range(4) if a != b])
    >>> pairs = Pairs(rows[:, :1], rows[:, 1:], rows[:, 0])
    >>> train, test = pairs[::2], pairs[1::2]
    >>> result = align(Copy().eval(), train, "point", k=3, test=test, epochs=30, rate=0.1)
    >>> result.featurizers
    {('point', -1): subspace, 3 of 3 features}
    >>> result.accuracy.select(control="aligned").mean()  # point, pos
    tensor([[1.]])
    """

    featurizers: Mapping[tuple[str, Any], Featurizer]
    accuracy: Result
    metric: Result
    losses: Mapping[tuple[str, Any], tuple[float, ...]]

    is_plot = True

    def as_json(self) -> dict[str, Any]:
        """Return the accuracy, the metric and the losses, in the JSON form of all results; see
        `interp.json_form`.
        """
        labels = {"place": [f"{point}, pos {pos}" for point, pos in self.featurizers]}
        parts = [repr(part) for part in self.featurizers.values()]
        losses = Table([*self.losses.values()], "place epoch", "nats", labels)
        tables = {
            **self.accuracy.tables("accuracy"),
            **self.metric.tables("metric"),
            "losses": losses,
            "part": Table(parts, "place", labels=labels),
        }
        return form("Alignment", tables, self.accuracy.about)

    def view(self) -> plots.View:
        """Return a view of the accuracies."""
        return plots.effects(self.accuracy)

    def __repr__(self) -> str:
        """Return the accuracy of each control with its interval, for up to 12 places."""
        interval = self.accuracy.interval()
        columns = (interval.low, interval.high, self.accuracy.mean())
        lines = [f"Alignment, accuracy on {self.accuracy.values.shape[-1]} other pairs"]
        for n, (point, pos) in enumerate([*self.featurizers][:12]):
            lines.append(f"  {point}, pos {pos}: {self.featurizers[point, pos]}")
            of_place = (column.flatten(1)[:, n].tolist() for column in columns)
            for control, low, high, value in zip(_CONTROLS, *of_place, strict=True):
                lines.append(f"    {control:<17} {value:.3f}{interval_text(low, high, '.3f')}")
        return "\n".join(lines)


@shows_progress
@without_gradients
def align(
    model: nn.Module,
    pairs: Pairs,
    site: str = "resid_post",
    k: int = 32,
    *,
    test: Pairs,
    pos: int | str | Sequence[int | str] = -1,
    layers: int | Sequence[int] | None = None,
    head: int | None = None,
    direction: PatchingDirection = "denoising",
    features: Featurizer | None = None,
    sparsity: float = 0.0,
    epochs: int = 3,
    rate: float = 1e-2,
    batch: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> Alignment:
    """Return the part of a value that determines the answers of pairs, with scores and controls.

    The part is an orthonormal basis of `k` columns, learned by gradient descent (distributed
    alignment search; Geiger et al. 2024). The corrupted text is run with the part from the clean
    text. The run should predict `answers`, the answers of the causal model with the variable from
    the clean text. Such an answer may differ from the answers of both texts.

    By default, the part of the clean run replaces the part of the corrupted run
    (`direction="denoising"`), which shows the parts that restore the answer. Analyses of circuits
    do the reverse by default.

    Args:
        model: any model with hook points, in evaluation mode. Its weights do not change.
        pairs: the training pairs. They need answers: the right token, or the right and the wrong
            token.
        site: the last part of the names of points in all layers, or the name of one point.
        k: the number of columns. Default: 32.
        test: other pairs, for the scores.
        pos: a position, the name of a span of the pairs, or a list of them. Each position has a
            separate fit. Default: the last position.
        layers: a layer or several layers. Default: all layers.
        head: the head, if the point has heads.
        direction: `denoising` runs the corrupted text; `noising` runs the clean text with the part
            from the corrupted text.
        features: features of the value; see `alignment.featurizers`. The part is then a learned
            mask of these features, and `k` is ignored. Default: the part is `k` columns.
        sparsity: the cost of a mask with all features, in nats. The cost of a smaller mask is
            proportional to its share of the features. Default: 0.
        epochs, rate, batch: the number of epochs, the learning rate and the batch size of Adam.
        seed: the seed of the initial columns, of the order of the pairs and of the controls.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The learned part of each point and position, and two results [control, point, pos, example]
        on the test pairs: the accuracy, from 0 to 1, and the change of the pairs' metric in its
        unit. The first control, `aligned`, is the learned part. The other controls are a
        `random` part, the same search in a model with `shuffled weights` (fitted and scored there),
        a part that was fitted to `shuffled answers`, and the `whole` value.

    Raises:
        ValueError: if pairs have no answers or corrupted texts, if k is below 1 or above the size
            of the value, if a pair is in both `pairs` and `test`, if a point does not have a vector
            at each position, or if it has heads and `head` is missing.
        UnknownNameError: if the site or the span is unknown. The error contains close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if `features` are the features of a dictionary that was trained at another
            point.

    This model adds two numbers a and b, modulo 3. The columns should find a, so the right answer is
    a of the clean text plus b of the corrupted text.

    >>> from itertools import product
    >>> from hooks import HookPoint
    >>> class Sum(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = nn.Embedding.from_pretrained(torch.eye(3))
    ...         self.numbers = HookPoint("batch pos d_model")
    ...
    ...     def forward(self, tokens):
    ...         one_hot = self.embed(tokens).flatten(1)
    ...         a, b = self.numbers(torch.stack([one_hot, one_hot], 1)).split(3, -1)
    ...         reversed_b = b.flip(-1)
    ...         sums = [(a * reversed_b.roll(total + 1, -1)).sum(-1) for total in range(3)]
    ...         return 10 * torch.stack(sums, -1)
    >>> rows = torch.tensor([row for row in product(range(3), repeat=4) if row[0] != row[2]])
    >>> rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    >>> clean, corrupted = rows[:, :2], rows[:, 2:]
    >>> pairs = Pairs(clean, corrupted, (clean[:, 0] + corrupted[:, 1]) % 3)
    >>> model = Sum().eval()
    >>> result = align(model, pairs[:40], "numbers", k=3, test=pairs[40:], epochs=6, rate=0.1)
    >>> result.accuracy.select(control="aligned").mean()  # point, pos
    tensor([[1.]])
    >>> result.accuracy.select(control="random").mean() < 0.7
    tensor([[True]])
    """
    fitted = Runs(model, pairs, direction)
    tested = Runs(model, test, direction)
    _require_answers(fitted.pairs, tested.pairs)
    points = [*named(fitted.runner, Choice(site, ("layer",), layers)).values()]
    positions = [pos] if isinstance(pos, int | str) else [*pos]
    learn = Fit(
        k=k,
        features=features,
        sparsity=sparsity,
        epochs=epochs,
        rate=rate,
        batch=batch,
        seed=seed,
    )
    if learn.features is not None:
        warn_of_place(fitted.runner, *((learn.features.place, name) for name in points))
    places = _Places(fitted=fitted, tested=tested, learn=learn)
    scores: list[Scores] = []
    learned: dict[tuple[str, Any], Featurizer] = {}
    losses: dict[tuple[str, Any], tuple[float, ...]] = {}
    n_steps = 3 * len(points) * len(positions) * learn.steps(len(fitted.pairs))
    with progress_bar("steps of the fits", total=n_steps) as count:
        for name, position in product(points, positions):
            place = places.at(name, position, head=head, count=count)
            part, losses[name, position] = learn(place.train, count)
            learned[name, position] = part
            scores += [control(place, part) for control in _CONTROLS.values()]
    labels: dict[str, Sequence[Any]] = {"control": [*_CONTROLS], "point": points, "pos": positions}
    about = {"site": site, "direction": direction, "metric": name_of(tested.metric), "k": k}
    accuracy, metric = _results(scores, labels, about=about, tested=tested, base=place.test.base)
    return Alignment(featurizers=learned, accuracy=accuracy, metric=metric, losses=losses)


def _results(
    scores: Sequence[Scores],
    labels: Mapping[str, Sequence[Any]],
    about: Mapping[str, Any],
    tested: Runs,
    base: Tensor | None,
) -> tuple[Result, Result]:
    """Return the accuracy, and the change of the metric, [control, point, pos, example].

    Args:
        scores: the scores, ordered by point, then by position, then by control.
        labels: the labels of the axes.
        about: facts about the alignment.
        tested: the runs of the test pairs.
        base: the metric of the test pairs without an interchange.
    """
    accuracy = Result(
        _by_label([score.right for score in scores], labels),
        (*labels, "example"),
        labels=labels,
        unit="accuracy",
        about=about,
        bounds=(0.0, 1.0),
        groups=tested.groups,
    )
    metric = replace(
        accuracy,
        values=_by_label([score.effect for score in scores], labels),
        base=base,
        unit=unit_of(tested.metric),
        bounds=None,
    )
    return accuracy, metric


def _by_label(
    scores: Sequence[Float[Tensor, " example"]], labels: Mapping[str, Sequence[Any]]
) -> Float[Tensor, "control point pos example"]:
    """Return scores as a tensor with the axis `control` first.

    The scores are ordered by point, then by position, then by control.
    """
    n_controls, n_points, n_positions = map(len, labels.values())
    by_place = torch.stack([*scores]).view(n_points, n_positions, n_controls, -1)
    return by_place.movedim(2, 0)


@dataclass(frozen=True)
class _Place:
    """Training and test pairs at one point and position, and the settings of the fits.

    Attributes:
        train, test: the pairs.
        shuffled_train, shuffled_test: the same pairs, run on the model with shuffled weights.
        drawn_train: the training pairs, each with the answer of a random training pair.
        learn: the settings.
        count: a function to call after each step of a fit.
    """

    train: InterchangeRuns
    test: InterchangeRuns
    shuffled_train: InterchangeRuns
    shuffled_test: InterchangeRuns
    drawn_train: InterchangeRuns
    learn: Fit
    count: Callable[[], object]


class _Places:
    """A factory that makes a `_Place` for a point and a position. All places share the same runs.

    Args:
        fitted, tested: runs of the training and the test pairs.
        learn: the settings of the fits.
    """

    def __init__(self, fitted: Runs, tested: Runs, learn: Fit) -> None:
        shuffled = with_shuffled_weights(fitted.model, learn.seed)
        self._fitted = fitted
        self._tested = tested
        self._shuffled_fitted, self._shuffled_tested = (
            Runs(shuffled, runs.pairs, runs.direction) for runs in (fitted, tested)
        )
        drawn_pairs = fitted.pairs.with_answers_of(_drawn(fitted.pairs, learn.seed))
        self._drawn_fitted = Runs(fitted.model, drawn_pairs, fitted.direction)
        self._learn = learn

    def at(
        self, point: str, pos: int | str, head: int | None, count: Callable[[], object]
    ) -> _Place:
        """Return the place at a point and a position, for one head if the point has heads.

        Args:
            point: the name of the point.
            pos: the position, or the name of a span.
            head: the head, if the point has heads.
            count: a function to call after each step of a fit.
        """

        def runs_at(runs: Runs) -> InterchangeRuns:
            return InterchangeRuns(
                runs=runs, name=point, pos=pos, head=head, batch=self._learn.batch
            )

        return _Place(
            train=runs_at(self._fitted),
            test=runs_at(self._tested),
            shuffled_train=runs_at(self._shuffled_fitted),
            shuffled_test=runs_at(self._shuffled_tested),
            drawn_train=runs_at(self._drawn_fitted),
            learn=self._learn,
            count=count,
        )


# A control takes a place and the learned part, and returns the scores of some part at this place.


def _aligned(place: _Place, learned: Featurizer) -> Scores:
    """Score the learned part."""
    return place.test.scores(learned)


def _random(place: _Place, learned: Featurizer) -> Scores:
    """Score the same number of random columns or features."""
    return place.test.scores(place.learn.random(place.train.size, learned))


def _shuffled_weights(place: _Place, learned: Featurizer) -> Scores:
    """Fit and score the part on a model with shuffled weights.

    This control is weak if the model computes most of its output in code without parameters.
    """
    part, _ = place.learn(place.shuffled_train, place.count)
    return place.shuffled_test.scores(part)


def _shuffled_answers(place: _Place, learned: Featurizer) -> Scores:
    """Fit a part to training pairs that have the answers of other pairs, and score it on the test
    pairs with their true answers.
    """
    part, _ = place.learn(place.drawn_train, place.count)
    return place.test.scores(part)


def _whole(place: _Place, learned: Featurizer) -> Scores:
    """Score the whole value.

    This score is the ceiling if the right answer is the answer of the clean text.
    If the right answer is not the answer of either text, a part can have a higher score than the
    whole value.
    """
    return place.test.scores(neurons(place.train.size))


_CONTROLS: Mapping[str, Callable[[_Place, Featurizer], Scores]] = {
    "aligned": _aligned,
    "random": _random,
    "shuffled weights": _shuffled_weights,
    "shuffled answers": _shuffled_answers,
    "whole": _whole,
}


def _require_answers(pairs: Pairs, test: Pairs) -> None:
    """Check that training and test pairs have answers, and that no pair is in both."""
    for kind in (pairs, test):
        if kind.answers is None and kind.continuations is None:
            raise ValueError("pairs and test must have answers to align; got none")
    if both := {*pairs.digests()} & {*test.digests()}:
        raise ValueError(
            f"test pairs must differ from the training pairs; got {len(both)} pairs in both"
        )


def _drawn(pairs: Pairs, seed: int) -> Int[Tensor, " pair"]:
    """Return, for each pair, the index of the random pair whose answer it gets.

    Copies of a pair get the answer of the same pair.
    """
    texts = numbered(pairs.digests())
    first_row = {text: row for row, text in reversed([*enumerate(texts)])}
    order = torch.randperm(len(first_row), generator=seeded(seed))
    donors = torch.tensor([first_row[text] for text in range(len(first_row))])[order]
    return donors[texts]
