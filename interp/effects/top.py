"""The largest estimated effects of all neurons, or of given directions, at each position."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from hooks.base import (
    at_least_float32,
    padding_messages,
    require_integer,
    shows_progress,
    to_device,
)
from hooks.shared import names_by_layer
from interp.numbers.ranks import largest_rows
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.protocol import has_text_of_logits, require_points
from interp.results.result import Result
from interp.runs.estimates import at_prompts
from interp.runs.gradients import Gradients, require_numbers, warn_of_flat, warn_of_unread
from interp.runs.runs import Runs


@shows_progress
@of_pairs
def top_attributions(
    model: nn.Module,
    pairs: Pairs,
    directions: Mapping[str, Float[Tensor, "dim _n"]] | None = None,
    *,
    k: int = 100,
    direction: PatchingDirection = "denoising",
    progress: bool = True,
) -> Result:
    """Return the `k` largest estimated effects of MLP neurons, or of directions, at positions.

    The estimate is the same as in `attribution_patching`. For a unit vector u, the estimate is
    ((target - base) · u) times (u · gradient), which approximates `edits.interchange` along u. Only
    the `k` mean effects with the largest absolute values are stored while the layers are read, so
    the table of all places is never in memory.

    By default, clean values replace values of the corrupted run (`direction="denoising"`), which
    shows the parts that restore the answer. Analyses of nodes, edges, paths and circuits do the
    reverse by default.

    Args:
        model: any model with the usual points. Its weights need no gradients and receive none.
        pairs: clean and corrupted texts of the same length and padding, and the metric, which must
            be differentiable.
        direction: `denoising` edits the corrupted run and takes gradients there; `noising` edits
            the clean run.
        directions: the columns of each matrix are vectors along the last axis of a point; the keys
            are exact names of points. The lengths of the vectors do not matter. Default: the
            neurons of `mlp.post`.
        k: the number of places to return.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Estimated effects [place, example] in the metric's unit, sorted by the absolute mean, the
        largest first. Examples of labels: `layer 3, pos 5, neuron 17`, and
        `blocks.3.resid_post, pos 5, direction 2`.

    Raises:
        ValueError: for the reasons of `attribution_patching`, or if vectors do not fit their point
            or are 0.
        UnknownNameError: if the model has no such point.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: for the reasons of `attribution_patching`.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> top_attributions(model, pairs, k=2).top()
    place layer 3, pos 8, neuron 124  +1.9
    place layer 0, pos 8, neuron 227  +1.391
    """
    require_integer("k", k)
    runs = Runs(model, pairs, direction)
    titles = _titles(runs.runner, directions)
    names = [*titles]
    if not runs.text.is_aligned_with(runs.other):
        raise ValueError(padding_messages.different_padding("both texts", "different ones"))
    cache = runs.source(names)
    units = {name: _units(vectors, cache, name) for name, vectors in (directions or {}).items()}
    run = Gradients(runs.runner, runs.text, metric=runs.metric, names=names)
    last_axis = "neuron" if directions is None else "direction"
    base = runs.per_example(run.base)
    largest = _Largest(k, base)
    reached = set()

    def receive(name: str, gradient: Tensor) -> None:
        change = at_least_float32(cache[name]) - run.values[name]
        gradient = at_least_float32(gradient)
        if name in units:
            change = change @ units[name]
            gradient = gradient @ units[name]
        axes = runs.runner.points[name].axes
        effects = change * gradient
        if runs.rows is not runs.pairs and has_text_of_logits(name):
            effects = at_prompts(runs.prompts, axes, effects, along=axes)
        effects = runs.per_example(effects.movedim(axes.index("batch"), -1))
        require_numbers(name, effects)
        axes_before = [axis for axis in axes[:-1] if axis != "batch"]
        columns = zip(axes_before, map(range, effects.shape[:-2]), strict=True)
        exists = runs.exists({**dict(columns), last_axis: range(1)}, effects.device, name)
        largest.offer(effects, exists, titles[name], [*axes_before, last_axis])
        reached.add(name)

    run.backward(receive)
    warn_of_flat(run)
    warn_of_unread([name for name in names if name not in reached])
    labels = {"place": largest.labels}
    result = runs.result(largest.values, labels, base, estimate="attribution")
    return replace(result, exists=largest.exists)


def _titles(runner: HookedRunner, directions: Mapping[str, Tensor] | None) -> dict[str, str]:
    """Return the points to read, each with the words that describe it in labels of places.

    A point of `directions` is described by its name. Without `directions`, the points are the
    `mlp.post` of each layer, which are described as `layer 0`, `layer 1` and so on.
    """
    if directions is not None:
        return {name: name for name in directions}
    require_points(runner)
    points = names_by_layer("mlp.post", runner.points)
    return {name: f"layer {layer}" for layer, name in points.items()}


class _Largest:
    """The `k` places with the largest mean effects among all places that were offered."""

    def __init__(self, k: int, base: Float[Tensor, " batch"]) -> None:
        self._k = k
        self.values: Float[Tensor, "place batch"] = base.new_zeros(0, len(base))
        self.exists: Bool[Tensor, "place batch"] = self.values.bool()
        self.labels: list[str] = []

    def offer(
        self,
        effects: Float[Tensor, "..."],
        exists: Bool[Tensor, "..."] | None,
        title: str,
        axes: Sequence[str],
    ) -> None:
        """Add effects to the comparison.

        Args:
            effects: the effects [*axes, batch].
            exists: True for the effects that exist, which broadcasts to the effects; None if all
                exist. The mean of a place is over the examples in which the place exists.
            title: the name of the point in labels.
            axes: the names of the axes in labels.
        """
        flat = effects.flatten(0, -2)
        if exists is None:
            exists = torch.ones_like(effects, dtype=torch.bool)
        exists = exists.expand_as(effects).reshape_as(flat)
        best = self._order(flat, exists)
        indices = torch.stack(torch.unravel_index(best, effects.shape[:-1]), 1).tolist()
        labels = []
        for place in indices:
            parts = [f"{axis} {index}" for axis, index in zip(axes, place, strict=True)]
            labels.append(", ".join([title, *parts]))
        device = self.values.device
        values = torch.cat([self.values, to_device(flat[best], device)])
        all_exist = torch.cat([self.exists, to_device(exists[best], device)])
        all_labels = [*self.labels, *labels]
        order = self._order(values, all_exist)
        self.values, self.exists = values[order], all_exist[order]
        self.labels = [all_labels[n] for n in order.tolist()]

    def _order(
        self, values: Float[Tensor, "place batch"], exists: Bool[Tensor, "place batch"]
    ) -> Int[Tensor, " _k"]:
        """Return the rows with the largest absolute means, the largest first."""
        means = values.where(exists, 0).sum(-1) / exists.sum(-1).clamp(min=1)
        return largest_rows(means.abs(), self._k)


def _units(vectors: Tensor, cache: ActivationCache, name: str) -> Float[Tensor, "dim n"]:
    """Return columns as unit vectors of the last axis of a point.

    Raises:
        ValueError: if the vectors do not fit the point, or a vector is 0.
    """
    value = at_least_float32(cache[name])
    axes = cache.axes(name)
    if "batch" not in axes[:-1]:
        raise ValueError(f"directions need a point with named axes; got {name}")
    units = vectors.to(value) / vectors.to(value).norm(dim=0)
    if vectors.ndim != 2 or len(vectors) != value.shape[-1] or not units.isfinite().all():
        rule = (
            f"directions at {name} must be columns of {value.shape[-1]} numbers that are not all 0"
        )
        raise ValueError(f"{rule}; got {list(vectors.shape)}")
    return units
