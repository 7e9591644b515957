"""Tokens and positions of examples, and the logits at these positions.

Negative positions count from the last real token of a text. Positions from 0 count columns, and a
position at padding raises an error.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from hooks.base import (
    Selection,
    at_least_float32,
    columns_of_last,
    padding_messages,
    padding_of,
    shown,
    to_device,
)

Tokens = int | str | Sequence[int] | Sequence[str] | Int[Tensor, "..."]
"""One token or position for all examples, or one for each.

A token may be a string if a model reads it.
"""

SeveralTokens = Tokens | Sequence[Sequence[int]] | Sequence[Sequence[str]]
"""Tokens as in `Tokens`, or several tokens for each example."""

Mask = Shaped[Tensor, "batch pos"]
"""True or 1 at real tokens, False or 0 at padding."""


def last_real(
    logits: Float[Tensor, "batch pos vocab"],
    last: int,
    attention_mask: Shaped[Tensor, "batch _column"] | None = None,
) -> Float[Tensor, "batch _last vocab"]:
    """Return the logits at the last real positions of each text, or at all columns.

    Args:
        logits: the logits of whole texts, or of a classifier; see `mask_of_columns`.
        last: the number of last real positions; 0 for all columns.
        attention_mask: True or 1 at real tokens. Default: no padding.

    Raises:
        ValueError: if a text has fewer real positions; see `columns_of_last`. If the only column is
            padding in a text.

    >>> logits = torch.arange(6.0).view(2, 3, 1)  # [batch, pos, vocab]
    >>> last_real(logits, 1, torch.tensor([[1, 1, 0], [1, 1, 1]])).flatten()
    tensor([1., 5.])
    """
    attention_mask = mask_of_columns(logits, attention_mask)
    if not last:
        return logits
    if attention_mask is None and last <= logits.shape[1]:
        # A copy, because the caller may store it: a view would keep all logits in memory.
        return logits[:, -last:].clone()
    columns = columns_of_last(last, logits.shape[1], len(logits), attention_mask)
    rows = torch.arange(len(logits), device=logits.device)
    return logits[rows[:, None], to_device(columns, logits.device)]


def mask_of_columns(
    logits: Float[Tensor, "batch pos vocab"], attention_mask: Shaped[Tensor, "batch _column"] | None
) -> Shaped[Tensor, "batch _column"] | None:
    """Return the mask of the columns of some logits; None without padding.

    The logits of a classifier have one column for a whole text. The mask of the text is then
    ignored. In a run with `logits_to_keep=1`, the only column is the last column of the texts,
    which may be padding. The mask that this run stored with its logits tells the two cases apart.

    Args:
        logits: the logits of a run.
        attention_mask: the mask of the texts, True or 1 at real tokens. None if all are real.

    Raises:
        ValueError: if the only column is padding in a text.
    """
    if attention_mask is not None and logits.shape[1] == 1 < attention_mask.shape[1]:
        attention_mask = padding_of(logits)
        if attention_mask is not None:
            require_real_columns(attention_mask)
    return attention_mask


def require_real_columns(attention_mask: Shaped[Tensor, "batch _column"]) -> None:
    """Check that each text has a real token in the columns of some logits.

    Args:
        attention_mask: the mask of these columns, True or 1 at real tokens.

    Raises:
        ValueError: naming the first text without a real token.
    """
    has_real = attention_mask.bool().any(1).tolist()
    if not all(has_real):
        message = padding_messages.no_real_logits(has_real.index(False), attention_mask.shape[1])
        raise ValueError(message)


class Position:
    """The position at which a metric reads the logits: one for all examples, or one for each.

    Call a `Position` with logits to get the logits at the position.

    Attributes:
        where: the position or the positions.
        last: the number of last real positions that the metric needs. 0 means all positions.

    Raises:
        ValueError: if some positions are negative and others are not. A call also raises this error
            if the positions do not fit the logits.
        TypeError: if the positions are not integers.
    """

    def __init__(self, pos: Tokens) -> None:
        self.where = Selection.one_each(pos)
        positions = [part if isinstance(part, int) else part[0] for part in self.where.parts]
        if min(positions) < 0 <= max(positions):
            raise ValueError(
                f"positions must be all negative or all non-negative; got {short(pos)}"
            )
        self.last = max(0, -min(positions))

    def columns(
        self, n_pos: int, batch: int, attention_mask: Mask | None = None
    ) -> Int[Tensor, " _batch"]:
        """Return the column of each example's position, or one column for all examples.

        Args:
            n_pos: the number of columns.
            batch: the number of examples.
            attention_mask: True or 1 at real tokens. Default: no padding.

        Raises:
            ValueError: if a text is too short, or if the column is padding.
        """
        return self.where.columns(n_pos, "pos", batch, attention_mask)[:, 0]

    def __call__(self, logits: Tensor) -> Float[Tensor, "batch vocab"]:
        """Return the logits of each example at its position, in float32 or a larger dtype."""
        columns = self.columns(logits.shape[1], len(logits))
        if len(columns) == 1:
            return at_least_float32(logits[:, int(columns)])
        rows = torch.arange(len(logits), device=logits.device)
        return at_least_float32(logits[rows, to_device(columns, logits.device)])


def as_positions(pos: Tokens) -> int | Int[Tensor, " batch"]:
    """Return positions as an integer for all examples, or as a tensor with one for each example.

    Raises:
        ValueError, TypeError: see `Position`.
    """
    position = Position(pos)
    if position.where.is_one:
        return int(position.where.index)
    return torch.tensor([part[0] for part in position.where.parts])


def tokens_of(tokens: SeveralTokens, most: int = 1) -> Int[Tensor, "..."]:
    """Return tokens as a tensor [], [batch] or, if `most` is 2, [batch, n], on the CPU.

    Args:
        tokens: one token, or tokens for each example.
        most: the largest number of axes.

    Raises:
        TypeError: if the tokens are not integers.
        ValueError: if there is no token, if a token is negative, or if they have too many axes.
    """
    rule = "tokens must be one integer, or one for each example"
    try:
        ids = torch.as_tensor(tokens, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{rule}; got {shown(tokens)}") from None
    if ids.numel() and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise TypeError(f"{rule}; got {ids.dtype} {list(ids.shape)}")
    if ids.ndim > most or not ids.numel():
        raise ValueError(f"{rule}; got {ids.dtype} {list(ids.shape)}")
    if int(ids.min()) < 0:
        raise ValueError(f"tokens must be at least 0; got {int(ids.min())}")
    return ids.long()


def fitting(tokens: Tensor, largest: int, logits: Tensor) -> Int[Tensor, "batch n"]:
    """Return the tokens of each example, on the device of the logits.

    Args:
        tokens: one token for all examples, or one or several tokens for each example.
        largest: the largest of these tokens.
        logits: the logits, [batch, vocab].

    Raises:
        ValueError: if the number of tokens differs from the batch size, or if a token is outside
            the vocabulary.
    """
    batch, vocab = logits.shape
    if tokens.ndim and len(tokens) != batch:
        raise ValueError(
            f"tokens must be one token, or a token for each of the {batch} examples; got "
            f"{len(tokens)}"
        )
    if largest >= vocab:
        raise ValueError(f"tokens must be in [0, {vocab}); got {largest}")
    tokens = tokens.expand(batch) if tokens.ndim == 0 else tokens
    return to_device(tokens, logits.device).view(batch, -1)


def short(value: object) -> str:
    """Return a number, string, list or tensor as text, with at most three of its entries."""
    if isinstance(value, str):
        return repr(value)
    entries = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(entries, Sequence) or len(entries) <= 3:
        return str(entries)
    return f"[{', '.join(map(repr, entries[:3]))}, ... {len(entries)} in all]"
