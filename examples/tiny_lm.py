"""Trains a small language model of characters, samples from it, and draws what it learned.

By default it is nanoGPT's setting for a CPU (4 layers, 4 heads, width 128, context 64, 2000 batches of 12,
no dropout) at twice its learning rate: 1.82 nats per character on the held-out tenth of Tiny Shakespeare
after some minutes. At nanoGPT's own 1e-3 it is 1.90; nanoGPT's published 1.88 is estimated from 20 random
batches, with a standard deviation of 0.016. The text is ../shared/data/tinyshakespeare.txt if it is
there, else Python's own documentation. The tiny transformer's experiments are options: sizes,
positions, regularisation, schedule, or any registered config.

    python examples/tiny_lm.py --out out/tiny-lm
    python examples/tiny_lm.py --positions rotary --dropout 0.1 --out out/rotary
    python examples/tiny_lm.py --model d12_post_norm_qk_norm --steps 10 --batch-size 1
    python -m interp report --model out/tiny-lm
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hooks import HookedRunner
from models import (
    CharTokenizer,
    Sampling,
    TrainingConfig,
    Transformer,
    TransformerConfig,
    available,
    config_of,
    generate,
    save,
    split,
    train,
)

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
# Options that are fields of the model's config: those that are given replace what it has.
FIELDS = {
    "layers": "n_layers",
    "heads": "n_heads",
    "width": "d_model",
    "mlp_width": "d_mlp",
    "context": "n_ctx",
    "positions": "positions",
    "dropout": "dropout",
}
# At most so many layers and heads are drawn.
MAPS = 6
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=0.8),
    Sampling(temperature=1.0),
    Sampling(temperature=1.3),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.9),
)


def nano(vocab_size: int) -> TransformerConfig:
    """nanoGPT's model for a CPU: GPT-2 without biases, with the exact GELU (Karpathy 2022)."""
    return TransformerConfig(
        vocab_size=vocab_size,
        n_ctx=64,
        n_layers=4,
        n_heads=4,
        d_model=128,
        norm_bias=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        activation="gelu",
    )


def text_of(path: Path | None) -> str:
    """The text at a path, by default Tiny Shakespeare where it is, else Python's documentation."""
    if path is not None or SHAKESPEARE.is_file():
        return (path or SHAKESPEARE).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def continued(
    model: Transformer, prompt: list[int], length: int, sampling: Sampling, seed: int
) -> list[int]:
    """A prompt and `length` more tokens, also beyond the context: each time it is full, the model
    reads the last half of what is written anew."""
    n_ctx, tokens = model.config.n_ctx, list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while (left := len(prompt) + length - len(tokens)) > 0:
        seen = tokens[-n_ctx // 2 :] if len(tokens) >= n_ctx else tokens
        (row,) = generate(
            model,
            [seen],
            max_new_tokens=min(left, n_ctx - len(seen)),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=generator,
        )
        tokens += row[len(seen) :]
    return tokens


def in_words(sampling: Sampling) -> str:
    """A heading for a sample."""
    if sampling.is_greedy:
        return "greedy"
    cuts = {"top-k": sampling.top_k, "top-p": sampling.top_p}
    given = [f"{name} {value}" for name, value in cuts.items() if value is not None]
    return ", ".join([f"temperature {sampling.temperature}", *given])


def draw_losses(path: Path, losses: Sequence[float], validation: dict[int, float]) -> None:
    """Training and validation loss by step, in nats and, on the right, in bits per character."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    window = max(1, len(losses) // 100)
    smooth = torch.tensor(losses).unfold(0, window, 1).mean(1)
    axes.plot(range(1, len(losses) + 1), losses, color="#c9d7e8", linewidth=0.6)
    axes.plot(
        range(window, len(losses) + 1),
        smooth,
        color="#1f5fa8",
        label=f"training, mean of {window} steps" if window > 1 else "training",
    )
    axes.plot(
        list(validation), list(validation.values()), "o-", color="#c4501b", label="validation"
    )
    axes.set(xlabel="step", ylabel="loss in nats per character")
    bits = axes.secondary_yaxis(
        "right", functions=(lambda nats: nats / math.log(2), lambda bits: bits * math.log(2))
    )
    bits.set_ylabel("bits per character")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_attention(path: Path, model: Transformer, tokenizer: CharTokenizer, text: str) -> None:
    """What each head's queries attend to on a text: a map for each of the first layers and heads."""
    from matplotlib.figure import Figure

    tokens = torch.tensor([tokenizer.encode(text)])
    _, cache = HookedRunner(model).run_with_cache(tokens, names="blocks.*.attn.pattern")
    layers, heads = min(model.config.n_layers, MAPS), min(model.config.n_heads, MAPS)
    labels = [{"\n": "↵", " ": "·"}.get(character, character) for character in text]
    figure = Figure(figsize=(2.4 * heads, 2.5 * layers + 0.4), layout="constrained")
    grid = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head, axes in enumerate(grid[layer]):
            image = axes.imshow(
                cache["pattern", layer][0, head].numpy(), vmin=0, vmax=1, cmap="Blues"
            )
            axes.set_title(f"layer {layer}, head {head}", fontsize=8)
            axes.set_xticks(range(len(text)), labels, fontsize=5)
            axes.set_yticks(range(len(text)), labels, fontsize=5)
            axes.tick_params(length=0)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.4, label="attention")
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_argument_group("text")
    data.add_argument("--text", type=Path, help="a file in UTF-8")
    data.add_argument(
        "--validation-windows",
        type=int,
        help="contexts of the held-out tenth that are evaluated (all; 16 with --model)",
    )
    model = parser.add_argument_group("model; what is not given is nanoGPT's, or the --model's")
    model.add_argument("--model", metavar="NAME", help=", ".join(available()))
    model.add_argument("--layers", type=int)
    model.add_argument("--heads", type=int)
    model.add_argument("--width", type=int, help="of the residual stream")
    model.add_argument("--mlp-width", type=int)
    model.add_argument("--context", type=int, help="in characters")
    model.add_argument("--positions", help="learned, sinusoidal, rotary or none")
    model.add_argument("--dropout", type=float)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=2000)
    training.add_argument("--batch-size", type=int, default=12)
    training.add_argument("--learning-rate", type=float, default=2e-3, help="(%(default)s)")
    training.add_argument("--warmup", type=int, default=100, help="steps (%(default)s)")
    training.add_argument(
        "--final-rate", type=float, default=0.1, help="share of the rate at the end; 1: constant"
    )
    training.add_argument("--weight-decay", type=float, default=0.1)
    training.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0 for any")
    training.add_argument("--evaluate-every", type=int, default=250, metavar="STEPS")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--resume", action="store_true", help="go on from --out's checkpoint")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("out/tiny-lm"), metavar="DIRECTORY")
    output.add_argument("--prompt", default="\n", help="how samples begin (a new line)")
    output.add_argument("--length", type=int, default=300, help="characters a sample")
    return parser


