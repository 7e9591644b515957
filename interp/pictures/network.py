"""A circuit drawn from the input upward, heads and MLPs as boxes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from interp.pictures.figure import Picture
from interp.pictures.view import Arrow

_WIDTH, _HEIGHT, _STEP = 0.8, 0.4, 1.2
_COLOURS = {"a": "#fee8c8", "m": "#e0f3db", "": "white"}
_HELPS, _HARMS = "#2166ac", "#b2182b"
_PORTS = {"q": -0.27, "k": 0.0, "v": 0.27}
"""The ends of the edges to a head's query, key and value, from its middle."""


def drawn(rows: Sequence[Sequence[str]], arrows: Sequence[Arrow], title: str) -> Figure:
    """Nodes in rows from the bottom upward, as boxes, and arrows as wide as their scores."""
    widest = max((len(row) for row in rows), default=1)
    figure = Picture(figsize=(1.5 + widest, 0.8 + 0.75 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = {
        node: (x - (len(row) - 1) / 2, _STEP * y)
        for y, row in enumerate(rows)
        for x, node in enumerate(row)
    }
    largest = max((abs(arrow.score) for arrow in arrows), default=0.0) or 1.0
    for start, end, part, score in arrows:
        _edge(axes, places[start], places[end], _PORTS.get(part, 0.0), score / largest)
    for node, place in places.items():
        _box(axes, node, *place)
    axes.set_xlim(-widest / 2 - 0.2, widest / 2 + 0.2)
    axes.set_ylim(-0.5, _STEP * (len(rows) - 1) + 0.5)
    axes.axis("off")
    figure.suptitle(f"{title}\nblue edges help, red ones harm", fontsize="small")
    return figure


def _edge(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], port: float, score: float
) -> None:
    passes_a_row = start[0] == end[0] and end[1] - start[1] > 1.1 * _STEP
    axes.add_patch(
        FancyArrowPatch(
            (start[0], start[1] + _HEIGHT / 2),
            (end[0] + port, end[1] - _HEIGHT / 2),
            connectionstyle=f"arc3,rad={0.3 if passes_a_row else 0.0}",
            arrowstyle="-|>",
            shrinkA=0,
            shrinkB=0,
            mutation_scale=6,
            linewidth=0.6 + 3 * abs(score),
            color=_HELPS if score < 0 else _HARMS if score > 0 else "grey",
            alpha=0.4 + 0.55 * abs(score),
            zorder=1,
        )
    )


def _box(axes: Axes, node: str, x: float, y: float) -> None:
    kind = node[0] if node[1:2].isdigit() else ""
    corner, style = (x - _WIDTH / 2, y - _HEIGHT / 2), "round,pad=0,rounding_size=0.08"
    box = FancyBboxPatch(
        corner, _WIDTH, _HEIGHT, boxstyle=style, fc=_COLOURS[kind], ec="black", lw=0.7
    )
    axes.add_patch(box)
    box.set_zorder(2)
    is_head = kind == "a" and ".h" in node
    axes.text(x, y + 0.04 * is_head, node, ha="center", va="center", fontsize="small", zorder=3)
    for part, port in _PORTS.items() if is_head else ():
        at = x + port, y - _HEIGHT / 2 + 0.02
        axes.text(*at, part, ha="center", va="bottom", fontsize=5, color="dimgrey", zorder=3)
