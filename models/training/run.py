"""One training run: its settings, its state, and its files."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Int
from torch import Tensor

from models.checks import check_types
from models.training.data import check_learnable, digest, evaluate, mean_loss
from models.transformer import Transformer

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
# Increase it with every change that gives a resumed run other numbers.
CODE_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train. The defaults are nanoGPT's for small character models (Karpathy 2022).

    Attributes:
        steps: number of updates.
        batch_size: rows of a batch, and windows that are evaluated at once.
        learning_rate: the largest rate, reached after `warmup` steps; it then falls along a cosine
            (Loshchilov & Hutter 2017).
        final_rate: the rate at the end, as a share of `learning_rate`; 1 for a constant rate.
        warmup: steps of linear warm-up.
        betas: AdamW's decay rates for the mean and the mean square of gradients.
        weight_decay: AdamW's, for matrices; biases and norms are not decayed.
        clip: the largest norm of the whole gradient; 0 means no limit.
        seed: the seed of batches and dropout.
        train_fraction: the share of a text for training; the rest is held out.
        evaluate_every: steps between validations. A checkpoint follows each. Both are also done after
            the last step.
        characters_per_token: for bits per character: 1 if tokens are characters, 0 if unknown.

    Raises:
        ValueError: naming the field, its value and its range.
    """

    steps: int
    batch_size: int = 12
    learning_rate: float = 1e-3
    final_rate: float = 0.1
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    train_fraction: float = 0.9
    evaluate_every: int = 250
    characters_per_token: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        # AdamW refuses rates, betas and weight decays out of range itself.
        least = {"steps": 1, "batch_size": 1, "evaluate_every": 1, "warmup": 0, "clip": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}; got {getattr(self, name)}")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate must be 0 to 1; got {self.final_rate}")

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        fallen = (1 - self.final_rate) * (1 - math.cos(math.pi * done)) / 2
        return self.learning_rate * (1 - fallen)


