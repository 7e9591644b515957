"""Answers and spans of pairs: check that they fit their texts, and find the columns of spans."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.base import Index, Selection, Text, real_columns, real_of, shown

Spans = Mapping[str, Index]
"""The positions of each span in each example, by the name of the span.

The positions are a list of lists or a tensor, of integers or booleans.
"""


def aligned(
    one: Text, other: Text | None, answers: Any, spans: Spans, others: Spans | None, last_only: bool
) -> tuple[Text, Text | None, Tensor | None]:
    """Return the texts of pairs with the columns of their spans, and the answers as a tensor.

    Args:
        one, other: the clean texts and the corrupted texts. None if there are no corrupted texts.
        answers: the answers; see `Pairs`.
        spans, others: the spans of the clean and the corrupted texts. None for the same spans in
            both.
        last_only: whether to use only the last position of each span.

    Raises:
        ValueError: if texts, masks, answers or spans do not fit each other.
    """
    texts, kinds = [one] if other is None else [one, other], ("clean", "corrupted")
    reals = [
        real_of(text.attention_mask, text.tokens.shape[:2], f"the {kind} texts' attention_mask")
        for kind, text in zip(kinds, texts, strict=False)
    ]
    counts = [len(text.tokens) for text in texts]
    if not counts[0] or counts[0] != counts[-1]:
        got = " and ".join(map(str, counts))
        raise ValueError(
            f"the numbers of clean and corrupted texts must be equal and at least 1; got {got}"
        )
    if not spans and not torch.equal(reals[0].cpu(), reals[-1].cpu()):
        shapes = " and ".join(str([*text.tokens.shape]) for text in texts)
        raise ValueError(
            "clean and corrupted tokens must have the same shape and padding, unless spans define "
            f"which positions correspond; got {shapes}"
        )
    named = zip(kinds, reals, (spans, spans if others is None else others), strict=False)
    columns = [positions_of_spans(each, real, kind, last_only) for kind, real, each in named]
    check_counts(columns[0], columns[-1])
    first, *rest = (
        replace(
            text,
            attention_mask=None if text.attention_mask is None else real,
            spans=as_tensors(each, one.tokens.device),
        )
        for text, real, each in zip(texts, reals, columns, strict=True)
    )
    return first, rest[0] if rest else None, as_answers(answers, one.tokens)


def as_answers(answers: Any, tokens: Shaped[Tensor, "batch *size"]) -> Tensor | None:
    """Return answers as a tensor. One answer, or one tuple (right, wrong), is used for every text.

    Raises:
        ValueError: if the answers are not one or two tokens for each text.
    """
    if answers is None:
        return None
    if not isinstance(answers, Tensor):
        is_one = isinstance(answers, (int, tuple))
        each = [answers] * len(tokens) if is_one else answers
        answers = torch.as_tensor(each, device=tokens.device)
    batch = len(tokens)
    if answers.shape not in ((batch,), (batch, 2)):
        raise ValueError(
            f"answers must be right tokens [{batch}], or right and wrong tokens [{batch}, 2]; "
            f"got {list(answers.shape)}"
        )
    if int(answers.min()) < 0:
        raise ValueError(f"answers must be at least 0; got {int(answers.min())}")
    return answers


def positions_of_spans(
    spans: Spans, real: Tensor, text: str, last_only: bool
) -> dict[str, list[list[int]]]:
    """Return the columns of the spans in each example. Padding is ignored."""
    listed, (batch, n_pos) = {}, real.shape
    for name, index in spans.items():
        span, what = Selection(index), f"span {name!r} of the {text} text"
        if len(span.parts) != batch:
            raise ValueError(
                f"{what} must be a list of positions for each of the {batch} examples; got "
                f"{shown(index)}"
            )
        rows = span.rows(n_pos, what, batch, real_columns(real))
        if not all(rows):
            raise ValueError(
                f"{what} must have at least one position in each example; got {shown(index)}"
            )
        listed[name] = [row[-1:] if last_only else row for row in rows * (batch // len(rows))]
    return listed


def check_counts(counted: dict[str, list[list[int]]], others: dict[str, list[list[int]]]) -> None:
    """Check that spans have the same names and the same numbers of positions in both texts.

    Raises:
        ValueError: if the names or the numbers of positions differ.
    """
    if counted.keys() != others.keys():
        raise ValueError(
            f"spans must have the same names in both texts; got {[*counted]} and {[*others]}"
        )
    for name in counted:
        for example, (row, other) in enumerate(zip(counted[name], others[name], strict=True)):
            if len(row) != len(other):
                raise ValueError(
                    f"span {name!r} must have equally many positions in both texts, unless "
                    "last_only=True; "
                    f"got {len(row)} and {len(other)} in example {example}"
                )


def as_tensors(
    spans: Mapping[str, list[list[int]]], device: torch.device
) -> dict[str, Int[Tensor, "batch _n"]]:
    """Return the columns of each text by name, as tensors on a device.

    If a text has fewer columns than the longest span, its last column is repeated.
    """
    tensors = {}
    for name, rows in spans.items():
        longest = max(map(len, rows))
        full = [row + row[-1:] * (longest - len(row)) for row in rows]
        tensors[name] = torch.tensor(full, device=device)
    return tensors
