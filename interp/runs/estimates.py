"""Estimates of patching effects: (target - base) times a gradient, summed at each place of a site.

The target is the value of the other run, or the result of an edit of the base value.

A site is a point of each layer, and its places are, for example, layers and heads (`sites`). For
`z` [batch, pos, head, d_head] over `layer` and `head`, in a model of 2 layers:

1. `compared` lists the places where the two runs are compared: here 2 layers and all heads.
2. `replacements` returns the values that would replace `blocks.0.attn.z`: here only the value of
   the other run, or the value after the edit of all heads.
3. `estimated_effects` multiplies the change by the gradient at this point, and sums over `pos` and
   `d_head`: [head, example].
4. `of_layers` stacks the layers to [layer, head, example], and makes a `Result`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import POSITION_AXES, Piece, at_least_float32, reading, to_device
from interp.edits import Edit
from interp.numbers.precision import has_nan
from interp.results.result import Result
from interp.runs.gradients import Gradients, require_numbers, warn_of_unread
from interp.runs.runs import Runs
from interp.runs.sites import Choice, Sites


def compared(runs: Runs, choice: Choice, edit: Edit | None = None) -> Sites:
    """Return the places of two runs where effects are estimated.

    Args:
        runs: the two runs; with an edit, the run that is edited.
        choice: the choice of places.
        edit: the edit that is made at each place. Default: None, if the values of the other run
            replace the values at each place.

    Raises:
        ValueError: if there are several layers but no axis `layer`, for an edit without a gradient,
            or for the reasons of `Sites`.
    """
    if edit is not None and edit.name == "knockout":
        raise ValueError(
            "an estimate needs an edit with finite values; got edits.knockout(), which writes -inf "
            "(site='pattern' and edits.zero() remove the weights, and activation_patching is exact)"
        )
    sites = Sites(runs, choice, edit)
    if "layer" not in sites.places and len(sites.names) > 1:
        raise ValueError(
            f"over must contain 'layer' if there are several layers; got {(*sites.places,)}"
        )
    return sites


def estimated_effects(
    sites: Sites, name: str, run: Gradients, gradient: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Estimate the effect of each place of one point: (target - base) · gradient.

    Args:
        sites: the places, and the values of the source run or the edit.
        name: the name of the point.
        run: the edited run, with the value of the point.
        gradient: the gradient of the metric at the point.

    Returns:
        Estimated effects [*axes, example] in at least float32. The axes are the axes of the places
        without `layer`.
    """
    gradient = at_least_float32(gradient)
    base = run.values[name]
    axes = sites.points[name].axes
    by_replacement = []
    for replacement in replacements(sites, name, base, run.pieces[name]):
        change = to_device(at_least_float32(replacement), base.device) - base
        by_replacement.append(summed(sites, axes, change, gradient))
    return by_place(sites, by_replacement)


def replacements(
    sites: Sites, name: str, base: Float[Tensor, "..."], piece: Piece
) -> list[Float[Tensor, "..."]]:
    """Return the values that replace `base`, the value of a point.

    Without spans, there is one replacement: the value of the other run, or the value after the
    edit. With spans, there is one replacement for each span: the base value with this span
    replaced.

    Args:
        sites: the places, and the values of the other run or the edit.
        name: the name of the point.
        base: the value of the point in the edited run.
        piece: the texts that the point reads.
    """
    if sites.edit is None and "span" not in sites.places:
        return [sites.values[name]]
    point = sites.points[name]
    with reading(piece):
        return [edit(base.clone(), point) for edit in edits_of_point(sites, name, base)]


def edits_of_point(sites: Sites, name: str, base: Float[Tensor, "..."]) -> list[Edit]:
    """Return one edit of a point for each span, or one edit without spans.

    Each edit changes all places along the other axes together. The changes at two places do not
    depend on each other, so the edit of one place would make the same change there.

    Args:
        sites: the places, and the values of the other run or the edit.
        name: the name of the point.
        base: the value of the point in the edited run.

    Raises:
        EditError, ValueError: if the edit cannot be made at one place.
    """
    spans = [selected for _, selected in sites.places.get("span", [(0, {})])]
    if sites.edit is None:
        return [sites.edit_at(**selected) for selected in spans]
    point = sites.points[name]
    place: dict[str, Any] = {}
    for axis, places in sites.places.items():
        if axis not in ("layer", "span"):
            place |= places[0][1]
    at_place = sites.edit_at(**place, **spans[0])
    sites.of_texts(at_place, point).try_on(base, point)
    edit = sites.edit
    if edit.source is not None:
        edit = replace(edit, source=edit.source.with_all_axes(base, point, at_place.where))
    # If a text is continued by answers, `of_texts` excludes the answers from a selection.
    together = dict.fromkeys(place, slice(None))
    return [sites.of_texts(edit.at(**together, **selected), point) for selected in spans]


