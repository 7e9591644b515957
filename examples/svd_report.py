"""Figures and words for `svd_stability.py`."""

import math
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

METRICS = {
    "angle": "largest principal angle, radians",
    "change": "change of singular values,\nshare of their norm",
}
COLOURS = ("tab:blue", "tab:orange")


def draw_spectra(spectra: dict[int, dict[str, Tensor]], out: Path) -> None:
    """Singular values by number, a line for each checkpoint, a panel for each target and layer."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 3, sharex="col", sharey="col", squeeze=False)
    for column, (target, title) in enumerate((("qkt", "QKᵀ"), ("wvwo", "WvWo"), ("avwo", "AVWo"))):
        for layer in range(2):
            panel = panels[layer][column]
            for at, (step, one) in enumerate(spectra.items()):
                s = one[target].reshape(-1, 2, one[target].shape[-1])
                values = s[:, layer].mean(0)
                colour = _shade(at, len(spectra))
                panel.plot(range(1, len(values) + 1), values, color=colour, label=f"{step}")
            panel.set_yscale("log")
            panel.set_title(f"{title}, layer {layer}")
        panels[1][column].set_xlabel("number of singular value")
        # What float32 leaves below says nothing.
        panels[0][column].set_ylim(bottom=max(panels[0][column].get_ylim()[0], 1e-5))
    for row in panels:
        row[0].set_ylabel("singular value")
    panels[0][2].legend(title="training step", fontsize="small", ncols=2)
    figure.savefig(out / "spectra.png", dpi=140)


def _shade(at: int, count: int) -> tuple[float, float, float]:
    """From light to dark blue-green over training."""
    share = at / max(1, count - 1)
    return (0.75 - 0.7 * share, 0.85 - 0.6 * share, 0.75 - 0.3 * share)


def draw_drift(rows: list[list], top: int, out: Path) -> None:
    """The angle between checkpoints, by target and layer."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    styles = {
        "qkt": ("QKᵀ", "tab:blue"),
        "wvwo": ("WvWo", "tab:green"),
        "avwo": ("AVWo", "tab:red"),
    }
    for target, (title, colour) in styles.items():
        for layer, dash in enumerate(("-", "--")):
            mine = [row for row in rows if row[2] == target and row[3] == layer]
            labels = [f"{row[0]}\n→ {row[1]}" for row in mine]
            values = [math.degrees(row[4]) for row in mine]
            panel.plot(
                labels, values, dash, marker="o", color=colour, label=f"{title}, layer {layer}"
            )
    panel.set_ylim(0, 95)
    panel.set_ylabel(f"largest angle of top {top} right\nsingular subspaces, degrees")
    panel.set_xlabel("from checkpoint to checkpoint")
    panel.legend(fontsize="small", ncols=3)
    figure.savefig(out / "drift.png", dpi=140)


def draw_events(
    rows: list[list], lags: dict[int, list], delay: int, buffer: int, out: Path
) -> None:
    """Differences with intervals, untrained beside trained, and the course around an event."""
    steps = (min(row[0] for row in rows), max(row[0] for row in rows))
    figure = Figure(figsize=(11, 10), layout="constrained")
    panels = figure.subplots(3, 2)
    for column, metric in enumerate(METRICS):
        panel = panels[0][column]
        for row in rows:
            if row[0] not in steps or row[3] != metric:
                continue
            at = 2 * ("qkt", "avwo").index(row[1]) + row[2] + 0.2 * (row[0] == steps[1]) - 0.1
            colour = COLOURS[row[0] == steps[1]]
            panel.plot([at, at], row[7:9], color=colour, linewidth=2)
            panel.plot(at, row[6], "o", color=colour, label=f"step {row[0]}")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_xticks(
            range(4), ["QKᵀ\nlayer 0", "QKᵀ\nlayer 1", "AVWo\nlayer 0", "AVWo\nlayer 1"]
        )
        panel.set_title("inside minus outside event windows, 95% intervals")
        panel.set_ylabel(METRICS[metric])
        handles, labels = panel.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        panel.legend(unique.values(), unique.keys(), fontsize="small")
    for at, (target, title) in enumerate((("qkt", "QKᵀ"), ("avwo", "AVWo"))):
        for layer in range(2):
            panel = panels[1 + at][layer]
            for colour, (step, found) in zip(COLOURS, lags.items(), strict=False):
                mine = [row[3:] for row in found if row[1:3] == [target, layer]]
                lag, mean, low, high = zip(*mine, strict=True)
                panel.plot(lag, mean, color=colour, label=f"step {step}")
                panel.fill_between(lag, low, high, color=colour, alpha=0.25, lw=0)
            panel.axvspan(0, delay + buffer, color="grey", alpha=0.12, lw=0)
            panel.axvline(delay, color="black", linewidth=0.8, linestyle=":")
            panel.set_title(f"{title}, layer {layer}: around an event (dotted: landing)")
            panel.set_ylabel("angle to the window before, radians")
            panel.legend(fontsize="small")
            if at == 1:
                panel.set_xlabel("newest token, steps after the jumper (grey: event window)")
    figure.savefig(out / "events.png", dpi=140)


