"""TokenBatch: tokens with their mask; and what counts as tokens, or as one text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.base import shown


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """The tokens of a batch of texts. It unpacks: `tokens, attention_mask = model.to_tokens(texts)`.

    Every function that takes tokens also takes it, with its mask, as one argument.

    Attributes:
        tokens: [batch, pos].
        attention_mask: True at real tokens, False at padding; None if there is none.
        texts: the strings that were read; None if there were none.
    """

    tokens: Int[Tensor, "batch pos"]
    attention_mask: Shaped[Tensor, "batch pos"] | None = None
    texts: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.tokens, self.attention_mask))

    def __repr__(self) -> str:
        padded = "" if self.attention_mask is None else ", padded"
        first = "" if self.texts is None else f": {self.texts[0]!r:.60}"
        return f"TokenBatch {list(self.tokens.shape)}{padded}{first}"


def is_tokens(texts: object) -> bool:
    """Whether texts are a tensor [batch, pos] already."""
    return isinstance(texts, Tensor) and texts.ndim == 2


def is_columns(texts: object) -> bool:
    """Whether texts are a mapping, such as a tokenizer gives, or a table: both hold columns by name."""
    return isinstance(texts, Mapping) or hasattr(texts, "columns")


def is_one_text(texts: Any) -> bool:
    """Whether texts are one text, not a batch."""
    if isinstance(texts, Mapping):
        texts = texts.get("input_ids", ())
    if isinstance(texts, str | Tensor):
        return isinstance(texts, str) or texts.ndim == 1
    if isinstance(texts, TokenBatch):
        return False
    if not hasattr(texts, "__len__"):
        raise ValueError(
            f"texts must be a string, a list of tokens, a tensor, or several; got {shown(texts)}"
        )
    return bool(len(texts)) and all(is_integer(token) for token in texts)


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, of Python, NumPy or PyTorch."""
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True
