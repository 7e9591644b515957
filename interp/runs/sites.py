"""Sites: where runs are compared, over which axes, and which texts belong to which run."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, UnknownNameError
from hooks.shared import layer_of, names_by_layer, unknown_point, without_gradients
from interp.edits import Edit
from interp.inputs.pairs import Pairs, PatchingDirection, pairs_for
from interp.inputs.texts import Text, are_aligned, words_of
from interp.measuring import Metric, measure
from interp.protocol import is_of_text, logits_of, require_points
from interp.results.result import Result

SELECTS = {
    "pos": ("pos",),
    "span": ("pos",),
    "feature": ("feature",),
    "head": ("head", "kv_head"),
    "neuron": ("d_mlp",),
    "expert": ("expert",),
    "query": ("query",),
    "key": ("key",),
    "encoder_pos": ("encoder_pos",),
}
"""The axes of a result besides `layer`, each with the axes of a point that it may be."""
PatchPlace = tuple[int | str, dict[str, Any]]
"""A label, and what is selected there: along `layer` a point's name."""
Some = int | Sequence[int] | None
"""One of several, some of them, or all."""
T = TypeVar("T")


class Choice(NamedTuple):
    """Choice of the places that are compared; see `activation_patching`."""

    site: str = "resid_pre"
    over: Sequence[str] | None = None
    layers: Some = None
    heads: Some = None
    neurons: int | None = None


def named(runner: HookedRunner, choice: Choice) -> dict[int, str]:
    """The names of a choice's points, by layer. One that is in no layer, such as `embed`, stands under 0.

    Raises:
        TypeError: if the site is no name, or the model has no points yet.
        UnknownNameError: if the model has no such point.
        ValueError: if a layer is not there.
    """
    if not isinstance(choice.site, str):
        raise TypeError(
            f"site must be a name, such as 'resid_pre'; got {choice.site!r} (a metric belongs into Pairs)"
        )
    points = runner.points
    if choice.site in points and layer_of(choice.site) is None:
        if choice.layers is not None:
            raise ValueError(
                f"layers must be None for {choice.site!r}, which has none; got {choice.layers}"
            )
        return {0: choice.site}
    try:
        by_layer = names_by_layer(choice.site, points)
    except UnknownNameError:
        if any(name.endswith(f".{choice.site}") for name in points):  # several in a layer
            raise
        require_points(runner)
        in_layers = (name.partition(f".{layer_of(name)}.")[2] or name for name in points)
        raise unknown_point(choice.site, dict.fromkeys(in_layers), "site") from None
    return _some("layers", by_layer, choice.layers)


@dataclass(frozen=True, eq=False)
class TwoRuns:
    """A run to be edited, and another that values come from; made by `two_runs`.

    Attributes:
        runner: the model's.
        edited, source: the texts of both.
        metric: a function from logits to a number per example.
        cache: values of the source's run.
        target: the metric of the source's run.
        about: facts for a result.
    """

    runner: HookedRunner
    edited: Text
    source: Text
    metric: Metric
    cache: ActivationCache
    target: Float[Tensor, " batch"]
    about: Mapping[str, Any]

    def result(
        self,
        values: Float[Tensor, "*axes example"],
        labels: Mapping[str, Sequence[Any]],
        base: Float[Tensor, " example"],
        **about: Any,
    ) -> Result:
        """Effects with labels for each axis, the metric of the run to be edited, and more facts."""
        axes, unit = (*labels, "example"), getattr(self.metric, "unit", "")
        is_text = all(map(is_of_text, self.cache))
        words = worded(self.runner.model, labels, self.edited, self.source) if is_text else {}
        facts = {**self.about, **about}
        return Result(values, axes, base, self.target, labels, unit, facts, words=words)


def worded(
    model: nn.Module, labels: Mapping[str, Sequence[Any]], *texts: Text
) -> dict[str, list[str]]:
    """The words at the labels of axes that are columns of texts; none without a tokenizer."""
    axes = [axis for axis in ("pos", "query", "key") if axis in labels]
    words = words_of(model, *texts) if axes else None
    return {axis: [words[column] for column in labels[axis]] for axis in axes if words}


@without_gradients
def two_runs(
    runner: HookedRunner, pairs: Pairs, direction: PatchingDirection, names: Iterable[str]
) -> TwoRuns:
    """Runs the text that values come from, and keeps its values at some points.

    Raises:
        TypeError: if the pairs are something else.
        ValueError: if there is no such direction, no corrupted text or no metric.
    """
    pairs = pairs_for(runner.model, pairs)
    edited, source = pairs.texts(direction)
    metric = pairs.metric
    output, cache = runner.run_with_cache(
        source.tokens, names=[*names], **source.arguments(runner.model)
    )
    target = measure(metric, logits_of(output), source.of_logits.mask)
    about = {"metric": repr(metric), "direction": direction, "texts": pairs.digests()}
    return TwoRuns(runner, edited, source, metric, cache, target, about)