def run(options: argparse.Namespace) -> None:
    """Trains, then writes model, samples and figures to the directory."""
    text = text_of(options.text)
    tokenizer = CharTokenizer.of(text)
    prompt = tokenizer.encode(options.prompt)
    vocab_size = len(tokenizer.characters)
    base = config_of(options.model, vocab_size=vocab_size) if options.model else nano(vocab_size)
    given = {field: getattr(options, option) for option, field in FIELDS.items()}
    config = base.replace(**{name: value for name, value in given.items() if value is not None})
    training = TrainingConfig(
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        final_rate=options.final_rate,
        warmup=options.warmup,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        evaluate_every=options.evaluate_every,
        characters_per_token=1.0,
    )
    learned, held_out = split(torch.tensor(tokenizer.encode(text)))
    windows = options.validation_windows or (16 if options.model else len(held_out))
    held_out = held_out[: windows * config.n_ctx + 1]
    torch.manual_seed(options.seed)
    model = Transformer(config)
    print(f"{model.count_parameters():,} weights, {len(text):,} characters, {vocab_size} distinct")
    result = train(
        model,
        learned,
        training,
        validation=held_out,
        directory=options.out,
        resume=options.resume,
    )
    model.eval()
    save(options.out, model, tokenizer)
    for step, found in result.validation.items():
        print(
            f"step {step}: validation {found.nats:.4f} nats, {found.bits_per_character:.4f} bits per "
            f"character, perplexity {found.perplexity:.2f}"
        )
    samples = [
        f"--- {in_words(sampling)} ---\n"
        + tokenizer.decode(continued(model, prompt, options.length, sampling, options.seed))
        for sampling in SAMPLINGS
    ]
    (options.out / "samples.txt").write_text("\n\n".join(samples) + "\n", encoding="utf-8")
    validation = {step: found.nats for step, found in result.validation.items()}
    draw_losses(options.out / "losses.png", result.losses, validation)
    passage = tokenizer.decode(held_out[: min(32, config.n_ctx)].tolist())
    draw_attention(options.out / "attention.png", model, tokenizer, passage)
    print(f"{options.out} has the model, log.jsonl, samples.txt, losses.png and attention.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for what cannot be done, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    try:
        import matplotlib  # noqa: F401  # rather now than after the training
    except ModuleNotFoundError:
        return refuse('figures need Matplotlib: pip install "hookscope[report]"')
    try:
        run(options)
    except (ValueError, OSError, FloatingPointError) as error:
        hint = "; --resume goes on, --out chooses" if isinstance(error, FileExistsError) else ""
        return refuse(f"{error}{hint}")
    except KeyError as error:
        return refuse(error.args[0])
    except KeyboardInterrupt as error:
        print(
            f"\n{error}: --resume goes on from there" if str(error) else "\ninterrupted",
            file=sys.stderr,
        )
        return 130
    return 0


def refuse(reason: Any) -> int:
    """Says why in one line."""
    print("error:", " ".join(str(reason).split()), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
