"""Integrated gradients: effects along a path between two runs, which sum to the whole change.

The algorithm (Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks"), for each layer
of a site:

1. Run the other text, and cache its values at the points of the site. With an edit there is no
   other text: the target is the edited value.
2. Run the edited text with the gradient at each point. This is the start of each path.
3. Move all values of one point from base to target in steps, and compute the gradient in a run at
   each step. Take the mean gradient with the trapezoid rule (`runs.trapezoid`).
4. The effect of a place is (target - base) · mean gradient, summed over all axes that are not axes
   of the result (`runs.estimates`).
5. Check the sum: the effects of a point add up to the change of the metric when all values of the
   point move.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import (
    Texts,
    at_least_float32,
    progress_of,
    reading,
    shows_progress,
    stacked,
    warn,
)
from interp.edits import Edit
from interp.inputs.parts import UNFINISHED, finished
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.estimates import compared, edits_of_point, estimated_effects, of_layers
from interp.runs.gradients import Gradients
from interp.runs.models import Source
from interp.runs.runs import runs_of
from interp.runs.sites import Choice, Sites, Some
from interp.runs.trapezoid import TOLERANCE, Mean, PathSteps, averaged, gap_shares, of_paths


@shows_progress
@of_pairs
def integrated_gradients(
    model: nn.Module,
    pairs: "Pairs | Texts",
    site: str = "embed",
    over: Sequence[str] | None = None,
    *,
    steps: PathSteps = "auto",
    direction: PatchingDirection = "denoising",
    edit: "Edit | None" = None,
    source: Source | None = None,
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
    progress: bool = True,
) -> Result:
    """Return estimates of effects from gradients on the straight path between two runs.

    The estimate is (target - base) times the mean gradient on the path. A path moves all values of
    one point together, and their effects add up to the effect of replacing all of them
    (Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks"). Each layer of a site has
    a separate path. The mean is computed with the trapezoid rule. The completeness gap is the
    difference between the sum of the effects and the measured change of the metric: a small gap
    means that the mean is accurate.

    By default, clean values replace values of the corrupted run (`direction="denoising"`), which
    shows the parts that restore the answer. Analyses of nodes, edges, paths and circuits do the
    reverse by default.

    Args:
        model: any model with the usual points. Its weights need no gradients and receive none.
        pairs: clean and corrupted texts, and the metric, which must be differentiable. With `edit`,
            corrupted texts are not needed.
        site: the point whose values change, such as `resid_pre`. Default: the token embeddings.
        over: the axes of the result; see `activation_patching` for the default. With several
            layers, `layer` must be one of the axes.
        steps: the number of steps of each path, or a list with a number for each layer, such as
            `about["steps"]`; the number of gradients is larger by one. `auto` doubles the number
            until the gap of every example is at most 0.01 of the mean absolute change of the
            metric, up to 1024 steps, and computes only the additional gradients each time.
        direction: `denoising` edits the corrupted run; `noising` edits the clean run. It is not
            used with `edit`.
        edit: an edit of the clean run. Each path leads from the value to the edited value. With
            `edits.zero()` the effects are minus the attributions of the paper with a baseline of
            zeros, because an effect is the change from the value to the baseline. Default: None.
        source: another model, whose values are used instead of a run on other texts; see
            `activation_patching`.
        layers, heads: the layers or heads to patch, one or several. Default: all.
        neurons: the number of neighbouring neurons in one place. Default: 1.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [*over, example] in the metric's unit, in at least float32. `about` contains the
        `steps` of each path, and its `gaps` for each example, as shares of the mean absolute
        change.

    Raises:
        ValueError: for the reasons of `attribution_patching`, or if `steps` is less than 1, or a
            metric is infinite.
        TypeError: if `edit` was not made by a function of `interp.edits`.
        EditError: if the edit cannot be made at one place.
        UnknownNameError: if the site does not exist or the model lacks it; the error names close
            matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a gap is larger than 0.01.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> integrated_gradients(model, pairs, "mlp_out", layers=3).top(1)
    layer 3, pos 8 'i|m'  +4.531
    >>> from interp import activation_patching
    >>> activation_patching(model, pairs, "mlp_out", layers=3).top(1)  # the exact effect
    layer 3, pos 8 'i|m'  +4.549

    With an edit, one text is enough:

    >>> from interp import edits
    >>> alone = Pairs("def __ini", answers=("t", "e"))
    >>> integrated_gradients(model, alone, "mlp_out", layers=3, edit=edits.zero()).top(1)
    layer 3, pos 8 'i'  -1.606
    >>> activation_patching(model, alone, "mlp_out", layers=3, edit=edits.zero()).top(1)
    layer 3, pos 8 'i'  -1.602
    """
    choice = Choice(site=site, over=over, layers=layers, heads=heads, neurons=neurons)
    runs = runs_of(model, pairs, direction=direction, source=source, edit=edit)
    sites = compared(runs, choice, edit)
    start = Gradients(runs.runner, runs.text, metric=runs.metric, names=sites.points)
    means = _means(sites, start, steps)
    by_point = {
        name: estimated_effects(sites, name, start, mean.values[0]) for name, mean in means.items()
    }
    zeros = torch.zeros_like(start.base)[None]
    unread = Mean(start.base[None], [0], gaps=zeros, changes=zeros)
    paths = [means.get(name, unread) for name in sites.points]
    changes = [path.changes[0].abs() for path in paths]
    sums = {
        "largest": {"steps": [path.steps[0] for path in paths]},
        "examples": {
            "gaps": _listed([path.gaps[0] * path.changes[0].abs().mean() for path in paths]),
            "changes": _listed(changes),
        },
    }
    estimate = "integrated gradients"
    result = of_layers(sites, by_point, start.base, estimate=estimate, unfinished=sums)
    return finished(result, with_gaps)


def _listed(rows: Sequence[Float[Tensor, " example"]]) -> list[list[float]]:
    """Return the numbers of each example, for each path."""
    return stacked(rows).tolist()


def with_gaps(result: Result) -> Result:
    """Return effects with the gap of each path and example in `about`, and warn of a large gap.

    Args:
        result: the effects. Their `about` contains for each path the steps, and for each example
            the gap and the change of the metric.
    """
    about = dict(result.about)
    sums = about.pop(UNFINISHED)
    steps = sums["largest"]["steps"]
    gaps = gap_shares(**sums["examples"])
    largest = max(map(max, gaps))
    if largest > TOLERANCE:
        warn(
            f"effects should add up to within {TOLERANCE} of the mean change of the metric; "
            f"got {largest:.2g} after {max(steps)} steps"
        )
    return replace(result, about=about | {"steps": steps, "gaps": [*map(_rounded, gaps)]})


def _means(sites: Sites, start: Gradients, steps: PathSteps) -> dict[str, Mean]:
    """Return the mean gradient on the path of each point that the metric depends on.

    Args:
        sites: the places, and the values of the other run.
        start: the run at the start of each path.
        steps: the number of steps of each path.
    """
    first_gradients: dict[str, Tensor] = {}
    start.backward(first_gradients.__setitem__)
    names = [*sites.points]
    # With one layer, the progress bar counts the steps instead.
    layers = progress_of(names, "layers", len(names)) if len(names) > 1 else names
    steps_by_point = dict(zip(names, of_paths(steps, len(names)), strict=True))
    means = {}
    for name in layers:
        if name in first_gradients:
            first = first_gradients[name]
            number = steps_by_point[name]
            means[name] = _mean_gradient(sites, name, start, first=first, steps=number)
    return means


def _mean_gradient(
    sites: Sites, name: str, start: Gradients, first: Tensor, steps: PathSteps
) -> Mean:
    """Return the mean gradient while the values of one point move from base to target.

    Args:
        sites: the places, and the values of the other run.
        name: the name of the point.
        start: the run at the start of the path.
        first: the gradient at the start of the path.
        steps: the number of steps.
    """
    runs = sites.runs
    base = start.values[name]
    change = _whole_change(sites, name, start)

    def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
        value = (base + share * change).to(base.dtype)
        gradients: dict[str, Tensor] = {}
        with runs.runner.hooks({name: lambda activation, point: value}):
            run = Gradients(runs.runner, runs.text, metric=runs.metric, names=[name])
        run.backward(gradients.__setitem__)
        return at_least_float32(gradients[name])[None], run.base[None]

    def added(means: Tensor) -> Tensor:
        return (change * means).flatten(2).sum(2)

    first = at_least_float32(first)[None]
    return averaged(at, first, base=start.base, added=added, steps=steps)


def _whole_change(sites: Sites, name: str, start: Gradients) -> Tensor:
    """Return the change of a point when the values at all places move.

    Args:
        sites: the places, and the values of the other run or the edit.
        name: the name of the point.
        start: the run at the start of the path.
    """
    base = at_least_float32(start.values[name])
    if sites.edit is None and "span" not in sites.places:
        return at_least_float32(sites.values[name]) - base
    change = torch.zeros_like(base)
    with reading(start.pieces[name]):
        for edit in edits_of_point(sites, name, start.values[name]):
            change_of_span = edit(base.clone(), sites.points[name]) - base
            # Spans may share positions, whose values change only once.
            change = torch.where(change_of_span == 0, change, change_of_span)
    return change


def _rounded(gaps: Sequence[float]) -> list[float]:
    """Return numbers with two digits."""
    return [float(f"{share:.2g}") for share in gaps]
