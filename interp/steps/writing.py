"""Continuations of texts by the model, as text and as tokens."""

from collections.abc import Callable, Sequence

from torch import nn

from hooks.base import require_callable
from interp.protocol import of

Write = Callable[..., list[list[int]]]
"""`write(prompts, max_new_tokens=, temperature=, seed=)` returns the new tokens of each prompt.

Prompts are lists of tokens. The new tokens do not contain the token that ends a text.
"""


def writer(model: nn.Module, write: Write | None = None) -> Write:
    """Return the function that continues prompts: the caller's function, or the model's method.

    Args:
        model: the model.
        write: the caller's function. Default: `model.continuations`.

    Raises:
        TypeError: if the model has no method `continuations`.
    """
    if write is not None:
        if not callable(write):
            require_callable("write", write, ("prompts",))
        return write
    return of(model, "continuations").continuations


def text_of_tokens(model: nn.Module, tokens: Sequence[int]) -> str:
    """Return the text of tokens, also of no tokens.

    An incomplete character at the end is left out.
    """
    if not len(tokens):
        return ""
    text: str = of(model, "to_text").to_text([*tokens])
    return text.rstrip("\ufffd")


def tokens_of_text(model: nn.Module, text: str) -> list[int]:
    """Return the tokens of a text that continues another text."""
    tokens: list[int] = of(model, "to_tokens").to_tokens(text, bos=False).listed()[0]
    return tokens
