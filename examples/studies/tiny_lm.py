"""Train a small language model on a text, sample from it, and draw its attention and loss.

The default is nanoGPT's setting for a CPU (4 layers, 4 heads, width 128, context 64, 2000 batches
of 12, no dropout) with twice its learning rate, on the text that --text names or on Python's own
documentation. It takes some minutes. On Tiny Shakespeare it reaches 1.82 nats per character on the
held-out tenth. With the learning rate of nanoGPT, 1e-3, it reaches 1.90. nanoGPT's published 1.88
is an estimate from 20 random batches, with a standard deviation of 0.016.

Options change sizes, positions, regularisation and schedule, or choose any registered config.
--tokens chooses the tokens: characters, bytes, or the directory of a tokenizer. With the directory
of GPT-2's encoder.json and vocab.bpe, the vocabulary has 50,257 tokens, and steps are slower.

A directory holds one run. The default directory is out/tiny-lm or, with --model, out/ and the name
of the model. Give each further experiment its own --out. The first command below shows everything
in less than a minute.

    python examples/studies/tiny_lm.py --steps 100 --validation-windows 50 --length 60 \\
        --out out/first-look
    python examples/studies/tiny_lm.py
    python examples/studies/tiny_lm.py --text mine.txt --tokens bytes --out out/bytes
    python examples/studies/tiny_lm.py --positions rotary --dropout 0.1 --out out/rotary
    python examples/studies/tiny_lm.py --model d12_post_norm_qk_norm --steps 10 --batch-size 1 \\
        --validation-windows 4
    python -m interp report --model out/tiny-lm
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

# For `commands`, which all examples share.
sys.path.append(str(Path(__file__).resolve().parents[1]))

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
    Tokenizer,
    TrainingConfig,
    TrainingResult,
    Transformer,
    TransformerConfig,
    config_of,
    generate,
    list_configs,
    load_tokenizer,
    save,
    train,
    train_test_split,
)
from models.text.tokenizer import SubwordTokenizer, byte_level

# Options that replace fields of the config of the model.
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
# The files of a tokenizer. They are copied to the directory of the model.
FILES = (
    *("vocabulary.json", "tokenizer.json", "encoder.json", "vocab.bpe", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
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


def tokenizer_of(kind: str, text: str, out: Path) -> CharTokenizer | SubwordTokenizer:
    """Return a tokenizer of the characters of `text`, of bytes, or from a directory.

    Its files are written to `out`.

    Raises:
        ImportError, OSError, ValueError: if a library or a file is missing or wrong.
    """
    if kind == "characters":
        # The tokenizer is saved with the model.
        return CharTokenizer.of(text)
    if kind == "bytes":
        import tokenizers

        signs = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {sign: token for token, sign in enumerate(signs)}
        whole = byte_level(tokenizers.models.BPE(vocabulary, []))
        out.mkdir(parents=True, exist_ok=True)
        whole.save(str(out / "tokenizer.json"))
        return SubwordTokenizer(whole)
    if not Path(kind).is_dir():
        raise ValueError(f"--tokens must be characters, bytes, or a directory; got {kind!r}")
    tokenizer = load_tokenizer(kind)
    out.mkdir(parents=True, exist_ok=True)
    for file in filter(Path.is_file, (Path(kind, name) for name in FILES)):
        shutil.copy(file, out)
    return tokenizer


def prompt_of(given: str | None, text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that samples begin with.

    By default, they are a new line, or the first character of a text that has only one line.
    """
    if given is None:
        given = "\n" if "\n" in text else text[0]
    if not given:
        raise ValueError("--prompt must have at least one character; got ''")
    try:
        return tokenizer.encode(given)
    except ValueError as error:
        raise ValueError(f"--prompt: {error}") from None


