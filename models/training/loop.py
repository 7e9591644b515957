"""The training loop, which stops cleanly on Ctrl-C."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hooks.base import Count, explains_calls, number_of, progress_bar
from models.mode import mode
from models.training.data import (
    Batches,
    Evaluation,
    Loss,
    TrainingConfig,
    TrainingText,
    check_learnable,
    require_plain_model,
    row_losses,
    sample_batch,
    tensor_of,
    train_test_split,
)
from models.training.run import Run
from models.transformer import Transformer

HELD_OUT = "the text to validate on"


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The losses of a run from its first step on, including the steps before it was resumed.

    Attributes:
        losses: the loss of the batch of each step before the update, in nats per token.
        validation: the loss on the held-out text, by the number of steps taken.

    >>> result = TrainingResult(losses=(2.5, 2.0), validation={2: Evaluation(nats=2.25)})
    >>> result.validation[2].nats - result.losses[-1]
    0.25
    """

    losses: tuple[float, ...]
    validation: Mapping[int, Evaluation]

    def __repr__(self) -> str:
        text = f"TrainingResult of {number_of(len(self.losses), 'step')}"
        if self.losses:
            text += f", loss {self.losses[-1]:.4g}"
        for evaluation in [*self.validation.values()][-1:]:
            text += f", {evaluation.nats:.4g} held out"
        return f"{text} (nats per token)"


@explains_calls
def train(
    model: Transformer,
    data: "TrainingText | Batches",
    config: TrainingConfig,
    *,
    validation: "TrainingText | None" = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = False,
    after_step: Callable[[Transformer, int, float], None] | None = None,
    loss: "Loss" = row_losses,
) -> TrainingResult:
    """Train `model` in place to predict each next token, or to minimise another loss.

    The same arguments give bitwise the same weights on the same machine, even if the run was
    stopped and resumed. On a GPU this needs `torch.use_deterministic_algorithms(True)`.
    `config.seed` also seeds dropout (on CPU and CUDA). The state of PyTorch's own generators is
    restored at the end.

    Two files are written to `directory`: `log.jsonl`, with one line per step and losses in nats per
    token, and `checkpoint.pt`, which is always replaced as a whole. Ctrl-C ends the run after the
    current step and saves it. A second Ctrl-C ends it at once. Only one run at a time may use a
    directory.

    Args:
        model: the model. At the end, the mode of each module is restored, and no gradients are
            left.
        data: one long text [pos], or many texts of equal length [walk, pos]. Random windows are
            drawn from them, each inside one text. Without `validation`, they are drawn
            from the first `config.train_fraction`; with `validation`, from everything. Or a
            function of a step and a generator that returns the batch of the step; see `Batches`.
        config: the settings of training.
        validation: the held-out text, or held-out texts, for the validation loss.
        directory: the folder for the log and the checkpoint. Default: nothing is written.
        resume: whether to continue from the checkpoint in the directory.
        after_step: a function that is called with the model, the number of steps and the last loss
            after each step. With it, the host waits for each step of an accelerator; without it,
            the host is one step ahead.
        loss: `loss(model, rows)` returns a number for each row of a batch [batch pos]. The mean
            over rows is minimised. It is also the loss on the held-out text. To continue from a
            checkpoint, give the same loss.

    Returns:
        The losses of the steps, in nats per token unless `loss` has another unit, and the
        validation losses by step.

    Raises:
        TypeError: if the model is not a `Transformer`.
        ValueError: before any work, if a text is shorter than a context and its next token, if a
            text has tokens outside the vocabulary, or if a checkpoint is damaged or belongs to
            another run. Later, if a batch contains tokens outside the vocabulary.
        FileExistsError: if the directory has a checkpoint and `resume` is False.
        FileNotFoundError: if the directory has no checkpoint and `resume` is True.
        FloatingPointError: if a loss or a gradient is not finite. The last checkpoint stays.
        OSError: if a file cannot be written. The last checkpoint stays.
        KeyboardInterrupt: after Ctrl-C. The message names the checkpoint that was saved.

    >>> from models import TransformerConfig
    >>> sizes = TransformerConfig(vocab_size=2, n_ctx=4, n_layers=1, n_heads=1, d_model=8)
    >>> config = TrainingConfig(steps=3, evaluate_every=2)
    >>> result = train(Transformer(sizes), torch.tensor([0, 1] * 50), config)
    >>> len(result.losses), list(result.validation)
    (3, [2, 3])
    """
    require_plain_model(model)
    batches, texts = _batches_and_texts(data, validation, model=model, config=config)
    run = Run(model, config, texts=texts, directory=directory, loss=loss)
    with (
        mode(model, training=True),
        torch.random.fork_rng([run.device] if run.device.type == "cuda" else []),
        _interruptible(run) as interrupted,
    ):
        run.begin(resume=resume)
        n_done = len(run.records)
        bar = progress_bar("training", config.steps, unit="step", first=n_done, stays=True)
        # The `with` ends after the last step, so the bar shows the last loss until then.
        with bar as count:
            for step in range(n_done + 1, config.steps + 1):
                tokens = torch.atleast_2d(batches(step - 1, run.generators[0]))
                run.update(tokens)
                due = step % config.evaluate_every == 0 or step == config.steps
                # An accelerator computes this step while the host reads the numbers of the previous
                # step.
                run.settle(but=0 if due or after_step or run.device.type == "cpu" else 1)
                if due and HELD_OUT in texts:
                    run.measure(texts[HELD_OUT])
                run.log()
                last = _show(count, tokens, run)
                if after_step:
                    after_step(run.model, step, last)
                # Ctrl-C may come at any moment, so the flag is read only once: a run that stops
                # must have saved.
                if (stop := interrupted()) or due:
                    run.settle()
                    run.log()
                    run.save()
                if stop:
                    break
    return _result(run)


