"""Attribution patching: a first-order estimate of activation patching, from one backward pass."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooks import Point
from hooks.shared import Session, names_by_layer, require_choice
from interp.inputs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.gradients.attention import AttentionPoints, OtherKeys, OtherQueries
from interp.runs.gradients.backward import Gradients
from interp.runs.gradients.estimates import (
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

    for n, without in enumerate(dropped, 1):
        run.backward(receive, without, last=n == len(dropped))
    warn_of_flat(run, 3)
    return of_layers(sites, by_point, run.base, **_about(qk_correction, grad_drop))


def _attentions(sites: Sites, site: str) -> dict[str, AttentionPoints]:
    """The attention of each point of queries or keys."""
    require_choice("site of qk_correction", site, "qk")
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
