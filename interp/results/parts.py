"""Checks of results; parts of them, by label; entries regrouped by what their names say; and differences of two results."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hooks.base import shown, unknown_name
from interp.inputs.token_positions import short
from interp.results.node import NodeName

if TYPE_CHECKING:
    from interp.results.result import Result


def check(result: "Result") -> None:
    """Refuses axes, labels, words, base, target or groups that do not fit the values.

    Raises:
        ValueError: if they do not, or there are no values.
    """
    axes, shape = result.axes, result.values.shape
    if len(axes) != len(shape) or axes[-1:] != ("example",) or len(set(axes)) < len(axes):
        raise ValueError(
            f"axes must name each axis of values {list(shape)}, the last 'example'; got {axes}"
        )
    if not result.values.numel():
        raise ValueError(f"values must have at least one place and example; got {list(shape)}")
    for name, metrics in (("base", result.base), ("target", result.target)):
        if metrics is not None and metrics.shape != shape[-1:]:
            raise ValueError(
                f"{name} must have one number for each example, [{shape[-1]}]; "
                f"got the shape {list(metrics.shape)}"
            )
    if result.groups is not None and len(result.groups) != shape[-1]:
        raise ValueError(
            f"groups must have a number for each example, {shape[-1]}; got {len(result.groups)}"
        )
    sizes = dict(zip(axes, shape, strict=True))
    for axis, labels in [*result.labels.items(), *result.words.items()]:
        plain = all(isinstance(label, (str, int, float)) for label in labels)
        if not plain or sizes.get(axis) != len(labels):
            raise ValueError(
                f"labels must be numbers or text, one for each index of {sizes}; "
                f"got {len(labels)} for {axis!r}, {short(labels)}"
            )


def selected(result: "Result", axis: str, asked: Any) -> "Result":
    """The part at one label of an axis, without it; or at a list of labels, or at those that a pattern matches."""
    if axis not in result.axes:
        raise unknown_name(axis, result.axes, "axis of this result")
    several = isinstance(asked, (list, tuple, range))
    indices = [_indices(result, axis, label) for label in (asked if several else [asked])]
    chosen = part(result, axis, [index for matching in indices for index in matching])
    if several or axis == "example" or _is_pattern(result, axis, asked):
        return chosen
    values = chosen.values.squeeze(result.axes.index(axis))
    return _without(chosen, axis, values, about={**result.about, axis: chosen.labels[axis][0]})


def summed(result: "Result", axis: str) -> "Result":
    """The effects added up along an axis; see `Result.sum`."""
    if axis not in result.axes:
        raise unknown_name(axis, result.axes, "axis of this result")
    if axis == "example":
        raise ValueError("examples are not added up: mean() is their mean")
    values = result.values.sum(result.axes.index(axis))
    return _without(result, axis, values, bounds=None, counts=None)


def _without(result: "Result", axis: str, values: torch.Tensor, **changes: Any) -> "Result":
    """A result with these values, that lack one of its axes."""
    labels, words = (
        {other: facts for other, facts in all_facts.items() if other != axis}
        for all_facts in (result.labels, result.words)
    )
    return replace(result, values=values, axes=tuple(labels), labels=labels, words=words, **changes)


def part(result: "Result", axis: str, indices: Sequence[int]) -> "Result":
    """The part at some indices of an axis, which stays."""
    indices = [*indices]
    values = result.values[(slice(None),) * result.axes.index(axis) + (indices,)]
    labels = {**result.labels, axis: [result.labels[axis][index] for index in indices]}
    words = {**result.words}
    if axis in words:
        words[axis] = [words[axis][index] for index in indices]
    if axis != "example":
        return replace(result, values=values, labels=labels, words=words)
    base, target = (x if x is None else x[indices] for x in (result.base, result.target))
    groups = None if result.groups is None else tuple(result.groups[index] for index in indices)
    few = replace(result, values=values, labels=labels, base=base, target=target, groups=groups)
    # Over fewer examples, the mean of target - base is another one.
    return few.normalized() if result.is_ratio else few


def _is_pattern(result: "Result", axis: str, label: Any) -> bool:
    """Whether a label is a pattern, and no label or word that has such a sign itself."""
    is_name = label in result.labels[axis] or label in result.words.get(axis, ())
    return isinstance(label, str) and not is_name and ("*" in label or "?" in label)


def _indices(result: "Result", axis: str, label: Any) -> list[int]:
    """The index of a label or word, or those of all labels that a pattern matches."""
    known = result.labels[axis]
    if _is_pattern(result, axis, label):
        matching = [n for n, name in enumerate(known) if fnmatch.fnmatchcase(str(name), label)]
        if not matching:
            raise ValueError(f"{axis} must match a label of {short(known)}; got {shown(label)}")
        return matching
    for labels in (known, result.words.get(axis, ())):
        if labels.count(label) == 1:
            return [labels.index(label)]
    raise ValueError(f"{axis} must be a unique label of {short(known)}; got {shown(label)}")


def regrouped(result: "Result", what: str) -> "Result":
    """The entries of nodes as [layer, head], [layer, neuron] or [layer, part]; see `Result.by`."""
    ways = ("layer", "head", "neuron", "expert")
    if what not in ways:
        raise unknown_name(what, ways, "way to regroup")
    second = "part" if what == "layer" else what
    for axis in result.axes[:-1]:
        indices: dict[tuple[int, Any], int] = {
            (label.layer, label.part if what == "layer" else label.number): n
            for n, label in enumerate(result.labels[axis])
            if isinstance(label, NodeName) and (what in ("layer", label.kind))
            if label.layer is not None
        }
        if indices:
            break
    else:
        raise ValueError(
            f"by({what!r}) needs an axis of nodes, with labels that know a {what} (NodeName); got {result.axes}"
        )
    layers = sorted({layer for layer, _ in indices})
    places = [*dict.fromkeys(place for _, place in indices)]
    places = places if second == "part" else sorted(places)
    index = torch.tensor(
        [[indices.get((layer, place), -1) for place in places] for layer in layers]
    )
    index, dim = index.to(result.values.device), result.axes.index(axis)
    values = result.values.movedim(dim, 0)[index]  # [layer, place, *other axes]
    values = values.where(index.view(*index.shape, *[1] * (values.ndim - 2)) >= 0, torch.nan)
    axes = list(result.axes)
    axes[dim : dim + 1] = ["layer", second]
    labels = {**result.labels, "layer": layers, second: places}
    words = {**result.words}
    for facts in (labels, words):
        facts.pop(axis, None)
    return replace(
        result,
        values=values.movedim((0, 1), (dim, dim + 1)),
        axes=tuple(axes),
        labels=labels,
        words=words,
    )


def numbers(values: torch.Tensor | None) -> Any:
    """The numbers of a tensor in lists; None, JSON's null, in place of NaN and infinity."""
    if values is None:
        return None
    flat = values.detach().cpu().double().numpy()
    plain = flat.astype(object)
    plain[~np.isfinite(flat)] = None
    return plain.tolist()


