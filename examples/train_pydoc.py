"""Train a character model like the bundled pydoc-4l on Python's own documentation.

The text is `pydoc_data.topics`, which every Python has. Its last tenth is held out. At first, all
batches are prose, and the model learns to attend to the previous character. Later, six of the
sixteen texts of a batch are repeated random characters, and the model learns to copy them within
some hundred steps. If repeated characters are in the batches from the start, the model needs much
longer to learn both.

The training takes about 25 minutes on one core. The script prints a line for every evaluation, with
the remaining time.

The directory of `--out` gets a log, checkpoints, and the best model: among the models that copy,
the one with the lowest validation loss. pydoc-4l was trained on texts that are one character
shorter, so a run gives other weights than pydoc-4l has. The losses of pydoc-4l are in its
training.json.

    python examples/train_pydoc.py --out out/pydoc-4l
    python examples/train_pydoc.py --out out/pydoc-4l --resume
"""

import argparse
import hashlib
import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from functools import partial

import torch
from commands import Pace, attempt, parser, pydoc_text, require_least, require_own
from tqdm import tqdm

from interp import repeated_tokens
from models import (
    CharTokenizer,
    TrainingConfig,
    Transformer,
    TransformerConfig,
    evaluate,
    load,
    next_token_loss,
    sample_batch,
    save,
    train,
    train_test_split,
)

ROWS, COPIES = 16, 6


def model_config(vocab_size: int, dropout: float) -> TransformerConfig:
    """Return the config of pydoc-4l."""
    return TransformerConfig(
        vocab_size=vocab_size, n_ctx=256, n_layers=4, n_heads=4, d_model=128, dropout=dropout
    )


def repeated(rows: int, length: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows of random characters that repeat, [rows, length].

    The period of each row is a random number from 4 to 48.
    """
    periods = torch.randint(4, 49, (rows, 1), generator=generator)
    once = torch.randint(vocab_size, (rows, 48), generator=generator)
    return once.gather(1, torch.arange(length) % periods)


@torch.no_grad()
def copying(model: Transformer) -> tuple[float, float]:
    """Return the mean losses on the first and on the second copy of 40 random characters.

    They are in nats per character. A model that copies has a small loss on the second copy.
    """
    tokens = repeated_tokens(model.config.vocab_size, period=40, batch=64)
    loss = next_token_loss(model(tokens), tokens)
    return loss[:, :39].mean().item(), loss[:, 39:].mean().item()


def run(options: argparse.Namespace, command: str) -> None:
    """Train, save the model with the lowest validation loss that copies, and write its losses."""
    require_least(options, {"prose_steps": 0})
    require_own(options.out, resume=options.resume)
    text = pydoc_text()
    tokenizer = CharTokenizer.of(text)
    training, validation = train_test_split(torch.tensor(tokenizer.encode(text)))
    config = model_config(len(tokenizer.characters), options.dropout)
    schedule = TrainingConfig(
        steps=options.steps,
        batch_size=ROWS,
        learning_rate=options.learning_rate,
        seed=options.seed,
    )
    torch.manual_seed(options.seed)
    model = Transformer(config)

    def batches(step: int, generator: torch.Generator) -> torch.Tensor:
        copies = COPIES if step >= options.prose_steps else 0
        # Rows have one character more than the context, because the model predicts the last
        # character, but does not read it.
        length = config.n_ctx + 1
        prose = sample_batch(training, ROWS - copies, length, generator)
        return torch.cat([prose, repeated(copies, length, config.vocab_size, generator)])

    best = math.inf
    # A saved model means that this run is resumed.
    if (options.out / "config.json").exists():
        best = evaluate(load(options.out), validation).nats

    pace = Pace(options.steps)
    print(
        f"{model.count_parameters():,} weights, {len(training):,} characters to learn from: "
        f"{options.steps:,} steps, of which the first {options.prose_steps:,} are only prose",
        flush=True,
    )

    def after_step(model: Transformer, step: int, loss: float) -> None:
        nonlocal best
        where = pace(step)
        # Write a message early, so that the user sees how long the training will take.
        if step == 25:
            tqdm.write(f"{where}: loss {loss:.2f} nats")
        if step % schedule.evaluate_every and step != options.steps:
            return
        validated = evaluate(model, validation).nats
        model.eval()
        first, second = copying(model)
        model.train()
        tqdm.write(
            f"{where}: validation {validated:.4f} nats per character; random characters "
            f"{first:.2f}, "
            f"repeated {second:.2f}"
        )
        if validated < best and second < 0.5 * first:
            best = validated
            save(options.out, model, tokenizer)

    where, resume = options.out, options.resume
    train(model, batches, schedule, directory=where, resume=resume, after_step=after_step)
    if best == math.inf:
        raise ValueError(
            f"the model must copy in context; it does not after {options.steps} steps: none is kept"
        )
    kept = load(options.out)
    first, second = copying(kept)
    report = {
        "command": command,
        "seed": options.seed,
        "training_loss_nats": round(evaluate(kept, training).nats, 4),
        "validation_loss_nats": round(evaluate(kept, validation).nats, 4),
        "first_copy_loss_nats": round(first, 4),
        "second_copy_loss_nats": round(second, 4),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_characters": len(text),
    }
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser(__doc__, "out/pydoc-4l", 3500)
    options.add_argument(
        "--prose-steps", type=int, default=1500, help="steps before copying begins"
    )
    options.add_argument("--learning-rate", type=float, default=2e-3)
    options.add_argument("--dropout", type=float, default=0.0)
    options.add_argument(
        "--resume", action="store_true", help="continue --out's checkpoint with the same options"
    )
    command = shlex.join(["python", "examples/train_pydoc.py", *arguments])
    return attempt(partial(run, options.parse_args(arguments), command))


if __name__ == "__main__":
    sys.exit(main())
