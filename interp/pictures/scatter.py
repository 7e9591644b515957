"""Estimated over exact effects: a dot for each place."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from interp.causal.comparison import Comparison

_NAMED = 5


def scatter(comparison: "Comparison") -> Figure:
    """See `Comparison.plot`."""
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
