"""TrainingConfig: how a model is trained, by values alone, checked when it is built."""

import math
from dataclasses import dataclass

from models.checks import check_types

_COUNTS = ("steps", "batch_size", "evaluate_every")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train; the defaults are nanoGPT's for small models of characters (Karpathy 2022).

    Attributes:
        steps: number of updates.
        batch_size: rows of a batch, and windows that are evaluated at once.
        learning_rate: the largest step size, reached after `warmup` steps; it then falls along a
            cosine (Loshchilov & Hutter 2017).
        final_rate: where it falls to, as a share of `learning_rate`; 1 for a constant rate.
        warmup: steps of linear warm-up.
        betas: AdamW's decay of the mean and of the mean square of gradients.
        weight_decay: AdamW's, for matrices; biases and norms are not decayed.
        clip: the largest norm of the whole gradient; 0 for any.
        seed: of the generator that draws batches, and of dropout.
        train_fraction: the share of a text that is trained on; what follows it is held out.
        evaluate_every: steps between measurements of the validation loss, after each of which a
            checkpoint is written; both are done after the last step too.
        characters_per_token: for bits per character: 1 where tokens are characters, 0 where it is
            not known.

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
        rules = {
            **{n: (getattr(self, n) >= 1, "at least 1") for n in _COUNTS},
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "final_rate": (0 <= self.final_rate <= 1, "0 to 1"),
            "warmup": (self.warmup >= 0, "at least 0"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two of at least 0 and below 1"),
            "weight_decay": (self.weight_decay >= 0, "at least 0"),
            "clip": (self.clip >= 0, "at least 0"),
            "train_fraction": (0 < self.train_fraction < 1, "above 0 and below 1"),
            "characters_per_token": (self.characters_per_token >= 0, "at least 0"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {rule}, not {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        fallen = (1 - self.final_rate) * (1 - math.cos(math.pi * done)) / 2
        return self.learning_rate * (1 - fallen)
