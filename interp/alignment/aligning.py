"""Distributed alignment search: the part of a value whose interchange does what a variable of a causal model does.

Geiger et al. 2024, "Finding Alignments Between Interpretable Causal Variables and Distributed Neural Representations".

1. Keep the values of the source texts at a point.
2. Run the base texts with a part of the value taken from their source, and ask for the answers that the causal model gives
   when the variable is taken from the source.
3. Learn the part by gradients: an orthonormal basis of k columns; or, of given features, a mask (De Cao et al. 2022; the
   sigmoid of a boundary sharpens with a falling temperature, and in the end a feature is in or out).
4. Score it on other pairs, beside a part drawn at random, the same fit on a model with shuffled weights, the same fit to
   shuffled answers, and the whole value. Copies of a pair get the same shuffled answer, and count
   once in an interval. A search that is free enough fits anything, and the controls show it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks.base import Words, progress_bar, shows_progress, without_gradients
from interp import pictures
from interp.alignment.featurizers import Featurizer, neurons
from interp.alignment.fitting import Fit
from interp.alignment.runs import InterchangeRuns, Scores
from interp.features.places import warn_of_place
from interp.inputs.copies import numbered
from interp.numbers.intervals import interval_text
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.runs import Runs
from interp.runs.sites import Choice, named


def counterfactual(
    causal: Callable[..., Mapping[str, Any]],
    base: Mapping[str, Any],
    source: Mapping[str, Any],
    *variables: str,
) -> Mapping[str, Any]:
    """The values of a causal model on a base input, with some variables as they are on a source input.

    Args:
        causal: a function from inputs to values by name. It takes each of its variables by name too, and then uses that value.
        base, source: inputs.
        variables: the names of those that come from the source.
    """
    values = causal(**source)
    return causal(**base, **{name: values[name] for name in variables})


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(pictures.Shown):
    """Learned parts of values and their scores; made by `align`.

    Attributes:
        featurizers: by point and position; `edits.interchange` takes them.
        accuracy: 1 where the interchanged run gives the right answer, [control, point, pos, example] of the test pairs.
        metric: the change of the pairs' metric, in its unit, of the same axes. `base` is that of the run without interchange.
        losses: of each epoch, by point and position: the mean cross-entropy, in nats.
    """

    featurizers: Mapping[tuple[str, Any], Featurizer]
    accuracy: Result
    metric: Result
    losses: Mapping[tuple[str, Any], tuple[float, ...]]

    is_plot = True

    def view(self) -> pictures.View:
        """The accuracies."""
        return pictures.effects(self.accuracy)

    def __repr__(self) -> str:
        ends, mean = self.accuracy.interval(), self.accuracy.mean()
        lines = [f"Alignment, accuracy on {self.accuracy.values.shape[-1]} other pairs"]
        for n, (point, pos) in enumerate([*self.featurizers][:12]):
            lines.append(f"  {point}, pos {pos}: {self.featurizers[point, pos]}")
            for control, low, high, value in zip(
                _CONTROLS,
                *(x.flatten(1)[:, n].tolist() for x in (ends.low, ends.high, mean)),
                strict=True,
            ):
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
    progress: bool = True,
    **fit: Any,
) -> Alignment:
    """Learn which part of a value carries what the answers of pairs depend on, and score it with controls.

    The corrupted text is run, with the part taken from the clean one, and should give `answers`: those of the causal model
    with the variable taken from the clean text, which may be the answer of neither text.

    Args:
        model: any model with hook points, in evaluation mode. Its weights do not change.
        pairs: what is fitted on. Answers are needed: the right token, or the right and the wrong one.
        site: the last part of points of all layers, or the name of one point.
        k: the number of columns.
        test: other pairs, for the scores.
        pos: a position, or the name of a span of the pairs; or several, each with a fit of its own.
        layers: only this one or these.
        head: which head, where the point has heads.
        direction: `noising` runs the clean text, with the part taken from the corrupted one.
        fit: how the part is learned, such as `epochs=6`, or `features` to learn a mask of; see `Fit`.
        progress: whether to show a bar after two seconds.

    Raises:
        ValueError: if pairs have no answers or corrupted texts, k does not fit, a pair is in both, or a point has other axes.
        UnknownNameError: if there is no such site or span; it has close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if `features` are of a dictionary that was trained at another point.
    """
    fitted, tested = (Runs(model, each, direction) for each in (pairs, test))
    answers = _answers(fitted.pairs, tested.pairs)
    points = [*named(fitted.runner, Choice(site, ("layer",), layers)).values()]
    positions = [pos] if isinstance(pos, int | str) else [*pos]
    Words(Fit).require(fit, ("test", "pos", "layers", "head", "direction", "progress"), "align")
    learn = Fit(k, **fit)
    if learn.features is not None:
        warn_of_place(fitted.runner, *((learn.features.place, name) for name in points))
    places = _Places(fitted, tested, answers, learn)
    scores: list[Scores] = []
    learned: dict[tuple[str, Any], Featurizer] = {}
    losses: dict[tuple[str, Any], tuple[float, ...]] = {}
    n_steps = 3 * len(points) * len(positions) * learn.steps(len(answers))
    with progress_bar("steps of the fits", total=n_steps) as count:
        for name, position in product(points, positions):
            place = places.at(name, position, head, count)
            part, losses[name, position] = learn(place.train, count)
            learned[name, position] = part
            scores += [control(place, part) for control in _CONTROLS.values()]
    labels: dict[str, Sequence[Any]] = {"control": [*_CONTROLS], "point": points, "pos": positions}
    accuracy = Result(
        _by_label([score.right for score in scores], labels),
        (*labels, "example"),
        labels=labels,
        unit="accuracy",
        about={"site": site, "direction": direction, "metric": repr(tested.metric), "k": k},
        bounds=(0.0, 1.0),
        groups=tested.groups,
    )
    metric = replace(
        accuracy,
        values=_by_label([score.effect for score in scores], labels),
        base=place.test.base,
        unit=getattr(tested.metric, "unit", ""),
        bounds=None,
    )
    return Alignment(learned, accuracy, metric, losses)


def _by_label(
    scores: Sequence[Float[Tensor, " example"]], labels: Mapping[str, Sequence[Any]]
) -> Float[Tensor, "control point pos example"]:
    """Stack scores that come point by point, position by position and control by control."""
    n_controls, n_points, n_positions = map(len, labels.values())
    return torch.stack([*scores]).view(n_points, n_positions, n_controls, -1).movedim(2, 0)


@dataclass(frozen=True)
class _Place:
    """Pairs at one point and position, to fit and to test on, and the settings of the fits there.

    Attributes:
        train, test: the pairs.
        shuffled_train, shuffled_test: the same pairs, run with shuffled weights.
        drawn_answers: for each pair of `train` the answer of a pair drawn at random.
        learn: the settings.
        count: is called after each step of a fit.
    """

    train: InterchangeRuns
    test: InterchangeRuns
    shuffled_train: InterchangeRuns
    shuffled_test: InterchangeRuns
    drawn_answers: Int[Tensor, "pair *two"]
    learn: Fit
    count: Callable[[], object]


class _Places:
    """Makes each place, from runs that all places share.

    Args:
        fitted, tested: runs of the pairs to fit and to test on.
        answers: the answers of the pairs to fit on.
        learn: the settings of fits.
    """

    def __init__(
        self, fitted: Runs, tested: Runs, answers: Int[Tensor, "pair *two"], learn: Fit
    ) -> None:
        shuffled = _with_shuffled_weights(fitted.model, learn.seed)
        self._fitted, self._tested = fitted, tested
        self._shuffled_fitted, self._shuffled_tested = (
            Runs(shuffled, runs.pairs, runs.direction) for runs in (fitted, tested)
        )
        self._drawn_answers = answers[_drawn(fitted.pairs, learn.seed).to(answers.device)]
        self._learn = learn

    def at(
        self, point: str, pos: int | str, head: int | None, count: Callable[[], object]
    ) -> _Place:
        """The place at a point and a position, of one head or of all."""

        def runs_at(runs: Runs) -> InterchangeRuns:
            return InterchangeRuns(runs, point, pos, head, self._learn.batch)

        return _Place(
            train=runs_at(self._fitted),
            test=runs_at(self._tested),
            shuffled_train=runs_at(self._shuffled_fitted),
            shuffled_test=runs_at(self._shuffled_tested),
            drawn_answers=self._drawn_answers,
            learn=self._learn,
            count=count,
        )


# Each control scores a part at a place, given the part that was learned there.


def _aligned(place: _Place, learned: Featurizer) -> Scores:
    """The part that was learned."""
    return place.test.scores(learned)


def _random(place: _Place, learned: Featurizer) -> Scores:
    """As many columns or features, drawn at random."""
    return place.test.scores(place.learn.random(place.train.size, learned))


def _shuffled_weights(place: _Place, learned: Featurizer) -> Scores:
    """The same fit on a model with shuffled weights, and scored on it.

    It tests little where most of a model's work is in code without parameters.
    """
    part, _ = place.learn(place.shuffled_train, place.count)
    return place.shuffled_test.scores(part)


def _shuffled_answers(place: _Place, learned: Featurizer) -> Scores:
    """The same fit to the answers of other pairs."""
    part, _ = place.learn(place.train.answering(place.drawn_answers), place.count)
    return place.test.scores(part)


def _whole(place: _Place, learned: Featurizer) -> Scores:
    """The whole value: the ceiling where the right answer is the clean text's.

    Where it is neither text's, a part can do better than the whole value.
    """
    return place.test.scores(neurons(place.train.size))


_CONTROLS: Mapping[str, Callable[[_Place, Featurizer], Scores]] = {
    "aligned": _aligned,
    "random": _random,
    "shuffled weights": _shuffled_weights,
    "shuffled answers": _shuffled_answers,
    "whole": _whole,
}


def _answers(pairs: Pairs, test: Pairs) -> Int[Tensor, "pair *two"]:
    """Return the answers of the pairs that are fitted on.

    Raises:
        ValueError: if pairs have no answers, or a pair is in both.
    """
    if pairs.answers is None or test.answers is None:
        raise ValueError("an alignment needs pairs with answers; got none")
    if both := {*pairs.digests()} & {*test.digests()}:
        raise ValueError(f"test pairs must be others than those fitted on; {len(both)} are in both")
    return pairs.answers


def _drawn(pairs: Pairs, seed: int) -> Int[Tensor, " pair"]:
    """Draw a pair for each pair, whose answer it gets. Copies get the same answer."""
    texts = numbered(pairs.digests())
    first = {text: row for row, text in reversed([*enumerate(texts)])}
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))
    donors = torch.tensor([first[text] for text in range(len(first))])[order]
    return donors[texts]


def _with_shuffled_weights(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose weights are the same numbers in other places: a model of its scale that has learned nothing."""
    other, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        order = torch.randperm(weight.numel(), generator=draw).to(weight.device)
        weight.data.copy_(weight.data.flatten()[order].view_as(weight))
    return other
