"""Answers and spans of pairs: checks that they fit their texts, and the columns of spans."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from hooks.shared import Index, Selection, real_columns

Spans = Mapping[str, Index]
"""By name, the positions of a span in each example: a list of lists, or a tensor, of integers or booleans."""


def as_answers(answers: Any, tokens: Shaped[Tensor, "batch *size"]) -> Any:
    """Answers as a tensor, where they are numbers; a single one, or a tuple (right, wrong), is that of every text."""
    if answers is None or isinstance(answers, Tensor):
        return answers
    is_one = isinstance(answers, (int, tuple))
    return torch.as_tensor([answers] * len(tokens) if is_one else answers, device=tokens.device)


def check_answers(answers: Tensor, batch: int) -> None:
    """Refuses answers that are not one or two tokens for each text.

    Raises:
        ValueError: if they are not.
    """
    if answers.shape not in ((batch,), (batch, 2)):
        raise ValueError(
            f"answers must be right ones [{batch}], or right and wrong ones [{batch}, 2]; "
            f"got {list(answers.shape)}"
        )
    if int(answers.min()) < 0:
        raise ValueError(f"answers must be tokens, 0 and up; got {int(answers.min())}")


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


def as_tensor(rows: list[list[int]], tokens: Tensor) -> Int[Tensor, "batch n"]:
    """Columns of each text, on the device of the tokens. Where one has fewer, its last is repeated."""
    longest = max(map(len, rows))
    full = [row + row[-1:] * (longest - len(row)) for row in rows]
    return torch.tensor(full, device=tokens.device)
