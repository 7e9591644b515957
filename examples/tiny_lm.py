"""Trains a small character model, samples from it, and draws what it learned.

The default is nanoGPT's setting for a CPU (4 layers, 4 heads, width 128, context 64, 2000 batches of 12,
no dropout) with twice its learning rate. After some minutes it reaches 1.82 nats per character on the
held-out tenth of Tiny Shakespeare. With nanoGPT's own 1e-3 it is 1.90. nanoGPT's published 1.88 is an
estimate from 20 random batches, with a standard deviation of 0.016. The text is
../shared/data/tinyshakespeare.txt if it exists, otherwise Python's own documentation. Options change
sizes, positions, regularisation and schedule, or choose any registered config.

A directory holds one run. Without --out it is out/tiny-lm or, with --model, out/ and the model's name.
Give each further experiment its own --out.

    python examples/tiny_lm.py
    python examples/tiny_lm.py --positions rotary --dropout 0.1 --out out/rotary
    python examples/tiny_lm.py --model d12_post_norm_qk_norm --steps 10 --batch-size 1 --validation-windows 4
    python -m interp report --model out/tiny-lm
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from commands import (
    attempt,
    parser,
    pydoc_text,
    require_least,
    require_matplotlib,
    require_own,
    text_at,
)
from tqdm import tqdm

from models import (
    CharTokenizer,
    Sampling,
    TrainingConfig,
    TrainingResult,
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
# Options for fields of the model's config. Options that are given replace its values.
FIELDS = {
    "layers": "n_layers",
    "heads": "n_heads",
    "width": "d_model",
    "mlp_width": "d_mlp",
    "context": "n_ctx",
    "positions": "positions",
    "dropout": "dropout",
}
# Options for fields of the training config.
TRAINING = (
    *("steps", "batch_size", "learning_rate", "final_rate", "warmup", "weight_decay", "clip"),
    *("seed", "evaluate_every"),
)
MIDWAY = Sampling(temperature=0.8)
SAMPLINGS = (
    Sampling(),
    *(Sampling(temperature=temperature) for temperature in (0.5, 0.8, 1.0, 1.3)),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.9),
)


def nano(vocab_size: int) -> TransformerConfig:
    """nanoGPT's model for a CPU: GPT-2 without biases, with the exact GELU (Karpathy 2022)."""
    sizes = {"n_ctx": 64, "n_layers": 4, "n_heads": 4, "d_model": 128}
    biases = dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), False)
    return TransformerConfig(vocab_size=vocab_size, activation="gelu", **sizes, **biases)


def text_of(path: Path | None) -> tuple[str, str]:
    """The text and the name of its source: a path, or Tiny Shakespeare if it exists, otherwise Python's
    documentation."""
    if path is not None or SHAKESPEARE.is_file():
        return text_at(path or SHAKESPEARE), str(path or SHAKESPEARE)
    return pydoc_text(), "Python's documentation"


def prompt_of(given: str | None, text: str, tokenizer: CharTokenizer) -> list[int]:
    """The beginning of samples: by default a new line or, in a text of one line, its first character."""
    if given is None:
        given = "\n" if "\n" in text else text[0]
    if not given:
        raise ValueError("--prompt must have at least one character of the text; got ''")
    try:
        return tokenizer.encode(given)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None


