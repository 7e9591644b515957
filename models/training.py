"""A small training loop: AdamW, warm-up and cosine decay, clipped gradients, seeded sampling."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from models.transformer import Transformer

Batches = Callable[[torch.Generator], Int[Tensor, "batch pos"]]
"""Draws a batch of token sequences from a generator; the model learns each next token."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: number of updates.
        learning_rate: the largest step size, reached after `warmup` steps; it then falls along a
            cosine to a tenth.
        warmup: steps of linear warm-up.
        weight_decay: AdamW's, for matrices; biases and norms are not decayed.
        clip: the largest norm of the whole gradient.
        seed: of the generator that draws batches.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


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


@torch.no_grad()
def evaluate(model: Transformer, tokens: Int[Tensor, " text"], batch: int = 16) -> float:
    """Mean loss in nats per token over consecutive windows of the model's whole context.

    Raises:
        ValueError: if the text is shorter than one window and its next token.
    """
    length = model.config.n_ctx
    windows = tokens.unfold(0, length + 1, length) if len(tokens) > length else tokens[:0, None]
    if not len(windows):
        raise ValueError(
            f"a text of {len(tokens)} tokens has no window of {length} and a next token"
        )
    was_training = model.training
    model.eval()
    losses = [
        F.cross_entropy(model(w[:, :-1]).transpose(1, 2), w[:, 1:], reduction="sum")
        for w in windows.split(batch)
    ]
    model.train(was_training)
    return float(torch.stack(losses).sum()) / windows[:, 1:].numel()


def train(
    model: Transformer,
    batches: Batches,
    config: TrainingConfig,
    after_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Trains `model` in place and returns the loss of each step, in nats per token.

    Args:
        model: left in training mode.
        batches: draws what to learn from; drawn once a step.
        config: how to train.
        after_step: called with the number of steps taken and the last loss.
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=config.weight_decay,
    )
    generator = torch.Generator().manual_seed(config.seed)
    model.train()
    losses: list[float] = []
    for step in (progress := tqdm(range(config.steps), unit="step", desc="training")):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        tokens = batches(generator)
        loss = next_token_loss(model(tokens), tokens).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
        if after_step:
            after_step(step + 1, losses[-1])
    return losses
