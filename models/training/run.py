"""One training run: its optimizer and generators, the update, and what a checkpoint of it holds."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from models.training.config import TrainingConfig
from models.training.data import at_least_float32
from models.training.evaluation import Evaluation, evaluate
from models.training.files import RunFiles
from models.transformer import Transformer


@dataclass(frozen=True)
class TrainingResult:
    """What a run went through, from its first step on, also where it was resumed.

    Attributes:
        losses: of each step's batch before the update, in nats per token.
        validation: the loss on the held-out text, by the number of steps taken.
    """

    losses: tuple[float, ...]
    validation: Mapping[int, Evaluation]


@dataclass(frozen=True)
class Record:
    """A step: its number from 1, the loss in nats before the update, how it was made, and what came of it."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    validation: Evaluation | None = None

    def line(self) -> dict[str, Any]:
        """As the log has it."""
        line = dataclasses.asdict(self)
        del line["validation"]
        if (found := self.validation) is not None:
            line["validation_loss"] = found.nats
            line["bits_per_token"] = found.bits
            line["bits_per_character"] = found.bits_per_character
            # JSON has no infinity.
            line["perplexity"] = found.perplexity if found.perplexity < math.inf else None
        return line

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Record":
        """A record from its `asdict`."""
        found = saved["validation"]
        return cls(**{**saved, "validation": Evaluation(**found) if found else None})


class Run:
    """What changes from step to step, and how."""

    def __init__(self, model: Transformer, config: TrainingConfig, files: RunFiles) -> None:
        self.model, self.config, self.files = model, config, files
        self.device = model.token_embedding.weight.device
        self.generator = torch.Generator().manual_seed(config.seed)
        self.records: list[Record] = []
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters if p.ndim >= 2]},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def update(self, tokens: Int[Tensor, "batch pos"]) -> Record:
        """One step of the optimizer.

        Raises:
            FloatingPointError: before the weights are touched, if loss or gradient is not finite.
        """
        step = len(self.records)
        logits = at_least_float32(self.model(tokens[:, :-1]).flatten(0, 1))
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip or math.inf)
        record = Record(step + 1, loss.item(), self.config.rate(step), norm.item())
        self._require_finite("the loss", record.loss, step + 1)
        self._require_finite("the norm of the gradient", record.gradient_norm, step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = record.learning_rate
        self.optimizer.step()
        return record

    @contextmanager
    def own_dropout(self) -> Iterator[None]:
        """Dropout draws from the config's seed; afterwards torch's own generators are as they were."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if cuda else []):
            torch.default_generator.manual_seed(self.config.seed)
            if cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(self.config.seed)
            try:
                yield
            finally:
                self.optimizer.zero_grad()

    def measure(self, held_out: Int[Tensor, " text"]) -> Evaluation:
        """The loss on a text; FloatingPointError if it is not finite."""
        config = self.config
        found = evaluate(self.model, held_out, config.batch_size, config.characters_per_token)
        self._require_finite("the validation loss", found.nats, len(self.records) + 1)
        return found

    def save(self) -> None:
        """Writes a checkpoint; FloatingPointError if the weights are beyond saving."""
        total = sum(float(p.detach().sum()) for p in self.parameters)
        self._require_finite("the sum of the weights", total, len(self.records))
        cuda = self.device.type == "cuda"
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "dropout": torch.get_rng_state(),
            "dropout_cuda": torch.cuda.get_rng_state(self.device) if cuda else None,
            "records": [dataclasses.asdict(record) for record in self.records],
        }
        self.files.save(len(self.records), state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up what `save` wrote."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        torch.set_rng_state(state["dropout"])
        if self.device.type == "cuda" and state["dropout_cuda"] is not None:
            torch.cuda.set_rng_state(state["dropout_cuda"], self.device)
        self.records = [Record.of(saved) for saved in state["records"]]

    def result(self) -> TrainingResult:
        """All steps so far."""
        return TrainingResult(
            losses=tuple(record.loss for record in self.records),
            validation={r.step: r.validation for r in self.records if r.validation is not None},
        )

    def _require_finite(self, what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{what} is {value} at step {step}, so training stops; {self.files.last}"
            )
