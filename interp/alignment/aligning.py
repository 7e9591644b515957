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
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from hooks.base import Words, progress_bar, require_integer, shows_progress, without_gradients
from interp import pictures
from interp.alignment.featurizers import Featurizer, coordinates, neurons, subspace
from interp.alignment.runs import Interchanges
from interp.features.trained_at import warn_of_place
from interp.inputs.copies import numbered
from interp.inputs.pairs import Pairs, PatchingDirection
from interp.numbers.intervals import interval_text
from interp.numbers.precision import at_least_float32
from interp.results.result import Result
from interp.runs.runs import Runs
from interp.runs.sites import Choice, named

CONTROLS = ("aligned", "random", "shuffled weights", "shuffled answers", "whole")
"""What is scored: what was learned, and four controls.

`whole` is the ceiling where the right answer is the clean text's. Where it is neither text's, a part can do better than the whole
value. `shuffled weights` tests little where most of a model's work is in code without parameters.
"""
_COLDEST = 0.01


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
                CONTROLS,
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
    for each in (fitted, tested):
        if each.pairs.answers is None:
            raise ValueError("an alignment needs pairs with answers; got none")
    if both := {*fitted.pairs.digests()} & {*tested.pairs.digests()}:
        raise ValueError(f"test pairs must be others than those fitted on; {len(both)} are in both")
    points = [*named(fitted.runner, Choice(site, ("layer",), layers)).values()]
    places = [pos] if isinstance(pos, int | str) else [*pos]
    Words(Fit).require(fit, ("test", "pos", "layers", "head", "direction", "progress"), "align")
    learning = Fit(k, **fit)
    if learning.features is not None:
        uses = [(learning.features.place, name) for name in points]
        warn_of_place(model, fitted.runner.points, *uses)
    batch, seed = learning.batch, learning.seed
    shuffled = _with_shuffled_weights(model, seed)
    everywhere = [fitted, tested, *(Runs(shuffled, each, direction) for each in (pairs, test))]
    answers = fitted.pairs.answers
    assert answers is not None  # checked above
    shuffled_answers = answers[_drawn(fitted.pairs, seed).to(answers.device)]
    scores, learned, losses = [], {}, {}
    n_fits = 3 * len(points) * len(places)
    n_steps = n_fits * learning.steps(len(answers))
    with progress_bar("steps of the fits", total=n_steps) as count:
        for name in points:
            for place in places:
                train, held, other, other_held = (
                    Interchanges(runs, name, place, head) for runs in everywhere
                )
                part, losses[name, place] = learning(train, count)
                learned[name, place] = part
                parts = [
                    (held, part),
                    (held, learning.random(train.size, part)),
                    (other_held, learning(other, count)[0]),
                    (held, learning(train.answering(shuffled_answers), count)[0]),
                    (held, neurons(train.size)),
                ]
                bases = {site: site.scores(None, batch)[0] for site in (held, other_held)}
                row = [(site, *site.scores(each, batch)) for site, each in parts]
                scores.append([[right, metric - bases[site]] for site, metric, right in row])
    # [place, control, accuracy or metric, example]
    table = torch.stack([torch.stack([torch.stack(each) for each in row]) for row in scores])
    accuracy, metric = table.view(len(points), len(places), *table.shape[1:]).unbind(3)
    labels = {"control": CONTROLS, "point": points, "pos": places}
    about = {"site": site, "direction": direction, "metric": repr(tested.metric), "k": k}

    def result(values: Tensor, unit: str, base: Tensor | None = None, **more: Any) -> Result:
        axes = ("control", "point", "pos", "example")
        moved = values.movedim(2, 0)
        more["groups"] = tested.groups
        return Result(moved, axes, base, labels=labels, unit=unit, about=about, **more)

    unit = getattr(tested.metric, "unit", "")
    return Alignment(
        learned,
        result(accuracy, "accuracy", bounds=(0.0, 1.0)),
        result(metric, unit, bases[held]),
        losses,
    )


@dataclass(frozen=True)
class Fit:
    """Settings of a fit, which makes a part from pairs at a site.

    Attributes:
        k: the number of columns.
        features: features to learn a mask of, in place of columns; see `alignment.featurizers`. k does not count then.
        sparsity: of a mask: what a whole mask costs, in nats.
        epochs, rate, batch: of Adam.
        seed: of the first columns, the order of the pairs and the controls.
    """

    k: int
    features: Featurizer | None = None
    sparsity: float = 0.0
    epochs: int = 3
    rate: float = 1e-2
    batch: int = 32
    seed: int = 0

    def steps(self, n_pairs: int) -> int:
        """The steps of a fit to so many pairs."""
        return self.epochs * -(-n_pairs // self.batch)

    def __call__(
        self, site: Interchanges, done: Callable[[], object] = lambda: None
    ) -> tuple[Featurizer, tuple[float, ...]]:
        """The part, and the mean loss of each epoch. `done` is called after each step."""
        module, part = self._learner(site.source)
        optimizer = torch.optim.Adam(module.parameters(), lr=self.rate)
        draw, losses = torch.Generator().manual_seed(self.seed), []
        n = len(site.source)
        steps = self.steps(n)
        step = 0
        for _ in range(self.epochs):
            order, total = torch.randperm(n, generator=draw), 0.0
            for rows in order.split(self.batch):
                with torch.enable_grad():
                    learned = part(_COLDEST ** (step / max(1, steps - 1)))
                    loss = site.loss(learned, rows)
                    cost = self.sparsity * learned.mask.mean() if self.features else 0.0
                    parameters = [*module.parameters()]
                    gradients = torch.autograd.grad(loss + cost, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                total, step = total + float(loss.detach()) * len(rows), step + 1
                done()
            losses.append(total / n)
        return part(None), tuple(losses)

    def _learner(self, like: Tensor) -> tuple[nn.Module, Callable[[float | None], Featurizer]]:
        """What is trained, and the part that it makes at a temperature; None at the end."""
        size = like.shape[-1]
        kind: dict[str, Any] = {"device": like.device, "dtype": at_least_float32(like).dtype}
        if self.features is not None:
            features, boundary = (
                self.features,
                nn.ParameterList([torch.zeros(len(self.features.mask), **kind)]),
            )

            def masked(temperature: float | None) -> Featurizer:
                where = boundary[0]
                if temperature is None:
                    return features.only((where > 0).to(where).detach())
                return features.only(torch.sigmoid(where / temperature))

            return boundary, masked
        require_integer("k", self.k, most=size)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            columns = orthogonal(nn.Linear(self.k, size, bias=False)).to(**kind)

        def spanned(temperature: float | None) -> Featurizer:
            basis = columns(torch.eye(self.k, **kind)).mT
            return coordinates(basis.detach() if temperature is None else basis)

        return columns, spanned

    def random(self, size: int, part: Featurizer) -> Featurizer:
        """As many columns, or features, drawn at random."""
        draw = torch.Generator().manual_seed(self.seed)
        if self.features is None:
            return subspace(torch.randn(size, self.k, generator=draw))
        return part.only(part.mask[torch.randperm(len(part.mask), generator=draw)])


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
