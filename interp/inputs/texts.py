"""Texts that a model reads: the texts of one run, or many texts in padded batches."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks import HookError
from hooks.base import (
    Text,
    Texts,
    each_text,
    is_batch,
    number_of_texts,
    progress_bar,
    require_integer,
)
from hooks.shared import edited_points_in_force
from interp.protocol import of


def text_for(model: nn.Module, texts: Texts) -> Text:
    """Return the texts of a run as the tokens that a model reads.

    Args:
        model: the model.
        texts: the texts in any form; see `Texts`.

    Raises:
        ValueError: if `model.to_tokens` raises it.
        TypeError: if the model can read only tensors.
    """
    if isinstance(texts, Text):
        return texts
    if is_batch(texts):
        return Text(texts)
    if (to_tokens := getattr(of(model), "to_tokens", None)) is None:
        raise TypeError(
            f"texts must be a tensor [batch, pos], because a {type(model).__name__} has no "
            f"to_tokens; got a {type(texts).__name__}"
        )
    text: Text = to_tokens(texts)
    return text


def padded(texts: Sequence[Any], model: nn.Module, numbers: Sequence[int]) -> Text:
    """Return texts as one batch on the model's device, padded on the right.

    The batch has no mask if all lengths are equal.

    Args:
        texts: the texts, at least one, as strings or lists of tokens.
        model: the model that will read the texts.
        numbers: for each text, the number by which an error names the text.

    Raises:
        ValueError: if a text has no tokens, or is not a string or a list of integers.

    >>> text = padded([[3, 1, 4], [1, 5]], nn.Linear(2, 3), range(2))
    >>> text.tokens.tolist(), text.attention_mask.int().tolist()
    ([[3, 1, 4], [1, 5, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    for number, text in zip(numbers, texts, strict=True):
        if isinstance(text, Mapping):
            raise ValueError(
                f"a text must be a string or a list of tokens; got a {type(text).__name__} for "
                f"text {number}"
            )
    token_rows = [
        text_for(model, text).tokens[0] if isinstance(text, str) else torch.as_tensor(text)
        for text in texts
    ]
    for number, tokens in zip(numbers, token_rows, strict=True):
        are_integers = not tokens.is_floating_point() and tokens.dtype != torch.bool
        if tokens.ndim != 1 or not tokens.numel() or not are_integers:
            raise ValueError(
                "a text must be a list of at least one token; "
                f"got {tokens.dtype} {list(tokens.shape)} for text {number}"
            )
    device = next((weight.device for weight in model.parameters()), None)
    # A weight on `meta` is stored elsewhere until it is needed, and the model moves its inputs.
    device = None if device is not None and device.type == "meta" else device
    return Text.padded(token_rows, getattr(of(model), "pad_token", 0), device=device)


def require_edits_of_all_texts(*models: nn.Module) -> None:
    """Check that the active edits are the same for all texts.

    Call this function in analyses that run texts in batches of their own. There, an edit with
    `batch=1` would act on one text of each batch, and a source with a value for each text would
    write the same values into the texts of each batch.

    Args:
        models: the models that will read the texts.

    Raises:
        HookError: if an edit that acts on a model depends on the number of a text.
    """
    for model in models:
        for edited in edited_points_in_force(model):
            for hook in edited.hooks:
                # The edits of `interp.edits`, which is a later package, have this method.
                differs = getattr(hook, "differs_by_text", None)
                if differs is not None and differs(edited.point):
                    raise HookError(
                        "an active edit must be the same for all texts in an analysis that runs "
                        f"texts in batches of its own; got {hook!r} at {edited.point.name}, which "
                        "would count the texts of each batch: leave out batch= and values for each "
                        "text, or run the texts in one batch with runner.run_with_cache(texts)"
                    )


def batches(texts: Texts, model: nn.Module, size: int) -> Iterator[tuple[int, Text]]:
    """Yield batches of at most `size` texts, each with the number of its first text.

    A batch contains only texts that get the same numbers as alone; see `groups_by_length`.

    Args:
        texts: the texts in any form; see `Texts`.
        model: the model that will read the texts.
        size: the largest number of texts in a batch.

    Raises:
        ValueError: if `size` is below 1, if there is no text, or if a text is wrong; see `padded`.
        HookError: if an active edit selects some of the texts.
    """
    require_integer("batch", size)
    require_edits_of_all_texts(model)
    remaining = each_text(texts)
    first = 0
    # If the analysis fails between two batches, Python does not close this iterator at once. The
    # decorator `shows_progress` of the analysis then removes the bar.
    with progress_bar("texts", number_of_texts(texts)) as count:
        while batch := list(itertools.islice(remaining, size)):
            numbers = range(first, first + len(batch))
            text = padded(batch, model, numbers)
            groups = groups_by_length(model, text.real.sum(1))
            for group in groups:
                part = slice(group.start, group.stop)
                if len(groups) > 1:
                    text = padded(batch[part], model, numbers[part])
                yield numbers[group.start], text
            count(len(batch))
            first = numbers.stop
    if not first:
        raise ValueError("texts must contain at least one text; got no text")


def groups_by_length(
    model: nn.Module, lengths: Sequence[int] | Int[Tensor, " text"]
) -> list[range]:
    """Return the texts that may be in one batch, as ranges of their numbers, in order.

    All texts may be in one batch, except in an attached model whose rotary frequencies depend on
    the longest text of a batch. A range then ends at each text with other frequencies.

    Args:
        model: the model that will read the texts.
        lengths: the number of tokens of each text.

    >>> groups_by_length(nn.Linear(2, 3), [3, 5, 8])
    [range(0, 3)]
    """
    group_of = getattr(of(model), "length_group", None)
    if group_of is None or not group_of(1):
        return [range(len(lengths))]
    numbers = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    groups = list[range]()
    for _, group in itertools.groupby(map(group_of, numbers)):
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start + len([*group])))
    return groups
