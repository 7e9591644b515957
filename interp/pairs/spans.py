"""Answers and spans of pairs: checks that they fit their texts, and the columns of spans."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.base import Index, Selection, Text, real_columns, real_of, shown

Spans = Mapping[str, Index]
"""By name, the positions of a span in each example: a list of lists, or a tensor, of integers or booleans."""


def aligned(
    one: Text, other: Text | None, answers: Any, spans: Spans, others: Spans | None, last_only: bool
) -> tuple[Text, Text | None, Tensor | None]:
    """The texts of pairs with the columns of their spans, and their answers as a tensor.

    Args:
        one, other: the clean texts, and the corrupted ones if there are any.
        answers: as `Pairs` takes them.
        spans, others: the spans of both; None for the same in both.
        last_only: whether to keep the last position of each span.

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
        raise ValueError(f"clean and corrupted texts must be as many, at least one; got {got}")
    if not spans and not torch.equal(reals[0].cpu(), reals[-1].cpu()):
        shapes = " and ".join(str([*text.tokens.shape]) for text in texts)
        raise ValueError(
            "clean and corrupted tokens must have the same shape and padding, unless spans say "
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
    """Answers as a tensor; a single one, or a tuple (right, wrong), is that of every text.

    Raises:
        ValueError: if they are not one or two tokens for each text.
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
            f"answers must be right ones [{batch}], or right and wrong ones [{batch}, 2]; "
            f"got {list(answers.shape)}"
        )
    if int(answers.min()) < 0:
        raise ValueError(f"answers must be tokens, 0 and up; got {int(answers.min())}")
    return answers


def positions_of_spans(
    spans: Spans, real: Tensor, text: str, last_only: bool
) -> dict[str, list[list[int]]]:
    """The columns of the spans in each example, all of real tokens."""
    listed, (batch, n_pos) = {}, real.shape
    for name, index in spans.items():
        span, what = Selection(index), f"span {name!r} of the {text} text"
        if len(span.parts) != batch:
            raise ValueError(
                f"{what} must have a list of positions for each of the {batch} examples; got {shown(index)}"
            )
        rows = span.rows(n_pos, what, batch, real_columns(real))
        if not all(rows):
            raise ValueError(f"{what} must have a position in each example; got {shown(index)}")
        listed[name] = [row[-1:] if last_only else row for row in rows * (batch // len(rows))]
    return listed


def check_counts(counted: dict[str, list[list[int]]], others: dict[str, list[list[int]]]) -> None:
    """Refuses spans that have other names or other numbers of positions in the two texts.

    Raises:
        ValueError: if they have.
    """
    if counted.keys() != others.keys():
        raise ValueError(
            f"spans must have the same names in both texts; got {[*counted]} and {[*others]}"
        )
    for name in counted:
        for example, (row, other) in enumerate(zip(counted[name], others[name], strict=True)):
            if len(row) != len(other):
                raise ValueError(
                    f"span {name!r} must have as many positions in both texts, or last_only=True; "
                    f"got {len(row)} and {len(other)} in example {example}"
                )


def as_tensors(
    spans: Mapping[str, list[list[int]]], device: torch.device
) -> dict[str, Int[Tensor, "batch _n"]]:
    """Columns of each text by name, on a device. Where one has fewer, its last is repeated."""
    tensors = {}
    for name, rows in spans.items():
        longest = max(map(len, rows))
        full = [row + row[-1:] * (longest - len(row)) for row in rows]
        tensors[name] = torch.tensor(full, device=device)
    return tensors
