"""Pictures of results: bars of one axis, a heat map of two, and a heat map for each label of a third."""

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from interp.pictures.plots import bars, heat_maps
from interp.pictures.view import plotted_axes

if TYPE_CHECKING:
    from interp.results.result import Result


def plot(result: "Result", facet: str | None = None) -> Figure:
    """The mean effects of a result; see `Result.plot`."""
    axes = plotted_axes(result.axes[:-1], facet)
    unit = f"mean ({result.unit})" if result.unit else "mean"
    title = ", ".join(f"{name}: {value}" for name, value in result.about.items())
    labels = {axis: _labels_with_words(result, axis) for axis in axes}
    means = result.mean()
    if len(axes) == 1:
        return bars(means, *result.interval(), labels, unit, title)
    base, target = result.base, result.target
    reach = 0.0 if base is None or target is None else (target - base).mean().abs().item()
    if facet is None:
        return heat_maps(means[None], labels, [""], unit, title, reach)
    names = [f"{facet} {label}" for label in _labels_with_words(result, facet)]
    return heat_maps(means.movedim(result.axes.index(facet), 0), labels, names, unit, title, reach)


def _labels_with_words(result: "Result", axis: str) -> list[Any]:
    """The labels of an axis, with its words."""
    labels = result.labels[axis]
    pairs = zip(labels, result.words.get(axis) or [""] * len(labels), strict=True)
    return [f"{label} {word!r}" if word else label for label, word in pairs]