def report(run: str, learning, event_rows, beyond, drifts, table, norms) -> str:
    """What the tables say, with its uncertainty."""
    last = learning[-1][0]
    lines = [
        run,
        "",
        "Learning (loss in nats; chance is "
        f"{math.log(120):.2f}, an edge of 4 costs {math.log(4):.2f}, a known region {math.log(30):.2f}):",
    ]
    for step, edge, landing, mass in learning:
        lines.append(
            f"  step {step:>5}: along edges {edge:.3f}, at landings {landing:.3f}, "
            f"probability of the landing's region {mass:.2f}"
        )
    lines += ["", f"Effective rank and stable rank, median, step 0 to step {last}:"]
    for target in ("qkt", "wvwo", "avwo"):
        for layer in range(2):
            mine = {row[0]: row[3:5] for row in table if row[1:3] == [target, layer]}
            (er, sr), (er_last, sr_last) = mine[0], mine[last]
            lines.append(
                f"  {target:>4}, layer {layer}: {er:.1f} to {er_last:.1f}; {sr:.1f} to {sr_last:.1f}"
            )
    lines += ["", "Turn of the top right subspace, first and last interval of checkpoints:"]
    for target in ("qkt", "wvwo", "avwo"):
        for layer in range(2):
            mine = [row for row in drifts if row[2:4] == [target, layer]]
            first, final = (
                f"{math.degrees(row[4]):.0f} ({row[0]} to {row[1]})" for row in (mine[0], mine[-1])
            )
            lines.append(f"  {target:>4}, layer {layer}: {first}, {final} degrees")
    lines += ["", "Step to step, inside minus outside event windows [95% over walks]:"]
    pairs = {tuple(row[:3]): row[3:] for row in beyond}
    for step, target, layer, metric, within, outside, gap, low, high in event_rows:
        if step == last:
            extra, extra_low, extra_high = pairs[target, layer, metric]
            lines.append(
                f"  {target:>4}, layer {layer}, {metric:>6}: {within:.4f} against {outside:.4f}: "
                f"{gap:+.4f} [{low:+.4f}, {high:+.4f}]; beyond the untrained model {extra:+.4f} "
                f"[{extra_low:+.4f}, {extra_high:+.4f}]"
            )
    clear = [row for row in beyond if row[4] > 0 or row[5] < 0]
    less = sum(row[3] > 0 for row in clear)
    lines += ["", "Norm of the residual stream after each block, inside minus outside:"]
    for layer, within, outside, gap, low, high, rank in norms:
        lines.append(
            f"  layer {layer}: {within:.2f} against {outside:.2f}: {gap:+.2f} [{low:+.2f}, "
            f"{high:+.2f}]; effective rank of the vectors inside {rank:.1f} of 64"
        )
    lines += [
        "",
        f"Of {len(beyond)} comparisons beyond the untrained model, {len(clear)} exclude zero "
        f"({0.05 * len(beyond):.1f} expected by chance): {less} less stable inside, "
        f"{len(clear) - less} more stable.",
        "The intervals cover the choice of walks, not that of the graph or of the model: one of each, "
        "by its seed. A window holds other events besides its newest token's, so a difference is of "
        "one token entering, and one leaving.",
    ]
    return "\n".join(lines)
