"""The training loop: seeded batches, a log, checkpoints, and an orderly end on Ctrl-C."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from models.checks import mode
from models.training.config import TrainingConfig
from models.training.data import Batches, check_batch, check_text, digest, sample_batch, split
from models.training.files import RunFiles
from models.training.run import Run, TrainingResult
from models.transformer import Transformer


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
    `config.seed` too (on CPU and CUDA), and torch's own generators are left as they were.

    A `directory` gets `log.jsonl`, a line a step with losses in nats per token, and `checkpoint.pt`,
    which is replaced as a whole. Ctrl-C ends the run after the step at hand and saves it; a second
    one ends it at once.

    Args:
        model: its modules' modes, training or not, are afterwards what they were, and no gradients
            are left.
        data: a text, of which random stretches are learned: its first `config.train_fraction` if no
            `validation` is given, else all of it; or what draws each step's batch.
        config: how to train.
        validation: the text that the loss is measured on.
        directory: where log and checkpoint go; None for neither.
        resume: go on from the directory's checkpoint.
        after_step: called with the number of steps taken and the last loss.

    Raises:
        ValueError: if a text is shorter than a context and a next token or has tokens outside the
            vocabulary, or a checkpoint is damaged or of another run; before any work. Later, if a
            drawn batch is no matrix of the vocabulary's tokens.
        FileExistsError: if the directory has a checkpoint and `resume` is False.
        FileNotFoundError: if it has none and `resume` is True.
        FloatingPointError: if a loss or a gradient is not finite; the last checkpoint stays.
        OSError: if a file cannot be written; the last checkpoint stays.
        KeyboardInterrupt: saying how to go on.
    """
    batches, held_out, text = _source(data, validation, model, config)
    files = RunFiles(
        None if directory is None else Path(directory), _description(model, config, text)
    )
    run = Run(model, config, files)
    with (
        mode(model, training=True),
        run.own_dropout(),
        _whole_steps(files) as interrupted,
        closing(files),
    ):
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
                tokens = batches(step, run.generator)
                check_batch(tokens, model.config.vocab_size, step + 1)
                record = run.update(tokens.to(run.device).long())
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
                    break
        if interrupted():  # also while the last checkpoint was written
            raise KeyboardInterrupt(
                f"stopped after step {len(run.records)} of {config.steps}; {files.way_on}"
            )
    return run.result()


def _description(model: Transformer, config: TrainingConfig, text: str) -> dict[str, Any]:
    """What a run is: a checkpoint of another one is not gone on from."""
    return {
        "model": dataclasses.asdict(model.config),
        "training": dataclasses.asdict(config),
        "text": text,
        "dtype": str(model.W_E.dtype),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }


def _source(
    data: Tensor | Batches, validation: Tensor | None, model: Transformer, config: TrainingConfig
) -> tuple[Batches, Tensor | None, str]:
    """What draws batches, the held-out text, and a digest of the texts."""
    length, vocab_size = model.config.n_ctx, model.config.vocab_size
    texts: dict[str, Tensor] = {}
    if isinstance(data, Tensor):
        text, validation = (
            split(data, config.train_fraction) if validation is None else (data, validation)
        )
        texts["the text to train on"] = text

        def data(step: int, generator: torch.Generator) -> Tensor:
            return sample_batch(text, config.batch_size, length + 1, generator)

    if validation is not None:
        texts["the text to validate on"] = validation
    for what, tokens in texts.items():
        check_text(what, tokens, length, vocab_size)
    return data, validation, digest(*texts.values())


def _show(progress: "tqdm[Any]", loss: float, tokens: int) -> None:
    progress.update()
    if not progress.disable:
        rate = tokens * (progress.format_dict["rate"] or 0.0)
        progress.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s", refresh=False)


@contextmanager
def _whole_steps(files: RunFiles) -> Iterator[Callable[[], bool]]:
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
    except KeyboardInterrupt as stopped:
        if stopped.args:
            raise
        raise KeyboardInterrupt(f"stopped within a step; {files.way_on}") from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