class Run:
    """The state of a run: weights, optimizer, generators and records of all steps, with its directory.

    Args:
        model: trained in place.
        config: how to train.
        texts: the texts for training and validation that are known before training.
        directory: created if missing; if None, nothing is written.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainingConfig,
        texts: Mapping[str, Tensor],
        directory: str | os.PathLike[str] | None,
    ) -> None:
        self.model, self.config = model, config
        self.directory = None if directory is None else Path(directory)
        self.device = model.token_embedding.weight.device
        self.records: list[dict[str, Any]] = []
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        vectors = [p for p in self._parameters if p.ndim < 2]
        groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        rate, decay, betas = config.learning_rate, config.weight_decay, config.betas
        self.optimizer = torch.optim.AdamW(groups, rate, betas, weight_decay=decay, fused=True)
        # The first draws batches. The others are PyTorch's own, for dropout.
        self.generators = [torch.Generator(), torch.default_generator]
        if self.device.type == "cuda":
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[self.device.index])
        # Everything that affects the numbers of a run.
        self._identity = {
            **{f"model.{k}": v for k, v in dataclasses.asdict(model.config).items()},
            **{f"training.{k}": v for k, v in dataclasses.asdict(config).items()},
            "text": digest(*texts.values()),
            "dtype": str(model.W_E.dtype),
            "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
            "code": [CODE_VERSION, str(torch.__version__)],
        }
        self._saved = 0

    @property
    def last(self) -> str:
        """A message that says what can be resumed."""
        if self.directory is None or not self._saved:
            return "no checkpoint has been written"
        return (
            f"{self.directory / CHECKPOINT} holds step {self._saved}; resume=True continues there"
        )

    def begin(self, *, resume: bool) -> None:
        """Seeds the generators or, with `resume`, loads the checkpoint; then begins the log.

        Raises:
            FileExistsError: if there is a checkpoint and `resume` is False.
            FileNotFoundError: if there is none and `resume` is True.
            OSError: if the directory or the log cannot be written.
            ValueError: if the checkpoint is damaged or of another run; it names what differs.
        """
        for generator in self.generators:
            generator.manual_seed(self.config.seed)
        if self.directory is None:
            if resume:
                raise ValueError("resume=True must come with the directory of the run; got None")
            return
        checkpoint = self.directory / CHECKPOINT
        if resume:
            self._load(checkpoint)
        elif checkpoint.exists():
            raise FileExistsError(
                f"{self.directory} already has a checkpoint of a run: resume it, or choose another "
                "directory"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        # Rewritten, because a killed run may have logged steps after its checkpoint.
        with self._replacing(self.directory / LOG) as file:
            file.write(b"".join(map(_line, self.records)))

    def update(self, tokens: Int[Tensor, "batch pos"]) -> float:
        """Takes one step and adds its record; returns the loss before it.

        Raises:
            ValueError: if the tokens are not a matrix of the vocabulary's tokens.
            FloatingPointError: if loss or gradient is not finite; the weights are not changed.
        """
        step, vocab_size = len(self.records), self.model.config.vocab_size
        check_learnable(f"the batch of step {step + 1}", tokens, "batch pos", 2, vocab_size)
        loss = mean_loss(self.model, tokens)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip or math.inf)
        record = {"step": step + 1, "loss": loss.item()}
        record |= {"learning_rate": self.config.rate(step), "gradient_norm": norm.item()}
        self._require_finite("the loss", record["loss"], step + 1)
        self._require_finite("the norm of the gradient", record["gradient_norm"], step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = record["learning_rate"]
        self.optimizer.step()
        self.records.append(record)
        return record["loss"]

    def measure(self, held_out: Int[Tensor, " text"]) -> None:
        """Adds the loss on a text to the last record.

        Raises:
            FloatingPointError: if it is not finite.
        """
        config, record = self.config, self.records[-1]
        found = evaluate(self.model, held_out, config.batch_size, config.characters_per_token)
        self._require_finite("the validation loss", found.nats, record["step"])
        record["validation_loss"] = found.nats
        record["bits_per_token"] = found.bits
        record["bits_per_character"] = found.bits_per_character
        # JSON has no infinity.
        record["perplexity"] = found.perplexity if found.perplexity < math.inf else None

    def log(self) -> None:
        """Adds the last record to the log.

        Raises:
            OSError: if it cannot be written; the message says what can be resumed.
        """
        if self.directory is not None:
            path = self.directory / LOG
            with self._naming(path), path.open("ab") as file:
                file.write(_line(self.records[-1]))

    def save(self) -> None:
        """Replaces the checkpoint. If that fails, the old one stays complete.

        Raises:
            FloatingPointError: if the weights are not finite.
            OSError: if it cannot be written; the message says what can be resumed.
        """
        step = len(self.records)
        total = sum(float(p.detach().sum()) for p in self._parameters)
        self._require_finite("the sum of the weights", total, step)
        if self.directory is None:
            return
        state = {
            "run": self._identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [generator.get_state() for generator in self.generators],
            "records": self.records,
        }
        with self._replacing(self.directory / CHECKPOINT) as file:
            torch.save(state, file)
        self._saved = step

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            theirs, records = state["run"], state["records"]
        except FileNotFoundError:
            raise
        except Exception as error:  # from the system, zip, pickle or torch, depending on the damage
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{path} must be a complete checkpoint: {reason}") from error
        different = [
            f"{name} was {theirs.get(name)!r} and is now {self._identity.get(name)!r}"
            for name in {**theirs, **self._identity}
            if theirs.get(name) != self._identity.get(name)
        ]
        if different:
            raise ValueError(f"{path} must be of the same run; {'; '.join(different)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        # On another device the number of generators may differ.
        for generator, saved in zip(self.generators, state["generators"], strict=False):
            generator.set_state(saved)
        self.records, self._saved = records, len(records)

    def _require_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{what} must be finite; got {value} at step {step}; {self.last}"
            )

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        """A new file that replaces the old one when it is complete."""
        # In the same directory, because a move between file systems is a copy.
        partial = path.with_name(f".{path.name}.partial")
        try:
            with self._naming(path):
                with partial.open("wb") as file:
                    yield file
                    file.flush()
                    # Without this, a power failure could leave an empty file under the name.
                    os.fsync(file.fileno())
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        """Adds the file's name and what can be resumed to errors of writing."""
        try:
            yield
        # torch.save hides the reason in an error of its own.
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__ or error
            raise OSError(f"{path} cannot be written: {reason}; {self.last}") from error


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
