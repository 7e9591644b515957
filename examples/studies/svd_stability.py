"""Measure whether attention maps of a small transformer are less stable around events.

The study of svd-transformer.md.

A model with one head learns random walks on a graph (`walks.py`). Jumpers move the walk into
another region some steps later. All three SVD targets are computed at several checkpoints, always
on the same walks, in a window that slides by one token:

- spectra: singular values of WvWo, QK^T and AVWo, and numbers that summarize them;
- drift: how far the top singular subspace turns from one checkpoint to the next;
- events: how far the subspace turns, and how much the singular values change, from one window of
  tokens to the next. An event window begins at a jumper and ends a few steps after the landing:
  [jumper, jumper + delay + buffer]. Windows of tokens whose newest token is in an event window are
  compared with all other windows.

Differences have 95% intervals over walks. The same differences are shown for the untrained model.
If the untrained model has an effect too, the effect does not come from training.

With the default sizes, the study takes two minutes. The graph has four regions with --vertices
vertices together. The model reads --window tokens (w in the document). A jump lands --delay steps
(r in the document) after its jumper.

The analysed checkpoints stay in the directory, and `models.load` can load each of them. --resume
continues a run after Ctrl-C. If the training is complete, --resume repeats only the analysis, also
with another number of --walks.

    python examples/studies/svd_stability.py --out out/svd_stability
    python examples/studies/svd_stability.py --out out/svd_stability --resume --walks 96
    python examples/studies/svd_stability.py --out out/svd-256-6l --d-model 256 --layers 6
    python examples/studies/svd_stability.py --out out/long --window 64 --delay 12 --vertices 200
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

# For `commands`, which all examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from commands import Pace, Parser, attempt, require_least, require_matplotlib, require_own
from svd_analysis import analyse
from svd_report import draw_drift, draw_events, draw_spectra, report
from svd_statistics import FEWEST
from svd_tables import Setting
from torch import Tensor
from tqdm import tqdm
from walks import Walks, event_windows, random_graph, random_walks

from models import TrainingConfig, Transformer, build, sample_batch, save, train

TRAINING, LENGTH, BUFFER = 500, 160, 5
REGIONS, DEGREE, JUMPERS = 4, 4, 2
# A resumed run must keep these options.
SHAPE = ("window", "delay", "vertices")
TOP = 3  # the dimension of the top singular subspaces
# The number of checkpoints of a run. A killed run loses the time since the last checkpoint, a
# second or two.
SAVES = 60


def kept_steps(steps: int) -> list[int]:
    """Return the training steps whose models are analysed: up to nine, with 0 and the last step.

    Early steps are closer together, because most changes happen early.
    """
    return sorted({0, *(round(steps * 2.0**-part) for part in range(6)), steps * 3 // 4})


def train_with_checkpoints(
    model: Transformer, walks: Walks, config: TrainingConfig, out: Path, resume: bool
) -> dict[int, Path]:
    """Train on windows of the walks, and return the paths of the models to analyse, by step.

    A model is saved before the checkpoint that `train` writes at the same step, so a resumed run
    always has it.

    Raises:
        The errors of `train`.
    """
    kept = {step: out / "checkpoints" / f"step-{step}" for step in kept_steps(config.steps)}

    def batches(step: int, generator: torch.Generator) -> Tensor:
        # One more than the context, because the last position also predicts a token.
        return sample_batch(walks.tokens, 32, model.config.n_ctx + 1, generator)

    pace = Pace(config.steps)

    def after_step(model: Transformer, step: int, loss: float) -> None:
        where = pace(step)
        if step in kept:
            save(kept[step], model)
            tqdm.write(f"{where}: loss {loss:.3f} nats")

    if not resume:
        save(kept[0], model)
    train(model, batches, config, directory=out, resume=resume, after_step=after_step)
    return kept


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = Parser(__doc__)
    parser.add_argument("--d-model", type=int, default=64, choices=(64, 128, 256), help="(64)")
    parser.add_argument("--layers", type=int, default=2, choices=(2, 4, 6), help="(2)")
    parser.add_argument("--window", type=int, default=32, help="tokens of a window (%(default)s)")
    parser.add_argument(
        "--delay", type=int, default=6, help="steps from a jumper to the landing (%(default)s)"
    )
    parser.add_argument(
        "--vertices", type=int, default=120, help="of the graph, which are the tokens (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=3000, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for graph, walks and model")
    parser.add_argument(
        "--walks", type=int, default=48, help=f"held-out walks, at least {FEWEST} (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/svd_stability"), metavar="DIRECTORY")
    parser.add_argument("--resume", action="store_true", help="continue from --out's checkpoint")
    return parser


def run(options: argparse.Namespace) -> None:
    """Train a model, analyse its checkpoints, write tables and figures, and print the results.

    Raises:
        ValueError, OSError, FloatingPointError: if training or writing fails.
    """
    require_matplotlib()
    least = {"steps": 1, "walks": FEWEST, "window": TOP + 1, "delay": 1}
    require_least(options, least | {"vertices": REGIONS * (DEGREE + 1)})
    # With a longer window, almost no event would begin and land after the first window of a walk.
    for name, most in {"window": LENGTH - 16, "delay": LENGTH // 3}.items():
        if getattr(options, name) > most:
            rule = f"--{name} must be at most {most} for walks of {LENGTH}"
            raise ValueError(f"{rule}; got {getattr(options, name)}")
    out, seed = options.out, options.seed
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be 0 to 2**63 - 1; got {seed}")
    require_own(out, resume=options.resume)
    require_shape(options)
    config = TrainingConfig(
        steps=options.steps,
        learning_rate=2e-3,
        weight_decay=0.01,
        seed=seed,
        evaluate_every=max(1, options.steps // SAVES),
    )
    graph = random_graph(options.vertices, REGIONS, DEGREE, JUMPERS, seed)
    generator = torch.Generator().manual_seed(seed)
    training = random_walks(graph, TRAINING, LENGTH, options.delay, generator)
    held_out = random_walks(graph, options.walks, LENGTH, options.delay, generator)
    torch.manual_seed(seed)
    name = f"svd-{options.d_model}-{options.layers}l"
    model = build(name, vocab_size=len(graph.region), n_ctx=options.window)
    print(
        f"{name}: training for {options.steps:,} steps, then {len(kept_steps(options.steps))} "
        "checkpoints "
        f"are analysed on {options.walks} walks",
        flush=True,
    )
    checkpoints = train_with_checkpoints(model, training, config, out, options.resume)

    width = model.config.d_model
    setting = Setting(graph, options.window, options.delay, BUFFER, width, TOP)
    try:
        look(setting, checkpoints, held_out, out, f"{name}, {options.steps} steps, seed {seed}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; {out} has all checkpoints: --resume analyses them again"
        ) from None


def require_shape(options: argparse.Namespace) -> None:
    """Write the window, the delay and the graph of a new run to study.json.

    If the run is resumed, check that they are the same as in study.json.

    Raises:
        ValueError: if they are not the same. The message names the options.
    """
    noted, asked = options.out / "study.json", {name: getattr(options, name) for name in SHAPE}
    if not options.resume:
        options.out.mkdir(parents=True, exist_ok=True)
        noted.write_text(json.dumps(asked) + "\n")
    elif (run := json.loads(noted.read_text())) != asked:
        rules = [f"--{name} must be {run[name]}" for name in SHAPE if run[name] != asked[name]]
        raise ValueError(f"{', '.join(rules)} in the run that is resumed")


def look(
    setting: Setting, checkpoints: Mapping[int, Path], walks: Walks, out: Path, what: str
) -> None:
    """Analyse the checkpoints, and write tables, figures and findings.

    `what` describes the model in the findings.
    """
    tables = analyse(setting, checkpoints, walks)
    tables.write(out)
    draw_spectra(tables, out / "spectra.png")
    draw_drift(tables, setting, out / "drift.png")
    draw_events(tables, setting, out / "events.png")
    count, length = walks.tokens.shape
    inside = event_windows(walks.events, setting.delay, setting.buffer)[:, setting.width :]
    run = (
        f"{what}; {count} held-out walks of {length} steps with {int(walks.events.sum())} events; "
        f"{inside.double().mean().item():.0%} of the windows' newest tokens lie in an event window."
    )
    text = report(run, tables, setting)
    (out / "findings.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    return attempt(partial(run, parser().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
