"""Answers and spans of pairs: checks that they fit their texts, and the columns of spans."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.shared import Index, Selection, real_columns

Spans = Mapping[str, Index]
"""By name, the positions of a span in each example: a list of lists, or a tensor, of integers or booleans."""


def require_aligned(
    clean: Tensor,
    corrupted: Tensor | None,
    real: Tensor,
    other: Tensor | None,
    spans: Mapping[str, Any] | Sequence[str],
) -> None:
    """Refuses texts that are not as many or, where no spans say what corresponds, have other columns.

    Args:
        clean, corrupted: the texts; the second may be None.
        real, other: their masks.
        spans: those of the clean texts.

    Raises:
        ValueError: if they are not aligned.
    """
    if not len(clean) or (corrupted is not None and len(clean) != len(corrupted)):
        counts = f"{len(clean)} and {'none' if corrupted is None else len(corrupted)}"
        raise ValueError(f"clean and corrupted texts must be as many, at least one; got {counts}")
    if corrupted is None or other is None or spans:
        return
    if not torch.equal(real.cpu(), other.cpu()):
        raise ValueError(
            "clean and corrupted tokens must have the same shape and padding, unless spans say "
            f"which positions correspond; got {[*clean.shape]} and {[*corrupted.shape]}"
        )


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


def columns_of(
    spans: Spans,
    others: Spans,
    real: Tensor,
    other: Tensor | None,
    device: torch.device,
    last_only: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The columns of spans in the clean texts and in the corrupted ones, [batch, n] by name.

    Args:
        spans, others: the spans of both.
        real, other: the masks of both; the second is None without corrupted texts.
        device: where they are wanted.
        last_only: whether to keep the last position of each.

    Raises:
        ValueError: if a span does not fit its text, or the two do not correspond.
    """
    positions = positions_of_spans(spans, real, "clean", last_only)
    elsewhere: dict[str, list[list[int]]] = {}
    if other is not None:
        elsewhere = positions_of_spans(others, other, "corrupted", last_only)
        check_counts(positions, elsewhere)
    clean, corrupted = (
        {name: as_tensor(rows, device) for name, rows in each.items()}
        for each in (positions, elsewhere)
    )
    return clean, corrupted


def positions_of_spans(
    spans: Spans, real: Tensor, text: str, last_only: bool
) -> dict[str, list[list[int]]]:
    """The columns of the spans in each example, all of real tokens."""
    listed, (batch, n_pos) = {}, real.shape
    for name, index in spans.items():
        span, what = Selection(index), f"span {name!r} of the {text} text"
        if len(span.parts) != batch:
            raise ValueError(
                f"{what} must have a list of positions for each of the {batch} examples; got {index!r:.60}"
            )
        rows = span.rows(n_pos, what, batch, real_columns(real))
        if not all(rows):
            raise ValueError(f"{what} must have a position in each example; got {index!r:.60}")
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


def as_tensor(rows: list[list[int]], device: torch.device) -> Int[Tensor, "batch n"]:
    """Columns of each text, on a device. Where one has fewer, its last is repeated."""
    longest = max(map(len, rows))
    full = [row + row[-1:] * (longest - len(row)) for row in rows]
    return torch.tensor(full, device=device)