def by_place(sites: Sites, effects: list[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
    """Join the effects of all `replacements` of a point to one tensor [*axes, example].

    Args:
        sites: the places.
        effects: the effects of each replacement, [*axes without span, example].
    """
    axes = [axis for axis in sites.places if axis != "layer"]
    return torch.stack(effects, axes.index("span")) if "span" in axes else effects[0]


def summed(
    sites: Sites, axes: Sequence[str], *factors: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return the product of the factors, summed at each place.

    The sum is over all axes of the point except `batch` and the axes along which places are
    selected.

    Args:
        sites: the places. The result has no axes `layer` and `span`, because the factors are values
            of one layer, with one replaced span.
        axes: the names of the axes of each factor.
        factors: tensors with these axes.

    Returns:
        One number for each place and example, [*axes without layer and span, example].
    """
    selections: dict[str, list[int | slice]] = {}
    for axis, places in sites.places.items():
        if axis not in ("layer", "span"):
            # All places along an axis of the result select along the same axis of the point.
            (point_axis,) = places[0][1]
            selections[point_axis] = [selected[point_axis] for _, selected in places]
    if sites.prompts is not None:
        first, *others = factors
        factors = (at_prompts(sites.prompts, axes, first, selections), *others)
    # `einsum` also accepts a list of numbers after each factor, one for each axis, instead of a
    # string of letters.
    numbers = {axis: n for n, axis in enumerate(axes)}
    operands: list[Any] = []
    for factor in factors:
        operands += [factor, [*numbers.values()]]
    kept = (*selections, "batch")
    # Sum the last axes of the product first: their sum needs no copies of the factors.
    leading = axes[: 1 + max(axes.index(axis) for axis in kept)]
    sums = torch.einsum(*operands, [numbers[axis] for axis in leading])
    other_dims = [dim for dim, axis in enumerate(leading) if axis not in kept]
    if other_dims:
        sums = sums.sum(other_dims)
    kept_in_order = [axis for axis in leading if axis in kept]
    sums = sums.permute([kept_in_order.index(axis) for axis in kept])
    for dim, indices in enumerate(selections.values()):
        sums = _grouped(sums, dim, indices)
    return sums


def at_prompts(
    prompts: Bool[Tensor, "row column"],
    axes: Sequence[str],
    factor: Float[Tensor, "..."],
    along: Iterable[str],
) -> Float[Tensor, "..."]:
    """Return a factor with 0 at the tokens of answers, if the places are positions.

    Args:
        prompts: True at the tokens of prompts.
        axes: the axes of the factor.
        factor: the factor.
        along: the axes along which places are selected.
    """
    for axis in along:
        if axis in POSITION_AXES:
            shape = [1] * factor.ndim
            shape[axes.index("batch")], shape[axes.index(axis)] = prompts.shape
            is_prompt = to_device(prompts.view(shape), factor.device)
            factor = factor.where(is_prompt, 0)
    return factor


def _grouped(values: Tensor, dim: int, indices: list[int | slice]) -> Tensor:
    """Return the sums of `values` along one axis, one sum for each index.

    Args:
        values: the values.
        dim: the index of the axis.
        indices: the places, each a number or a slice.
    """
    members = []
    for n, index in enumerate(indices):
        if isinstance(index, int):
            members.append((n, index))
        else:
            members += [(n, member) for member in range(index.start, index.stop)]
    if members == [(n, n) for n in range(values.shape[dim])]:
        return values
    group, member = torch.tensor(members, device=values.device).T
    shape = [*values.shape]
    shape[dim] = len(indices)
    return values.new_zeros(shape).index_add_(dim, group, values.index_select(dim, member))


def of_layers(
    sites: Sites, by_point: Mapping[str, Tensor], base: Float[Tensor, " example"], **about: Any
) -> Result:
    """Return the effects of all layers together.

    Args:
        sites: the places.
        by_point: the effects [*places, example] of each point that a backward pass reached, in the
            order of the backward pass.
        base: the metric of the run to edit.
        about: more facts for the result.

    Raises:
        ValueError: if an effect is NaN.

    Warns:
        UserWarning: if the backward pass did not reach a point. The effects of the point are 0.
    """
    names = [*sites.names.values()]
    warn_of_unread([name for name in names if name not in by_point])
    sizes = [len(places) for axis, places in sites.places.items() if axis != "layer"]
    by_layer = []
    for name in names:
        values_of_point = by_point[name] if name in by_point else base.new_zeros(*sizes, len(base))
        by_layer.append(to_device(values_of_point, base.device))
    if "layer" in sites.places:
        values = torch.stack(by_layer, [*sites.places].index("layer"))
    else:
        values = by_layer[0]
    # One check for all points waits for the device once. The points are searched only after it.
    if has_nan(values):
        for name, values_of_point in by_point.items():
            require_numbers(name, values_of_point)
    return sites.result(base, values, **about)
