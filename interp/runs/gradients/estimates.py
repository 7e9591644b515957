"""Estimates of effects from gradients: sums over places, and means along paths by the trapezoid rule."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import ActivationCache, Point
from hooks.base import progress_of, require_integer, to_device, warn
from interp import edits
from interp.numbers.precision import at_least_float32
from interp.results.result import Result
from interp.runs.gradients.backward import Gradients
from interp.runs.runs import Runs
from interp.runs.sites import Choice, PatchPlace, Sites

TOLERANCE = 0.01
"""How large a gap may be without a warning."""

_FIRST, _MOST = 4, 1024

Steps = int | Literal["auto"]
"""The number of steps of each path; `auto` doubles them until its gap is within `TOLERANCE`, at most 1024."""

AtShare = Callable[
    [Sequence[int], float], tuple[Float[Tensor, "_some *axes"], Float[Tensor, "_some batch"]]
]
"""The values on some paths, by index, after a share of them, and the metrics there."""


class Mean(NamedTuple):
    """Means of values along paths.

    Attributes:
        values: the mean on each path.
        steps: how many steps it took.
        gaps: how far they are from adding up to the change of the metric, as a share.
    """

    values: Float[Tensor, "path *axes"]
    steps: list[int]
    gaps: Float[Tensor, "path batch"]


def averaged(
    at: AtShare,
    first: Float[Tensor, "path *axes"],
    base: Float[Tensor, " batch"],
    added: Callable[[Float[Tensor, "path *axes"]], Float[Tensor, "path batch"]],
    steps: Steps,
    size: Float[Tensor, ""] | None = None,
) -> Mean:
    """The mean of a function along each path. No value is computed twice.

    Args:
        at: gives the function.
        first, base: its values at the start, and the metric there.
        added: what means add up to, which should be the change of the metric.
        steps: see `Steps`.
        size: what gaps are a share of; by default the mean absolute change of the metric.

    Raises:
        ValueError: if steps are less than 1, or the metric is not finite at an end.

    >>> import torch
    >>> at = lambda paths, share: (torch.tensor([[share**2]]), torch.tensor([[share**3 / 3]]))
    >>> averaged(at, torch.zeros(1, 1), torch.zeros(1), lambda means: means, 4)
    Mean(values=tensor([[0.3438]]), steps=[4], gaps=tensor([[0.0312]]))
    """
    require_integer("steps, if not 'auto',", 1 if steps == "auto" else steps)
    last, end = at(range(len(first)), 1.0)
    change = to_device(end - base, first.device)
    if not change.isfinite().all():
        raise ValueError("the metric must be finite at both ends of a path; got others")
    size = change.abs().mean() if size is None else size
    sums, taken = (first + last) / 2, [1] * len(first)
    paths, before, now = [*range(len(first))], 1, _FIRST if steps == "auto" else steps
    while True:
        shares = [n / now for n in range(1, now) if n * before % now]
        for share in progress_of(shares, "steps on the way", len(shares)):
            sums[paths] += at(paths, share)[0]
        for path in paths:
            taken[path] = now
        means = sums / sums.new_tensor(taken).view(-1, *[1] * (sums.ndim - 1))
        gaps = ((added(means) - change).abs() / size).nan_to_num()  # 0 / 0, where nothing changes
        off = gaps.amax(1).tolist()
        before, again = now, [path for path in paths if off[path] > TOLERANCE]
        if steps != "auto" or now == _MOST or not again:
            return Mean(means, taken, gaps)
        paths, now = again, 2 * now


def of_layers(
    sites: Sites, by_point: Mapping[str, Tensor], base: Float[Tensor, " example"], **about: Any
) -> Result:
    """The effects of all layers together.

    Args:
        sites: the places.
        by_point: the effects [*places, example] of each point that a backward pass reached, in its order.
        base: the metric of the run to be edited.
        about: more facts.

    Raises:
        ValueError: if an effect is NaN.

    Warns:
        UserWarning: if a point was not reached. Its effects are 0.
    """
    for name, values in by_point.items():
        require_numbers(name, values)
    names, places = [*sites.names.values()], sites.places
    warn_of_unread([name for name in names if name not in by_point])
    sizes = [len(along) for axis, along in places.items() if axis != "layer"]
    zero = base.new_zeros(*sizes, len(base))
    by_layer = [to_device(by_point.get(name, zero), base.device) for name in names]
    layer_axis = [*places].index("layer") if "layer" in places else None
    values = by_layer[0] if layer_axis is None else torch.stack(by_layer, layer_axis)
    return sites.result(base, values, **about)


def require_numbers(name: str, effects: Float[Tensor, "..."]) -> None:
    """Refuses NaN. Called in the order of a backward pass, it names where that began."""
    if effects.isnan().any():
        raise ValueError(f"gradients must be numbers; going back, the first NaN is at {name}")


def warn_of_unread(names: Sequence[str]) -> None:
    """Warns once of points that no gradient reached."""
    if names:
        more = f" and {len(names) - 1} more points" if len(names) > 1 else ""
        without = f"the metric does not depend on {names[0]}{more}: effects there are 0"
        warn(without)


def warn_of_flat(run: Gradients) -> None:
    """Warns if the metric has no gradient at the base run."""
    if run.is_flat():
        warn(
            "the metric has no gradient at the base run, where it is smallest or largest: these estimates are "
            "rounding. integrated_gradients, or method='eap_ig_inputs' of edges, takes gradients along the way",
        )


def compared(runs: Runs, choice: Choice) -> Sites:
    """The places of two runs where effects are estimated.

    Raises:
        ValueError: if there are several layers and no axis for them; or as for `Sites`.
    """
    sites = Sites(runs, choice)
    if "layer" not in sites.places and len(sites.names) > 1:
        raise ValueError(f"over must have 'layer' where there are several; got {(*sites.places,)}")
    return sites


def effects(
    point: Point,
    base: Float[Tensor, "..."],
    gradient: Float[Tensor, "..."],
    source: ActivationCache,
    places: Mapping[str, list[PatchPlace]],
) -> Float[Tensor, "..."]:
    """(source - base) · gradient at each place of one point, in float32 at least.

    Args:
        point: where the values are.
        base: the value there.
        gradient: that of the metric.
        source: holds the values that would take the place of `base`.
        places: the places along each axis.

    Returns:
        Estimated effects [*axes, example], the axes of the places without `layer`.
    """
    gradient = at_least_float32(gradient)
    changes = [
        at_least_float32(other) - base for other in replacement_values(point, base, source, places)
    ]
    return joined([summed(point.axes, places, change, gradient) for change in changes], places)


def replacement_values(
    point: Point,
    base: Float[Tensor, "..."],
    source: ActivationCache,
    places: Mapping[str, list[PatchPlace]],
) -> list[Float[Tensor, "..."]]:
    """Return the values that would take the place of a point's: one for each span, or one for all places.

    Without spans that is the source's value; with spans, for each the base value with this span replaced. For
    arguments see `effects`.
    """
    if "span" not in places:
        return [source[point.name]]
    moves = [edits.replace(source, **selected) for _, selected in places["span"]]
    return [move(base.clone(), point) for move in moves]


def joined(
    by_span: list[Float[Tensor, "..."]], places: Mapping[str, list[PatchPlace]]
) -> Float[Tensor, "..."]:
    """The effects of each of `replacement_values` as one tensor [*axes, example]."""
    axes = [axis for axis in places if axis != "layer"]
    return torch.stack(by_span, axes.index("span")) if "span" in axes else by_span[0]


def summed(
    axes: Sequence[str], places: Mapping[str, list[PatchPlace]], *factors: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """The product of the factors, summed over all axes but `batch` and those that places select along.

    Args:
        axes: those of each factor.
        places: the places along each axis; those along `layer` and `span` do not count.
        factors: tensors with these axes.

    Returns:
        One number for each place and example, [*places, example].
    """
    selections: dict[str, list[int | slice]] = {}
    for axis, along in places.items():
        if axis not in ("layer", "span"):
            # Each place selects along one axis.
            (point_axis,) = along[0][1]
            selections[point_axis] = [selected[point_axis] for _, selected in along]
    numbers = {axis: n for n, axis in enumerate(axes)}
    operands = [part for factor in factors for part in (factor, [*numbers.values()])]
    sums = torch.einsum(*operands, [numbers[axis] for axis in (*selections, "batch")])
    for dim, indices in enumerate(selections.values()):
        sums = _grouped(sums, dim, indices)
    return sums


def _grouped(values: Tensor, at: int, indices: list[int | slice]) -> Tensor:
    """The sum of `values` along one axis for each index: a number, or a slice of several."""
    chosen = [range(i, i + 1) if isinstance(i, int) else range(i.start, i.stop) for i in indices]
    members = [(n, member) for n, several in enumerate(chosen) for member in several]
    if [(n, n) for n in range(values.shape[at])] == members:
        return values
    group, member = torch.tensor(members, device=values.device).T
    shape = [*values.shape]
    shape[at] = len(indices)
    return values.new_zeros(shape).index_add_(at, group, values.index_select(at, member))
