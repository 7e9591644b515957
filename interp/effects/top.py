"""The largest of very many estimated effects: of neurons, or of directions, at each position."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner
from hooks.base import at_least_float32, require_integer, shows_progress, to_device
from hooks.shared import names_by_layer
from interp.numbers.ranks import largest_rows
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.protocol import require_points
from interp.results.result import Result
from interp.runs.gradients import require_numbers, warn_of_flat, warn_of_unread
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
    """Find the `k` largest estimated effects of MLP neurons, or of directions, at single positions.

    The estimate is that of `attribution_patching`. For a unit vector u it is ((target - base) · u)
    times (u · gradient), which estimates `edits.interchange` along u. Of each layer only the
    largest mean effects are kept, so there is never a table of all places.

    Args:
        model, pairs, direction: see `attribution_patching`. Both texts must have the same columns.
        directions: by the exact name of any point, vectors of its last axis, as columns. Their
            lengths do not count. None for the neurons of `mlp.post`.
        k: how many places are kept.
        progress: whether to show a bar after two seconds.

    Returns:
        Estimated effects [place, example], the largest mean first. Their labels are such as
        `layer 3, pos 5, neuron 17`, or `blocks.3.resid_post, pos 5, direction 2`.

    Raises:
        ValueError: as for `attribution_patching`, or if vectors do not fit their point or are 0.
        UnknownNameError: if the model has no such point.
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: as `attribution_patching` does.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> top_attributions(model, pairs, k=2).labels["place"]
    ('layer 3, pos 8, neuron 124', 'layer 0, pos 8, neuron 227')
    """
    require_integer("k", k)
    runs = Runs(model, pairs, direction)
    titles = _titles(runs.runner, directions)
    names = [*titles]
    if not runs.text.is_aligned_with(runs.other):
        raise ValueError("both texts must have the same columns and padding; got others")
    cache = runs.source(names)
    units = {name: _units(vectors, cache, name) for name, vectors in (directions or {}).items()}
    run = runs.gradients(names)
    last = "neuron" if directions is None else "direction"
    kept = _Largest(k, run.base)
    read = set()

    def receive(name: str, gradient: Tensor) -> None:
        change = at_least_float32(cache[name]) - run.values[name]
        gradient = at_least_float32(gradient)
        if name in units:
            change, gradient = change @ units[name], gradient @ units[name]
        axes = runs.runner.points[name].axes
        effects = (change * gradient).movedim(axes.index("batch"), -1)
        require_numbers(name, effects)
        others = [axis for axis in axes[:-1] if axis != "batch"]
        kept.offer(effects, titles[name], [*others, last])
        read.add(name)

    run.backward(receive)
    warn_of_flat(run)
    warn_of_unread([name for name in names if name not in read])
    return runs.result(kept.values, {"place": kept.labels}, run.base, estimate="attribution")


def _titles(runner: HookedRunner, directions: Mapping[str, Tensor] | None) -> dict[str, str]:
    """The points, each with what labels call it."""
    if directions is not None:
        return {name: name for name in directions}
    require_points(runner)
    points = names_by_layer("mlp.post", runner.points)
    return {name: f"layer {layer}" for layer, name in points.items()}


class _Largest:
    """The places with the largest mean effects of those that were offered, at most `k`."""

    def __init__(self, k: int, base: Float[Tensor, " batch"]) -> None:
        self._k = k
        self.values: Float[Tensor, "place batch"] = base.new_zeros(0, len(base))
        self.labels: list[str] = []

    def offer(self, effects: Float[Tensor, "..."], title: str, axes: Sequence[str]) -> None:
        """Take effects [*axes, batch] into account."""
        flat = effects.flatten(0, -2)
        best = largest_rows(flat.mean(-1).abs(), self._k)
        indices = torch.stack(torch.unravel_index(best, effects.shape[:-1]), 1).tolist()
        labels = []
        for place in indices:
            parts = [f"{axis} {at}" for axis, at in zip(axes, place, strict=True)]
            labels.append(", ".join([title, *parts]))
        values = torch.cat([self.values, to_device(flat[best], self.values.device)])
        order = largest_rows(values.mean(-1).abs(), self._k).tolist()
        self.values = values[order]
        self.labels = [[*self.labels, *labels][at] for at in order]


def _units(vectors: Tensor, cache: ActivationCache, name: str) -> Float[Tensor, "dim n"]:
    """The columns as unit vectors of a point's last axis."""
    value, axes = at_least_float32(cache[name]), cache.axes(name)
    if "batch" not in axes[:-1]:
        raise ValueError(f"directions need points with named axes; got {name}")
    units = vectors.to(value) / vectors.to(value).norm(dim=0)
    if vectors.ndim != 2 or len(vectors) != value.shape[-1] or not units.isfinite().all():
        rule = (
            f"directions at {name} must be columns of {value.shape[-1]} numbers that are not all 0"
        )
        raise ValueError(f"{rule}; got {list(vectors.shape)}")
    return units