def continued(
    model: Transformer, prompt: list[int], length: int, sampling: Sampling, seed: int
) -> list[int]:
    """Return a prompt with `length` more tokens. The result may be longer than the context.

    When the context is full, the model reads only its last half, and continues from there.
    """
    n_ctx, tokens = model.config.n_ctx, list(prompt)
    generator = torch.Generator().manual_seed(seed)
    while (left := len(prompt) + length - len(tokens)) > 0:
        seen = tokens[-n_ctx // 2 :] if len(tokens) >= n_ctx else tokens
        new = min(left, n_ctx - len(seen))
        (row,) = generate(model, [seen], max_new_tokens=new, seed=generator, **asdict(sampling))
        tokens += row[len(seen) :]
    return tokens


def in_words(sampling: Sampling) -> str:
    """Return the settings of sampling in words, as a heading for a sample."""
    if sampling.is_greedy:
        return "greedy"
    cuts = {"top-k": sampling.top_k, "top-p": sampling.top_p}
    given = [f"{name} {value}" for name, value in cuts.items() if value is not None]
    return ", ".join([f"temperature {sampling.temperature}", *given])


def all_options() -> argparse.ArgumentParser:
    """The options."""
    options = parser(__doc__, None, 2000)
    data = options.add_argument_group("text")
    data.add_argument("--text", type=Path, help="a file in UTF-8 (Python's documentation)")
    data.add_argument(
        "--tokens",
        default="characters",
        help="characters, bytes, or a directory with the files of a tokenizer (%(default)s)",
    )
    data.add_argument(
        "--validation-windows",
        type=int,
        help="the most contexts of the held-out tenth to evaluate (all)",
    )
    model = options.add_argument_group("model (by default nanoGPT's or --model's values)")
    model.add_argument("--model", metavar="NAME", help=", ".join(list_configs()))
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
    samples.add_argument("--length", type=int, default=300, help="tokens per sample")
    return options


def run(options: argparse.Namespace) -> None:
    """Train with a sample at each validation, then write the model, samples and figures to the
    directory.
    """
    # A context of 1 has no room for a character after the prompt.
    require_least(options, {"validation_windows": 1, "context": 2, "length": 1})
    require_matplotlib()
    out = Path("out", options.model or "tiny-lm") if options.out is None else options.out
    require_own(out, resume=options.resume)
    source = options.text or "Python's documentation"
    text = text_at(options.text) if options.text else pydoc_text()
    tokenizer = tokenizer_of(options.tokens, text, out)
    prompt = prompt_of(options.prompt, text, tokenizer)
    vocab_size = tokenizer.vocab_size
    base = config_of(options.model, vocab_size=vocab_size) if options.model else nano(vocab_size)
    given = {field: getattr(options, option) for option, field in FIELDS.items()}
    config = base.replace(**{name: value for name, value in given.items() if value is not None})
    tokens = tokenizer.encode(text)
    learned, held_out = train_test_split(torch.tensor(tokens))
    windows = options.validation_windows or len(held_out)
    held_out = held_out[: windows * config.n_ctx + 1]
    characters = len(tokenizer.decode(held_out.tolist())) / len(held_out)
    training = TrainingConfig(
        **{name: getattr(options, name) for name in TRAINING}, characters_per_token=characters
    )
    torch.manual_seed(options.seed)
    model = Transformer(config)
    print(
        f"{model.count_parameters():,} weights; {len(text):,} characters of {source} as "
        f"{len(tokens):,} "
        f"tokens, {len(set(tokens)):,} distinct; training on {len(learned):,} of them, "
        f"{options.steps:,} "
        f"steps of {options.batch_size}, with a sample after every {options.evaluate_every}",
        flush=True,
    )

    def sample(sampling: Sampling, when: str = "") -> str:
        found = continued(model, prompt, options.length, sampling, options.seed)
        return f"--- {when}{in_words(sampling)} ---\n{tokenizer.decode(found)}"

    def after_step(model: Transformer, step: int, loss: float) -> None:
        if step % options.evaluate_every == 0 or step == options.steps:
            model.eval()
            found = sample(MIDWAY, f"step {step}, ") + "\n"
            model.train()
            # `print` would break the progress bar.
            tqdm.write(found)
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
    save(out, model, tokenizer if isinstance(tokenizer, CharTokenizer) else None)
    for step, found in result.validation.items():
        error = found.standard_error
        print(
            f"step {step}: validation {found.nats:.4f} nats per token"
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
    tokenizer: Tokenizer,
    held_out: torch.Tensor,
    result: TrainingResult,
) -> None:
    """Draw the losses, and the attention on the first held-out tokens, and save the figures."""
    from tiny_lm_figures import attention_figure, loss_figure

    loss_figure(result.losses, result.validation).savefig(out / "losses.png", dpi=120)
    passage = held_out[: min(24, model.config.n_ctx)].tolist()
    attention_figure(model, tokenizer, passage).savefig(out / "attention.png", dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example, and return its exit status: 0, 1 for an error, or 130 for Ctrl-C."""
    return attempt(partial(run, all_options().parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
