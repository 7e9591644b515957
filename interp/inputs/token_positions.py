"""Reading of a batch of texts: which tokens, at which columns, in which precision; not padding."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from hooks.base import Selection, at_least_float32, real_columns, real_of, shown, to_device

Tokens = int | str | Sequence[int] | Sequence[str] | Int[Tensor, "..."]
"""One token or position for all examples, or one for each. A token may be a text, where a model reads it."""

SeveralTokens = Tokens | Sequence[Sequence[int]] | Sequence[Sequence[str]]
"""As `Tokens`, or several for each example."""

Mask = Shaped[Tensor, "batch pos"]
"""True or 1 at real tokens, False or 0 at padding."""


def is_worded(tokens: Any) -> bool:
    """Whether tokens are given as text, all or some of them."""
    if isinstance(tokens, str):
        return True
    return isinstance(tokens, Sequence) and any(map(is_worded, tokens))


def columns_of_last(
    last: int, n_pos: int, batch: int, attention_mask: Mask | None = None
) -> Int[Tensor, "batch last"]:
    """The columns of the last real positions of each example, in order.

    Args:
        last: how many, at least 1.
        n_pos, batch: the shape of the texts.
        attention_mask: True or 1 at real tokens; None if all are.

    Raises:
        ValueError: if the mask has another shape, or an example has fewer real tokens.

    >>> columns_of_last(2, 4, 2, torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    tensor([[2, 3],
            [0, 1]])
    """
    real = real_columns(real_of(attention_mask, (batch, n_pos)))
    rows = Selection([*range(-last, 0)]).rows(n_pos, "a metric's pos", batch, real)
    return torch.tensor(rows).expand(batch, -1)


def last_real(
    logits: Float[Tensor, "batch pos vocab"],
    last: int,
    attention_mask: Shaped[Tensor, "batch _column"] | None = None,
) -> Float[Tensor, "batch _last vocab"]:
    """Logits at the last real positions; at all columns if `last` is 0. A classifier has one position for all of a text.

    Raises:
        ValueError: as for `columns_of_last`.
    """
    if attention_mask is not None and logits.shape[1] == 1 < attention_mask.shape[1]:
        attention_mask = None
    if not last:
        return logits
    columns = columns_of_last(last, logits.shape[1], len(logits), attention_mask)
    return logits[torch.arange(len(logits))[:, None], columns]


class Position:
    """The position where a metric reads: one for all, or one for each example.

    Attributes:
        where: the position.
        last: how many last real positions it needs; 0 for all.

    Raises:
        ValueError: if positions count from both ends; when called, if they do not fit the logits.
        TypeError: if they are no integers.
    """

    def __init__(self, pos: Tokens) -> None:
        self.where = Selection.one_each(pos)
        asked = [part if isinstance(part, int) else part[0] for part in self.where.parts]
        if min(asked) < 0 <= max(asked):
            raise ValueError(f"positions must all be negative, or none; got {short(pos)}")
        self.last = max(0, -min(asked))

    def columns(
        self, n_pos: int, batch: int, attention_mask: Mask | None = None
    ) -> Int[Tensor, " _batch"]:
        """The column of each example, or one for all.

        Raises:
            ValueError: if a text has no such column, or it is padding.
        """
        real = None if attention_mask is None else real_columns(attention_mask)
        return torch.tensor(self.where.rows(n_pos, "pos", batch, real))[:, 0]

    def __call__(self, logits: Tensor) -> Float[Tensor, "batch vocab"]:
        """The logits there, in float32 if they are in half precision."""
        columns = self.columns(logits.shape[1], len(logits))
        if len(columns) == 1:
            return at_least_float32(logits[:, int(columns)])
        rows = torch.arange(len(logits), device=logits.device)
        return at_least_float32(logits[rows, to_device(columns, logits.device)])


def as_positions(pos: Tokens) -> int | Int[Tensor, " batch"]:
    """One position, or a tensor with one for each example.

    Raises:
        ValueError, TypeError: as for `Position`.
    """
    position = Position(pos)
    if position.where.is_one:
        return int(position.where.index)
    return torch.tensor([part[0] for part in position.where.parts])


def tokens_of(tokens: SeveralTokens, most: int = 1) -> Int[Tensor, "..."]:
    """Tokens [], [batch] or, where `most` is 2, [batch, n], on the CPU.

    Raises:
        ValueError: if they are something else, or negative.
    """
    try:
        ids = torch.as_tensor(tokens, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"tokens must be one integer, or one for each example; got {shown(tokens)}"
        ) from None
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.ndim > most or not ids.numel():
        raise ValueError(
            "tokens must be one integer, or one for each example; "
            f"got {ids.dtype} {list(ids.shape)}"
        )
    if int(ids.min()) < 0:
        raise ValueError(f"tokens must be 0 and up; got {int(ids.min())}")
    return ids.long()


def fitting(tokens: Tensor, logits: Tensor) -> Int[Tensor, "batch n"]:
    """Tokens for each row of `logits` [batch, vocab].

    Raises:
        ValueError: if they are as many as another batch has, or outside the vocabulary.
    """
    batch, vocab = logits.shape
    if tokens.ndim and len(tokens) != batch:
        raise ValueError(
            f"tokens must be one, or one for each of the {batch} examples; got {len(tokens)}"
        )
    if int(tokens.max()) >= vocab:
        raise ValueError(f"tokens must be 0 to {vocab - 1}; got {int(tokens.max())}")
    one_each = tokens.expand(batch) if tokens.ndim == 0 else tokens
    return to_device(one_each, logits.device).view(batch, -1)


def short(value: object) -> str:
    """A number, text, list or tensor, cut after three entries."""
    if isinstance(value, str):
        return repr(value)
    listed = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(listed, Sequence) or len(listed) <= 3:
        return str(listed)
    return f"[{', '.join(map(repr, listed[:3]))}, ... {len(listed)} in all]"
