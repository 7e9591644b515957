"""Reading of a batch of texts: which tokens, at which columns, in which precision; not padding."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks.base import Selection, at_least_float32, columns_of_last, shown, to_device
from interp.protocol import of

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
        return self.where.columns(n_pos, "pos", batch, attention_mask)[:, 0]

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


def token_ids(model: nn.Module, tokens: Any) -> Any:
    """Tokens with a number in place of each text, which must be one token of the model's tokenizer.

    Raises:
        ValueError: if a text is several tokens; it lists them.
        TypeError: if the model cannot read text.
    """
    if isinstance(tokens, str):
        return of(model, "to_id").to_id(tokens)
    return [token_ids(model, part) for part in tokens] if is_worded(tokens) else tokens


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
