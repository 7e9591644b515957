"""Messages about padding: the text of every error about padding, masks of texts and real tokens.

A function returns the message, and its caller decides when to raise an error and of which class.
So change the words of a message here, and its condition in the file that raises the error. Some
callers pass the reason of a message as text, such as the name of the model that needs the padding.

1. Masks of texts: `mask_shape`, `mask_numbers`, `mask_changed`, `mask_axes`, `second_mask`,
   `mask_unknown`.
2. Selected tokens: `no_real_token`, `no_real_logits`, `padding_selected`, `before_the_text`.
3. Texts with padding: `moved_prompts`, `different_starts`, `wrong_side`, `unequal_lengths`,
   `different_frequencies`, `decoder_copies_padding`, `several_texts`, `different_padding`,
   `no_donor`.
4. Hook functions of the user: `changed_padding`.

Errors about a mask of queries and keys (`query_key_mask`) are in `models.running.masks`.
"""

from collections.abc import Sequence
from typing import Literal

Side = Literal["left", "right"]
"""The side of the tokens on which a text has padding."""

_PLACES = {"left": "before a token", "right": "after a token"}


def other_side(side: Side) -> Side:
    """Return `right` for `left`, and `left` for `right`."""
    return "left" if side == "right" else "right"


def mask_shape(
    name: str,
    needed: Sequence[int],
    given: Sequence[int],
    axes: str = "[batch, pos]",
    remedy: str = "",
) -> str:
    """Return the message for a mask whose shape does not fit its texts.

    Args:
        name: the name of the mask.
        needed: the shape of the texts, or their lengths.
        given: the shape of the mask, or its lengths.
        axes: the meaning of the shape.
        remedy: the advice to the user. Default: no advice.

    >>> mask_shape("attention_mask", (2, 3), (2, 5))
    'attention_mask must be [batch, pos], [2, 3]; got [2, 5]'
    """
    advice = remedy and f" ({remedy})"
    return f"{name} must be {axes}, {[*needed]}; got {[*given]}{advice}"


def mask_numbers(name: str, given: object) -> str:
    """Return the message for a mask that contains other numbers than 0 and 1.

    Args:
        name: the name of the mask.
        given: the other numbers.

    >>> mask_numbers("attention_mask", 2)
    'attention_mask must be 1 at keys that queries may see, and 0 at padding; got 2'
    """
    return f"{name} must be 1 at keys that queries may see, and 0 at padding; got {given}"


def metric_reads_padding(metric: object) -> str:
    """Return the message for a function of the user whose result depends on logits at padding.

    Args:
        metric: the function.
    """
    return (
        f"a metric must not read the logits at padding; got {metric!r}, whose values depend on "
        "them: if it reads logits[:, -1], set metric.last = 1, and it gets the last real token of "
        "each text; otherwise leave out padding"
    )


def two_masks() -> str:
    """Return the message for a metric of pairs without a mask, if their texts have two masks."""
    return (
        "attention_mask must be given, because the clean and the corrupted texts of the pairs have "
        "different padding; got None: pass pairs.text or pairs.other, the texts of the logits"
    )


def mask_changed() -> str:
    """Return the message for a mask that differs from the mask of the cached tokens.

    >>> mask_changed()
    'attention_mask must not change for cached tokens; got different numbers'
    """
    return "attention_mask must not change for cached tokens; got different numbers"


def mask_axes(point: object) -> str:
    """Return the message for a mask at a point whose values have no axis of texts or positions.

    >>> mask_axes("blocks.0.weight")
    'attention_mask needs a point with the axes batch and pos; got blocks.0.weight'
    """
    return f"attention_mask needs a point with the axes batch and pos; got {point}"


def second_mask(given: str) -> str:
    """Return the message for a mask beside texts that have a mask or need no mask.

    Args:
        given: the texts.

    >>> second_mask("texts with a mask")
    'attention_mask needs texts in a tensor [batch, pos] without a mask; got texts with a mask'
    """
    return f"attention_mask needs texts in a tensor [batch, pos] without a mask; got {given}"


