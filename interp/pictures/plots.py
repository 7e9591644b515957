"""Plots of numbers: effects, estimates over exact effects, and faithfulness over the size of a circuit."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from interp.causal.comparison import Comparison
    from interp.causal.evaluation import Curve
    from interp.results.result import Result

_COLOURS = {"signed": "#2166ac", "absolute": "#1b7837", "random": "grey"}
_NAMED = 5  # of the places where estimates are furthest off


def effects(result: "Result") -> Figure:
    """Mean effects as a heat map, or as bars with intervals; see `Result.plot`."""
    shown = result.axes[:-1]
    if len(shown) not in (1, 2):
        raise ValueError(
            f"a plot must have one or two axes besides example; got {shown}: use select()"
        )
    mean = result.mean().numpy(force=True)
    unit = f"mean ({result.unit})" if result.unit else "mean"
    width, height = (min(max(0.3 * size + 2, 4), 16) for size in (mean.shape[-1], mean.shape[0]))
    figure = Figure(figsize=(width, height if len(shown) == 2 else 4), layout="constrained")
    axes = figure.subplots()
    if len(shown) == 2:
        known = mean[mean == mean]  # NaN differs from itself
        limit = max(abs(known).max(initial=0), _whole(result)) or 1
        colours = ("RdBu", -limit) if known.min(initial=0) < 0 else ("Blues", 0)
        image = axes.imshow(mean, cmap=colours[0], vmin=colours[1], vmax=limit, aspect="auto")
        figure.colorbar(image, label=unit)
        axes.set_ylabel(shown[0])
        axes.set_yticks(*_ticks(result.labels[shown[0]]))
    else:
        low, high = (end.numpy(force=True) for end in result.interval())
        axes.bar(range(len(mean)), mean, color="#4393c3")
        axes.vlines(range(len(mean)), low, high, color="black")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel(unit)
    ticks, texts = _ticks(result.labels[shown[-1]])
    axes.set_xticks(ticks, texts, rotation=90 if max(map(len, texts), default=0) > 3 else 0)
    axes.set_xlabel(shown[-1])
    facts = ", ".join(f"{name}: {value}" for name, value in result.about.items())
    figure.suptitle(facts, fontsize="small", wrap=True)
    return figure


def _whole(result: "Result") -> float:
    """The mean difference between the two runs, so that effects far below it look like nothing."""
    if result.base is None or result.target is None:
        return 0.0
    return abs((result.target - result.base).mean().item())


def scatter(comparison: "Comparison") -> Figure:
    """Estimated over exact effects, a dot for each place; see `Comparison.plot`."""
    exact, estimate = (x.numpy(force=True) for x in (comparison.exact, comparison.estimate))
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="lightgrey", linewidth=0.8)
    axes.axvline(0, color="lightgrey", linewidth=0.8)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8, linestyle="--")
    axes.scatter(exact, estimate, s=12, color="#4393c3")
    middle = (exact.min() + exact.max()) / 2
    apart = 0.05 * (exact.max() - exact.min()), 0.05 * (estimate.max() - estimate.min())
    named: list[tuple[float, float]] = []
    for miss in comparison.misses[:_NAMED]:
        at = miss.exact, miss.estimate
        # Names of dots that almost coincide could not be read.
        if any(abs(at[0] - x) < apart[0] and abs(at[1] - y) < apart[1] for x, y in named):
            continue
        named.append(at)
        # Towards the middle, so that no name is cut off.
        side, shift = ("left", 4) if at[0] < middle else ("right", -4)
        axes.annotate(
            ", ".join(f"{axis} {label}" for axis, label in miss.where.items()),
            at,
            xytext=(shift, 4),
            textcoords="offset points",
            ha=side,
            fontsize="x-small",
        )
    unit = f" ({comparison.unit})" if comparison.unit else ""
    axes.set_xlabel(f"exact mean effect{unit}")
    axes.set_ylabel(f"estimated mean effect{unit}")
    figure.suptitle(repr(comparison).splitlines()[1].strip(), fontsize="small")
    return figure


def curves(curve: "Curve") -> Figure:
    """Faithfulness over the share of edges that a circuit keeps; see `Curve.plot`."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="lightgrey", linewidth=0.8)
    axes.axhline(1, color="lightgrey", linewidth=0.8)
    for name, colour in _COLOURS.items():
        result = getattr(curve, name)
        shares = result.labels["edges"]
        low, high = (end.numpy(force=True) for end in result.interval())
        axes.plot(
            shares, result.mean().numpy(force=True), "o-", color=colour, label=name, markersize=3
        )
        axes.fill_between(shares, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("share of the edges kept")
    axes.set_ylabel("faithfulness")
    axes.legend()
    figure.suptitle("\n".join(repr(curve).split("\n  ")[1:]), fontsize="small")
    return figure


def _ticks(labels: Sequence[Any]) -> tuple[list[int], list[str]]:
    """Indices and texts of at most 40 labels."""
    at = list(range(0, len(labels), 1 + len(labels) // 40))
    return at, [str(labels[i]) for i in at]
