"""What is trained on: texts, batches drawn from them, and the loss of each next token."""

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from models.checks import INTEGERS, check_tokens

Batches = Callable[[int, torch.Generator], Int[Tensor, "batch pos"]]
"""Draws the batch of a step, counted from 0; the model reads all tokens but the last of each row.

What it gives follows from its arguments alone: else a resumed run could not go on as it would have. That
it is the same function as before cannot be checked.
"""


def next_token_loss(
    logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos-1"]:
    """Cross-entropy of each next token, in nats."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


def at_least_float32(logits: Float[Tensor, "*axes vocab"]) -> Float[Tensor, "*axes vocab"]:
    """Logits whose losses can be summed: in half precision a sum is rounded, or infinite."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def split(
    tokens: Int[Tensor, " text"], fraction: float = 0.9
) -> tuple[Int[Tensor, " training"], Int[Tensor, " validation"]]:
    """The first `fraction` of a text for training, the rest for validation.

    Raises:
        ValueError: if one of the two would be empty.
    """
    at = int(len(tokens) * fraction)
    if not 0 < at < len(tokens):
        raise ValueError(f"{fraction} of {len(tokens)} tokens leaves an empty part")
    return tokens[:at], tokens[at:]


def sample_batch(
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


def check_text(what: str, tokens: Tensor, n_ctx: int, vocab_size: int) -> None:
    """Refuses what is not a text that a model can learn or be measured on.

    Raises:
        ValueError: if it is not a row of integers, is shorter than a context and its next token, or
            has tokens outside the vocabulary.
    """
    rule = f"{what} is one row of integers"
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{rule}, not a {type(tokens).__name__}")
    if tokens.ndim != 1 or tokens.dtype not in INTEGERS:
        raise ValueError(f"{rule}, not {tokens.dtype} of shape {tuple(tokens.shape)}")
    if len(tokens) <= n_ctx:
        raise ValueError(
            f"{what} of {len(tokens)} tokens has no window of {n_ctx} and a next token: it needs "
            f"at least {n_ctx + 1}"
        )
    check_vocabulary(what, tokens, vocab_size)


def check_batch(tokens: Tensor, vocab_size: int, step: int) -> None:
    """Refuses a batch that has no targets, or targets that would be ignored.

    Raises:
        ValueError: naming the step and what is wrong.
    """
    rule = f"the batch of step {step} is integers [batch, pos], at least one row and two positions"
    check_tokens(tokens, rule)
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise ValueError(f"{rule}, not {tokens.dtype} of shape {tuple(tokens.shape)}")
    check_vocabulary(f"the batch of step {step}", tokens, vocab_size)


def check_vocabulary(what: str, tokens: Tensor, vocab_size: int) -> None:
    """Raises ValueError if there are tokens outside the vocabulary."""
    low, high = (int(extreme) for extreme in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{what} has tokens from {low} to {high}; the model's are 0 to {vocab_size - 1}"
        )


def digest(*texts: Int[Tensor, " _text"]) -> str:
    """Some digits that tell texts apart, whatever integers hold their tokens."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)}:".encode())
        for part in text.split(2**20):  # a text may be larger than memory has room for in int64
            found.update(part.cpu().long().numpy().tobytes())
    return found.hexdigest()[:16]
