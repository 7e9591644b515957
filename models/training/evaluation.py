"""How well a model predicts a text: its loss in nats, in bits, per character, and as perplexity."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from models.checks import check_whole, mode
from models.training.data import at_least_float32, check_text
from models.transformer import Transformer


@dataclass(frozen=True)
class Evaluation:
    """A mean loss, in the units in which it is reported.

    Attributes:
        nats: cross-entropy in nats per token.
        characters_per_token: mean length of a token; 1 where tokens are characters, 0 where it is
            not known.

    >>> Evaluation(nats=math.log(8), characters_per_token=2.0).bits_per_character
    1.5
    """

    nats: float
    characters_per_token: float = 0.0

    @property
    def bits(self) -> float:
        """Cross-entropy in bits per token."""
        return self.nats / math.log(2)

    @property
    def bits_per_character(self) -> float | None:
        """Cross-entropy in bits per character; None where the length of tokens is not known."""
        return self.bits / self.characters_per_token if self.characters_per_token else None

    @property
    def perplexity(self) -> float:
        """exp(nats): how many equally likely tokens are as uncertain; inf where that overflows."""
        try:
            return math.exp(self.nats)
        except OverflowError:
            return math.inf


@torch.no_grad()
def evaluate(
    model: Transformer,
    tokens: Int[Tensor, " text"],
    batch: int = 16,
    characters_per_token: float = 0.0,
) -> Evaluation:
    """Mean loss over consecutive windows of the model's whole context, without dropout.

    Windows do not overlap, and what is left at the end is not read. The mode of each module, training
    or not, is afterwards what it was.

    Args:
        model: of the text's vocabulary.
        tokens: the text.
        batch: how many windows are read at once.
        characters_per_token: see `Evaluation`.

    Raises:
        ValueError: if the text is not a row of integers, is shorter than one window and its next
            token, or has tokens outside the vocabulary; or if `batch` is below 1.
    """
    length = model.config.n_ctx
    check_whole("batch", batch)
    check_text("the text", tokens, length, model.config.vocab_size)
    windows = tokens.unfold(0, length + 1, length)
    device = model.token_embedding.weight.device
    total = 0.0
    with mode(model, training=False):
        for rows in windows.split(batch):
            rows = rows.to(device).long()
            logits = at_least_float32(model(rows[:, :-1]).flatten(0, 1))
            total += F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum").item()
    return Evaluation(total / windows[:, 1:].numel(), characters_per_token)
