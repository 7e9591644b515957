"""Text: the tokens of a batch of texts, with their mask, strings and spans, as one value.

1. `model.to_tokens` makes a `Text` from strings, and `as_text` from tensors. `pairs.text` is a
   `Text`, and every function of texts accepts a `Text`.
2. It has methods for padding, rows, positions and words of texts. The rules for positions are in
   `hooks.base.selection`.
3. A run reads `tokens` and `arguments(model)`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn

from hooks.base.accessor import language_of, writer_of
from hooks.base.arguments import each_row, is_listed, joined, require_rows, without_rows
from hooks.base.decorators import explains_calls
from hooks.base.errors import unknown_name
from hooks.base.hints import HintsAtNames
from hooks.base.selection import Index, Selection, real_of, real_positions, true_columns
from hooks.base.transfer import to_device


class WordsOfTexts(str):
    """The label of a position of several texts, a string, with the word of every text.

    The label is the word if all texts have the same word, both words if the texts have two, as in
    "Mary|John", and empty otherwise.

    Attributes:
        different: the different words of the texts, in the order of the texts.

    >>> label = WordsOfTexts(["Mary", "John", "Anne"])
    >>> str(label), label.different
    ('', ('Mary', 'John', 'Anne'))
    """

    different: tuple[str, ...]

    def __new__(cls, different: Iterable[str]) -> "WordsOfTexts":
        """Return the label of a position with these different words."""
        words = tuple(different)
        label = super().__new__(cls, "|".join(words) if len(words) < 3 else "")
        label.different = words
        return label

    def __reduce__(self) -> tuple[Any, ...]:
        return WordsOfTexts, (self.different,)


@dataclass(frozen=True, eq=False)
class Text(HintsAtNames):
    """A batch of texts: all that one run of a model reads.

    A `Text` can be unpacked: `tokens, attention_mask = model.to_tokens(texts)`.

    Attributes:
        tokens: the tokens [batch, pos]; or images or sounds [batch, ...], for a model of images or
            sounds.
        attention_mask: True or 1 at real tokens, False or 0 at padding, [batch, pos]; None if there
            is no padding.
        texts: the strings; None if the texts were given as tokens.
        spans: positions in each text by name: a tensor [batch, n], or a list for each text.
        more: other arguments of the model by name. If texts are selected, the rows of a tensor with
            one row for each text are selected too, and so are the entries of a list with one tensor
            for each text. The model receives the tensors of a list joined as one tensor.
            `position_ids` may be [section, batch, pos].

    >>> text = Text(torch.tensor([[3, 1, 4], [0, 0, 5]]), torch.tensor([[1, 1, 1], [0, 0, 1]]))
    >>> text
    Text [2, 3], padded
    >>> text.listed()
    [[3, 1, 4], [5]]
    """

    tokens: Shaped[Tensor, "batch *size"]
    attention_mask: Shaped[Tensor, "..."] | None = None
    texts: tuple[str, ...] | None = None
    spans: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def padded(
        cls,
        rows: Sequence[Shaped[Tensor, " _pos"]],
        pad: int = 0,
        *,
        side: Literal["left", "right"] = "right",
        device: torch.device | None = None,
        texts: tuple[str, ...] | None = None,
    ) -> "Text":
        """Return texts of any lengths as one batch. Equal lengths need no mask.

        Args:
            rows: the tokens of each text, on the CPU.
            pad: the token that pads shorter texts.
            side: the side of the padding.
            device: the device of the batch. Default: the CPU.
            texts: the strings of the tokens.

        >>> Text.padded([torch.tensor([3, 1, 4]), torch.tensor([5])], side="left").tokens
        tensor([[3, 1, 4],
                [0, 0, 5]])
        """
        tokens = nn.utils.rnn.pad_sequence(
            [tokens_of_text.long() for tokens_of_text in rows],
            batch_first=True,
            padding_value=pad,
            padding_side=side,
        )
        n_pos = tokens.shape[1]
        lengths = torch.tensor([[len(tokens_of_text)] for tokens_of_text in rows])
        columns = torch.arange(n_pos)
        mask = columns < lengths if side == "right" else columns >= n_pos - lengths
        is_padded = any(len(tokens_of_text) < n_pos for tokens_of_text in rows)
        return cls(tokens.to(device), mask.to(device) if is_padded else None, texts)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.tokens, self.attention_mask))

    def __getitem__(self, index: Any) -> Any:
        """Raise an error, because `text[0]` could be a text or a tensor. It names both.

        >>> Text(torch.tensor([[3, 1, 4]]))[0]  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: a Text cannot be indexed: use text.rows(slice(0, 1)), text.tokens[0] or ...
        """
        row = f"slice({index}, {index + 1})" if isinstance(index, int) else "slice(0, 1)"
        raise TypeError(
            f"a Text cannot be indexed: use text.rows({row}), text.tokens[0] or text.texts"
        )

    def __len__(self) -> int:
        """Raise an error, because the length could be of texts or of tokens. It names both.

        >>> len(Text(torch.tensor([[3, 1, 4]])))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        TypeError: the length of a Text is ambiguous: use len(text.tokens) for texts, ...
        """
        raise TypeError(
            "the length of a Text is ambiguous: use len(text.tokens) for texts, and "
            "text.tokens.shape[1] for tokens"
        )

    # Without this method, Python would ask for the length.
    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        padded = "" if self.attention_mask is None else ", padded"
        first = "" if self.texts is None else f": {self.texts[0]!r:.60}"
        return f"Text {list(self.tokens.shape)}{padded}{first}"

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments of the model, without the tokens."""
        more = {
            name: joined(name, value) if is_listed(value, len(self.tokens)) else value
            for name, value in self.more.items()
        }
        mask = self.attention_mask
        return more if mask is None else {"attention_mask": mask, **more}

    @explains_calls
    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return `kwargs` and further arguments that a run of the model needs.

        The further arguments are positions, if the model does not count them from the mask itself,
        and `use_cache=False`, if the model runs only without a cache. An argument that is already
        in `kwargs` keeps its value.
        """
        language = language_of(model)
        mask = self.attention_mask
        positions = getattr(language, "positions_of", None)
        position_ids = {} if mask is None or positions is None else positions(mask)
        return {**getattr(language, "needed", {}), **position_ids, **self.kwargs}

    @property
    def of_logits(self) -> "Text":
        """The texts whose positions the logits have.

        In an encoder-decoder model, these are the texts of the decoder.
        """
        decoded = self.more.get("decoder_input_ids")
        if not isinstance(decoded, Tensor):
            return self
        return Text(decoded, self.more.get("decoder_attention_mask"))

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens, on the tokens' device.

        Raises:
            ValueError: if the shapes of the mask and the tokens differ.
        """
        return to_device(real_of(self.attention_mask, self.tokens.shape[:2]), self.tokens.device)

    @property
    def has_padding(self) -> bool:
        """True if some column of a text is padding."""
        return self.attention_mask is not None and not bool(self.real.all())

    @property
    def columns(self) -> list[list[int]]:
        """The columns of the real tokens of each text."""
        return true_columns(real_of(self.attention_mask, self.tokens.shape[:2]))

    @property
    def positions(self) -> Int[Tensor, "batch pos"]:
        """The position of each column, which counts only real tokens; see `real_positions`."""
        return real_positions(self.real)

    def mask_on_cpu(self) -> Shaped[Tensor, "..."] | None:
        """Return the mask on the CPU, for checks that read its numbers several times.

        Each look at the numbers of a mask on a device waits for the device.
        """
        return None if self.attention_mask is None else self.attention_mask.cpu()

    def listed(self) -> list[list[int]]:
        """Return the real tokens of each text."""
        rows = self.tokens.tolist()
        if self.attention_mask is None:
            return rows
        real = real_of(self.attention_mask, self.tokens.shape[:2]).tolist()
        return [[*itertools.compress(*pair)] for pair in zip(rows, real, strict=True)]

    def at(self, pos: Index | None) -> Bool[Tensor, "batch pos"]:
        """Return a mask that is True at the selected real tokens.

        Args:
            pos: the positions, the same for all texts. Position 0 is the first real token of each
                text, and -1 is the last. Padding is not counted: in edits and caches, unlike here,
                positions from 0 on count columns of the batch. None selects all real tokens.

        Raises:
            ValueError: if `pos` is not the same for all texts.
        """
        if pos is None:
            return self.real
        chosen = torch.zeros_like(self.real)
        for chosen_in_text, columns in zip(chosen, self.columns, strict=True):
            inside = places_inside(pos, len(columns))
            chosen_in_text[[columns[place] for place in inside]] = True
        return chosen

    def is_aligned_with(self, other: "Text") -> bool:
        """Return whether the other texts have the same columns and padding."""
        if self.attention_mask is other.attention_mask:
            return self.tokens.shape[:2] == other.tokens.shape[:2]
        return torch.equal(self.real, other.real)

    @explains_calls
    def words(self, model: nn.Module, *others: "Text") -> list[str] | None:
        """Return the word of each column, or None without a tokenizer.

        If the texts have two different tokens in a column, its word contains both, as in
        "Mary|John". If they have more than two, its word is empty. `WordsOfTexts.different` has all
        words of a column.

        Args:
            model: the model, whose tokenizer knows the tokens.
            others: more texts with the same columns, such as corrupted texts.
        """
        texts = (self, *others)
        write = writer_of(model)
        if write is None or any(text.tokens.ndim > 2 for text in texts):
            return None
        # The different tokens of each column, in order. Each token is written once.
        columns: list[dict[int, None]] = [{} for _ in range(self.tokens.shape[1])]
        for text in texts:
            for tokens, real in zip(text.tokens.tolist(), text.real.tolist(), strict=True):
                for column, token, is_real in zip(columns, tokens, real, strict=False):
                    if is_real:
                        column[token] = None
        different = [*dict.fromkeys(itertools.chain(*columns))]
        words = dict(zip(different, write(different), strict=True))
        return [WordsOfTexts(map(words.__getitem__, column)) for column in columns]

    @property
    def goes_by_rows(self) -> bool:
        """True if the batch can be divided and repeated.

        This is possible if each argument in `more` either has a row or a tensor for each text, or
        does not depend on the texts.
        """
        return not [*without_rows(self.more, self.tokens.shape[:2])]

    def rows(self, rows: slice | Tensor) -> "Text":
        """Return some of the texts.

        Raises:
            ValueError: if an argument does not have a row for each text.
        """
        every = range(len(self.tokens))
        if isinstance(rows, slice) and every[rows] == every:
            return self
        require_rows(self.more, self.tokens.shape[:2])

        def selected(value: Tensor) -> Tensor:
            return value[rows if isinstance(rows, slice) else to_device(rows, value.device)]

        return self.changed(selected)

    def repeated(self, n: int) -> "Text":
        """Return `n` copies of the texts in sequence. For errors see `rows`."""
        if n == 1:
            return self
        require_rows(self.more, self.tokens.shape[:2])
        return self.changed(lambda value: value.repeat(n, *[1] * (value.ndim - 1)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Text":
        """Return the texts after the same change of the rows in each of their tensors and lists.

        Args:
            change: the function that selects or repeats rows, such as `lambda rows: rows[:2]`.
        """
        numbers = change(torch.arange(len(self.tokens))).tolist()

        def rows_of(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            return [value[number] for number in numbers]

        return dataclasses.replace(
            self,
            tokens=change(self.tokens),
            attention_mask=None if self.attention_mask is None else change(self.attention_mask),
            texts=None if self.texts is None else tuple(rows_of(self.texts)),
            spans={name: rows_of(places) for name, places in self.spans.items()},
            more=each_row(self.more, self.tokens.shape[:2], change),
        )


def as_text(texts: Any) -> Any:
    """Return a tensor with a row for each text, or a mapping with this tensor, as a `Text`.

    Values in other forms, such as strings, need a tokenizer and are returned unchanged.

    The tokens of a mapping are `input_ids` or, without these, the first entry, such as images.
    """
    if isinstance(texts, Mapping):
        others = {**texts}
        tokens = others.pop("input_ids" if "input_ids" in others else next(iter(others), ""), None)
        if not is_batch(tokens):
            return texts
        return Text(tokens, others.pop("attention_mask", None), more=others)
    return Text(texts) if is_batch(texts) else texts


def text_of_inputs(inputs: Mapping[str, Any]) -> Text | None:
    """Return the texts of a run from its arguments by name.

    The result is None if the run has neither `tokens` nor `input_ids`.

    >>> text_of_inputs({"tokens": torch.tensor([[3, 1]]), "last": 1})
    Text [1, 2]
    """
    tokens = inputs.get("tokens", inputs.get("input_ids"))
    if not isinstance(tokens, Tensor):
        return None
    mask = inputs.get("attention_mask")
    return Text(tokens, mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None)


def is_batch(inputs: Any) -> TypeGuard[Tensor]:
    """Return whether inputs are a tensor with a row for each text.

    Tokens are [batch, pos], and images or sounds are [batch, ...].
    """
    if not isinstance(inputs, Tensor):
        return False
    return inputs.ndim == 2 or (inputs.ndim > 2 and inputs.is_floating_point())


def places_inside(pos: Index | Selection, n: int) -> list[int]:
    """Return the selected places in a text of `n` tokens. Places after its end are left out.

    Raises:
        ValueError: if `pos` is not the same for all texts.
    """
    chosen = pos if isinstance(pos, Selection) else Selection(pos)
    if chosen.is_by_example:
        raise ValueError(f"pos must be the same in each text; got {chosen}")
    (places,) = chosen.rows(n, "pos", whole=False)
    return [place for place in places if 0 <= place < n]


def named_spans(texts: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the positions of spans in each text, such as the messages of a role in chats.

    Args:
        texts: texts in any form. Only a `Text` has spans.
        names: the names of spans.

    Raises:
        UnknownNameError: if the texts have no span of a name; the error lists close matches.
        ValueError: if one text lacks the span, such as a chat without a message of a role.

    >>> named_spans(Text(torch.tensor([[3, 1, 4]]), spans={"user": [[1, 2]]}), ["user"])
    {'user': [[1, 2]]}
    """
    known = texts.spans if isinstance(texts, Text) else {}
    if missing := [name for name in names if name not in known]:
        error = unknown_name(missing[0], known, "span of these texts")
        if not known:
            error.args = (f"{error.args[0]}: they have no spans; positions are numbers from 0",)
        raise error
    for name in names:
        for n, places in enumerate(known[name]):
            if not len(places):
                raise ValueError(
                    f"each text must have the span {name!r}; text {n} does not have it"
                )
    return {name: known[name] for name in names}
