"""Trains pydoc-4l, the character model that ships with the package, on Python's own documentation.

The text is `pydoc_data.topics`, which every Python carries; its last tenth is held out. A quarter of
each batch are random characters repeated, so that the model learns to copy in context.

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

from models import (
    CharTokenizer,
    TrainingConfig,
    Transformer,
    TransformerConfig,
    evaluate,
    next_token_loss,
    sample,
    save,
    split,
    train,
)


def repeated(batch: int, length: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Random characters, repeated with a period of 16 to 128: [batch, length]."""
    periods = torch.randint(16, 129, (batch,), generator=generator)
    rows = torch.randint(vocab_size, (batch, 128), generator=generator)
    return torch.stack(
        [
            row[:period].repeat(length // int(period) + 1)[:length]
            for row, period in zip(rows, periods, strict=True)
        ]
    )


@torch.no_grad()
def copying(model: Transformer, vocab_size: int, rows: int = 64) -> tuple[float, float]:
    """Mean loss, in nats per character, on the first and the second copy of 40 random characters."""
    generator = torch.Generator().manual_seed(40)
    tokens = torch.randint(vocab_size, (rows, 40), generator=generator).repeat(1, 2)
    loss = next_token_loss(model(tokens), tokens)
    return loss[:, :39].mean().item(), loss[:, 39:].mean().item()


def main() -> None:
    """Trains, keeps the weights with the lowest validation loss, and writes what it measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/pydoc-4l"))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
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

    def batches(generator: torch.Generator) -> torch.Tensor:
        prose = sample(training, 12, config.n_ctx + 1, generator)[:, : config.n_ctx]
        return torch.cat([prose, repeated(4, config.n_ctx, config.vocab_size, generator)])

    best = {"validation": float("inf")}

    def after_step(step: int, loss: float) -> None:
        if step % 250 and step != options.steps:
            return
        validated = evaluate(model, validation)
        print(
            f"step {step}: training batch {loss:.3f}, validation {validated:.4f} nats per character"
        )
        if validated < best["validation"]:
            best.update(step=step, validation=validated)
            save(options.out, model, tokenizer)

    schedule = TrainingConfig(steps=options.steps, learning_rate=2e-3, seed=options.seed)
    train(model, batches, schedule, after_step)

    from models import load

    kept = load(options.out)
    first, second = copying(kept, config.vocab_size)
    report = {
        "command": "python " + " ".join(sys.argv),
        "seed": options.seed,
        "step": best["step"],
        "training_loss_nats": round(evaluate(kept, training), 4),
        "validation_loss_nats": round(evaluate(kept, validation), 4),
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
