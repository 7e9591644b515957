"""Faithfulness over the share of edges that a circuit keeps."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from interp.causal.evaluation import Curve

_COLOURS = {"signed": "#2166ac", "absolute": "#1b7837", "random": "grey"}


def drawn(curve: "Curve") -> Figure:
    """See `Curve.plot`."""
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
