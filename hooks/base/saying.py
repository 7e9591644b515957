"""Short descriptions of arguments for errors. The numbers of a tensor are never printed."""

import os
import reprlib
from collections.abc import Sequence, Sized

import torch
from torch import Tensor, nn

_SHOWN_AS_THEY_ARE = (
    *(str, bytes, bool, int, float, complex),
    *(os.PathLike, slice, range, torch.dtype, torch.device),
)


class _ShortRepr(reprlib.Repr):
    """A writer of values that shortens them to about 60 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = 60
        self.maxother = 60


_SHORT = _ShortRepr()


def number_of(n: int, word: str) -> str:
    """Return a number with a noun, in the plural unless the number is 1.

    A noun that ends with "es", such as "edges", is a plural already.

    >>> number_of(1, "text"), number_of(2000, "query"), number_of(0, "batch")
    ('1 text', '2,000 queries', '0 batches')
    """
    if n != 1 and word.endswith("es"):
        return f"{n:,} {word}"
    if n != 1 and word.endswith("y"):
        word = f"{word[:-1]}ies"
    elif n != 1:
        word = f"{word}es" if word.endswith(("s", "x", "ch")) else f"{word}s"
    return f"{n:,} {word}"


def aligned_rows(rows: Sequence[Sequence[str]], between: str = "  ") -> list[str]:
    """Return the lines of a table whose columns are aligned on the left.

    Args:
        rows: the texts of each row.
        between: the text between two columns.

    >>> aligned_rows([["layer", "token"], ["0", "' a'"], ["10", "' the'"]])
    ['layer  token', "0      ' a'", "10     ' the'"]
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [between.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def shown(value: object) -> str:
    """Return a short description of a value.

    A tensor is described by its dtype and shape, and a large object by its class.

    >>> shown(torch.zeros(2, 3)), shown("def f(x):"), shown([1, 2]), shown({"a": torch.zeros(9)})
    ('a torch.float32 tensor [2, 3]', "'def f(x):'", '[1, 2]', 'a dict of 1')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        is_number = value.ndim == 0 and value.device.type == "cpu"
        number = f" of {value}" if is_number else ""
        return f"a {value.dtype} tensor {[*value.shape]}{number}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {value.dtype} array {[*value.shape]}"
    if value is None or isinstance(value, _SHOWN_AS_THEY_ARE):
        return _SHORT.repr(value)
    kind = type(value).__name__
    article = "an" if kind[:1] in "AEIOU" else "a"
    if isinstance(value, list | tuple) and all(
        isinstance(part, str | int | float) for part in value
    ):
        return _SHORT.repr(value)
    if isinstance(value, nn.Module):
        return f"{article} {kind}"
    if isinstance(value, Sized) and isinstance(value, list | tuple | dict | set):
        return f"a {kind} of {len(value)}"
    if callable(value) and (name := getattr(value, "__name__", "")):
        return f"the function {name}"
    return f"{article} {kind}"
