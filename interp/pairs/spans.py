"""Spans of pairs: find their columns, and check that the two texts of each pair fit each other.

`aligned` takes positions. `aligned_words` first finds the positions of parts of strings, with a
model's tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks.base import (
    Index,
    Selection,
    Text,
    named_spans,
    padding_messages,
    real_columns,
    real_of,
    shown,
)
from interp.inputs.offsets import offsets_of
from interp.inputs.words import is_worded
from interp.protocol import of

Spans = Mapping[str, Index]
"""The positions of each span in each example, by the name of the span.

The positions are a list of lists or a tensor, of integers or booleans.
"""

_UNEQUAL = (
    "Pairs(..., spans={'name': ('part of clean', 'part of corrupted')}, last_only=True) compares "
    "the last tokens of two parts"
)
"""The pairs for texts of unequal length, for errors."""


def aligned(
    clean: Text,
    corrupted: Text | None,
    *,
    spans: Spans,
    corrupted_spans: Spans | None,
    last_only: bool,
) -> tuple[Text, Text | None]:
    """Check that the two texts of each pair fit each other, and return texts with their spans.

    Both texts contain the columns of their spans (`Text.spans`).

    Args:
        clean: the clean texts.
        corrupted: the corrupted texts; None if there are no corrupted texts.
        spans: the spans of the clean texts.
        corrupted_spans: the spans of the corrupted texts; None for the spans of the clean texts.
        last_only: whether to use only the last position of each span.

    Raises:
        ValueError: if texts, masks or spans do not fit each other.
    """
    kinds = ("clean", "corrupted")
    texts = [clean] if corrupted is None else [clean, corrupted]
    masks: list[Tensor] = []
    for kind, text in zip(kinds, texts, strict=False):
        shape = text.tokens.shape[:2]
        # A mask of both texts is one tensor, so that it need not be compared with itself.
        if masks and text.attention_mask is clean.attention_mask and masks[0].shape == shape:
            masks.append(masks[0])
        else:
            masks.append(real_of(text.attention_mask, shape, f"the {kind} texts' attention_mask"))
    _require_same_texts(texts, masks, has_spans=bool(spans))
    spans_of_texts = (spans, spans if corrupted_spans is None else corrupted_spans)
    columns = [
        positions_of_spans(spans_of_text, mask, text=kind, last_only=last_only)
        for kind, mask, spans_of_text in zip(kinds, masks, spans_of_texts, strict=False)
    ]
    check_counts(columns[0], columns[-1])
    with_columns = [
        replace(
            text,
            attention_mask=None if text.attention_mask is None else mask,
            spans=as_tensors(columns_of_text, clean.tokens.device),
        )
        for text, mask, columns_of_text in zip(texts, masks, columns, strict=True)
    ]
    return with_columns[0], None if corrupted is None else with_columns[1]


def aligned_words(
    model: nn.Module,
    clean: Text,
    corrupted: Text | None,
    *,
    spans: Mapping[str, Any] | Sequence[str],
    last_only: bool,
) -> tuple[Text, Text | None]:
    """Return texts with their spans, which may be parts of strings; see `aligned`.

    Args:
        model: the model whose tokenizer converts strings.
        clean, corrupted: the texts as tokens.
        spans: see `Pairs`.
        last_only: whether to use only the last position of each span.

    Raises:
        ValueError: if a span does not occur exactly once in its text, if there are no spans and the
            two texts of a pair have different numbers of tokens, or if texts, masks or spans do not
            fit each other.
        UnknownNameError: if a chat has no span with a given name.
        TypeError: if the model cannot read text.
    """
    if corrupted is not None and not spans:
        _require_same_lengths(model, clean, corrupted)
    corrupted_spans = None if corrupted is None else _spans(model, corrupted, spans, side=1)
    return aligned(
        clean,
        corrupted,
        spans=_spans(model, clean, spans, side=0),
        corrupted_spans=corrupted_spans,
        last_only=last_only,
    )


def _require_same_lengths(model: nn.Module, clean: Text, corrupted: Text) -> None:
    """Check that the two texts of each pair have equally many tokens."""
    for tokens, corrupted_tokens in zip(clean.listed(), corrupted.listed(), strict=False):
        if len(tokens) != len(corrupted_tokens):
            pieces = "|".join(of(model).to_pieces(tokens))
            corrupted_pieces = "|".join(of(model).to_pieces(corrupted_tokens))
            raise ValueError(
                "clean and corrupted texts must have equally many tokens, unless spans are "
                f"given; got {len(tokens)}, {pieces!r}, and {len(corrupted_tokens)}, "
                f"{corrupted_pieces!r}; {_UNEQUAL}"
            )


def _require_same_texts(texts: list[Text], masks: list[Tensor], has_spans: bool) -> None:
    """Check that there are as many corrupted texts as clean texts.

    Without spans, the texts must also have the same shape and the same padding.

    Args:
        texts: the clean texts and, if there are any, the corrupted texts.
        masks: the mask of each of these texts.
        has_spans: whether spans define which positions correspond.
    """
    require_equal_numbers([len(text.tokens) for text in texts])
    is_same = masks[0] is masks[-1] or has_spans or torch.equal(masks[0].cpu(), masks[-1].cpu())
    if not is_same:
        shapes = [[*text.tokens.shape] for text in texts]
        is_one_shape = shapes[0] == shapes[-1]
        given = "different padding" if is_one_shape else " and ".join(map(str, shapes))
        raise ValueError(
            padding_messages.different_padding(
                "clean and corrupted tokens",
                given=given,
                reason="unless spans define which positions correspond",
            )
        )


def require_equal_numbers(counts: Sequence[int]) -> None:
    """Check the number of clean texts and, if there are any, of corrupted texts.

    >>> require_equal_numbers([3, 2])
    Traceback (most recent call last):
    ValueError: the numbers of clean and corrupted texts must be equal and at least 1; got 3 and 2
    """
    if not counts[0] or counts[0] != counts[-1]:
        got = " and ".join(map(str, counts))
        raise ValueError(
            f"the numbers of clean and corrupted texts must be equal and at least 1; got {got}"
        )


def positions_of_spans(
    spans: Spans, real: Tensor, text: str, last_only: bool
) -> dict[str, list[list[int]]]:
    """Return the columns of each span in each example, by the name of the span.

    Args:
        spans: the positions of the spans. Negative positions count from the last real token;
            positions from 0 count columns.
        real: the mask of the texts.
        text: `clean` or `corrupted`, for the errors.
        last_only: whether to return only the last column of each span.

    Raises:
        ValueError: if a span does not have at least one position in each example, or if a position
            is padding or outside the text.
    """
    batch, n_pos = real.shape
    columns = {}
    for name, index in spans.items():
        span = Selection(index)
        what = f"span {name!r} of the {text} text"
        if len(span.parts) != batch:
            raise ValueError(
                f"{what} must be a list of positions for each of the {batch} examples; got "
                f"{shown(index)}"
            )
        rows = span.rows(n_pos, what, batch=batch, real=real_columns(real))
        if not all(rows):
            raise ValueError(
                f"{what} must have at least one position in each example; got {shown(index)}"
            )
        rows = rows * (batch // len(rows))
        columns[name] = [row[-1:] if last_only else row for row in rows]
    return columns


def check_counts(
    clean: Mapping[str, list[list[int]]], corrupted: Mapping[str, list[list[int]]]
) -> None:
    """Check that spans have the same names and the same numbers of positions in both texts.

    Args:
        clean, corrupted: the columns of each span in each example, by the name of the span.

    Raises:
        ValueError: if the names or the numbers of positions differ.
    """
    if clean.keys() != corrupted.keys():
        raise ValueError(
            f"spans must have the same names in both texts; got {[*clean]} and {[*corrupted]}"
        )
    for name in clean:
        columns_of_examples = zip(clean[name], corrupted[name], strict=True)
        for example, (columns, corrupted_columns) in enumerate(columns_of_examples):
            if len(columns) != len(corrupted_columns):
                raise ValueError(
                    f"span {name!r} must have equally many positions in both texts; got "
                    f"{len(columns)} and {len(corrupted_columns)} in example {example}; "
                    "Pairs(..., last_only=True) uses the last position of each span"
                )


def as_tensors(
    spans: Mapping[str, list[list[int]]], device: torch.device
) -> dict[str, Int[Tensor, "batch _n"]]:
    """Return the columns of each span as a tensor [batch, n] on a device, by the name of the span.

    n is the largest number of columns of the span in a text. If a text has fewer, its last column
    is repeated.

    Args:
        spans: the columns of each span in each text, by the name of the span.
        device: the device.
    """
    tensors = {}
    for name, rows in spans.items():
        longest = max(map(len, rows))
        padded = [row + row[-1:] * (longest - len(row)) for row in rows]
        tensors[name] = torch.tensor(padded, device=device)
    return tensors


def _spans(
    model: nn.Module, text: Text, spans: Mapping[str, Any] | Sequence[str], side: int
) -> Mapping[str, Any]:
    """Return the columns of each span, by the name of the span.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts.
        spans: the spans by name, or the names of spans of chats.
        side: 0 for clean texts, 1 for corrupted texts.
    """
    if not isinstance(spans, Mapping):
        return named_spans(text, spans)
    return {name: _columns(model, text, name, span, side=side) for name, span in spans.items()}


def _columns(model: nn.Module, text: Text, name: str, span: Any, side: int) -> Any:
    """Return the columns of a span in each text.

    Args:
        model: the model whose tokenizer converts strings.
        text: the texts.
        name: the name of the span.
        span: one part for all texts, or a list with a part for each text. A part is a string, or a
            tuple of strings (clean part, corrupted part). Positions that contain no string are
            returned unchanged.
        side: 0 for clean texts, 1 for corrupted texts.
    """
    if not is_worded(span):
        return span
    n_texts = len(text.tokens)
    parts = [span] * n_texts if isinstance(span, (str, tuple)) else span
    if len(parts) != n_texts:
        raise ValueError(
            f"span {name!r} must be one part, or a part for each of {n_texts} texts; got "
            f"{len(parts)}"
        )
    columns = []
    for tokens, columns_of_text, part in zip(text.listed(), text.columns, parts, strict=True):
        part_of_side = part if isinstance(part, str) else part[side]
        inside = _tokens_inside(model, tokens, name, part_of_side)
        columns.append([columns_of_text[n] for n in inside])
    return columns


def _tokens_inside(model: nn.Module, tokens: list[int], name: str, part: str) -> list[int]:
    """Return the indices of the tokens of a text that overlap a part of the text.

    Args:
        model: the model whose tokenizer converts tokens.
        tokens: the text.
        name: the name of the span, for the error.
        part: the part of the text.

    Raises:
        ValueError: if the part does not occur exactly once in the text.
    """
    text, starts, ends = offsets_of(model, tokens)
    if (count := text.count(part)) != 1:
        raise ValueError(
            f"span {name!r} must occur once in the text; got {part!r} {count} times in "
            f"{text!r:.100}"
        )
    part_start = text.index(part)
    part_end = part_start + len(part)
    tokens_in_text = enumerate(zip(starts, ends, strict=True))
    return [n for n, (start, end) in tokens_in_text if start < part_end and end > part_start]
