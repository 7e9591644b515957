"""Texts: those of one run, and many that stream through a model, a padded batch at a time."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache, CacheError
from hooks.base import Index, Selection, encoded, progress_bar, require_integer, shown, to_device
from interp.inputs.arguments import each_row, is_listed, joined, require_rows, without_rows
from interp.inputs.token_positions import real_of
from interp.protocol import of


@runtime_checkable
class Tokenized(Protocol):
    """Tokens [batch, pos] and their mask, as `model.to_tokens` gives them."""

    tokens: Tensor
    attention_mask: Tensor | None


Texts = str | Iterable[Any] | Int[Tensor, " pos"] | Shaped[Tensor, "batch pos *size"] | Tokenized
"""One text, a string, a list of tokens or a tensor [pos]; or several, a list of these, a tensor [batch, pos], or what
`model.to_tokens` or a tokenizer of `transformers` gives. Strings need a model with a tokenizer. For a model that reads images or
sounds first, these, as numbers [batch, ...]."""


class Text(NamedTuple):
    """The texts of one run.

    Attributes:
        tokens: [batch, pos]; or images or sounds [batch, ...], for a model that reads these.
        mask: True or 1 at real tokens [batch, pos]; None if all are.
        spans: positions [batch, n] by name.
        more: other arguments of the model by name. Tensors with a row for each text go with the texts, and so do lists of
            tensors, one for each text, which the model gets joined. `position_ids` may be [section, batch, pos].
    """

    tokens: Tensor
    mask: Tensor | None = None
    spans: Mapping[str, Tensor] = {}
    more: Mapping[str, Any] = {}

    @property
    def kwargs(self) -> dict[str, Any]:
        """The model's arguments besides the tokens."""
        more = {
            name: joined(name, value) if is_listed(value, len(self.tokens)) else value
            for name, value in self.more.items()
        }
        return more if self.mask is None else {"attention_mask": self.mask, **more}

    @property
    def of_logits(self) -> "Text":
        """The texts whose positions logits have: those of a decoder, where an encoder reads the others."""
        decoded = self.more.get("decoder_input_ids")
        if not isinstance(decoded, Tensor):
            return self
        return Text(decoded, self.more.get("decoder_attention_mask"))

    @property
    def goes_by_rows(self) -> bool:
        """Whether the texts can be divided and repeated: all arguments have rows for them, or are of none."""
        return not [*without_rows(self.more, self.tokens.shape[:2])]

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """Return `kwargs`, and what a run of the model needs besides.

        These are positions, where the model does not count them from the mask itself, and `use_cache=False` for a model
        that runs only without a cache. What the texts say themselves stays.
        """
        language = of(model)
        positions = getattr(language, "positions_of", None)
        position_ids = {} if self.mask is None or positions is None else positions(self.mask)
        return {**getattr(language, "needed", {}), **position_ids, **self.kwargs}

    @property
    def real(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens, on the tokens' device."""
        return real_of(self.mask, self.tokens.shape[:2]).to(self.tokens.device)

    def at(self, pos: Index | None) -> Bool[Tensor, "batch pos"]:
        """True at the real tokens that are selected, counted in each text; None selects all of them.

        Raises:
            ValueError: if `pos` is not the same for all texts.
        """
        if pos is None:
            return self.real
        chosen = torch.zeros_like(self.real)
        for row, real in zip(chosen, self.real, strict=True):
            columns = real.nonzero()[:, 0]
            row[columns[places_inside(pos, len(columns))]] = True
        return chosen

    def listed(self) -> list[list[int]]:
        """The real tokens of each text."""
        return [row[real].tolist() for row, real in zip(self.tokens, self.real, strict=True)]

    def rows(self, rows: slice | Tensor) -> "Text":
        """Some of the texts.

        Raises:
            ValueError: if an argument has no rows for them.
        """
        every = range(len(self.tokens))
        if isinstance(rows, slice) and every[rows] == every:
            return self
        require_rows(self.more, self.tokens.shape[:2])
        return self.changed(lambda value: value[rows])

    def repeated(self, n: int) -> "Text":
        """`n` copies of the texts in sequence; see `rows` for errors."""
        if n == 1:
            return self
        require_rows(self.more, self.tokens.shape[:2])
        return self.changed(lambda value: value.repeat(n, *[1] * (value.ndim - 1)))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Text":
        """The texts after a change of each tensor that has a row for each text."""
        mask = None if self.mask is None else change(self.mask)
        spans = {name: change(places) for name, places in self.spans.items()}
        more = each_row(self.more, self.tokens.shape[:2], change)
        return Text(change(self.tokens), mask, spans, more)


def as_text(texts: Any) -> Any:
    """A `Text` of a batch, or of a mapping of tensors; other texts, which a model must read first, as they are.

    The tokens of a mapping are `input_ids` or, without these, the first entry, such as images.
    """
    if isinstance(texts, Mapping):
        rest = {**texts}
        tokens = rest.pop("input_ids" if "input_ids" in rest else next(iter(rest), ""), None)
        return (
            Text(tokens, rest.pop("attention_mask", None), {}, rest) if is_batch(tokens) else texts
        )
    return Text(texts) if is_batch(texts) else texts


def is_batch(inputs: Any) -> TypeGuard[Tensor]:
    """Whether inputs are a tensor with a row for each text: tokens [batch, pos], or images or sounds [batch, ...]."""
    if not isinstance(inputs, Tensor):
        return False
    return inputs.ndim == 2 or (inputs.ndim > 2 and inputs.is_floating_point())


def places_inside(pos: Index, n: int) -> list[int]:
    """The places that are selected of a text of `n` tokens, without those that it is too short for.

    Raises:
        ValueError: if `pos` is not the same for all texts.
    """
    chosen = Selection(pos)
    if chosen.is_by_example:
        raise ValueError(f"pos must be the same in each text; got {chosen}")
    (places,) = chosen.rows(n, "pos", whole=False)
    return [place for place in places if 0 <= place < n]


def are_aligned(one: Text, other: Text) -> bool:
    """Whether two texts have the same columns and padding."""
    return torch.equal(one.real, other.real)


def text_of(cache: ActivationCache) -> Text | None:
    """The texts of a cache's run; None where it was given no `tokens` or `input_ids`.

    >>> from interp.protocol import run_with_cache
    >>> from models import Transformer, TransformerConfig
    >>> model = Transformer(TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4))
    >>> _, cache = run_with_cache(model.eval(), torch.tensor([[3, 1]]))
    >>> text_of(cache).tokens
    tensor([[3, 1]])
    """
    tokens = cache.inputs.get("tokens", cache.inputs.get("input_ids"))
    if not isinstance(tokens, Tensor):
        return None
    mask = cache.inputs.get("attention_mask")
    mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
    fits = mask is not None and mask.shape == tokens.shape[:2]
    # A later piece of a text, or a generation, has the mask that its points read.
    real = None if fits or "decoder_input_ids" in cache.inputs else cache.real()
    if real is not None and real.shape == tokens.shape[:2]:
        mask = real
    return Text(tokens, mask)


def text_of_values(cache: ActivationCache, shape: Sequence[int]) -> Text | None:
    """Return the texts of a cache's values, [batch, pos]; None if the cache does not know their tokens.

    A cache that `at` has cut knows only the texts before the cut.
    """
    text = text_of(cache)
    is_known = text is not None and not cache.is_part and text.tokens.shape == tuple(shape)
    return text if is_known else None


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
    batch = to_tokens(texts)
    return Text(batch.tokens, batch.attention_mask)


def mask_of(cache: ActivationCache, shape: Sequence[int]) -> Tensor | None:
    """Return the mask of a cache's values, True at real tokens; None if there is no padding.

    Args:
        cache: the cache.
        shape: the shape of the values, [batch, pos].

    Raises:
        CacheError: if texts of the run had padding, and it is not known which of these values are padding.
    """
    mask = cache.real()
    if mask is None and (text := text_of(cache)) is not None:
        mask = text.mask  # of a model that does not say which columns are padding
    if mask is None or mask.shape == tuple(shape):
        return mask
    if bool(mask.all()):
        return None
    raise CacheError(
        f"the cache must know which of its values, [batch, pos] {[*shape]}, are padding; its mask is "
        f"{[*mask.shape]}: read the whole cache, or attach the model before the run"
    )


def nan_at_padding(
    values: Float[Tensor, "*axes batch pos"], mask: Tensor | None
) -> Float[Tensor, "*axes batch pos"]:
    """Values with NaN where the mask says padding."""
    return values if mask is None else values.where(to_device(mask, values.device), torch.nan)


def each_text(texts: Texts) -> Iterator[Any]:
    """Each of some texts, without padding: strings, and lists or tensors of tokens."""
    # First of all, because what a tokenizer of transformers gives has a method `tokens`.
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # a table
        rows, real = encoded(texts)
        yield from ([*itertools.compress(*pair)] for pair in zip(rows, real, strict=True))
    elif isinstance(texts, Tokenized):
        yield from Text(texts.tokens, texts.attention_mask).listed()
    elif isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1):
        yield texts
    else:
        if not isinstance(texts, Iterable):
            rule = "texts must be a string, a list of tokens, a tensor, or several"
            raise ValueError(f"{rule}; got {shown(texts)}")
        rest = iter(texts)
        first = next(rest, None)
        if isinstance(first, int):
            yield [first, *rest]
        elif first is not None:
            yield from itertools.chain([first], rest)