def mask_unknown(what: object, given: str = "no mask") -> str:
    """Return the message for a computation that must know the padding and does not know it.

    Args:
        what: the part of the computation that counts real tokens.
        given: the value without a mask.

    >>> mask_unknown("log_prob(3)")
    'log_prob(3) needs the attention_mask of padded texts; got no mask'
    """
    return f"{what} needs the attention_mask of padded texts; got {given}"


def no_real_token(what: str, place: str = "") -> str:
    """Return the message for places that are all padding.

    Args:
        what: the name of the places.
        place: the text or the column without a real token. Default: not named.

    >>> no_real_token("attention_mask", "row 2")
    'attention_mask must contain at least one real token; got none in row 2'
    """
    inside = place and f" in {place}"
    return f"{what} must contain at least one real token; got none{inside}"


def no_real_logits(text: int, n_columns: int) -> str:
    """Return the message for logits of some columns that are all padding in a text.

    Args:
        text: the number of the text.
        n_columns: the number of columns of the logits.

    >>> print(no_real_logits(3, 1))  # doctest: +ELLIPSIS
    logits must have a column at a real token of each text; got 1 column, which is padding in ...
    """
    got = "1 column, which is" if n_columns == 1 else f"{n_columns} columns, which are"
    return (
        f"logits must have a column at a real token of each text; got {got} padding in text "
        f"{text}: keep the logits of more columns (such as no logits_to_keep), or pad on the left"
    )


def padding_selected(what: str, place: str = "", remedy: str = "") -> str:
    """Return the message for a selected place that is padding.

    Args:
        what: the name of the selection.
        place: the column, and the text if there are several. Default: not named.
        remedy: the advice to the user. Default: no advice.

    >>> padding_selected("pos of example 1", "column 4")
    'pos of example 1 must be a real token; got padding at column 4'
    """
    at_place = place and f" at {place}"
    advice = remedy and f" ({remedy})"
    return f"{what} must be a real token; got padding{at_place}{advice}"


def before_the_text(what: str, length: int, given: object) -> str:
    """Return the message for a negative place before the first token of a text.

    Args:
        what: the name of the axis, or of its selection.
        length: the number of real tokens.
        given: the place.

    >>> before_the_text("pos", 3, -5)
    'pos must be from -3 on in a text of 3 tokens; got -5'
    """
    return f"{what} must be from {-length} on in a text of {length} tokens; got {given}"


def moved_prompts(what: str, selected: object) -> str:
    """Return the message for columns of prompts that a generation has padded on the left.

    Args:
        what: the name of the positions.
        selected: the selected columns.
    """
    return (
        f"{what} must count from the end, as in pos=-1, because a generation pads prompts of "
        f"unequal length on the left; got {selected!r}: or generate one prompt at a time"
    )


def different_starts(point: str, axis: str, starts: Sequence[int]) -> str:
    """Return the message for a mean over texts that do not begin in the same column.

    Args:
        point: the point of the mean.
        axis: the name of the axis of positions.
        starts: the first columns of the texts.
    """
    return (
        f"a mean at each {axis} of {point} needs texts that begin in the same column; got texts "
        f"that begin in the columns {', '.join(map(str, starts))}: pad on the right, use "
        f"across=('batch', '{axis}'), or count from the end with {axis}=-1"
    )


def wrong_side(side: Side, because: str) -> str:
    """Return the message for texts with padding on a side, which must be on the other side.

    Args:
        side: the side of the padding.
        because: the reason.

    >>> wrong_side("left", because="a GPT counts padding")
    'texts must be padded on the right, because a GPT counts padding; got padding before a token'
    """
    rule = f"texts must be padded on the {other_side(side)}, because {because}"
    return f"{rule}; got padding {_PLACES[side]}"


def unequal_lengths(side: Side, because: str, lacks_pad_token: bool) -> str:
    """Return the message for padded texts in a model that reads padding on both sides.

    Args:
        side: the side of the padding.
        because: the reason.
        lacks_pad_token: whether the model may read padding only because its config names no
            padding token.

    >>> unequal_lengths("right", because="a GPT reads padding", lacks_pad_token=False)
    'texts must have one length, because a GPT reads padding; got padding after a token'
    """
    choice = ", or the model a config.pad_token_id" if lacks_pad_token else ""
    return f"texts must have one length{choice}, because {because}; got padding {_PLACES[side]}"


