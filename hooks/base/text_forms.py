"""The forms in which users can pass one text or several: strings, lists, tensors and mappings."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from operator import index
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.base.padding_messages import mask_numbers, mask_shape
from hooks.base.saying import shown
from hooks.base.text import Text

Texts = str | Iterable[Any] | Int[Tensor, " pos"] | Shaped[Tensor, "batch pos *size"] | Text
"""Texts in every form.

A string, a list of tokens, or a tensor [pos] is one text. A list of these, a tensor [batch, pos] or
a `Text` is a batch. The output of a tokenizer of `transformers`, a mapping with
`input_ids` and `attention_mask`, is a batch too. Strings need a model with a tokenizer. A model of
images or sounds takes numbers [batch, ...]."""

_FORMS = "texts must be a string, a list of tokens, a tensor, or several"


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
    # The columns of a `Text` are numbers and not names.
    is_table = hasattr(texts, "columns") and not isinstance(texts, Text)
    return isinstance(texts, Mapping) or is_table


def require_readable(texts: object) -> None:
    """Check that texts have an order, and are not bytes, whose numbers would be read as tokens.

    Raises:
        TypeError: if texts are a set or bytes.
    """
    if isinstance(texts, Set) and not isinstance(texts, Mapping):
        raise TypeError(
            f"texts must be a list, because a set has no order; got {shown(texts)}: write "
            "sorted(texts)"
        )
    if isinstance(texts, bytes | bytearray):
        raise TypeError(f"a text must be a string; got {shown(texts)}: write text.decode()")


def is_one_text(texts: Any) -> bool:
    """Return whether texts are one text and not a batch.

    Raises:
        TypeError: if texts are a set or bytes, or have no length, such as None or a number.
    """
    require_readable(texts)
    if isinstance(texts, Mapping):
        texts = texts.get("input_ids", ())
    if isinstance(texts, str | Tensor):
        return isinstance(texts, str) or texts.ndim == 1
    if isinstance(texts, Text):
        return False
    if not hasattr(texts, "__len__"):
        hint = " (write list(texts))" if isinstance(texts, Iterator) else ""
        raise TypeError(f"{_FORMS}; got {shown(texts)}{hint}")
    return bool(len(texts)) and all(is_integer(token) for token in texts)


def each_text(texts: Texts) -> Iterator[Any]:
    """Yield each text without padding: a string, or a list or tensor of tokens.

    If `texts` is an iterator, only one text after the other is read.

    Raises:
        TypeError: if texts, or one of them, are a set or bytes, or texts are not iterable.
    """
    require_readable(texts)
    if is_columns(texts):
        rows, real = columns_of(texts)
        yield from ([*itertools.compress(*pair)] for pair in zip(rows, real, strict=True))
    elif isinstance(texts, Text):
        yield from texts.listed()
    elif isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1):
        yield texts
    else:
        if not isinstance(texts, Iterable):
            raise TypeError(f"{_FORMS}; got {shown(texts)}")
        others = iter(texts)
        first = next(others, None)
        if isinstance(first, int):
            yield [first, *others]
        elif first is not None:
            for text in itertools.chain([first], others):
                require_readable(text)
                yield text


def number_of_texts(texts: Texts) -> int | None:
    """Return the number of texts, or None if they must be read to count them.

    >>> number_of_texts(["def f", "import"]), number_of_texts([3, 1, 4])
    (2, 1)
    """
    if isinstance(texts, Text):
        return len(texts.tokens)
    is_text = isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1)
    if is_text or not isinstance(texts, Sequence | Tensor) or not len(texts):
        return 1 if is_text else None
    return 1 if is_integer(texts[0]) else len(texts)


def columns_of(texts: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the tokens and the mask of each text in the output of a tokenizer.

    Args:
        texts: a mapping or a table with `input_ids` and, for texts with padding, `attention_mask`.

    Raises:
        ValueError: if the mapping has no `input_ids`, its mask does not fit, or it contains other
            inputs of the model.

    >>> columns_of({"input_ids": [[3, 1], [4, 0]], "attention_mask": [[1, 1], [1, 0]]})
    ([[3, 1], [4, 0]], [[True, True], [True, False]])
    """
    if not isinstance(texts, Mapping) or "input_ids" not in texts:
        raise ValueError(
            "texts in a mapping or a table must have input_ids, like the output of a tokenizer; "
            f"got a {type(texts).__name__} of {', '.join(map(str, texts)):.80} (pass a column of "
            "texts as a list)"
        )
    tokens = _listed(texts["input_ids"])
    masks = [[1] * len(tokens_of_text) for tokens_of_text in tokens]
    if "attention_mask" in texts:
        masks = _listed(texts["attention_mask"])
    lengths = [*map(len, tokens)]
    mask_lengths = [*map(len, masks)]
    if mask_lengths != lengths:
        raise ValueError(
            mask_shape("attention_mask", lengths, mask_lengths, axes="as long as input_ids")
        )
    if others := set().union(*masks) - {0, 1}:
        raise ValueError(mask_numbers("attention_mask", min(others)))
    for name in _READ_BESIDE & {*texts}:
        if bool(torch.as_tensor(texts[name]).any()):
            raise ValueError(
                f"texts must contain only tokens and their mask; got {name} too; "
                f"to pass {name} to the model, call model(**texts)"
            )
    return tokens, [[*map(bool, mask)] for mask in masks]


# Inputs besides the tokens and their mask, which would be lost here and so raise an error. An input
# of zeros, such as the token types of single texts, has no effect and may be lost.
_READ_BESIDE = {"token_type_ids", "position_ids", "inputs_embeds", "pixel_values", "input_features"}


def _listed(numbers: Any) -> list[list[int]]:
    """Return the numbers of one text, or of several, as a list for each text."""
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
    parts = [part.tolist() if hasattr(part, "tolist") else part for part in numbers]
    return parts if parts and isinstance(parts[0], Sequence) else [parts]
