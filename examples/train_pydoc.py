"""Trains pydoc-4l, the character model that ships with the package, on Python's own documentation.

The text is `pydoc_data.topics`, which every Python carries; its last tenth is held out. Batches
are prose at first. Once the model has learned to look at the character before, six of their sixteen
rows are random characters repeated, and it learns to copy in context within some hundred steps; with
such rows from the start, both take much longer.

    python examples/train_pydoc.py --out out/pydoc-4l
"""

import argparse
import hashlib
import json
import platform
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch

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
    split,
    train,
)


def repeated(rows: int, length: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Random characters with a period of 4 to 48, another for each row: [rows, length]."""
    periods = torch.randint(4, 49, (rows, 1), generator=generator)
    once = torch.randint(vocab_size, (rows, 48), generator=generator)
    return once.gather(1, torch.arange(length) % periods)


@torch.no_grad()
def copying(model: Transformer) -> tuple[float, float]:
    """Mean loss, in nats per character, on the first and on the second copy of 40 random ones."""
    tokens = repeated_tokens(model.config.vocab_size, period=40, batch=64)
    loss = next_token_loss(model(tokens), tokens)
    return loss[:, :39].mean().item(), loss[:, 39:].mean().item()


def main() -> None:
    """Trains, keeps the weights with the lowest validation loss that copy, writes what it measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/pydoc-4l"))
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--prose-steps", type=int, default=1500, help="steps before copying begins")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    text = "\n".join(topics.values())
    tokenizer = CharTokenizer.of(text)
    training, validation = split(torch.tensor(tokenizer.encode(text)))
    config = TransformerConfig(
        vocab_size=len(tokenizer.characters),
        n_ctx=256,
        n_layers=4,
        n_heads=4,
        d_model=128,
        dropout=options.dropout,
    )
    torch.manual_seed(options.seed)
    model = Transformer(config)

    def batches(step: int, generator: torch.Generator) -> torch.Tensor:
        copies = 6 if step >= options.prose_steps else 0
        prose = sample_batch(training, 16 - copies, config.n_ctx, generator)
        return torch.cat([prose, repeated(copies, config.n_ctx, config.vocab_size, generator)])

    best = float("inf")

    def after_step(step: int, loss: float) -> None:
        nonlocal best
        if step % 250 and step != options.steps:
            return
        validated = evaluate(model, validation).nats
        first, second = copying(model)
        print(f"step {step}: validation {validated:.4f}, copies {first:.2f} then {second:.2f} nats")
        if validated < best and second < 0.5 * first:
            best = validated
            save(options.out, model, tokenizer)

    schedule = TrainingConfig(
        steps=options.steps, learning_rate=options.learning_rate, seed=options.seed
    )
    train(model, batches, schedule, after_step=after_step)

    if best == float("inf"):
        sys.exit(
            f"after {options.steps} steps the model does not copy in context; nothing was saved"
        )
    kept = load(options.out)
    first, second = copying(kept)
    report = {
        "command": f"python {' '.join(sys.argv)}",
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


if __name__ == "__main__":
    main()
