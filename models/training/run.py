"""The state and the files of one training run."""

import dataclasses
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import later, stacked, storage, strict_json
from models.training.data import Loss, TrainingConfig, check_learnable, evaluate, row_losses
from models.transformer import Transformer

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
# Increase this version with every change that gives a resumed run other numbers.
CODE_VERSION = 4


class Run:
    """The state of a run: weights, optimizer, generators, records of all steps, and the directory.

    Args:
        model: the model, which is trained in place.
        config: the settings of training.
        texts: the texts for training and validation by name. There is no text for training if a
            function makes the batches.
        directory: the folder of the run, which is created if missing. If None, nothing is written.
        loss: the loss of each row of a batch.
    """

    def __init__(
        self,
        model: Transformer,
        config: TrainingConfig,
        texts: Mapping[str, Tensor],
        directory: str | os.PathLike[str] | None,
        loss: Loss = row_losses,
    ) -> None:
        self.model = model
        self.config = config
        self._loss = loss
        self.directory = None if directory is None else Path(directory)
        if self.directory is not None:
            storage.require_folder(self.directory)
        self.device = model.token_embedding.weight.device
        self.records: list[dict[str, Any]] = []
        # Records whose numbers are still being copied to the host, each with a function that waits
        # for the copy and returns the numbers.
        self._pending: deque[tuple[dict[str, Any], Callable[[], list[float]]]] = deque()
        self._logged = 0
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.optimizer = _optimizer(self._parameters, config)
        self._failed = torch.zeros((), device=self.device)
        # The first generator draws batches. The others are the global generators of PyTorch, from
        # which dropout draws.
        self.generators = [torch.Generator(), torch.default_generator]
        if self.device.type == "cuda":
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[self.device.index])
        self._identity = _identity_of(model, config, texts)
        self._saved = 0

    @property
    def last(self) -> str:
        """A message that names the checkpoint from which the run can be resumed."""
        if self.directory is None or not self._saved:
            return "no checkpoint has been written"
        return (
            f"{self.directory / CHECKPOINT} holds step {self._saved}; resume=True continues there"
        )

    def begin(self, *, resume: bool) -> None:
        """Load the checkpoint in the directory if `resume` is True, and begin the log.

        Raises:
            FileExistsError: if the directory has a checkpoint and `resume` is False.
            FileNotFoundError: if the directory has no checkpoint and `resume` is True.
            OSError: if the directory or the log cannot be written.
            ValueError: if the checkpoint is damaged or belongs to another run; the error names the
                differences.
        """
        for generator in self.generators:
            generator.manual_seed(self.config.seed)
        if self.directory is None:
            if resume:
                raise ValueError("resume=True must come with the directory of the run; got None")
            return
        checkpoint = self.directory / CHECKPOINT
        if not resume:
            self.directory.mkdir(parents=True, exist_ok=True)
        elif not checkpoint.exists():
            raise FileNotFoundError(f"{checkpoint} must exist to resume the run; it does not exist")
        if resume:
            self._load(checkpoint)
        elif checkpoint.exists():
            raise FileExistsError(
                f"{self.directory} already has a checkpoint of a run: resume it, or choose "
                "another directory"
            )
        # Write the log again, because a killed run may have logged steps after its checkpoint.
        with self._replacing(self.directory / LOG) as file:
            file.write(b"".join(map(_line, self.records)))
        self._logged = len(self.records)

    def update(self, tokens: Int[Tensor, "batch pos"]) -> None:
        """Take one step. After a loss or gradient that is not finite, the weights never change.

        Raises:
            ValueError: if the rows contain tokens outside the vocabulary.
        """
        step = len(self.records) + len(self._pending)
        vocab_size = self.model.config.vocab_size
        check_learnable(f"the batch of step {step + 1}", tokens, least=2, vocab_size=vocab_size)
        loss = self._loss(self.model, tokens).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip or math.inf)
        numbers = torch.stack([loss.detach(), norm])
        record = {"step": step + 1, "loss": math.nan, "learning_rate": self.config.rate(step)}
        for group in self.optimizer.param_groups:
            group["lr"] = record["learning_rate"]
        # `found_inf` is the flag by which a GradScaler prevents an update. The fused kernel reads
        # the flag on the device and changes no weight if it is 1, so the host does not have to wait
        # for the numbers.
        self._failed = torch.maximum(self._failed, (~numbers.isfinite().all()).float())
        self.optimizer.found_inf = self._failed  # type: ignore[attr-defined]
        self.optimizer.step()
        self._pending.append((record, later(numbers)))

    def settle(self, *, but: int = 0) -> None:
        """Wait for the numbers of all steps but the last ones, and complete their records.

        Args:
            but: the number of last steps for whose numbers the host does not wait.

        Raises:
            FloatingPointError: if a loss or gradient was not finite.
        """
        while len(self._pending) > but:
            record, numbers = self._pending.popleft()
            record["loss"], record["gradient_norm"] = numbers()
            self._require_finite("the loss", record["loss"], record["step"])
            norm = record["gradient_norm"]
            self._require_finite("the norm of the gradient", norm, record["step"])
            self.records.append(record)

    def measure(self, held_out: Int[Tensor, "*walk pos"]) -> None:
        """Add the loss on a text to the last record.

        Raises:
            FloatingPointError: if the loss is not finite.
        """
        config = self.config
        record = self.records[-1]
        size = config.batch_size
        per_token = config.characters_per_token
        evaluation = evaluate(
            self.model, held_out, batch=size, characters_per_token=per_token, loss=self._loss
        )
        self._require_finite("the validation loss", evaluation.nats, record["step"])
        record["validation_loss"] = evaluation.nats
        record["standard_error"] = evaluation.standard_error
        record["bits_per_token"] = evaluation.bits
        record["bits_per_character"] = evaluation.bits_per_character
        # The perplexity of a very large loss is infinite, which JSON cannot represent.
        record["perplexity"] = evaluation.perplexity if evaluation.perplexity < math.inf else None

    def log(self) -> None:
        """Add new records to the log.

        Raises:
            OSError: if the log cannot be written; the error says from which checkpoint the run can
                be resumed.
        """
        if self.directory is not None:
            path = self.directory / LOG
            with self._naming(path), path.open("ab") as file:
                file.write(b"".join(map(_line, self.records[self._logged :])))
        self._logged = len(self.records)

    def save(self) -> None:
        """Replace the checkpoint. If this fails, the old checkpoint stays complete.

        Raises:
            FloatingPointError: if the weights are not finite.
            OSError: if it cannot be written; the error says from which checkpoint the run can be
                resumed.
        """
        step = len(self.records)
        # In half precision, the sum of finite weights may be infinite.
        largest = stacked(parameter.detach().abs().amax() for parameter in self._parameters)
        self._require_finite("the largest of the weights", largest.max().item(), step)
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
        """Load a checkpoint, after a check that it is complete and belongs to this run."""
        state = storage.read_saved(path)
        with storage.one_error(path):
            theirs = state["run"]
            different = [
                f"{name} was {theirs.get(name)!r} and is now {self._identity.get(name)!r}"
                for name in {**theirs, **self._identity}
                if theirs.get(name) != self._identity.get(name)
            ]
            if different:
                raise ValueError(
                    f"the checkpoint must belong to the same run; {'; '.join(different)}"
                )
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            # A run on CUDA has one more generator than a run on the CPU, and may be resumed there.
            for generator, saved in zip(self.generators, state["generators"], strict=False):
                generator.set_state(saved)
            self.records = state["records"]
            self._saved = len(state["records"])

    def _require_finite(self, what: str, value: float, step: int) -> None:
        """Check that a number is finite.

        Raises:
            FloatingPointError: if it is not; the error names the number and the step.
        """
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{what} must be finite; got {value} at step {step}; {self.last}"
            )

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        """Open a new file that replaces the old file when it is complete."""
        with (
            self._naming(path),
            storage.replacing(path, alone=True) as partial,
            partial.open("wb") as file,
        ):
            yield file
            file.flush()
            # Without `fsync`, a power failure could leave an empty file with the name of the old
            # file.
            os.fsync(file.fileno())

    @contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        """Add the name of the file, and the checkpoint to resume from, to errors of writing."""
        try:
            yield
        # torch.save hides the reason in its own error.
        except (OSError, RuntimeError) as error:
            reason = error if isinstance(error, OSError) else error.__context__ or error
            raise OSError(f"{path} cannot be written: {reason}; {self.last}") from error


def _line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON."""
    return strict_json.dumps(strict_json.finite(record)).encode() + b"\n"


def _optimizer(parameters: Sequence[nn.Parameter], config: TrainingConfig) -> torch.optim.AdamW:
    """Return the optimizer of the parameters. Only matrices have weight decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        config.learning_rate,
        config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _identity_of(
    model: Transformer, config: TrainingConfig, texts: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return everything that affects the numbers of a run."""
    identity: dict[str, Any] = {}
    for prefix, fields in (("model", model.config), ("training", config)):
        for name, value in dataclasses.asdict(fields).items():
            identity[f"{prefix}.{name}"] = value
    return {
        **identity,
        "text": [storage.checksum("", text.long()) for text in texts.values()],
        "dtype": str(model.W_E.dtype),
        "frozen": [
            name for name, parameter in model.named_parameters() if not parameter.requires_grad
        ],
        "code": [CODE_VERSION, str(torch.__version__)],
    }