def continued(
    model: Transformer, prompt: list[int], length: int, sampling: Sampling, seed: int
) -> list[int]:
    """A prompt and `length` more tokens, also beyond the context. Each time it is full, the model
    reads the last half of a context again."""
    n_ctx, tokens = model.config.n_ctx, list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while (left := len(prompt) + length - len(tokens)) > 0:
        seen = tokens[-n_ctx // 2 :] if len(tokens) >= n_ctx else tokens
        new = min(left, n_ctx - len(seen))
        (row,) = generate(model, [seen], max_new_tokens=new, seed=generator, **asdict(sampling))
        tokens += row[len(seen) :]
    return tokens


def in_words(sampling: Sampling) -> str:
    """A heading for a sample."""
    if sampling.is_greedy:
        return "greedy"
    cuts = {"top-k": sampling.top_k, "top-p": sampling.top_p}
    given = [f"{name} {value}" for name, value in cuts.items() if value is not None]
    return ", ".join([f"temperature {sampling.temperature}", *given])


def all_options() -> argparse.ArgumentParser:
    """The options."""
    options = parser(__doc__, None, 2000)
    data = options.add_argument_group("text")
    data.add_argument("--text", type=Path, help="a file in UTF-8")
    data.add_argument(
        "--validation-windows",
        type=int,
        help="the most contexts of the held-out tenth to evaluate (all)",
    )
    model = options.add_argument_group("model (by default nanoGPT's or --model's values)")
    model.add_argument("--model", metavar="NAME", help=", ".join(available()))
    for name in ("layers", "heads", "width", "mlp-width", "context"):
        model.add_argument(f"--{name}", type=int)
    model.add_argument("--positions", help="learned, sinusoidal, rotary or none")
    model.add_argument("--dropout", type=float)
    training = options.add_argument_group("training")
    training.add_argument("--batch-size", type=int, default=12)
    training.add_argument("--learning-rate", type=float, default=2e-3, help="(%(default)s)")
    training.add_argument("--warmup", type=int, default=100, help="steps (%(default)s)")
    training.add_argument(
        "--final-rate", type=float, default=0.1, help="the rate's share at the end; 1: constant"
    )
    training.add_argument("--weight-decay", type=float, default=0.1)
    training.add_argument("--clip", type=float, default=1.0, help="gradient norm; 0: no limit")
    training.add_argument("--evaluate-every", type=int, default=250, metavar="STEPS")
    training.add_argument("--resume", action="store_true", help="continue --out's checkpoint")
    samples = options.add_argument_group("samples")
    samples.add_argument("--prompt", help="how they begin (a new line, or the first character)")
    samples.add_argument("--length", type=int, default=300, help="characters per sample")
    return options


def run(options: argparse.Namespace) -> None:
    """Trains with a sample at each validation, then writes model, samples and figures to the directory."""
    # A context of 1 has no room for a character after the prompt.
    require_least(options, {"validation_windows": 1, "context": 2, "length": 1})
    require_matplotlib()
    out = Path("out", options.model or "tiny-lm") if options.out is None else options.out
    require_own(out, resume=options.resume)
    text, source = text_of(options.text)
    tokenizer = CharTokenizer.of(text)
    prompt = prompt_of(options.prompt, text, tokenizer)
    vocab_size = len(tokenizer.characters)
    base = config_of(options.model, vocab_size=vocab_size) if options.model else nano(vocab_size)
    given = {field: getattr(options, option) for option, field in FIELDS.items()}
    config = base.replace(**{name: value for name, value in given.items() if value is not None})
    training = TrainingConfig(
        **{name: getattr(options, name) for name in TRAINING}, characters_per_token=1.0
    )
    learned, held_out = split(torch.tensor(tokenizer.encode(text)))
    windows = options.validation_windows or len(held_out)
    held_out = held_out[: windows * config.n_ctx + 1]
    torch.manual_seed(options.seed)
    model = Transformer(config)
    print(
        f"{model.count_parameters():,} weights; {len(text):,} characters of {source}, "
        f"{vocab_size} distinct"
    )

    def sample(sampling: Sampling, when: str = "") -> str:
        found = continued(model, prompt, options.length, sampling, options.seed)
        return f"--- {when}{in_words(sampling)} ---\n{tokenizer.decode(found)}"

    def after_step(step: int, loss: float) -> None:
        if step % options.evaluate_every == 0 or step == options.steps:
            model.eval()
            found = sample(MIDWAY, f"step {step}, ") + "\n"
            model.train()
            tqdm.write(found)  # which leaves the bar in place
            with (out / "samples_by_step.txt").open("a", encoding="utf-8") as file:
                file.write(found)

    result = train(
        *(model, learned, training),
        validation=held_out,
        directory=out,
        resume=options.resume,
        after_step=after_step,
    )
    model.eval()
    save(out, model, tokenizer)
    for step, found in result.validation.items():
        error = found.standard_error
        print(
            f"step {step}: validation {found.nats:.4f} nats"
            f"{'' if error is None else f' (standard error {error:.4f})'}, "
            f"{found.bits_per_character:.4f} bits per character, perplexity {found.perplexity:.2f}"
        )
    samples = map(sample, SAMPLINGS)
    (out / "samples.txt").write_text("\n\n".join(samples) + "\n", encoding="utf-8")
    draw(out, model, tokenizer, held_out, result)
    print(f"{out} has the model, log.jsonl, samples and figures")


def draw(
    out: Path,
    model: Transformer,
    tokenizer: CharTokenizer,
    held_out: torch.Tensor,
    result: TrainingResult,
) -> None:
    """Writes the figures of losses, and of attention on the first held-out characters."""
    from tiny_lm_figures import attention_figure, loss_figure

    validation = {step: found.nats for step, found in result.validation.items()}
    loss_figure(result.losses, validation).savefig(out / "losses.png", dpi=120)
    passage = tokenizer.decode(held_out[: min(24, model.config.n_ctx)].tolist())
    attention_figure(model, tokenizer, passage).savefig(out / "attention.png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error, 130 for Ctrl-C."""
    return attempt(partial(run, all_options().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
