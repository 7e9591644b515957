"""Integrated gradients: effects that add up to that of the whole change, by gradients along a path."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hooks import Point
from interp import edits
from interp.inputs.pairs import Pairs, PatchingDirection, of_pairs
from interp.numbers.precision import at_least_float32
from interp.results.result import Result
from interp.runs.gradients.backward import Gradients
from interp.runs.gradients.estimates import compared, effects, of_layers
from interp.runs.gradients.trapezoid import Mean, Steps, averaged
from interp.runs.runs import Runs
from interp.runs.sites import Choice, Sites, Some


@of_pairs
def integrated_gradients(
    model: nn.Module,
    pairs: Pairs,
    site: str = "embed",
    over: Sequence[str] | None = None,
    *,
    steps: Steps = "auto",
    tolerance: float = 0.01,
    direction: PatchingDirection = "denoising",
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
) -> Result:
    """Estimate effects as (target - base) times the mean gradient on the straight path between the two.

    A path moves all values of one point together, and their effects add up to what replacing them all
    does to the metric (Sundararajan et al. 2017, "Axiomatic Attribution for Deep Networks"). Each layer of
    a site has a path of its own. The mean is that of the trapezoid rule. The completeness gap is the difference
    between the sum of the effects and the measured change of the metric: it says how good the mean is.

    Args:
        model: any model with the usual points. Its weights need no gradients, and get none.
        pairs: see `attribution_patching`.
        site: see `activation_patching`; by default the token embeddings.
        over: see `activation_patching`; with several layers `layer` is one of them.
        steps: how many steps each path has; one more gradient is taken. `auto` doubles them until the gap
            of every example is within the tolerance, at most 1024, and keeps each gradient it has.
        tolerance: for the gap, as a share of the mean absolute change of the metric over examples.
        direction, layers, heads, neurons: see `attribution_patching`.

    Returns:
        Effects [*over, example], in float32 at least. `about` has the `steps` of each path, and its `gaps`
        for each example, as shares like the tolerance.

    Raises:
        ValueError: as for `attribution_patching`, or if `steps` is less than 1, or a metric is infinite.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a gap is larger than the tolerance.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> integrated_gradients(model, pairs, "mlp_out", layers=3).top(1)
    layer 3, pos 8 'm|i'  +4.531
    """
    choice = Choice(site, over, layers, heads, neurons)
    runs = Runs(model, pairs, direction)
    sites = compared(runs, choice)
    start = runs.gradients(sites.names.values())
    first: dict[str, Tensor] = {}
    start.backward(first.__setitem__)
    names, points = [*sites.names.values()], runs.runner.points
    paths = {
        name: _mean_gradient(sites, name, start, first[name], steps, tolerance)
        for name in names
        if name in first
    }
    unread = Mean(start.base[None], [0], torch.zeros_like(start.base)[None])
    taken = [paths.get(name, unread).steps[0] for name in names]
    gaps = [paths.get(name, unread).gaps[0] for name in names]
    result = of_layers(
        sites,
        {
            name: effects(
                points[name], start.values[name], path.values[0], sites.values, sites.places
            )
            for name, path in paths.items()
        },
        start.base,
        estimate="integrated gradients",
        steps=taken,
        gaps=[[float(f"{share:.2g}") for share in gap.tolist()] for gap in gaps],
    )
    if (largest := max(float(gap.max()) for gap in gaps)) > tolerance:
        rule = f"effects should add up to within {tolerance:.2g} of the mean change of the metric"
        warnings.warn(f"{rule}; got {largest:.2g} after {max(taken)} steps", stacklevel=2)
    return result


def _mean_gradient(
    sites: Sites, name: str, start: Gradients, first: Tensor, steps: Steps, tolerance: float
) -> Mean:
    """The mean gradient while one point's values move from base to target, from the gradient at the start."""
    base = start.values[name]
    change = _whole_change(sites, sites.runs.runner.points[name], base)

    def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
        value, gradients = (base + share * change).to(base.dtype), dict[str, Tensor]()
        with sites.runs.runner.hooks({name: lambda activation, point: value}):
            run = sites.runs.gradients([name])
        run.backward(gradients.__setitem__)
        return at_least_float32(gradients[name])[None], run.base[None]

    def added(means: Tensor) -> Tensor:
        return (change * means).flatten(2).sum(2)

    return averaged(at, at_least_float32(first)[None], start.base, added, steps, tolerance)


def _whole_change(sites: Sites, point: Point, base: Tensor) -> Tensor:
    """The change at all places together."""
    changed = at_least_float32(base).clone()
    if "span" not in sites.places:
        return at_least_float32(sites.values[point.name]) - changed
    for _, selected in sites.places["span"]:
        changed = edits.replace(sites.values, **selected)(changed, point)
    return changed - base
