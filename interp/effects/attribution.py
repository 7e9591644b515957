"""Attribution patching, a first-order estimate from one backward pass, and integrated gradients, whose effects add up to that of the whole change."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hooks import Point
from hooks.base import progress_of, require_choice, shows_progress, warn
from hooks.shared import Session, names_by_layer
from interp import edits
from interp.inputs.pairs import Pairs, PatchingDirection, of_pairs
from interp.numbers.precision import at_least_float32
from interp.results.result import Result
from interp.runs.gradients.attention import AttentionPoints, OtherKeys, OtherQueries
from interp.runs.gradients.backward import Gradients
from interp.runs.gradients.estimates import (
    TOLERANCE,
    Mean,
    Steps,
    averaged,
    compared,
    effects,
    joined,
    of_layers,
    replacement_values,
    summed,
    warn_of_flat,
)
from interp.runs.runs import Runs
from interp.runs.sites import Choice, Sites, Some


@shows_progress
@of_pairs
def attribution_patching(
    model: nn.Module,
    pairs: Pairs,
    site: str = "resid_pre",
    over: Sequence[str] | None = None,
    *,
    direction: PatchingDirection = "denoising",
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
    qk_correction: bool = False,
    grad_drop: bool = False,
    progress: bool = True,
) -> Result:
    """Estimate the effects of `activation_patching` as (target - base) times the gradient at the base run.

    All places together take two forward passes and one backward pass (Nanda 2023, "Attribution
    Patching"). The estimate is exact where the metric is linear in the value. It can be far off
    elsewhere: where attention is saturated, or where a whole stream is replaced. See `compare`.

    Two options are those of AtP* (Kramár et al. 2024, "AtP*: An efficient and scalable method for localizing
    LLM behaviour to components").

    Args:
        model: any model with the usual points. Its weights need no gradients, and get none.
        pairs: see `activation_patching`. Their metric is differentiable.
        site: see `activation_patching`.
        over: see `activation_patching`; with several layers `layer` is one of them. A value changes those of
            later layers, so estimates of several layers do not add up to the effect of patching them
            together.
        direction: denoising edits the corrupted run, and takes gradients there; noising the clean one.
        layers, heads, neurons: see `activation_patching`.
        qk_correction: at the sites `q` and `k`, compute the softmax of attention again for each query, and
            for one key position at a time, and take gradients at the pattern. It costs a few runs of
            the attention alone. Saturated attention has almost no gradient, and needs it.
        grad_drop: take the gradient again for each layer, without what passes through what that layer adds
            to the stream. The effects are then mean absolute ones, for paths that cancel.
        progress: whether to show a bar after two seconds.

    Returns:
        Estimated effects [*over, example], in float32 at least. `base` and `target` are measured. With
        `grad_drop` they have no signs, and `about` says `signed: False`.

    Raises:
        ValueError: if texts, choices or the metric do not fit, the metric has no gradient, or one is NaN.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: where the metric does not depend on a point at all: effects there are 0. Or if the metric is
            smallest at the base run, as `kl_divergence` from that run is: it has no gradient there.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> attribution_patching(model, pairs, "z").top(1)
    layer 0, head 3  -8.599
    """
    runs = Runs(model, pairs, direction)
    sites = compared(runs, Choice(site, over, layers, heads, neurons))
    points, attentions = runs.runner.points, _attentions(sites, site) if qk_correction else {}
    # By the point whose gradient counts.
    listened = {attention.pattern: name for name, attention in attentions.items()}
    listened = listened or {name: name for name in sites.names.values()}
    dropped = _added_by_blocks(points) if grad_drop else [()]
    run = _run(runs, attentions.values(), [*listened, *itertools.chain(*dropped)])

    def estimate(name: str) -> Callable[[Tensor], Tensor]:
        if name in attentions:
            return _corrected(sites, points[name], attentions[name])
        return partial(
            effects, points[name], run.values[name], source=sites.values, places=sites.places
        )

    estimates = {recorded: estimate(name) for recorded, name in listened.items()}
    by_point: dict[str, Tensor] = {}

    def receive(recorded: str, gradient: Tensor) -> None:
        if recorded in listened:
            effect, name = estimates[recorded](gradient), listened[recorded]
            if grad_drop:
                effect = by_point.get(name, 0) + effect.abs() / (len(dropped) - 1)
            by_point[name] = effect

    passes = progress_of(dropped, "backward passes", len(dropped))
    for n, without in enumerate(passes, 1):
        run.backward(receive, without, last=n == len(dropped))
    warn_of_flat(run)
    return of_layers(sites, by_point, run.base, **_about(qk_correction, grad_drop))


def _attentions(sites: Sites, site: str) -> dict[str, AttentionPoints]:
    """The attention of each point of queries or keys."""
    require_choice("site of qk_correction", site, ("q", "k"))
    return {name: AttentionPoints(sites.runs.runner, name) for name in sites.names.values()}


def _run(runs: Runs, attentions: Iterable[AttentionPoints], names: Sequence[str]) -> Gradients:
    """The edited run, with gradients at some points, while attention is recorded."""
    with Session() as session:
        for attention in attentions:
            attention.listen(session)
        return runs.gradients(names)


def _about(qk_correction: bool, grad_drop: bool) -> dict[str, Any]:
    """The name of the estimate, and whether its effects have signs."""
    options = {"qk_correction": qk_correction, "grad_drop": grad_drop}
    parts = ["attribution", *(option for option, on in options.items() if on)]
    about: dict[str, Any] = {"estimate": " with ".join(parts)}
    return about | {"signed": False} if grad_drop else about


def _added_by_blocks(points: Mapping[str, Point]) -> list[list[str]]:
    """For each layer the points of what it adds to the residual stream."""
    attn = names_by_layer("attn_out", points)
    mlp = names_by_layer("mlp_out", points) if any(n.endswith("mlp_out") for n in points) else {}
    added = [[attn[layer], *filter(None, [mlp.get(layer)])] for layer in attn]
    if len(added) < 2:
        raise ValueError(f"grad_drop needs at least 2 layers; got {len(added)}")
    return added


def _corrected(
    sites: Sites, point: Point, attention: AttentionPoints
) -> Callable[[Tensor], Tensor]:
    """The effects of other queries or keys through the pattern, from the gradient there."""
    kind = OtherQueries if point.name.endswith(".q") else OtherKeys
    base = attention.values()
    value = base[point.name.rpartition(".")[2]]
    moved = replacement_values(point, value, sites.values, sites.places)
    changes = [kind(attention, base, other) for other in moved]
    axes = point.axes[:-1]

    def effects_of(gradient: Tensor) -> Tensor:
        by_change = [summed(axes, sites.places, change.effects(gradient)) for change in changes]
        return joined(by_change, sites.places)

    return effects_of


@shows_progress
@of_pairs
def integrated_gradients(
    model: nn.Module,
    pairs: Pairs,
    site: str = "embed",
    over: Sequence[str] | None = None,
    *,
    steps: Steps = "auto",
    direction: PatchingDirection = "denoising",
    layers: Some = None,
    heads: Some = None,
    neurons: int | None = None,
    progress: bool = True,
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
        steps: how many steps each path has; one more gradient is taken. `auto` doubles them until the gap of every
            example is within 0.01 of the mean absolute change of the metric, at most 1024, and keeps each gradient it has.
        direction, layers, heads, neurons: see `attribution_patching`.
        progress: whether to show a bar after two seconds.

    Returns:
        Effects [*over, example], in float32 at least. `about` has the `steps` of each path, and its `gaps`
        for each example, as shares of that change.

    Raises:
        ValueError: as for `attribution_patching`, or if `steps` is less than 1, or a metric is infinite.
        UnknownNameError: if there is no such site, or the model lacks it; with close matches.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a gap is larger than that.

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
    # Of one layer the steps are shown.
    each = progress_of(names, "layers", len(names)) if len(names) > 1 else names
    paths = {
        name: _mean_gradient(sites, name, start, first[name], steps)
        for name in each
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
    if (largest := max(float(gap.max()) for gap in gaps)) > TOLERANCE:
        rule = f"effects should add up to within {TOLERANCE} of the mean change of the metric"
        warn(f"{rule}; got {largest:.2g} after {max(taken)} steps")
    return result


def _mean_gradient(sites: Sites, name: str, start: Gradients, first: Tensor, steps: Steps) -> Mean:
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

    return averaged(at, at_least_float32(first)[None], start.base, added, steps)


def _whole_change(sites: Sites, point: Point, base: Tensor) -> Tensor:
    """The change at all places together."""
    changed = at_least_float32(base).clone()
    if "span" not in sites.places:
        return at_least_float32(sites.values[point.name]) - changed
    for _, selected in sites.places["span"]:
        changed = edits.replace(sites.values, **selected)(changed, point)
    return changed - base
