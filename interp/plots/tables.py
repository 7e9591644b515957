"""Pictures of numbers: one or several results as heat maps or bars, and lines."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hooks.base import explains_calls, require_kind
from interp.plots.parts import (
    MOST_COLUMNS,
    MOST_WEIGHTS,
    axis_part,
    grid_part,
    headline,
    thinned,
    with_head_map,
)
from interp.plots.view import View, least_limit, plotted_axes, visible_title

# The largest numbers that a browser draws without a pause.
_MOST_BARS = 60
_MOST_POINTS = 2000
_MOST_PIXELS = 256


@explains_calls
def effects(result: Any, facet: str | None = None) -> View:
    """Draw a `Result`: a heat map for two axes, or bars with 95% intervals for one axis.

    One axis with all heads of several layers, such as senders of `path_patching`, is drawn as a
    heat map of layers and heads.

    Each cell of a heat map shows its mean as a number. The pointer and the arrow keys show means
    and intervals.

    Args:
        result: the result. Besides `example` and the facet, it has one or two axes.
        facet: the name of the axis that gets one heat map for each of its labels, if the result has
            three axes besides `example`. Default: the first axis.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, in the unit of the result. `.figure` is
        the same plot as a matplotlib figure.

    Raises:
        UnknownNameError: if the axis of `facet` does not exist.
        ValueError: if the result does not have one or two axes besides `example` and the facet.

    >>> from interp import Result
    >>> effects(Result(torch.tensor([[1.0, 3.0, 2.5], [0.0, -0.5, 0.5]]), ("layer", "example")))
    View of mean effects: .save("x.html") writes it, .show() opens it
    """
    result = with_head_map(result)
    axes = [*result.axes[:-1]]
    means = result.mean().detach().cpu()
    facet = axes[0] if facet is None and len(axes) == 3 else facet
    rest = plotted_axes(axes, facet)
    low, high = (end.detach().cpu() for end in result.interval())
    if len(rest) == 1:
        part = _bars(rest[0], result, means=means, low=low, high=high)
    else:
        part = _heat_maps(result, rest, facet, means=means, low=low, high=high)
    return View(headline(result), [part], lambda: result.plot(facet))


def _heat_maps(
    result: Any, axes: Sequence[str], facet: str | None, *, means: Tensor, low: Tensor, high: Tensor
) -> dict[str, Any]:
    """Return the part of a heat map, or of one heat map for each label of the facet.

    Args:
        result: the result.
        axes: the axes of the rows and the columns.
        facet: the axis with a heat map for each label; None for a single heat map.
        means: the means.
        low, high: the ends of their intervals; NaN without intervals.
    """
    has_intervals = bool(low.isfinite().any())
    rows, columns = (min(len(result.labels[axis]), MOST_COLUMNS) for axis in axes)
    n_tables = 1 if facet is None else len(result.labels[facet])
    n_numbers = (1 + 2 * has_intervals) * rows * columns
    n_drawn = max(1, min(n_tables, MOST_WEIGHTS // n_numbers))

    def drawn(values: Tensor) -> Tensor:
        """Return the tables that are drawn, [facet, row, column]."""
        by_facet = values[None] if facet is None else values.movedim(result.axes.index(facet), 0)
        return by_facet[:n_drawn, -rows:, -columns:]

    tables = drawn(means)
    down, across = (
        axis_part(axis, result.labels[axis], words=result.words.get(axis), most=MOST_COLUMNS)
        for axis in axes
    )
    return grid_part(
        headline(result),
        tables,
        rows=down,
        columns=across,
        unit=result.unit,
        facets=[f"{facet} {label}" for label in result.labels[facet][:n_drawn]] if facet else [],
        least=least_limit(result, means),
        from_end=axes[-1] in ("pos", "key", "query"),
        written=True,
        more={"95 % from": drawn(low), "95 % to": drawn(high)} if has_intervals else {},
        note=thinned(means.numel(), tables.numel(), "values"),
    )


@explains_calls
def image(
    pixels: Float[Tensor, "channel height width"],
    values: Float[Tensor, " patch"],
    *,
    grid: tuple[int, int] | None = None,
    title: str = "patches",
    unit: str = "",
) -> View:
    """Draw the values of patches as colours over their image, which is drawn in grey.

    Args:
        pixels: the image, of any numbers; the smallest number is drawn black, the largest white.
        values: a number for each patch, from left to right and from top to bottom, without a number
            for a class token.
        grid: the numbers of rows and columns of patches. Default: a square.
        title, unit: the title and the unit of the numbers.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, with the values in `unit`, in the rows and
        columns of the grid.

    Raises:
        ValueError: if the patches do not fill the grid.

    >>> image(torch.rand(3, 8, 8), torch.tensor([0.0, 1.0, 2.0, -1.0]), unit="logits")
    View of patches: .save("x.html") writes it, .show() opens it
    """
    side = math.isqrt(len(values))
    rows, columns = (side, side) if grid is None else grid
    if rows * columns != len(values):
        raise ValueError(
            f"values must fill grid=(rows, columns), {rows} by {columns}; got {len(values)} "
            "numbers (leave out the number of a class token)"
        )
    # The browser scales the image to the page, so more pixels would only make the file larger.
    size = min(_MOST_PIXELS, pixels.shape[1]), min(_MOST_PIXELS, pixels.shape[2])
    grey = pixels.detach().cpu().float().mean(0, keepdim=True)
    shown = adaptive_avg_pool2d(grey, size).expand(3, *size)
    low, high = shown.aminmax()
    shown = ((shown - low) / (high - low).clamp(min=1e-9) * 255).round()
    table = values.detach().cpu().view(1, rows, columns)
    down = axis_part("row", range(rows), words=None, most=rows)
    across = axis_part("column", range(columns), words=None, most=columns)
    under = shown.movedim(0, -1).contiguous()
    return View(
        title,
        [grid_part(title, table, rows=down, columns=across, unit=unit, square=True, under=under)],
    )


@explains_calls
def together(title: str, results: Mapping[str, Any]) -> View:
    """Draw several results or pictures below each other, each with its heading.

    Args:
        title: the title above all results.
        results: the results by heading; see `effects`. A value can also be a `View`, whose parts
            are drawn.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, with one part for each heading, in the
        given order.

    >>> from interp import Result
    >>> one = Result(torch.tensor([[1.0, 3.0, 2.0]]), ("layer", "example"), unit="logits")
    >>> together("two", {"first": one, "second": one})
    View of two: .save("x.html") writes it, .show() opens it
    """
    parts = []
    for heading, result in results.items():
        view = result if isinstance(result, View) else effects(result)
        for number, part in enumerate(view.parts):
            parts.append({**part, "heading": heading if number == 0 else ""})
    return View(title, parts)


@explains_calls
def curves(
    series: Mapping[str, Sequence[float] | Float[Tensor, " x"]],
    *,
    x: Sequence[float] | Float[Tensor, " x"] | None = None,
    axis: str = "step",
    unit: str = "",
    title: str = "curves",
) -> View:
    """Draw numbers as lines: losses over steps, singular values of a spectrum, angles of subspaces.

    Args:
        series: the numbers of each line, by name.
        x: the place of each number on the axis. Default: 0, 1, 2, ...
        axis: the name of the axis.
        unit: the unit of the numbers.
        title: the title above the plot.

    Returns:
        The page, for `.save()`, `.show()` and notebooks, in the given unit. `.figure` is the same
        plot as a matplotlib figure.

    Raises:
        ValueError: if there are no lines, or the lines differ in length.

    >>> from interp.spectral import svd
    >>> s = svd(torch.diag(torch.tensor([3.0, 2.0, 1.0]))).s
    >>> curves({"head 0": s}, axis="rank", title="spectrum")
    View of spectrum: .save("x.html") writes it, .show() opens it
    """
    call = "for example {'head 0': [3.0, 2.0]}"
    require_kind("series", series, Mapping, "a mapping from names to numbers", call)
    lines = {name: torch.as_tensor(values).detach().cpu() for name, values in series.items()}
    sizes = {tuple(values.shape) for values in lines.values()}
    places = torch.arange(next(iter(lines.values())).numel()) if x is None and lines else x
    places = torch.as_tensor([] if places is None else places).double().cpu()
    if sizes != {tuple(places.shape)} or places.ndim != 1:
        raise ValueError(
            f"series must be one or more lines [x] of the same length; got {[*map(list, sizes)]}"
        )
    step = -(-len(places) // _MOST_POINTS)
    drawn = [*range(0, len(places), step or 1)]
    if drawn and drawn[-1] != len(places) - 1:
        drawn.append(len(places) - 1)
    part = {
        "kind": "lines",
        "title": title,
        "x": places[drawn],
        "xname": axis,
        "unit": unit,
        "series": {visible_title(name): values[drawn] for name, values in lines.items()},
        "note": thinned(len(places), len(drawn), "points"),
    }

    def draw() -> Any:
        from interp.plots.matplotlib_figures import lines as plot_lines

        return plot_lines(places, lines, axis=axis, unit=unit, title=title)

    return View(title, [part], draw)


def _bars(axis: str, result: Any, means: Tensor, low: Tensor, high: Tensor) -> dict[str, Any]:
    """Return bars with intervals for the largest means.

    Args:
        axis: the axis of the bars.
        result: the result.
        means: its means.
        low, high: the ends of the intervals.
    """
    size = means.abs().nan_to_num(nan=-1)
    largest = sorted(size.argsort(descending=True, stable=True)[:_MOST_BARS].tolist())
    words = result.words.get(axis)
    labels = [result.labels[axis][place] for place in largest]
    texts = words and [words[place] for place in largest]
    return {
        "kind": "bars",
        "title": headline(result),
        "unit": result.unit,
        "axis": axis_part(axis, labels, words=texts, most=_MOST_BARS),
        "values": means[largest],
        "low": low[largest],
        "high": high[largest],
        "note": len(largest) < len(means)
        and f"The {len(largest)} largest of {len(means)} are shown.",
    }
