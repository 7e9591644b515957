"""Are a small transformer's attention maps less stable around events? The study of svd-transformer.md.

A model with one head learns random walks on a graph (`walks.py`), whose jumpers move the walk into
another region some steps later. At checkpoints from the first step to the last, all three SVD targets
are taken on the same walks, seen through a window that slides by one token:

- spectra: singular values of WvWo, of QK^T and AVWo, and what can be read from them;
- drift: how far the top singular subspace turns from one checkpoint to the next;
- events: how far it turns, and how much the singular values change, from one window to the next, where
  the newest token lies in an event window, [jumper, jumper + delay + buffer], against elsewhere.

Differences come with 95% intervals from a bootstrap over walks, and beside those of the untrained
model: what it shows already is no work of training.

    python examples/svd_stability.py --out out/svd_stability
"""

import argparse
import csv
from dataclasses import dataclass
from pathlib import Path

import torch
from svd_report import METRICS, draw_drift, draw_events, draw_spectra, report
from torch import Tensor
from walks import Graph, Walks, event_windows, random_graph, random_walks, sliding_windows

from hooks import HookedRunner
from interp.subspaces import drift, subspace_angles
from interp.svd import (
    SVD,
    condition_number,
    decompose,
    effective_rank,
    spectral_gap,
    stable_rank,
    svd,
)
from interp.targets import residual_stream, svd_targets
from models import TrainingConfig, Transformer, build, next_token_loss, train

WIDTH, LENGTH, DELAY, BUFFER = 32, 160, 6, 5
TOP = 3  # the dimension of the subspaces that are followed
EVERY = 16  # of the windows, those whose drift between checkpoints is followed
RESAMPLES = 4000
LAGS = range(-8, DELAY + BUFFER + 9)


@dataclass(frozen=True)
class Seen:
    """What one checkpoint shows.

    Attributes:
        spectra: singular values by target: wvwo [layer, k], others [window, layer, k].
        kept: decompositions to compare with other checkpoints' ([matrix, layer, ...]), by target.
        steps: by (target, metric), the step from each window to the next: [walk, start - 1, layer].
    """

    spectra: dict[str, Tensor]
    kept: dict[str, SVD]
    steps: dict[tuple[str, str], Tensor]


