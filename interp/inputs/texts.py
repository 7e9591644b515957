"""Texts that a model reads: those of one run, and many that stream through it, a padded batch at a time."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import (
    Text,
    Texts,
    each_text,
    is_batch,
    number_of_texts,
    progress_bar,
    require_integer,
)
from interp.protocol import of


def text_for(model: nn.Module, texts: Texts, attention_mask: Tensor | None = None) -> Text:
    """The texts of a run, as the model reads them.

    Args:
        model: the model.
        texts: see `Texts`.
        attention_mask: the mask of a tensor [batch, pos].

    Raises:
        ValueError: as for `model.to_tokens`, or if other texts come beside a mask.
        TypeError: if the model reads tensors only.
    """
    if isinstance(texts, Text):
        return texts
    if is_batch(texts):
        return Text(texts, attention_mask)
    if attention_mask is not None:
        raise ValueError("attention_mask= needs tokens [batch, pos]; other texts have their own")
    if (to_tokens := getattr(of(model), "to_tokens", None)) is None:
        raise TypeError(
            f"texts must be a tensor [batch, pos] for a {type(model).__name__}, which has no to_tokens; "
            f"got a {type(texts).__name__}"
        )
    text: Text = to_tokens(texts)
    return text


def padded(texts: Sequence[Any], model: nn.Module, numbers: Sequence[int]) -> Text:
    """Texts as one batch, on the model's device, padded on the right. Equal lengths need no mask.

    Args:
        texts: each text, as `each_text` gives it; at least one.
        model: the model that is to read them.
        numbers: the number of each text, for errors.

    Raises:
        ValueError: if a text has no tokens, or is not a string or a list of integers.

    >>> text = padded([[3, 1, 4], [1, 5]], nn.Linear(2, 3), range(2))
    >>> text.tokens.tolist(), text.attention_mask.int().tolist()
    ([[3, 1, 4], [1, 5, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    for number, text in zip(numbers, texts, strict=True):
        if isinstance(text, Mapping):
            raise ValueError(
                f"a text must be a string or a list of tokens; got a {type(text).__name__} as text {number}"
            )
    rows = [
        text_for(model, text).tokens[0] if isinstance(text, str) else torch.as_tensor(text)
        for text in texts
    ]
    for number, row in zip(numbers, rows, strict=True):
        if row.ndim != 1 or not row.numel() or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(
                "a text must be a list of tokens, at least one; "
                f"got {row.dtype} {list(row.shape)} as text {number}"
            )
    device = next((weight.device for weight in model.parameters()), None)
    return Text.padded(rows, getattr(of(model), "pad_token", 0), device=device)


def batches(texts: Texts, model: nn.Module, size: int) -> Iterator[tuple[int, Text]]:
    """Batches of at most `size` texts, each with the number of its first text.

    Raises:
        ValueError: as for `padded`, if `size` is below 1, or if there is no text.
    """
    require_integer("batch", size)
    rest, first = each_text(texts), 0
    # An error may leave this iterator half read, so whoever reads it `shows_progress`, and takes the bar away.
    with progress_bar("texts", number_of_texts(texts)) as count:
        while some := list(itertools.islice(rest, size)):
            numbers = range(first, first + len(some))
            yield first, padded(some, model, numbers)
            count(len(some))
            first = numbers.stop
    if not first:
        raise ValueError("texts must hold at least one text; got none")
