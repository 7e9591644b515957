"""Offsets: the characters of a text that each of its tokens covers."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from interp.protocol import of


class Offsets(NamedTuple):
    """The text of tokens, and the characters of each token.

    Attributes:
        text: the text.
        starts: the index of the first character of each token.
        ends: the index after the last character of each token.
    """

    text: str
    starts: list[int]
    ends: list[int]


def offsets_of(model: nn.Module, tokens: Sequence[int]) -> Offsets:
    """Return the text of tokens, and the characters of each token.

    The string of a token alone may differ from its part of the text. So a token begins where the
    string of all tokens before it ends. If the tokens so far contain only some bytes of a
    character, all tokens with bytes of this character begin at the character.

    Args:
        model: the model whose tokenizer writes the text.
        tokens: the tokens of one text.

    Raises:
        TypeError: if the model cannot write text.
        ValueError: if the model has no tokenizer.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> offsets_of(model, model.encoded("a b"))
    Offsets(text='a b', starts=[0, 1, 2], ends=[1, 2, 3])
    """
    write = of(model, "to_text").to_text
    listed = [*tokens]
    prefixes = [""]
    for n in range(1, len(listed) + 1):
        prefixes.append(write(listed[:n]))
    # The string of an incomplete character ends with U+FFFD in its place.
    starts = [len(prefix.rstrip("\ufffd")) for prefix in prefixes[:-1]]
    ends = [max(len(prefix), 1) for prefix in prefixes[1:]]
    return Offsets(prefixes[-1], starts, ends)