def different_frequencies(kind: str, most: int, is_dynamic: bool) -> str:
    """Return the message for a batch in which a text gets the frequencies of a longer text.

    Args:
        kind: the class of the model.
        most: the length above which the frequencies change.
        is_dynamic: whether the frequencies of longer texts depend on the length.

    >>> print(different_frequencies("Phi3", 4096, is_dynamic=False))  # doctest: +ELLIPSIS
    texts of more than 4096 tokens must not be in a batch with shorter texts, because a Phi3 ...
    """
    other = "texts of another length" if is_dynamic else "shorter texts"
    return (
        f"texts of more than {most} tokens must not be in a batch with {other}, because a {kind} "
        "computes its rotary frequencies from the longest text; got both, or as many columns with "
        "padding: run them in separate batches, without columns that are padding in all texts"
    )


def decoder_copies_padding(kind: str, side: Side) -> str:
    """Return the message for a model whose decoder copies padded texts of the encoder.

    Args:
        kind: the class of the model.
        side: the side of the padding.

    >>> print(decoder_copies_padding("Bart", "left"))  # doctest: +ELLIPSIS
    a padded Bart must be given decoder_input_ids, because ...; got padding on the left
    """
    reason = "without them its decoder reads input_ids with the padding"
    rule = f"a padded {kind} must be given decoder_input_ids, because {reason}"
    return f"{rule}; got padding on the {side}"


def several_texts(what: str, given: str) -> str:
    """Return the message for several texts, or a text with padding, instead of one text.

    Args:
        what: the name of the text.
        given: the texts.

    >>> several_texts("text", "tokens [2, 3]")
    'text must be a single text without padding; got tokens [2, 3]'
    """
    return f"{what} must be a single text without padding; got {given}"


def different_padding(what: str, given: str, reason: str = "") -> str:
    """Return the message for two batches of texts that must have padding in the same columns.

    Args:
        what: the names of both batches.
        given: the difference.
        reason: the reason of the rule, or its exceptions. Default: no reason.

    >>> different_padding("both texts", given="different padding at column 2")
    'both texts must have the same columns and padding; got different padding at column 2'
    """
    more = reason and f", {reason}"
    return f"{what} must have the same columns and padding{more}; got {given}"


def no_donor(row: int, n_copies: int) -> str:
    """Return the message for a text that no other text with its padding can replace.

    Args:
        row: the row of the text.
        n_copies: the number of rows with the same text, this row included.

    >>> no_donor(3, n_copies=1)
    'resample must have 2 different texts with the same padding; got only row 3'
    """
    given = f"only row {row}" if n_copies == 1 else f"only {n_copies} copies of row {row}"
    return f"resample must have 2 different texts with the same padding; got {given}"


def changed_padding(points: Sequence[str], texts: Sequence[int], column: int | None) -> str:
    """Return the message for hook functions of the user that changed only padding in some texts.

    Args:
        points: the names of the points.
        texts: the numbers of the texts.
        column: the column that was changed; None if there are several.

    >>> print(changed_padding(["embed"], [1, 3], 6))  # doctest: +ELLIPSIS
    a hook function at embed changed only padding in texts 1, 3: column 6 is padding in these ...
    """
    others = len(points) - 1
    more = f" and {others} other point{'s' * (others > 1)}" if others else ""
    first = ", ".join(map(str, texts[:3]))
    where = f"text {first}" if len(texts) == 1 else f"texts {first}"
    if len(texts) > 3:
        where = f"{len(texts)} texts, first: {first}"
    these = "this text" if len(texts) == 1 else "these texts"
    changed = "the changed columns are" if column is None else f"column {column} is"
    return (
        f"a hook function at {points[0]}{more} changed only padding in {where}: {changed} padding "
        f"in {these}. Use an edit such as interp.edits.replace(cache, pos=-1), where pos=-1 is the "
        "last token of each text, or the mask hooks.token_mask()"
    )
