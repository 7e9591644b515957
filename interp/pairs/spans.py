"""Answers and spans of pairs: check that they fit their texts, and find their columns."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks.base import (
    Index,
    Selection,
    Text,
    padding_messages,
    real_columns,
    real_of,
    shown,
)
from interp.inputs.token_positions import short
from interp.pairs.answers import Continuations
from interp.protocol import of

Spans = Mapping[str, Index]
"""The positions of each span in each example, by the name of the span.

The positions are a list of lists or a tensor, of integers or booleans.
"""


def aligned(
    clean: Text,
    corrupted: Text | None,
    answers: Any,
    *,
    spans: Spans,
    corrupted_spans: Spans | None,
    last_only: bool,
) -> tuple[Text, Text | None, Tensor | Continuations | None]:
    """Check that the parts of pairs fit each other, and return the texts and the answers.

    The clean and the corrupted text contain the columns of their spans (`Text.spans`). The answers
    become a tensor, unless they are `Continuations` of several tokens.

    Args:
        clean: the clean texts.
        corrupted: the corrupted texts; None if there are no corrupted texts.
        answers: the answers; see `Pairs`.
        spans: the spans of the clean texts.
        corrupted_spans: the spans of the corrupted texts; None for the spans of the clean texts.
        last_only: whether to use only the last position of each span.

    Raises:
        ValueError: if texts, masks, answers or spans do not fit each other.
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
    corrupted = None if corrupted is None else with_columns[1]
    if not isinstance(answers, Continuations):
        answers = as_answers(answers, clean.tokens)
    return with_columns[0], corrupted, answers


def answer_positions(
    model: nn.Module, clean: Text, corrupted: Text | None
) -> int | Int[Tensor, " batch"] | None:
    """Return the position of the answer in each text, counted from the end of the text.

    A causal model answers after the last token, so the result is None. A model that reads texts in
    both directions answers at the mask token.

    Args:
        model: the model.
        clean: the clean texts.
        corrupted: the corrupted texts; None if there are no corrupted texts.

    Raises:
        ValueError: if a model that reads texts in both directions has no mask token, if a text does
            not contain the mask token exactly once, or if the mask token has different positions in
            the clean and the corrupted text.
    """
    language = of(model)
    if getattr(language, "is_causal", True):
        return None
    rule = (
        f"pairs need pos=, the position of the answers, because a {type(model).__name__} reads "
        "texts in both directions"
    )
    if (mask_token := _mask_token(language)) is None:
        raise ValueError(f"{rule}, and its tokenizer has no mask token")
    positions = []
    for text in filter(None, (clean, corrupted)):
        for number, tokens in enumerate(text.listed()):
            count = tokens.count(mask_token)
            if count != 1:
                raise ValueError(f"{rule}; text {number} has {count} mask tokens")
            positions.append(tokens.index(mask_token) - len(tokens))
    n_texts = len(clean.tokens)
    if positions[:n_texts] != positions[-n_texts:]:
        raise ValueError(
            "the mask token must be equally far from the end in clean and corrupted texts; got "
            f"{positions[:n_texts]} and {positions[-n_texts:]}"
        )
    return torch.tensor(positions[:n_texts])


def require_causal(model: nn.Module, pos: Any) -> None:
    """Check that a model can read answers of several tokens after its texts.

    Args:
        model: the model.
        pos: the position of the answers; see `Pairs`.

    Raises:
        ValueError: if a position is given, or the model reads texts in both directions.
    """
    if not getattr(of(model), "is_causal", True):
        raise ValueError(
            f"answers must be single tokens, because a {type(model).__name__} reads texts in both "
            "directions; got several tokens"
        )
    if pos is not None and not (isinstance(pos, int) and pos == -1):
        raise ValueError(
            "pos must be left out for answers of several tokens, which follow the last token of a "
            f"text; got {short(pos)}"
        )


def _mask_token(language: Any) -> int | None:
    """Return the token at which a masked language model predicts, or None if it has none."""
    try:
        return getattr(language, "mask_token", None)
    # A model whose tokenizer files cannot be read still works with `pos=`.
    except (ImportError, ValueError):
        return None


def _require_same_texts(texts: list[Text], masks: list[Tensor], has_spans: bool) -> None:
    """Check that there are as many corrupted texts as clean texts.

    Without spans, the texts must also have the same shape and the same padding.

    Args:
        texts: the clean texts and, if there are any, the corrupted texts.
        masks: the mask of each of these texts.
        has_spans: whether spans define which positions correspond.
    """
    counts = [len(text.tokens) for text in texts]
    if not counts[0] or counts[0] != counts[-1]:
        got = " and ".join(map(str, counts))
        raise ValueError(
            f"the numbers of clean and corrupted texts must be equal and at least 1; got {got}"
        )
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


def as_answers(answers: Any, tokens: Shaped[Tensor, "batch *size"]) -> Tensor | None:
    """Return answers as a tensor [batch] or, with wrong answers, [batch, 2].

    Args:
        answers: the answers; see `Pairs`. One answer, or one tuple (right, wrong), is used for
            every text.
        tokens: the tokens of the texts.

    Raises:
        ValueError: if the answers are not one or two tokens for each text.
    """
    if answers is None:
        return None
    if not isinstance(answers, Tensor):
        is_shared = isinstance(answers, (int, tuple))
        answers = [answers] * len(tokens) if is_shared else answers
        answers = torch.as_tensor(answers, device=tokens.device)
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
                    f"span {name!r} must have equally many positions in both texts, unless "
                    f"last_only=True; got {len(columns)} and {len(corrupted_columns)} in example "
                    f"{example}"
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