def _show(count: Count, tokens: Tensor, run: Run) -> float:
    """Show the last known loss, and return it."""
    loss = run.records[-1]["loss"] if run.records else math.nan
    count()
    rate = tokens[:, 1:].numel() * count.rate
    count.note = f"loss {loss:.3f}, {rate:,.0f} tok/s"
    return loss


def _result(run: Run) -> TrainingResult:
    """Return the losses of a run."""
    validation = {}
    for record in run.records:
        if "validation_loss" in record:
            validation[record["step"]] = Evaluation(
                nats=record["validation_loss"],
                characters_per_token=run.config.characters_per_token,
                standard_error=record["standard_error"],
            )
    losses = tuple(record["loss"] for record in run.records)
    return TrainingResult(losses, validation)


def _batches_and_texts(
    data: "TrainingText | Batches",
    validation: TrainingText | None,
    model: Transformer,
    config: TrainingConfig,
) -> tuple[Batches, dict[str, Tensor]]:
    """Return the function that makes batches, and the texts for training and validation by name.

    If `data` is a function, there is no text for training. If no tokens are held out, there is no
    text for validation.
    """
    length = model.config.n_ctx + 1
    vocab_size = model.config.vocab_size
    texts: dict[str, Tensor] = {}
    if not callable(data):
        text = tensor_of(data, "data")
        if validation is None:
            text, validation = train_test_split(text, config.train_fraction)
        texts["the text to train on"] = text

        def data(step: int, generator: torch.Generator) -> Tensor:
            return sample_batch(text, config.batch_size, length=length, generator=generator)

    if validation is not None:
        texts[HELD_OUT] = torch.as_tensor(validation)
    for name, tokens in texts.items():
        check_learnable(name, tokens, least=length, vocab_size=vocab_size)
    return data, texts


@contextmanager
def _interruptible(run: Run) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed.

    A run can then stop between two steps. A second Ctrl-C stops at once. In both cases the error
    says which checkpoint was saved, and no gradients are left.
    """
    pressed = threading.Event()

    def note(number: int, frame: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Only the main thread may set a signal handler, and a handler of the user must stay.
    is_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sets_handler = is_main and is_default
    if sets_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
        # Ctrl-C may also have been pressed during the last save.
        if pressed.is_set():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        steps = f"{len(run.records)} of {run.config.steps}"
        raise KeyboardInterrupt(f"stopped after step {steps}; {run.last}") from None
    finally:
        run.optimizer.zero_grad()
        if sets_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
