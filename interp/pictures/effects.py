"""Mean effects as a heat map, or as bars with intervals."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from interp.result import Result


def effects(result: "Result") -> Figure:
    """See `Result.plot`."""
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
        limit = abs(mean[mean == mean]).max(initial=0) or 1  # NaN differs from itself
        image = axes.imshow(mean, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
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


def _ticks(labels: Sequence[Any]) -> tuple[list[int], list[str]]:
    """Indices and texts of at most 40 labels."""
    at = list(range(0, len(labels), 1 + len(labels) // 40))
    return at, [str(labels[i]) for i in at]