def train_with_checkpoints(
    model: Transformer, walks: Walks, steps: int, seed: int
) -> dict[int, dict[str, Tensor]]:
    """Trains on the walks' sliding windows; the weights at up to nine steps, 0 and the last included."""
    at = {0, *(round(steps * 2.0**-part) for part in range(6)), steps * 3 // 4}
    # One more than the model reads: its last position has a next token to learn too.
    windows = sliding_windows(walks.tokens, WIDTH + 1).flatten(0, 1)

    def weights() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    def batches(step: int, generator: torch.Generator) -> Tensor:
        return windows[torch.randint(len(windows), (32,), generator=generator)]

    def after_step(step: int, loss: float) -> None:
        if step in at:
            kept[step] = weights()

    kept = {0: weights()}
    config = TrainingConfig(steps=steps, learning_rate=2e-3, weight_decay=0.01, seed=seed)
    train(model, batches, config, after_step=after_step)
    return kept


@torch.no_grad()
def observe(model: Transformer, walks: Walks) -> Seen:
    """The three targets on every window of the walks, decomposed."""
    runner = HookedRunner(model.eval())
    spectra: dict[str, list[Tensor]] = {"qkt": [], "avwo": []}
    vectors: dict[str, list[Tensor]] = {"qkt": [], "avwo": []}
    steps: dict[tuple[str, str], list[Tensor]] = {
        (target, metric): [] for target in spectra for metric in METRICS
    }
    for windows in sliding_windows(walks.tokens, WIDTH):
        _, cache = runner.run_with_cache(windows, mode="svd_targets")
        targets = svd_targets(model, cache).squeeze_heads()
        for name, found in decompose(targets).items():
            if name == "wvwo":
                constant = found
                continue
            moved = (found.s[1:] - found.s[:-1]).norm(dim=-1) / found.s[:-1].norm(dim=-1)
            if name == "qkt":
                # Columns are tokens of the window: over those that both windows hold.
                before, after = targets.qkt[:-1, ..., 1:], targets.qkt[1:, ..., :-1]
                angles = subspace_angles(svd(before), svd(after), TOP)
            else:
                angles = drift(found, TOP)
            steps[name, "angle"].append(angles[..., -1])
            steps[name, "change"].append(moved)
            spectra[name].append(found.s)
            vectors[name].append(getattr(targets, name)[::EVERY])
    kept = {name: svd(torch.cat(parts), name) for name, parts in vectors.items()}
    return Seen(
        {"wvwo": constant.s, **{name: torch.cat(parts) for name, parts in spectra.items()}},
        {"wvwo": constant[None], **kept},
        {key: torch.stack(parts) for key, parts in steps.items()},
    )


def interval(values: Tensor, inside: Tensor, seed: int) -> tuple[float, float, float, float, float]:
    """Means of [walk, step] values inside and outside, their difference, and its 95% interval.

    Walks are drawn again with replacement, whole, as steps of one walk depend on each other.
    """
    known = ~values.isnan()
    sums = torch.stack(
        [
            torch.where(known & where, part, 0).sum(1)
            for where in (inside, ~inside)
            for part in (values, torch.ones_like(values))
        ]
    ).double()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    total = sums[:, drawn].sum(-1)
    low, high = (total[0] / total[1] - total[2] / total[3]).nanquantile(
        torch.tensor([0.025, 0.975], dtype=torch.float64)
    )
    within, outside = ((sums[at].sum() / sums[at + 1].sum()).item() for at in (0, 2))
    return within, outside, within - outside, low.item(), high.item()


def locked(values: Tensor, events: Tensor, seed: int) -> list[tuple[int, float, float, float]]:
    """The mean of [walk, step] values at each lag from an event, with its 95% interval over walks."""
    rows = []
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    for lag in LAGS:
        here = events.roll(lag, 1)
        here[:, : max(lag, 0)] = here[:, events.shape[1] + min(lag, 0) :] = False
        here = here & ~values.isnan()
        sums, counts = values.where(here, 0).sum(1), here.sum(1)
        means = sums[drawn].sum(1) / counts[drawn].sum(1)
        low, high = means.nanquantile(torch.tensor([0.025, 0.975], dtype=means.dtype))
        rows.append((lag, (sums.sum() / counts.sum()).item(), low.item(), high.item()))
    return rows


@torch.no_grad()
def learned(model: Transformer, graph: Graph, walks: Walks) -> list[float]:
    """Loss in nats where a walk goes on along an edge and where it lands, and how far it was expected.

    That is the probability given to the region it lands in, one step before. Only the last position of
    each window counts: it has seen the most.
    """
    windows = sliding_windows(walks.tokens, WIDTH)
    logits = torch.stack([model(rows)[:, -2:] for rows in windows])
    losses = next_token_loss(logits.flatten(0, 1), windows[..., -2:].flatten(0, 1)).view(
        windows.shape[:2]
    )
    lands = walks.events.roll(DELAY, 1)[:, WIDTH - 1 :]  # the first window is long past any roll
    to = graph.region == graph.region[windows[..., -1]][..., None]
    mass = logits[..., -2, :].softmax(-1).where(to, 0).sum(-1)
    return [losses[~lands].mean().item(), losses[lands].mean().item(), mass[lands].mean().item()]


@torch.no_grad()
def residual_norms(model: Transformer, walks: Walks, inside: Tensor, seed: int) -> list[list]:
    """The residual stream's norm after each block, inside against outside event windows."""
    width = LENGTH // WIDTH * WIDTH
    tokens, windows = (value[:, :width].reshape(-1, WIDTH) for value in (walks.tokens, inside))
    _, cache = HookedRunner(model).run_with_cache(tokens, mode="residual", windows=windows)
    stream = residual_stream(cache)
    ranks = effective_rank(svd(stream.vectors.transpose(0, 1), "residual stream").s)
    norms = stream.norms.unflatten(0, (len(inside), -1)).flatten(1, 2)
    return [
        [layer, *interval(norms[..., layer], inside[:, :width], seed), ranks[layer].item()]
        for layer in range(norms.shape[-1])
    ]


def write(path: Path, header: str, rows: list) -> None:
    """A CSV file; numbers with six digits."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header.split())
        for row in rows:
            table.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])


def measures(step: int, target: str, s: Tensor) -> list[list]:
    """A row for each layer: medians over windows of what is read from singular values."""
    of = (effective_rank(s), stable_rank(s), spectral_gap(s), condition_number(s))
    each = [value.reshape(-1, s.shape[-2]).median(0).values for value in of]
    return [
        [step, target, layer, *(value[layer].item() for value in each)]
        for layer in range(s.shape[-2])
    ]


def main() -> None:
    """Trains, looks, writes tables and figures, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=Path("out/svd_stability"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--walks", type=int, default=48, help="how many to look at, at least 2")
    options = parser.parse_args()
    if options.steps < 1 or options.walks < 2:
        parser.error("--steps is at least 1 and --walks at least 2")
    options.out.mkdir(parents=True, exist_ok=True)

    graph = random_graph(n=120, regions=4, degree=4, jumpers=2, seed=options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    training = random_walks(graph, 500, LENGTH, DELAY, generator)
    held_out = random_walks(graph, options.walks, LENGTH, DELAY, generator)
    torch.manual_seed(options.seed)
    model = build("svd-64-2l", vocab_size=len(graph.region), n_ctx=WIDTH)
    checkpoints = train_with_checkpoints(model, training, options.steps, options.seed)

    inside = event_windows(held_out.events, DELAY, BUFFER)
    # A step belongs to its newest token; the first leads to the second window.
    newest, events = inside[:, WIDTH:], held_out.events[:, WIDTH:]
    seen: dict[int, Seen] = {}
    learning, event_rows, lags = [], [], {}
    for step, weights in checkpoints.items():
        model.load_state_dict(weights)
        seen[step] = observe(model, held_out)
        learning.append([step, *learned(model, graph, held_out)])
        for (target, metric), values in seen[step].steps.items():
            for layer in range(2):
                found = interval(values[..., layer], newest, options.seed)
                event_rows.append([step, target, layer, metric, *found])
        if step in (0, options.steps):
            lags[step] = [
                [step, target, layer, *row]
                for target in ("qkt", "avwo")
                for layer in range(2)
                for row in locked(
                    seen[step].steps[target, "angle"][..., layer], events, options.seed
                )
            ]
    drifts = [
        [one, two, target, layer, found.mean().item(), found.std(correction=0).item()]
        for one, two in zip(seen, list(seen)[1:], strict=False)
        for target in ("qkt", "wvwo", "avwo")
        for layer, angles in enumerate(
            subspace_angles(seen[one].kept[target], seen[two].kept[target], TOP)[..., -1].T
        )
        for found in [angles[~angles.isnan()]]
    ]
    beyond = [
        [target, layer, metric, *interval((last - first)[..., layer], newest, options.seed)[2:]]
        for (target, metric), last in seen[options.steps].steps.items()
        for first in [seen[0].steps[target, metric]]
        for layer in range(2)
    ]
    norms = residual_norms(model, held_out, inside, options.seed)

    out = options.out
    spectra = [
        [step, target, layer, number + 1, value]
        for step, one in seen.items()
        for target, s in one.spectra.items()
        for layer, values in enumerate(s.reshape(-1, *s.shape[-2:]).mean(0).tolist())
        for number, value in enumerate(values)
    ]
    table = [
        row
        for step, one in seen.items()
        for t, s in one.spectra.items()
        for row in measures(step, t, s)
    ]
    compared = "inside outside difference low high"
    write(out / "spectra.csv", "step target layer number singular_value", spectra)
    write(
        out / "measures.csv",
        "step target layer effective_rank stable_rank spectral_gap condition_number",
        table,
    )
    write(out / "drift.csv", "from_step to_step target layer mean_radians sd_radians", drifts)
    write(out / "events.csv", f"step target layer metric {compared}", event_rows)
    write(out / "beyond_untrained.csv", "target layer metric difference low high", beyond)
    write(
        out / "around_events.csv",
        "step target layer lag mean low high",
        [row for found in lags.values() for row in found],
    )
    write(out / "learning.csv", "step edge_nats landing_nats landing_region", learning)
    write(out / "residual_norms.csv", f"layer {compared} effective_rank_in_windows", norms)
    draw_spectra({step: one.spectra for step, one in seen.items()}, out)
    draw_drift(drifts, TOP, out)
    draw_events(event_rows, lags, DELAY, BUFFER, out)
    run = (
        f"svd-64-2l, {options.steps} steps, seed {options.seed}; {options.walks} held-out walks of "
        f"{LENGTH} steps with {int(held_out.events.sum())} events; {newest.double().mean():.0%} of "
        "the windows' newest tokens lie in an event window."
    )
    text = report(run, learning, event_rows, beyond, drifts, table, norms)
    (out / "findings.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