def places_of(
    runner: HookedRunner,
    choice: Choice,
    names: Mapping[int, str],
    values: ActivationCache,
    edited: Text,
    source: Text | None = None,
) -> dict[str, list[PatchPlace]]:
    """The places along each axis of the result. Along `feature` they are those that are active in either text.

    Args:
        runner: the model's.
        choice: which places.
        names: the names of its points, by layer.
        values: a cache of one of them, for its sizes.
        edited, source: the texts of the two runs; without a source only one run is edited.

    Raises:
        ValueError: if the axes are not those of the site, or places do not correspond.
    """
    name = next(iter(names.values()))
    value, layered = values[name], layer_of(name) is not None
    axes = values.axes(name) or tuple(map(str, range(value.ndim)))
    sizes = dict(zip(axes, value.shape, strict=True))
    over = _usual_axes(sizes, layered) if choice.over is None else choice.over
    over = (over,) if isinstance(over, str) else tuple(over)
    if "layer" in over and not layered:
        raise ValueError(f"over must not have 'layer' at {name}, which is in none; got {over}")
    if not over or len(set(over)) < len(over):
        raise ValueError(f"over must be different axes, at least one; got {over}")
    if {"pos", "span"} <= {*over}:
        raise ValueError(f"over must have 'pos' or 'span', not both; got {over}")
    for axis, wanted in (("head", choice.heads), ("neuron", choice.neurons)):
        if wanted is not None and axis not in over:
            raise ValueError(f"over must have {axis!r} where {axis}s= is given; got {over}")
    if source is not None and "span" not in over and not are_aligned(edited, source):
        raise ValueError(f"over must have 'span' where positions do not correspond; got {over}")
    features = _active_features(runner, names, edited, values) if "feature" in over else []
    return {
        axis: [(layer, {"layer": name}) for layer, name in names.items()]
        if axis == "layer"
        else _along(axis, choice, sizes, edited, source, features)
        for axis in over
    }


def entries(
    names: Mapping[int, str], places: Mapping[str, list[PatchPlace]], put: Callable[..., Edit]
) -> list[list[tuple[list[str], Edit]]]:
    """For each place, in order, the edit that `put` makes there, as `sweep` takes it.

    Args:
        names: the names of the points, by layer.
        places: the places along each axis.
        put: makes an edit of a place that is selected by axis names.
    """
    jobs = []
    for chosen in itertools.product(*places.values()):
        selected = {axis: at for _, along in chosen for axis, at in along.items()}
        edited = [selected.pop("layer")] if "layer" in selected else [*names.values()]
        jobs.append([(edited, put(**selected))])
    return jobs


def labels_of(places: Mapping[str, list[PatchPlace]]) -> dict[str, list[int | str]]:
    """The labels along each axis."""
    return {axis: [label for label, _ in along] for axis, along in places.items()}


def _active_features(
    runner: HookedRunner, names: Mapping[int, str], edited: Text, cache: ActivationCache
) -> list[int]:
    """The features that are not 0 somewhere, in the edited text or in a cache."""
    chosen = [*names.values()]
    run = runner.capture(edited.tokens, names=chosen, **edited.arguments(runner.model))
    values = [values[name] for values in (run, cache) for name in chosen if name in values]
    sizes = {value.shape[-1] for value in values}
    if len(sizes) > 1:
        raise ValueError(
            f"features of several dictionaries must be as many in each; got {sizes}: choose layers="
        )
    active = torch.stack([(value != 0).flatten(0, -2).any(0).cpu() for value in values])
    if not active.any():
        raise ValueError(f"no feature of {chosen[0]} is active in these texts")
    numbers: list[int] = active.any(0).nonzero()[:, 0].tolist()
    return numbers


def _usual_axes(sizes: Mapping[str, int], layered: bool) -> tuple[str, ...]:
    """The axes of a result unless others are given: the layer, and the feature, the expert, the head or else the position."""
    axes = ("feature", "expert", "head", "pos")
    usual = [axis for axis in axes if not sizes.keys().isdisjoint(SELECTS[axis])]
    return (*["layer"][:layered], *usual[:1])


def _along(
    axis: str,
    choice: Choice,
    sizes: Mapping[str, int],
    edited: Text,
    source: Text | None,
    features: Sequence[int],
) -> list[PatchPlace]:
    """The places along one axis of a point with these sizes."""
    point_axis = next((name for name in SELECTS.get(axis, ()) if name in sizes), None)
    if point_axis is None:
        has = [name for name, axes in SELECTS.items() if not sizes.keys().isdisjoint(axes)]
        raise ValueError(f"over must be of layer, {', '.join(has)} at {choice.site}; got {axis!r}")
    if axis == "span":
        if not edited.spans:
            raise ValueError("over=['span'] needs Pairs with spans; got none")
        spans: list[PatchPlace] = [(name, {point_axis: at}) for name, at in edited.spans.items()]
        if source is None:
            return spans
        return [(name, at | {"source_pos": source.spans[str(name)]}) for name, at in spans]
    if axis == "neuron":
        size = 1 if choice.neurons is None else choice.neurons
        if size < 1:
            raise ValueError(f"neurons must be at least 1; got {size}")
        groups = [range(sizes[point_axis])[n : n + size] for n in range(0, sizes[point_axis], size)]
        return [(_label(group), {point_axis: slice(group.start, group.stop)}) for group in groups]
    if axis == "feature":
        return [(n, {point_axis: n}) for n in features]
    indices = {n: n for n in range(sizes[point_axis])}
    if axis == "head":
        indices = _some("heads", indices, choice.heads)
    # A slice may hold padding, where a column may not.
    return [(n, {point_axis: n if axis == "head" else slice(n, n + 1)}) for n in indices]


def _label(group: range) -> int | str:
    return group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _some(what: str, known: Mapping[int, T], wanted: Some) -> dict[int, T]:
    """Select the wanted entries of `known`; all if `wanted` is None."""
    if wanted is None:
        return dict(known)
    wanted = [wanted] if isinstance(wanted, int) else wanted
    if not wanted or not known.keys() >= set(wanted):
        raise ValueError(f"{what} must be of {[*known]}; got {[*wanted]}")
    return {n: known[n] for n in wanted}