def difference(one: "Result", other: "Result") -> "Result":
    """The effects of one result minus those of another, for each example; see `Result.__sub__`."""
    for what in ("axes", "labels", "unit"):
        ours, theirs = getattr(one, what), getattr(other, what)
        if ours != theirs:
            raise ValueError(f"both must have the same {what}; got {ours!s:.60} and {theirs!s:.60}")
    texts = [result.about["texts"] for result in (one, other) if "texts" in result.about]
    if len(texts) == 2 and texts[0] != texts[1]:
        raise ValueError("both must be of the same texts, example for example; got others")
    runs: dict[str, Any] = {}
    for name in ("base", "target"):
        ours, theirs = getattr(one, name), getattr(other, name)
        same = ours is not None and theirs is not None and torch.allclose(ours, theirs)
        runs[name] = ours if same else None
    if one.is_ratio and any(metrics is None for metrics in runs.values()):
        raise ValueError("shares must be of the same runs: subtract effects, and then normalize")
    about = {name: fact for name, fact in one.about.items() if other.about.get(name) == fact}
    words = {axis: texts for axis, texts in one.words.items() if other.words.get(axis) == texts}
    ends = None if one.bounds is None or other.bounds is None else (*one.bounds, *other.bounds)
    return replace(
        one,
        values=one.values - other.values,
        **runs,
        about=about,
        words=words,
        bounds=None if ends is None else (ends[0] - ends[3], ends[1] - ends[2]),
        counts=None,
        groups=other.groups if one.groups is None else one.groups,
    )
