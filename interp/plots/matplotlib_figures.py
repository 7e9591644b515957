"""Figures for papers, with matplotlib: effects, estimates, faithfulness and lines."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import require_kind
from interp.plots.figure import Axes, Figure, Picture
from interp.plots.parts import facts_of, headline, with_head_map
from interp.plots.view import Arrow, least_limit, plotted_axes

AxisLabels = Mapping[str, Sequence[Any]]
"""For the name of each axis, in order, a label for each index."""

_COLOURS = {"signed": "#2166ac", "absolute": "#1b7837", "random": "grey"}
# By the direction of patching, the verb of a title: shares of target - base are restored or lost.
_VERBS = {"denoising": "restored", "noising": "lost"}
# By the name of a metric, its words in a title.
_METRICS = {"logit_diff": "logit difference", "log_prob": "log probability"}
# The largest number of ticks along an axis.
_MOST_TICKS = 80
# The space of a tick in inches: along columns, where letters are small, and along rows.
_COLUMN_TICK = 0.13
_ROW_TICK = 0.15
# The number of places with the largest errors of estimates that get a name.
_NAMED = 5


def effects(
    result: Any,
    facet: str | None = None,
    title: str | None = None,
    limit: float | None = None,
    ax: Any = None,
) -> Figure:
    """Plot the mean effects of a result.

    Args:
        result: the result.
        facet, title, limit, ax: see `Result.plot`, which also lists the errors.
    """
    result = with_head_map(result)
    axes = plotted_axes(result.axes[:-1], facet)
    require_kind("limit", limit, (int, float, type(None)), "a positive number")
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"limit must be a positive number in the unit of the result; got {limit}")
    limit = None if limit is None else float(limit)
    if ax is not None:
        require_kind("ax", ax, Axes, "the axes of one panel of a matplotlib figure")
    if ax is not None and facet is not None:
        raise ValueError(f"ax= draws a single heat map; got facet={facet!r}: leave out ax=")
    what = "mean effect" if result.values.shape[-1] > 1 else "effect"
    unit = f"{what} ({result.unit})" if result.unit else what
    if title is None:
        title = _title(result)
    labels = {axis: _labels_with_words(result, axis) for axis in axes}
    means = result.mean()
    if len(axes) == 1:
        low, high = result.interval()
        return bars(
            means, low, high=high, labels=labels, unit=unit, title=title, limit=limit, ax=ax
        )
    names = [""]
    tables = means[None]
    if facet is not None:
        names = [f"{facet} {label}" for label in _labels_with_words(result, facet)]
        tables = means.movedim(result.axes.index(facet), 0)
    reach = least_limit(result, means)
    return heat_maps(
        tables, labels, names=names, unit=unit, title=title, reach=reach, limit=limit, ax=ax
    )


def _title(result: Any) -> str:
    """Return a title such as `Share of the logit difference restored, by head`.

    Effects that are not shares have a title such as `Effect on the logit difference, by head`. Each
    axis is named, and `layer` and `effect` only if there is no other axis. Facts that the sentence
    does not contain follow in parentheses. The title of effects on a metric without words in
    `_METRICS` lists the facts only.
    """
    verb = _VERBS.get(result.about.get("direction", ""))
    metric, _, _ = result.about.get("metric", "").partition("(")
    words = _METRICS.get(metric, "effect")
    said = {"metric", "estimate"}
    is_estimate = "estimate" in result.about
    if verb is not None and result.unit.startswith("shares of"):
        said.add("direction")
        start = f"{'Estimated share' if is_estimate else 'Share'} of the {words} {verb}"
    elif metric in _METRICS and not result.unit.startswith("shares of"):
        start = f"{'Estimated effect' if is_estimate else 'Effect'} on the {words}"
    else:
        return headline(result)
    places = result.axes[:-1]
    axes = [axis for axis in places if axis not in ("layer", "effect")] or places
    names = [{"pos": "position"}.get(axis, axis) for axis in axes]
    if "head" in axes and result.about.get("site") == "z":
        said.add("site")
    facts = facts_of(result, but=said)
    title = f"{start}, by {' and '.join(names)}"
    return f"{title} ({facts})" if facts else title


def _labels_with_words(result: Any, axis: str) -> list[Any]:
    """Return the labels of an axis, with its words."""
    labels = result.labels[axis]
    pairs = zip(labels, result.words.get(axis) or [""] * len(labels), strict=True)
    return [f"{label} {word!r}" if word else label for label, word in pairs]


def heat_maps(
    values: Float[Tensor, "facet row column"],
    labels: AxisLabels,
    names: Sequence[str],
    unit: str,
    title: str,
    reach: float = 0.0,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Figure | Picture:
    """Plot tables as colours, side by side, all on one scale.

    White is 0. The range of colours includes `reach`, or ends at `limit`. It includes values below
    0 only if a value is below 0.

    Args:
        values: the tables.
        labels: the labels of the rows and of the columns.
        names: the name above each table.
        unit: the unit of the values, next to the scale.
        title: the title above all tables.
        reach: a value that the range of colours includes.
        limit: the end of the range of colours. Default: the largest absolute value, or `reach`.
        ax: for one table, the axes to draw in. Default: the axes of a new figure.
    """
    tables = values.numpy(force=True)
    # Leave out NaN, which is the only number that is not equal to itself.
    known = tables[tables == tables]
    largest = abs(known).max(initial=0)
    most = limit or max(largest, reach) or 1
    colours, least = ("RdBu", -most) if known.min(initial=0) < 0 else ("Blues", 0)
    (rows, of_rows), (columns, of_columns) = labels.items()
    figure: Figure | Picture
    if ax is None:
        across = math.ceil(len(tables) ** 0.5)
        down = math.ceil(len(tables) / across)
        size = (_inches(len(of_columns) * across), _inches(len(of_rows) * down))
        figure = _new_figure(size, title)
        panels = [figure.add_subplot(down, across, number + 1) for number in range(len(tables))]
    else:
        figure, panels, names = _figure_of(ax), [ax], [title]
    for axes, table, name in zip(panels, tables, names, strict=True):
        image = axes.imshow(table, cmap=colours, vmin=least, vmax=most, aspect="auto")
        axes.set_title(name, fontsize="small")
        axes.set_ylabel(rows)
        n_ticks = int(_inches_of(axes)[1] / _ROW_TICK)
        axes.set_yticks(*_ticks(of_rows, _decisive(table, 1), n_ticks))
        _label_columns(axes, columns, labels=of_columns, decisive=_decisive(table, 0))
    # Arrows at the ends of the scale show that values beyond it have its last colours.
    ends = "neither" if largest <= most else "both" if least < 0 else "max"
    figure.colorbar(image, ax=panels, label=unit, extend=ends)
    return figure


def bars(
    values: Float[Tensor, " place"],
    low: Float[Tensor, " place"],
    high: Float[Tensor, " place"],
    labels: AxisLabels,
    unit: str,
    title: str,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Figure | Picture:
    """Plot bars with intervals.

    Args:
        values: the height of each bar.
        low, high: the ends of the intervals.
        labels: the labels of the bars, by the name of their axis.
        unit: the unit of the values.
        title: the title above the bars.
        limit: the end of the axis of values, which begins at 0 if no interval goes below 0, and
            otherwise at -limit. Default: all bars and intervals fit.
        ax: the axes to draw in. Default: the axes of a new figure.
    """
    places = range(len(values))
    figure: Figure | Picture
    if ax is None:
        figure, axes = _framed((_inches(len(values)), 4.0), title)
    else:
        figure, axes = _figure_of(ax), ax
        axes.set_title(title, fontsize="small")
    axes.bar(places, values.numpy(force=True), color="#4393c3")
    axes.vlines(places, low.numpy(force=True), high.numpy(force=True), color="black")
    axes.axhline(0, color="black", linewidth=0.8)
    if limit is not None:
        lowest = torch.fmin(values, low.to(values)).min()
        axes.set_ylim(-limit if lowest < 0 else 0, limit)
    axes.set_ylabel(unit)
    name, labels_of_bars = next(iter(labels.items()))
    decisive = _decisive(values.numpy(force=True)[None], 0)
    _label_columns(axes, name, labels=labels_of_bars, decisive=decisive)
    return figure


def _inches(n_places: int) -> float:
    """Return the length of an axis with room for the labels of some places."""
    return min(max(0.3 * n_places + 2, 4.0), 16.0)


def scatter(
    exact: Float[Tensor, " place"],
    estimate: Float[Tensor, " place"],
    named: Sequence[tuple[float, float, str]],
    unit: str,
    title: str,
) -> Picture:
    """Plot estimated over exact effects, with a dot for each place and the names of some places.

    Args:
        exact, estimate: the effects.
        named: the exact effect, the estimate and the name of some places, the most important first.
        unit: the unit of the effects.
        title: the title above the plot.
    """
    figure, axes = _framed((5.0, 5.0), title)
    axes.axhline(0, color="lightgrey", linewidth=0.8)
    axes.axvline(0, color="lightgrey", linewidth=0.8)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle="--")
    axes.scatter(exact.numpy(force=True), estimate.numpy(force=True), s=12, color="#4393c3")
    left, right = exact.min().item(), exact.max().item()
    bottom, top = estimate.min().item(), estimate.max().item()
    near_x = 0.05 * (right - left)
    near_y = 0.05 * (top - bottom)
    named_at: list[tuple[float, float]] = []
    for x, y, name in named[:_NAMED]:
        # Skip names of dots that almost coincide, because they would overlap.
        if any(abs(x - at_x) < near_x and abs(y - at_y) < near_y for at_x, at_y in named_at):
            continue
        named_at.append((x, y))
        # Write the name towards the middle, so that it is not cut off.
        side, shift = ("left", 4) if x < (left + right) / 2 else ("right", -4)
        axes.annotate(
            name,
            (x, y),
            xytext=(shift, 4),
            textcoords="offset points",
            ha=side,
            fontsize="x-small",
        )
    unit = f" ({unit})" if unit else ""
    axes.set_xlabel(f"exact mean effect{unit}")
    axes.set_ylabel(f"estimated mean effect{unit}")
    return figure


def curves(
    shares: Sequence[float], heights: Mapping[str, Sequence[Float[Tensor, " share"]]], title: str
) -> Picture:
    """Plot faithfulness over the share of edges in circuits.

    Args:
        shares: the shares of edges.
        heights: by name, the mean and both ends of its interval.
        title: the title above the plot.
    """
    figure, axes = _framed((6.0, 4.0), title)
    axes.axhline(0, color="lightgrey", linewidth=0.8)
    axes.axhline(1, color="lightgrey", linewidth=0.8)
    for name, numbers in heights.items():
        _line(axes, shares, numbers, colour=_COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("share of the edges kept")
    axes.set_ylabel("faithfulness")
    axes.legend()
    return figure


def below_each_other(
    x: Sequence[float],
    heights: Mapping[str, Sequence[Float[Tensor, " x"]]],
    axis: str,
    title: str,
) -> Picture:
    """Plot numbers with intervals over one axis, in a panel of its own for each name.

    Args:
        x: the places on the axis.
        heights: by the name of a panel, the mean and both ends of its interval.
        axis: the name of the axis.
        title: the title above all panels.
    """
    figure = Picture(figsize=(6.0, 1.0 + 2.5 * len(heights)), layout="constrained")
    figure.suptitle(title, fontsize="small", wrap=True)
    panels = figure.subplots(len(heights), sharex=True, squeeze=False)[:, 0]
    for axes, (name, numbers) in zip(panels, heights.items(), strict=True):
        axes.axhline(0, color="lightgrey", linewidth=0.8)
        _line(axes, x, numbers, colour="#4393c3", label=name)
        axes.set_ylabel(name)
    panels[-1].set_xlabel(axis)
    return figure


def _line(
    axes: Axes, x: Sequence[float], numbers: Sequence[Float[Tensor, " x"]], colour: str, label: str
) -> None:
    """Plot a line with dots through means, and a band for their interval.

    Args:
        axes: the axes to plot on.
        x: the places, in any order.
        numbers: the mean and both ends of its interval at each place.
        colour: the colour.
        label: the name of the line.
    """
    order = np.argsort(x)
    places = np.asarray(x)[order]
    mean, low, high = (values.numpy(force=True)[order] for values in numbers)
    axes.plot(places, mean, "o-", color=colour, label=label, markersize=3)
    axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def lines(
    x: Float[Tensor, " x"],
    series: Mapping[str, Float[Tensor, " x"]],
    axis: str,
    unit: str,
    title: str,
) -> Picture:
    """Plot numbers over an axis, with a line for each name.

    Args:
        x: the places on the axis.
        series: the numbers of each line.
        axis: the name of the axis.
        unit: the unit of the numbers.
        title: the title above the plot.
    """
    figure, axes = _framed((6.0, 4.0), title)
    for name, values in series.items():
        axes.plot(x.numpy(force=True), values.numpy(force=True), label=name)
    axes.set_xlabel(axis)
    axes.set_ylabel(unit)
    if len(series) <= 12:
        axes.legend()
    return figure


_INCHES_OF_TITLE = 0.8


def network(rows: Sequence[Sequence[str]], arrows: Sequence[Arrow], title: str) -> Picture:
    """Plot nodes in rows, the first row at the bottom, and arrows between them.

    An arrow is wider if its score is larger. An arrow with a negative score is blue, and bends to
    the right. An arrow with a positive score is red and dashed, and bends to the left. An arrow
    without a score is grey. The part of the node, such as `q`, is written on its arrow.

    Args:
        rows: the names of the nodes in each row.
        arrows: the arrows. The first one is drawn above all others.
        title: the title above the plot.
    """
    widest = max(map(len, rows), default=1)
    reach = 0.75 * widest + 0.15 * len(rows)
    # matplotlib bends arrows on the screen, so `_on_arc` needs axes of one scale.
    width, height = 2 * reach, len(rows) - 0.1
    scale = min(_inches(3 * widest) / width, _inches(2 * len(rows)) / height)
    figure, axes = _framed((width * scale, height * scale + _INCHES_OF_TITLE), title)
    places = {}
    for number, row in enumerate(rows):
        for n, node in enumerate(row):
            places[node] = (1.5 * (n - (len(row) - 1) / 2), float(number))
    largest = max((abs(arrow.score) for arrow in arrows), default=0) or 1
    for arrow in reversed(arrows):
        harms = arrow.score > 0
        colour = "#b2182b" if harms else "#2166ac"
        bend = -0.25 if harms else 0.25
        style: dict[str, Any] = {
            "arrowstyle": "-|>",
            "connectionstyle": f"arc3,rad={bend}",
            "color": colour if arrow.score else "grey",
            "linestyle": "dashed" if harms else "solid",
            "linewidth": 0.5 + 2.5 * abs(arrow.score) / largest,
            "shrinkA": 9,
            "shrinkB": 9,
        }
        start, end = places[arrow.start], places[arrow.end]
        axes.annotate("", xy=end, xytext=start, arrowprops=style)
        if arrow.part:
            at = _on_arc(start, end, bend)
            box = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"}
            axes.text(*at, arrow.part, fontsize="xx-small", color=style["color"], bbox=box)
    for node, (x, y) in places.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "grey"}
        axes.text(x, y, node, ha="center", va="center", fontsize="x-small", bbox=box)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-0.5, len(rows) - 0.6)
    axes.set_aspect("equal", anchor="N")
    axes.set_axis_off()
    return figure


def _on_arc(
    start: tuple[float, float], end: tuple[float, float], bend: float
) -> tuple[float, float]:
    """Return a place near the end of an arc, a Bézier curve as matplotlib draws it with `arc3`.

    Args:
        start, end: the two ends.
        bend: the distance of the control point from the middle, divided by the length.
    """
    (x0, y0), (x1, y1) = start, end
    control = ((x0 + x1) / 2 + bend * (y1 - y0), (y0 + y1) / 2 - bend * (x1 - x0))
    share = 0.75
    x, y = (
        (1 - share) ** 2 * a + 2 * share * (1 - share) * b + share**2 * c
        for a, b, c in zip(start, control, end, strict=True)
    )
    return x, y


def _framed(size: tuple[float, float], title: str) -> tuple[Picture, Axes]:
    """Return a figure with a title, and its axes. The size is in inches."""
    figure = _new_figure(size, title)
    return figure, figure.subplots()


def _new_figure(size: tuple[float, float], title: str) -> Picture:
    """Return an empty figure with a title. The size is in inches."""
    figure = Picture(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize="small", wrap=True)
    return figure


def _figure_of(ax: Axes) -> Figure:
    """Return the whole figure that contains axes.

    Raises:
        ValueError: if the axes were removed from their figure.
    """
    figure = ax.get_figure(root=True)
    if figure is None:
        raise ValueError("ax must be the axes of a figure; got axes that were removed from theirs")
    return figure


def _label_columns(axes: Axes, name: str, labels: Sequence[Any], decisive: int) -> None:
    """Write the labels of columns and the name of their axis.

    Args:
        axes: the axes to label.
        name: the name of the axis.
        labels: the labels.
        decisive: the index of a label that is always written.
    """
    width = _inches_of(axes)[0]
    ticks, texts = _ticks(labels, decisive, int(width / _COLUMN_TICK))
    is_narrow = len(ticks) > min(_MOST_TICKS // 2, int(width / (2 * _COLUMN_TICK)))
    axes.set_xticks(
        ticks,
        texts,
        rotation=90 if max(map(len, texts), default=0) > 3 else 0,
        fontsize="x-small" if is_narrow else None,
    )
    axes.set_xlabel(name)


def _decisive(table: Any, along: int) -> int:
    """Return the index, along one axis, of the row or column with the largest absolute value."""
    sizes = np.nan_to_num(np.abs(table), nan=-1).max(along)
    return int(sizes.argmax()) if sizes.size else 0


def _inches_of(axes: Axes) -> tuple[float, float]:
    """Return the width and the height of axes, before the figure makes room for its labels."""
    place = axes.get_position()
    figure = _figure_of(axes)
    return place.width * figure.get_figwidth(), place.height * figure.get_figheight()


def _ticks(
    labels: Sequence[Any], decisive: int, most: int = _MOST_TICKS
) -> tuple[list[int], list[str]]:
    """Return the indices and the texts of the labels to draw.

    If there are too many labels, the result has only some of them, always with the decisive one.

    Args:
        labels: the labels.
        decisive: the index of the decisive label.
        most: the number of labels that the axis has room for.
    """
    step = 1 + (len(labels) - 1) // max(1, min(most, _MOST_TICKS))
    # A label next to the decisive label would overlap with it.
    ticks = []
    for tick in range(0, len(labels), step):
        if tick == decisive or abs(tick - decisive) >= step:
            ticks.append(tick)
    ticks = sorted({*ticks, decisive}) if labels else []
    return ticks, [str(labels[tick]) for tick in ticks]
