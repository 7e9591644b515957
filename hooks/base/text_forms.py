"""The forms of texts that users can pass: strings, lists, tensors, mappings; one text
or several.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.base.saying import shown
from hooks.base.text import Text

Texts = str | Iterable[Any] | Int[Tensor, " pos"] | Shaped[Tensor, "batch pos *size"] | Text
"""Texts in every form.

A string, a list of tokens, or a tensor [pos] is one text. A list of these, a tensor [batch, pos] or
a `Text` is a batch. The output of a tokenizer of `transformers`, a mapping with
`input_ids` and `attention_mask`, is a batch too. Strings need a model with a tokenizer. A model of
images or sounds takes numbers [batch, ...]."""


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer of Python, NumPy or PyTorch."""
    if isinstance(value, bool):
        return False
    try:
        index(value)
    except TypeError:
        return False
    return True


def is_columns(texts: object) -> bool:
    """Return whether texts are a mapping or a table, which contain columns by name."""
    return isinstance(texts, Mapping) or hasattr(texts, "columns")


def is_one_text(texts: Any) -> bool:
    """Return whether texts are one text and not a batch."""
    if isinstance(texts, Mapping):
        texts = texts.get("input_ids", ())
    if isinstance(texts, str | Tensor):
        return isinstance(texts, str) or texts.ndim == 1
    if isinstance(texts, Text):
        return False
    if not hasattr(texts, "__len__"):
        raise ValueError(
            f"texts must be a string, a list of tokens, a tensor, or several; got {shown(texts)}"
        )
    return bool(len(texts)) and all(is_integer(token) for token in texts)


def each_text(texts: Texts) -> Iterator[Any]:
    """Yield each text without padding: a string, or a list or tensor of tokens.

    The texts may be a stream.
    """
    # Check this first, because the output of a tokenizer of transformers has a method `tokens`.
    if is_columns(texts):
        rows, real = columns_of(texts)
        yield from ([*itertools.compress(*pair)] for pair in zip(rows, real, strict=True))
    elif isinstance(texts, Text):
        yield from texts.listed()
    elif isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1):
        yield texts
    else:
        if not isinstance(texts, Iterable):
            rule = "texts must be a string, a list of tokens, a tensor, or several"
            raise ValueError(f"{rule}; got {shown(texts)}")
        rest = iter(texts)
        first = next(rest, None)
        if isinstance(first, int):
            yield [first, *rest]
        elif first is not None:
            yield from itertools.chain([first], rest)


def number_of_texts(texts: Texts) -> int | None:
    """Return the number of texts, or None if they must be read to count them."""
    is_text = isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1)
    if is_text or not isinstance(texts, Sequence | Tensor) or not len(texts):
        return 1 if is_text else None
    return 1 if isinstance(texts[0], int) else len(texts)


def columns_of(texts: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the tokens and the mask of each text in the output of a tokenizer, a mapping with
    `input_ids`.

    Raises:
        ValueError: if the mapping has no `input_ids`, its mask does not fit, or it contains other
            inputs of the model.

    >>> columns_of({"input_ids": [[3, 1], [4, 0]], "attention_mask": [[1, 1], [1, 0]]})
    ([[3, 1], [4, 0]], [[True, True], [True, False]])
    """
    if not isinstance(texts, Mapping) or "input_ids" not in texts:
        raise ValueError(
            "texts in a mapping or a table must have input_ids, like the output of a tokenizer; "
            f"got a {type(texts).__name__} "
            f"of {', '.join(map(str, texts)):.80} (pass a column of texts as a list)"
        )
    rows = _listed(texts["input_ids"])
    mask = (
        _listed(texts["attention_mask"])
        if "attention_mask" in texts
        else [[1] * len(row) for row in rows]
    )
    lengths = [*map(len, mask)]
    if lengths != [*map(len, rows)] or (others := set().union(*mask) - {0, 1}):
        got = (
            f"{lengths} for {[*map(len, rows)]} tokens" if lengths != [*map(len, rows)] else others
        )
        raise ValueError(
            f"attention_mask must have a 1 or a 0 for each token of input_ids; got {got!s:.80}"
        )
    for name in _READ_BESIDE & {*texts}:
        if bool(torch.as_tensor(texts[name]).any()):
            raise ValueError(
                f"texts must contain only tokens and their mask; got {name} too (call "
                "model(**texts) if the model accepts it)"
            )
    return rows, [[bool(real) for real in row] for row in mask]


# Other inputs of some models. An input of zeros has no effect.
_READ_BESIDE = {"token_type_ids", "position_ids", "inputs_embeds", "pixel_values", "input_features"}


def _listed(rows: Any) -> list[list[int]]:
    rows = rows.tolist() if hasattr(rows, "tolist") else rows
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
    return rows if rows and isinstance(rows[0], Sequence) else [rows]
