"""What is read of a batch of texts: which tokens, at which columns, in which precision; not padding."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooks.transfer import to_device

Tokens = int | Sequence[int] | Int[Tensor, "..."]
"""One token or position for all examples, or one for each."""

SeveralTokens = Tokens | Sequence[Sequence[int]]
"""As `Tokens`, or several for each example."""

Mask = Shaped[Tensor, "batch pos"]
"""True or 1 at real tokens, False or 0 at padding."""


def real_of(
    mask: Mask | None, shape: Sequence[int], name: str = "attention_mask"
) -> Bool[Tensor, "batch pos"]:
    """The mask of texts [batch, pos] as booleans.

    Raises:
        ValueError: if it has another shape; the error gives its name.
    """
    if mask is None:
        return torch.ones(*shape, dtype=torch.bool)
    if mask.shape != tuple(shape):
        raise ValueError(f"{name} must be [batch, pos], {[*shape]}; got {list(mask.shape)}")
    return mask.bool()


def real_columns(
    last: int, n_pos: int, batch: int, attention_mask: Mask | None = None
) -> Int[Tensor, "batch last"]:
    """The columns of the last real positions of each example, in order.

    Args:
        last: how many, at least 1.
        n_pos, batch: the shape of the texts.
        attention_mask: True or 1 at real tokens; None if all are.

    Raises:
        ValueError: if an example has fewer real tokens.

    >>> real_columns(2, 4, 2, torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    tensor([[2, 3],
            [0, 1]])
    """
    real = real_of(attention_mask, (batch, n_pos))
    n_real = real.sum(1)
    if int(n_real.min()) < last:
        raise ValueError(
            f"each example must have at least {last} real tokens for this metric; "
            f"got {int(n_real.min())} in example {int(n_real.argmin())}"
        )
    # Padding first, then the real columns in order.
    return real.int().argsort(stable=True, dim=1)[:, n_pos - last :]


def last_real(
    logits: Float[Tensor, "batch pos vocab"], last: int, attention_mask: Mask | None = None
) -> Float[Tensor, "batch _last vocab"]:
    """Logits at the last real positions; at all columns if `last` is 0.

    Raises:
        ValueError: as for `real_columns`.
    """
    if not last:
        return logits
    columns = real_columns(last, logits.shape[1], len(logits), attention_mask).to(logits.device)
    return logits[torch.arange(len(logits), device=logits.device)[:, None], columns]


class Position:
    """Where a metric reads: one position, or one for each example.

    Attributes:
        last: how many last real positions it needs; 0 for all.

    Raises:
        ValueError: if positions count from both ends; when called, if they do not fit the logits.
    """

    def __init__(self, pos: Tokens) -> None:
        self.pos = _whole(pos, "positions", 1)
        self.lowest, self.highest = int(self.pos.min()), int(self.pos.max())
        if self.lowest < 0 <= self.highest:
            raise ValueError(f"positions must all be negative, or none; got {short(pos)}")
        self.last = max(0, -self.lowest)

    def __call__(self, logits: Tensor) -> Float[Tensor, "batch vocab"]:
        """The logits there, in float32 if they are in half precision."""
        batch, n_pos = logits.shape[:2]
        _check_batch(self.pos, batch, "positions")
        if self.lowest < -n_pos or self.highest >= n_pos:
            asked = self.lowest if self.lowest < 0 else self.highest
            raise ValueError(f"pos must be {-n_pos} to {n_pos - 1}; got {asked}")
        if self.pos.ndim == 0:
            return at_least_float32(logits[:, int(self.pos)])
        rows = torch.arange(batch, device=logits.device)
        return at_least_float32(logits[rows, to_device(self.pos, logits.device)])


def tokens_of(tokens: SeveralTokens, most: int = 1) -> Int[Tensor, "..."]:
    """Tokens [], [batch] or, where `most` is 2, [batch, n], on the CPU.

    Raises:
        ValueError: if they are something else, or negative.
    """
    found = _whole(tokens, "tokens", most)
    if int(found.min()) < 0:
        raise ValueError(f"tokens must be 0 and up; got {int(found.min())}")
    return found


def _whole(given: SeveralTokens, what: str, most: int) -> Int[Tensor, "..."]:
    """Integers of at most so many axes, on the CPU, where a look at their values is free."""
    found = torch.as_tensor(given, device="cpu")
    wrong = found.is_floating_point() or found.dtype == torch.bool
    if wrong or found.ndim > most or not found.numel():
        raise ValueError(
            f"{what} must be one integer, or one for each example; got {found.dtype} {list(found.shape)}"
        )
    return found.long()


def fitting(tokens: Tensor, found: Tensor) -> Int[Tensor, "batch n"]:
    """Tokens for each row of the logits `found`, [batch, vocab].

    Raises:
        ValueError: if they are as many as another batch has, or outside the vocabulary.
    """
    batch, vocab = found.shape
    _check_batch(tokens, batch, "tokens")
    if int(tokens.max()) >= vocab:
        raise ValueError(f"tokens must be 0 to {vocab - 1}; got {int(tokens.max())}")
    wide = tokens.expand(batch) if tokens.ndim == 0 else tokens
    return to_device(wide, found.device).view(batch, -1)


def at_least_float32(values: Shaped[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Values in float32 if they are integers or in half precision; others do not change."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def like(values: Shaped[Tensor, "*axes"], other: Tensor) -> Shaped[Tensor, "*axes"]:
    """Values on the device and in the dtype of another tensor."""
    return to_device(values, other.device).to(other.dtype)


def divergence(
    expected: Float[Tensor, "*axes vocab"], found: Float[Tensor, "*more vocab"]
) -> Float[Tensor, "*more"]:
    """KL(expected ‖ found) of log-probabilities, in nats; `found` may have more axes in front.

    A token that is never expected adds nothing, even where both are -inf.

    >>> divergence(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()).exp() ** 2
    tensor(1.3333)
    """
    return (expected.exp() * (expected - found)).where(expected != -torch.inf, 0).sum(-1)


def short(value: object) -> str:
    """A number, list or tensor, cut after three entries."""
    listed = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(listed, Sequence) or len(listed) <= 3:
        return str(listed)
    return f"[{', '.join(map(str, listed[:3]))}, ... {len(listed)} in all]"


def _check_batch(given: Tensor, batch: int, what: str) -> None:
    if given.ndim and len(given) != batch:
        raise ValueError(
            f"{what} must be one, or one for each of the {batch} examples; got {len(given)}"
        )