def _number_of(texts: Texts) -> int | None:
    """How many texts there are; None if only reading them tells."""
    is_text = isinstance(texts, str) or (isinstance(texts, Tensor) and texts.ndim == 1)
    if is_text or not isinstance(texts, Sequence | Tensor) or not len(texts):
        return 1 if is_text else None
    return 1 if isinstance(texts[0], int) else len(texts)


def padded(texts: Sequence[Any], model: nn.Module, numbers: Sequence[int]) -> Text:
    """Texts as one batch, on the model's device, padded on the right. Equal lengths need no mask.

    Args:
        texts: each text, as `each_text` gives it; at least one.
        model: the model that is to read them.
        numbers: the number of each text, for errors.

    Raises:
        ValueError: if a text has no tokens, or is not a string or a list of integers.

    >>> text = padded([[3, 1, 4], [1, 5]], nn.Linear(2, 3), range(2))
    >>> text.tokens.tolist(), text.mask.int().tolist()
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
    lengths = torch.tensor([len(row) for row in rows])
    tokens = nn.utils.rnn.pad_sequence(
        [row.long() for row in rows],
        batch_first=True,
        padding_value=getattr(of(model), "pad_token", 0),
    )
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    device = next((weight.device for weight in model.parameters()), tokens.device)
    return Text(tokens.to(device), None if mask.all() else mask.to(device))


def batches(texts: Texts, model: nn.Module, size: int) -> Iterator[tuple[int, Text]]:
    """Batches of at most `size` texts, each with the number of its first text.

    Raises:
        ValueError: as for `padded`, if `size` is below 1, or if there is no text.
    """
    require_integer("batch", size)
    rest, first = each_text(texts), 0
    # An error may leave this iterator half read, so whoever reads it `shows_progress`, and takes the bar away.
    with progress_bar("texts", _number_of(texts)) as count:
        while some := list(itertools.islice(rest, size)):
            numbers = range(first, first + len(some))
            yield first, padded(some, model, numbers)
            count(len(some))
            first = numbers.stop
    if not first:
        raise ValueError("texts must hold at least one text; got none")
