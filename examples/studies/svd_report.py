"""The figures of `svd_stability.py`, and its findings in words."""

import math
from pathlib import Path

from svd_tables import METRICS, Beyond, Event, Norm, Setting, Tables

TITLES = {"qkt": "QKᵀ", "wvwo": "WvWo", "avwo": "AVWo"}
COLOURS = {"qkt": "tab:blue", "wvwo": "tab:green", "avwo": "tab:red"}
LABELS = {
    "angle": "largest principal angle, radians",
    "change": "change of singular values,\nshare of their norm",
}
# Colours of untrained, trained, and their difference.
SERIES = ("tab:blue", "tab:orange", "black")


def draw_spectra(tables: Tables, path: Path) -> None:
    """Draw singular values: a line for each checkpoint, a panel for each target and layer."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1 + 2.5 * len(tables.layers)), layout="constrained")
    panels = figure.subplots(len(tables.layers), 3, sharex="col", sharey="col", squeeze=False)
    # Use only green to dark violet of the colour map, because lighter colours are pale on white.
    shades = colormaps["viridis_r"].resampled(len(tables.steps) + 1)
    for column, (target, title) in enumerate(TITLES.items()):
        for layer in tables.layers:
            panel = panels[layer][column]
            for at, step in enumerate(tables.steps):
                mine = [row for row in tables.spectra if row[:3] == (step, target, layer)]
                panel.plot(
                    [row.number for row in mine],
                    [row.singular_value for row in mine],
                    # Draw the untrained model last, because the other lines would hide it.
                    **(dict(color=shades(at + 1)) if at else dict(color="k", ls=":", zorder=3)),
                    label=f"{step}",
                )
            panel.set_yscale("log")
            panel.set_title(f"{title}, layer {layer}")
        panels[-1][column].set_xlabel("number of singular value")
        # Do not show smaller values, because they are rounding of float32.
        panels[0][column].set_ylim(bottom=max(panels[0][column].get_ylim()[0], 1e-5))
    for row in panels:
        row[0].set_ylabel("singular value")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, title="training\nstep", loc="outside right upper")
    figure.savefig(path, dpi=140)


def draw_drift(tables: Tables, setting: Setting, path: Path) -> None:
    """Draw the angle between consecutive checkpoints, by target and layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    panel = figure.subplots()
    for target, title in TITLES.items():
        for layer in tables.layers:
            mine = [row for row in tables.drift if row[2:4] == (target, layer)]
            panel.plot(
                [f"{row.from_step}\n→ {row.to_step}" for row in mine],
                [math.degrees(row.mean_radians) for row in mine],
                ("-", "--", ":", "-.")[layer % 4],
                marker=".x"[layer // 4],
                color=COLOURS[target],
                label=f"{title}, layer {layer}",
            )
    panel.set_ylim(0, 95)
    panel.set_yticks(range(0, 91, 15))
    panel.grid(axis="y", alpha=0.3)
    panel.set_ylabel(f"largest angle of top {setting.top} right\nsingular subspaces, degrees")
    panel.set_xlabel("from checkpoint to checkpoint")
    figure.legend(loc="outside upper center", fontsize="small", ncols=3, handlelength=4)
    figure.savefig(path, dpi=140)


def draw_events(tables: Tables, setting: Setting, path: Path) -> None:
    """Draw differences with intervals, untrained and trained, and angles around an event."""
    from matplotlib.figure import Figure

    first, last = tables.steps[0], tables.steps[-1]
    figure = Figure(figsize=(11, 3.8 + 3 * len(tables.layers)), layout="constrained")
    panels = figure.subplots(1 + len(tables.layers), 2, squeeze=False)
    for panel, metric in zip(panels[0], METRICS, strict=True):
        series = {
            f"step {first}": [r for r in tables.events if (r.step, r.metric) == (first, metric)],
            f"step {last}": [r for r in tables.events if (r.step, r.metric) == (last, metric)],
            f"step {last} beyond step {first}, walk by walk": [
                r for r in tables.beyond_untrained if r.metric == metric
            ],
        }
        for shift, (label, rows) in enumerate(series.items(), start=-1):
            at = [place + 0.18 * shift for place in range(len(rows))]
            low, high = [r.low for r in rows], [r.high for r in rows]
            panel.vlines(at, low, high, SERIES[shift + 1], linewidth=2)
            middle = [r.difference for r in rows]
            panel.plot(at, middle, "o", color=SERIES[shift + 1], label=label)
        panel.axhline(0, color="black", linewidth=0.8)
        names = [f"{TITLES[r.target]}\n{r.layer}" for r in rows]
        panel.set_xticks(range(len(names)), names)
        panel.set_xlabel("target and layer")
        panel.set_title("inside minus outside event windows, 95% intervals")
        panel.set_ylabel(LABELS[metric])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    for row, layer in zip(panels[1:], tables.layers, strict=True):
        for panel, target in zip(row, ("qkt", "avwo"), strict=True):
            for step, colour in zip((first, last), SERIES, strict=False):
                found = [r for r in tables.around_events if r[:3] == (step, target, layer)]
                lags = [r.lag for r in found]
                panel.plot(lags, [r.mean for r in found], color=colour)
                low, high = [r.low for r in found], [r.high for r in found]
                panel.fill_between(lags, low, high, color=colour, alpha=0.25, lw=0)
            panel.axvspan(0, setting.delay + setting.buffer, color="grey", alpha=0.12, lw=0)
            panel.axvline(setting.delay, color="black", linewidth=0.8, linestyle=":")
            panel.set_title(f"{TITLES[target]}, layer {layer}: around an event (dotted: landing)")
            panel.set_ylabel("angle to the window\nbefore, radians")
    for panel in panels[-1]:
        panel.set_xlabel("newest token, steps after the jumper (grey: event window)")
    figure.savefig(path, dpi=140)


def report(run: str, tables: Tables, setting: Setting) -> str:
    """Return the findings in words, with their uncertainty. `run` describes the run."""
    parts = (_learning, _ranks, _drifts, _events, _norms, _summary)
    return "\n\n".join([run, *("\n".join(part(tables, setting)) for part in parts)])


def _learning(tables: Tables, setting: Setting) -> list[str]:
    graph = setting.graph
    # The probability of a vertex is proportional to its number of neighbours.
    degrees = graph.adjacency.sum(1).double()
    edge = ((degrees * degrees.log()).sum() / degrees.sum()).item()
    n = len(graph.region)
    return [
        f"Learning (loss in nats; {math.log(n):.2f} without knowledge, "
        f"{math.log(n / graph.regions):.2f} "
        f"knowing the region, {edge:.2f} knowing the neighbours):",
        *(
            f"  step {row.step:>5}: along edges {row.edge_nats:.3f}, at landings "
            f"{row.landing_nats:.3f}, probability of the landing's region {row.landing_region:.2f}"
            for row in tables.learning
        ),
    ]


def _ranks(tables: Tables, setting: Setting) -> list[str]:
    last = tables.steps[-1]
    rows = {row[:3]: row for row in tables.measures}
    lines = [f"Effective rank and stable rank, median, step 0 to step {last}:"]
    for target in TITLES:
        for layer in tables.layers:
            one, two = rows[0, target, layer], rows[last, target, layer]
            lines.append(
                f"  {target:>4}, layer {layer}: {one.effective_rank:.1f} to "
                f"{two.effective_rank:.1f}; "
                f"{one.stable_rank:.1f} to {two.stable_rank:.1f}"
            )
    return lines


def _drifts(tables: Tables, setting: Setting) -> list[str]:
    lines = [f"Turn of the top {setting.top} right subspace, first and last pair of checkpoints:"]
    for target in TITLES:
        for layer in tables.layers:
            mine = [row for row in tables.drift if row[2:4] == (target, layer)]
            first, final = (
                f"{math.degrees(row.mean_radians):.0f} ({row.from_step} to {row.to_step})"
                for row in (mine[0], mine[-1])
            )
            lines.append(f"  {target:>4}, layer {layer}: {first}, {final} degrees")
    return lines


def _events(tables: Tables, setting: Setting) -> list[str]:
    lines = ["Step to step, inside minus outside event windows [95% over walks]:"]
    extra = {row[:3]: row for row in tables.beyond_untrained}
    for row in tables.events:
        if row.step == tables.steps[-1]:
            more = extra[row.target, row.layer, row.metric]
            lines.append(
                f"  {row.target:>4}, layer {row.layer}, {row.metric:>6}: {row.inside:.4f} against "
                f"{row.outside:.4f}: {_signed(row)}; beyond the untrained model {_signed(more)}"
            )
    return lines


def _signed(row: Event | Beyond | Norm) -> str:
    return f"{row.difference:+.4f} [{row.low:+.4f}, {row.high:+.4f}]"


def _norms(tables: Tables, setting: Setting) -> list[str]:
    return [
        "Norm of the residual stream after each block, inside minus outside:",
        *(
            f"  layer {row.layer}: {row.inside:.2f} against {row.outside:.2f}: {_signed(row)}; "
            "effective "
            f"rank of the vectors inside {row.effective_rank_in_windows:.1f} of {setting.d_model}"
            for row in tables.residual_norms
        ),
    ]


def _summary(tables: Tables, setting: Setting) -> list[str]:
    rows = tables.beyond_untrained
    clear = [row for row in rows if row.low > 0 or row.high < 0]
    less = sum(row.difference > 0 for row in clear)
    return [
        f"Of {len(rows)} comparisons beyond the untrained model, {len(clear)} exclude zero: {less} "
        f"less stable inside, {len(clear) - less} more stable. By chance the mean would be "
        f"{0.05 * len(rows):.1f}. All share the same walks, so they tend to exclude "
        "zero together: this count is not a joint test of all comparisons.",
        "The intervals cover the choice of walks, but not the choice of graph and model: there "
        "is one "
        "of each, by its seed. A window may hold other events than its newest token's, so a "
        "difference "
        "is the effect of one token entering and one leaving.",
    ]
