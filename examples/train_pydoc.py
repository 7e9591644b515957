"""Train a character model like the bundled pydoc-4l on Python's own documentation.

The text is `pydoc_data.topics`, a part of every Python. Its last tenth is held out. At first
batches are only prose, and the model learns to attend to the previous character. Then six of their
sixteen rows are repeated random characters, and it learns to copy in context within some hundred
steps. With such rows from the start, both take much longer.

It takes about 25 minutes of one core. It prints a line for every evaluation, and how long the rest
will take.

The directory gets a log, checkpoints, and the model with the lowest validation loss among those
that copy. pydoc-4l itself was trained on rows of one character less, so a run gives other weights.
Its losses are in its training.json.

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
    """The sizes of pydoc-4l."""
    return TransformerConfig(
        vocab_size=vocab_size, n_ctx=256, n_layers=4, n_heads=4, d_model=128, dropout=dropout
    )


def repeated(rows: int, length: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Random characters that repeat, [rows, length], each row with its own period of 4 to 48."""
    periods = torch.randint(4, 49, (rows, 1), generator=generator)
    once = torch.randint(vocab_size, (rows, 48), generator=generator)
    return once.gather(1, torch.arange(length) % periods)


@torch.no_grad()
def copying(model: Transformer) -> tuple[float, float]:
    """Mean losses, in nats per character, on the first and the second copy of 40 random
    characters.
    """
    tokens = repeated_tokens(model.config.vocab_size, period=40, batch=64)
    loss = next_token_loss(model(tokens), tokens)
    return loss[:, :39].mean().item(), loss[:, 39:].mean().item()


def run(options: argparse.Namespace, command: str) -> None:
    """Trains, keeps the best model that copies, by validation loss, and writes measurements."""
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
        # The last character of each row is only predicted, not read.
        length = config.n_ctx + 1
        prose = sample_batch(training, ROWS - copies, length, generator)
        return torch.cat([prose, repeated(copies, length, config.vocab_size, generator)])

    best = math.inf
    if (options.out / "config.json").exists():  # from this run, which is resumed
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
        # An early message shows how long the training takes.
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
    """Returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
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
