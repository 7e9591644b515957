"""Data for training and evaluation: texts, batches, and the loss of each next token."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from models.checks import INTEGERS, check_whole, mode
from models.transformer import Transformer

Batches = Callable[[int, torch.Generator], Int[Tensor, "batch pos"]]
"""Makes the batch of a step, counted from 0. The model reads all tokens of a row but the last, and
predicts all but the first.

A batch must depend only on the step and the generator. Otherwise a resumed run would continue with other
batches, without an error.
"""


@dataclass(frozen=True)
class Evaluation:
    """A mean loss in several units.

    Attributes:
        nats: cross-entropy in nats per token.
        characters_per_token: mean length of a token; 1 if tokens are characters, 0 if unknown.

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
        """Cross-entropy in bits per character; None if the length of tokens is unknown."""
        return self.bits / self.characters_per_token if self.characters_per_token else None

    @property
    def perplexity(self) -> float:
        """exp(nats): the number of equally likely tokens with the same cross-entropy."""
        return math.exp(self.nats) if self.nats < 709 else math.inf  # float64 ends at exp(709.8)


def next_token_loss(
    logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos-1"]:
    """Cross-entropy of each next token, in nats."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def mean_loss(model: Transformer, rows: Int[Tensor, "batch pos"]) -> Float[Tensor, ""]:
    """Mean cross-entropy, in nats, of all tokens but the first of each row."""
    rows = rows.to(model.token_embedding.weight.device).long()
    logits = model(rows[:, :-1]).flatten(0, 1)
    # In half precision the sum over tokens would be rounded, or infinite.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, rows[:, 1:].flatten())


def split(
    tokens: Int[Tensor, " text"], fraction: float = 0.9
) -> tuple[Int[Tensor, " training"], Int[Tensor, " validation"]]:
    """The first `fraction` of a text for training, the rest for validation.

    Raises:
        ValueError: if one of the two would be empty.

    >>> [part.tolist() for part in split(torch.arange(5), 0.6)]
    [[0, 1, 2], [3, 4]]
    """
    at = int(len(tokens) * fraction)
    if not 0 < at < len(tokens):
        raise ValueError(
            f"both parts of a text must have tokens; got {at} of {len(tokens)} tokens for training, "
            f"with a fraction of {fraction}"
        )
    return tokens[:at], tokens[at:]


def sample_batch(
    tokens: Int[Tensor, " text"], batch: int, length: int, generator: torch.Generator
) -> Int[Tensor, "batch length"]:
    """Random windows of a text.

    Raises:
        ValueError: if the text is shorter than a window.

    >>> rows = sample_batch(torch.arange(10), 2, 4, torch.Generator().manual_seed(0))
    >>> (rows - rows[:, :1]).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """
    if len(tokens) < length:
        raise ValueError(f"the text must have at least {length} tokens; got {len(tokens)}")
    starts = torch.randint(len(tokens) - length + 1, (batch, 1), generator=generator)
    return tokens[starts + torch.arange(length)]


@torch.no_grad()
def evaluate(
    model: Transformer,
    tokens: Int[Tensor, " text"],
    batch: int = 16,
    characters_per_token: float = 0.0,
) -> Evaluation:
    """Mean loss over consecutive windows of the model's whole context, in evaluation mode.

    Windows do not overlap. A shorter rest at the end is not read. Afterwards each module has its previous
    mode again.

    Args:
        model: the model to measure.
        tokens: the text.
        batch: how many windows are read at once.
        characters_per_token: see `Evaluation`.

    Raises:
        ValueError: if the text is not a row of integers, is shorter than a window and its next token,
            or has tokens outside the vocabulary; or if `batch` is below 1.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=7, n_ctx=4, n_layers=1, n_heads=1, d_model=2)
    >>> round(evaluate(Transformer(config), torch.arange(5)).perplexity)  # it knows nothing yet
    7
    """
    length = model.config.n_ctx
    check_whole("batch", batch)
    check_learnable("the text", tokens, "pos", length + 1, model.config.vocab_size)
    windows = tokens.unfold(0, length + 1, length)
    with mode(model, training=False):
        total = sum(mean_loss(model, rows).item() * len(rows) for rows in windows.split(batch))
    return Evaluation(total / len(windows), characters_per_token)


def check_learnable(what: str, tokens: Tensor, axes: str, least: int, vocab_size: int) -> None:
    """Refuses tokens that would give a wrong loss in silence, or an error only later.

    Floats would be rounded, and cross-entropy ignores targets of -100.

    Raises:
        ValueError: if they are not integers with these axes, have fewer than `least` positions or no
            row, or are outside the vocabulary.
    """
    fits = tokens.ndim == len(axes.split()) and tokens.dtype in INTEGERS
    if not fits or tokens.shape[-1] < least or not len(tokens):
        raise ValueError(
            f"{what} must be integers [{axes}] with pos at least {least}; got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    low, high = (int(extreme) for extreme in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} must have tokens from 0 to {vocab_size - 1}; got tokens from {low} to {high}"
        )


def digest(*texts: Int[Tensor, " _text"]) -> str:
    """A short hash of texts. The integer dtype of their tokens does not matter."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)}:".encode())
        for part in text.split(2**20):  # a whole copy in int64 might not fit in memory
            found.update(part.cpu().long().numpy().tobytes())
    return found.hexdigest()[:16]
