"""Train a small model with and without QK-norm, and compare attention scores, entropy and loss.

The model is a small version of d12_post_norm in qk-norm.md. Text, seed and batches are the same for
both. Without the norm, scores grow with the learning rate, and attention can saturate. With it,
they cannot exceed sqrt(d_head), because queries and keys have length sqrt(d_head). It takes some
minutes.

    python examples/studies/qk_norm.py --out out/qk-norm
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# For `commands`, which all examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from commands import attempt, parser, pydoc_text, require_least, require_matplotlib, text_at

from hooks import HookedRunner
from models import (
    CharTokenizer,
    TrainingConfig,
    Transformer,
    build,
    evaluate,
    train,
    train_test_split,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Measurement:
    """Statistics of attention on held-out text after some steps.

    Attributes:
        step: the number of steps.
        largest_score: the largest absolute score of a query and a key that it may attend to.
        score_deviation: the standard deviation of the scores of such queries and keys.
        entropy: the mean entropy of the patterns, relative to uniform attention. 1 means uniform
            attention, and 0 means that each query attends to one key.
        validation_loss: the loss in nats per character.
    """

    step: int
    largest_score: float
    score_deviation: float
    entropy: float
    validation_loss: float


def measure(model: Transformer, tokens: torch.Tensor, text: torch.Tensor, step: int) -> Measurement:
    """Measure attention in all layers and heads on `tokens` [batch, pos], and the loss on `text`.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    names = ["blocks.*.attn.scores", "blocks.*.attn.pattern"]
    model.eval()
    # The loss comes first, because `evaluate` refuses a text that is too short.
    loss = evaluate(model, text).nats
    if not math.isfinite(loss):
        raise FloatingPointError(f"the validation loss must be finite; got {loss} at step {step}")
    _, cache = HookedRunner(model).run_with_cache(tokens, names=names)
    layers, pos = range(model.config.n_layers), tokens.shape[1]
    allowed = torch.ones(pos, pos, dtype=torch.bool).tril()
    scores = torch.stack([cache["scores", layer][..., allowed] for layer in layers])
    patterns = torch.stack([cache["pattern", layer] for layer in layers])
    # The first query has only one key, so its entropy is always 0.
    entropy = -torch.xlogy(patterns, patterns).sum(-1)[..., 1:] / torch.arange(2, pos + 1).log()
    model.train()
    largest, deviation = scores.abs().max().item(), scores.std().item()
    return Measurement(step, largest, deviation, entropy.mean().item(), loss)


def compared(options: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Train with and without QK-norm, and return the measurements of each run, by its name."""
    trainings = [
        TrainingConfig(
            steps=options.steps,
            learning_rate=rate,
            warmup=min(100, options.steps // 4),
            seed=options.seed,
            evaluate_every=options.steps,
        )
        for rate in dict.fromkeys(options.learning_rates)
    ]
    text = pydoc_text() if options.text is None else text_at(options.text)
    tokenizer = CharTokenizer.of(text)
    learned, held_out = train_test_split(torch.tensor(tokenizer.encode(text)))
    size = {"vocab_size": len(tokenizer.characters), "n_ctx": options.context}
    size |= {"n_layers": options.layers, "n_heads": options.heads, "d_model": options.width}
    # Use a part of the held-out text, because every measurement reads it.
    held_out = held_out[: 64 * options.context + 1]
    tokens = held_out[: len(held_out) // options.context * options.context]
    tokens = tokens.view(-1, options.context)[:8]
    runs: dict[str, list[Measurement]] = {}
    print(f"training {2 * len(trainings)} models for {options.steps:,} steps each", flush=True)
    for training in trainings:
        for preset in ("d12_post_norm", "d12_post_norm_qk_norm"):
            torch.manual_seed(options.seed)
            model = build(preset, **size)
            found = [measure(model, tokens, held_out, 0)]
            every = max(1, options.steps // 20)

            def after_step(
                model: Transformer,
                step: int,
                loss: float,
                found: list[Measurement] = found,
                every: int = every,
            ) -> None:
                if step % every == 0 or step == options.steps:
                    found.append(measure(model, tokens, held_out, step))

            name = (
                f"rate {training.learning_rate}, "
                f"{'no ' if model.config.qk_norm == 'none' else ''}QK-norm"
            )
            runs[name] = found
            try:
                train(model, learned, training, validation=held_out, after_step=after_step)
            except FloatingPointError as error:
                print(f"{name}: {error}", file=sys.stderr)
            print(f"{name} ({model.count_parameters():,} weights)")
            last = found[-1]
            print(
                f"  largest score {last.largest_score:7.2f}   deviation "
                f"{last.score_deviation:6.2f}   "
                f"entropy {last.entropy:.3f}   validation loss {last.validation_loss:.4f} nats"
            )
    return runs


def figure_of(runs: dict[str, list[Measurement]], bound: float) -> "Figure":
    """Return a figure of the largest score, the entropy and the loss by step.

    A grey line shows the bound that QK-norm puts on scores."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = {
        "largest_score": "largest attention score",
        "entropy": "entropy of attention / that of uniform",
        "validation_loss": "validation loss in nats per character",
    }
    colours = ["#c4501b", "#1f5fa8"]
    for axes, (field, title) in zip(panels, titles.items(), strict=True):
        for index, (name, found) in enumerate(runs.items()):
            axes.plot(
                [m.step for m in found],
                [getattr(m, field) for m in found],
                color=colours[index % 2],
                linestyle=("-", "--", ":", "-.")[index // 2 % 4],
                label=name,
            )
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    panels[0].axhline(bound, color="grey", linewidth=0.8)
    place = panels[0].get_yaxis_transform()
    panels[0].text(1, bound, "sqrt(d_head)", transform=place, color="grey", fontsize=8, ha="right")
    panels[0].set_yscale("log")
    panels[2].legend(fontsize=8)
    return figure


def run(options: argparse.Namespace) -> None:
    """Train both models, then write the table and the figure to the directory."""
    # With a context of 1 there is only one key.
    require_least(options, {"steps": 1, "context": 2})
    require_matplotlib()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = compared(options)
    found = {name: [asdict(m) for m in run] for name, run in runs.items()}
    (options.out / "qk_norm.json").write_text(json.dumps(found, indent=1) + "\n")
    bound = math.sqrt(options.width / options.heads)
    figure_of(runs, bound).savefig(options.out / "qk_norm.png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    options = parser(__doc__, "out/qk-norm", 400)
    options.add_argument("--text", type=Path, help="a UTF-8 file (Python's documentation)")
    options.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 1e-2])
    for name, default in {"layers": 4, "heads": 4, "width": 128, "context": 64}.items():
        options.add_argument(f"--{name}", type=int, default=default)
    return attempt(partial(run, options.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
