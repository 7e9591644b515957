"""Training: AdamW with warm-up and cosine decay on seeded samples, logged, saved and resumed."""

import dataclasses
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from models.evaluation import evaluate as evaluate
from models.evaluation import mode, require_window
from models.training_config import TrainingConfig as TrainingConfig
from models.training_run import Run, TrainingResult
from models.training_state import RunFiles
from models.transformer import Transformer

Batches = Callable[[int, torch.Generator], Int[Tensor, "batch pos"]]
"""Draws the batch of a step, counted from 0; the model reads all tokens but the last of each row.

What it gives follows from its arguments alone: else a resumed run could not go on as it would have.
"""


def next_token_loss(
    logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos-1"]:
    """Cross-entropy of each next token, in nats."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def split(tokens: Int[Tensor, " pos"], fraction: float = 0.9) -> tuple[Tensor, Tensor]:
    """The first `fraction` of a text for training, the rest for validation.

    Raises:
        ValueError: if one of the two would be empty.
    """
    at = int(len(tokens) * fraction)
    if not 0 < at < len(tokens):
        raise ValueError(f"{fraction} of {len(tokens)} tokens leaves an empty part")
    return tokens[:at], tokens[at:]


def sample(
    tokens: Int[Tensor, " text"], batch: int, length: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Random stretches of a text.

    Raises:
        ValueError: if the text is shorter than a stretch.
    """
    if len(tokens) < length:
        raise ValueError(f"a text of {len(tokens)} tokens has no stretch of {length}")
    starts = torch.randint(len(tokens) - length + 1, (batch, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


def train(
    model: Transformer,
    data: Int[Tensor, " text"] | Batches,
    config: TrainingConfig,
    *,
    validation: Int[Tensor, " held_out"] | None = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    after_step: Callable[[int, float], None] | None = None,
) -> TrainingResult:
    """Trains `model` in place to predict each next token.

    The same arguments give the same weights on the same machine, bit for bit, also when the run was
    stopped and resumed; on a GPU under `torch.use_deterministic_algorithms(True)`. Dropout draws from
    `config.seed` too, and torch's own generator is left as it was.

    A `directory` gets `log.jsonl`, a line a step with losses in nats per token, and `checkpoint.pt`,
    which is replaced as a whole. Ctrl-C ends the run after the step at hand and saves it; a second
    one ends it at once.

    Args:
        model: its modules' modes, training or not, are afterwards what they were.
        data: a text, of which random stretches are learned: its first `config.train_fraction` if no
            `validation` is given, else all of it; or what draws each step's batch.
        config: how to train.
        validation: the text that the loss is measured on.
        directory: where log and checkpoint go; None for neither.
        resume: go on from the directory's checkpoint.
        after_step: called with the number of steps taken and the last loss.

    Raises:
        ValueError: if a text is shorter than a context and a next token or has tokens outside the
            vocabulary, or a checkpoint is damaged or of another run; before any work.
        FileExistsError: if the directory has a checkpoint and `resume` is False.
        FileNotFoundError: if it has none and `resume` is True.
        FloatingPointError: if a loss or a gradient is not finite; the last checkpoint stays.
        OSError: if a file cannot be written; the last checkpoint stays.
        KeyboardInterrupt: saying how to go on.
    """
    batches, held_out, digest = _source(data, validation, model, config)
    described = {"model": dataclasses.asdict(model.config), "training": dataclasses.asdict(config)}
    files = RunFiles(None if directory is None else Path(directory), {**described, "text": digest})
    run = Run(model, config, files)
    with (
        mode(model, training=True),
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        _whole_steps() as interrupted,
        closing(files),
    ):
        torch.manual_seed(config.seed)
        if resume:
            run.restore(files.load())
        files.open([record.line() for record in run.records], resume=resume)
        done = len(run.records)
        # Hidden where nobody watches: in a file it would be one long line.
        progress = tqdm(
            total=config.steps, initial=done, unit="step", desc="training", disable=None
        )
        with progress:
            for step in range(done, config.steps):
                tokens = batches(step, run.generator).to(run.device)
                record = run.update(tokens)
                due = (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps
                if due and held_out is not None:
                    record = dataclasses.replace(record, validation=run.measure(held_out))
                run.records.append(record)
                files.log(record.line())
                _show(progress, record.loss, tokens[:, 1:].numel())
                if after_step:
                    after_step(step + 1, record.loss)
                # Asked once: in between, the answer could change.
                stop = interrupted()
                if due or stop:
                    run.save()
                if stop:
                    raise KeyboardInterrupt(
                        f"stopped after step {step + 1} of {config.steps}; {files.last}"
                    )
    return run.result()


def _source(
    data: Tensor | Batches, validation: Tensor | None, model: Transformer, config: TrainingConfig
) -> tuple[Batches, Tensor | None, str]:
    """What draws batches, the held-out text, and a digest of both texts."""
    length, vocab_size = model.config.n_ctx, model.config.vocab_size
    digest = hashlib.sha256()
    texts: dict[str, Tensor] = {}
    if isinstance(data, Tensor):
        text, validation = (
            split(data, config.train_fraction) if validation is None else (data, validation)
        )
        texts["the text to train on"] = text

        def data(step: int, generator: torch.Generator) -> Tensor:
            return sample(text, config.batch_size, length + 1, generator)

    if validation is not None:
        texts["the text to validate on"] = validation
    for what, tokens in texts.items():
        if tokens.ndim != 1 or tokens.is_floating_point():
            raise ValueError(
                f"{what} is one row of integers, not {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        require_window(what, tokens, length)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{what} has tokens from {low} to {high}; the model's are 0 to {vocab_size - 1}"
            )
        digest.update(what.encode() + tokens.cpu().numpy().tobytes())
    return data, validation, digest.hexdigest()


def _show(progress: "tqdm[Any]", loss: float, tokens: int) -> None:
    progress.update()
    if not progress.disable:
        rate = tokens * (progress.format_dict["rate"] or 0.0)
        progress.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)


@contextmanager
def _whole_steps() -> Iterator[Callable[[], bool]]:
    """Says whether Ctrl-C was pressed instead of stopping there and then, where weights may be half
    changed; pressed again it stops at once."""
    pressed = threading.Event()

    def note(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Python lets only the main thread decide; and a handler that somebody else set is theirs.
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
