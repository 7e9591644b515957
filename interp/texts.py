"""Texts: those of one run, and many that stream through a model, a padded batch at a time."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from hooks import ActivationCache
from interp.protocol import of

Tokens = Sequence[int] | Int[Tensor, " pos"]
"""The tokens of one text."""

Texts = Sequence[Tokens] | Int[Tensor, "batch pos"]
"""The tokens of several texts, of any lengths."""


class Text(NamedTuple):
    """The texts of one run.

    Attributes:
        tokens: [batch, pos].
        mask: True or 1 at real tokens [batch, pos]; None if all are.
        spans: positions [batch, n] by name.
        more: other arguments of the model by name. Tensors with a row for each text go with the texts.
    """

    tokens: Tensor
    mask: Tensor | None = None
    spans: Mapping[str, Tensor] = {}
    more: Mapping[str, Any] = {}

    @property
    def kwargs(self) -> dict[str, Any]:
        """The model's arguments besides the tokens."""
        return {**self.more} if self.mask is None else {"attention_mask": self.mask, **self.more}

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """`kwargs` and, where the model does not count positions from the mask itself, the positions."""
        positions = getattr(of(model), "positions_of", None)
        found = {} if self.mask is None or positions is None else positions(self.mask)
        return {**found, **self.kwargs}

    def rows(self, rows: slice) -> "Text":
        """Some of the texts, without spans."""
        return self._mapped(lambda value: value[rows])

    def repeated(self, n: int) -> "Text":
        """`n` copies of the texts in sequence, without spans."""
        return self._mapped(lambda value: value.repeat(n, *[1] * (value.ndim - 1)))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Text":
        mask = None if self.mask is None else change(self.mask)
        return Text(change(self.tokens), mask, {}, each_row(self.more, len(self.tokens), change))


def each_row(
    arguments: Mapping[str, Any], batch: int, change: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Arguments of a model, of which tensors with a row for each of `batch` texts are changed."""
    return {
        name: change(value) if isinstance(value, Tensor) and len(value) == batch else value
        for name, value in arguments.items()
    }


def are_aligned(one: Text, other: Text) -> bool:
    """Whether two texts have the same columns and padding."""
    full = [torch.ones_like(t.tokens) if t.mask is None else t.mask.long() for t in (one, other)]
    return torch.equal(*full)


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
    mask = cache.inputs.get("attention_mask")
    if not isinstance(tokens, Tensor):
        return None
    return Text(tokens, mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None)


def padded(texts: Texts, model: nn.Module, numbers: Sequence[int]) -> Text:
    """Texts as one batch, on the model's device, padded on the right. Equal lengths need no mask.

    Args:
        texts: the tokens of each text, at least one.
        model: the model that is to read them.
        numbers: the number of each text, for errors.

    Raises:
        ValueError: if a text has no tokens, or is not a list of integers.

    >>> text = padded([[3, 1, 4], [1, 5]], nn.Linear(2, 3), range(2))
    >>> text.tokens.tolist(), text.mask.int().tolist()
    ([[3, 1, 4], [1, 5, 0]], [[1, 1, 1], [1, 1, 0]])
    """
    rows = [torch.as_tensor(text) for text in texts]
    for number, row in zip(numbers, rows, strict=True):
        if row.ndim != 1 or not row.numel() or row.is_floating_point() or row.dtype == torch.bool:
            raise ValueError(
                "a text must be a list of tokens, at least one; "
                f"got {row.dtype} {list(row.shape)} as text {number}"
            )
    lengths = torch.tensor([len(row) for row in rows])
    tokens = nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True)
    mask = torch.arange(tokens.shape[1]) < lengths[:, None]
    device = next((weight.device for weight in model.parameters()), tokens.device)
    return Text(tokens.to(device), None if mask.all() else mask.to(device))


def batches(
    texts: Iterable[Tokens] | Texts, model: nn.Module, size: int
) -> Iterator[tuple[int, Text]]:
    """Batches of at most `size` texts, each with the number of its first text.

    Raises:
        ValueError: as for `padded`, if `size` is below 1, or if there is no text.
    """
    if size < 1:
        raise ValueError(f"a batch must have at least 1 text; got {size}")
    rest, first = iter(texts), 0
    while some := list(itertools.islice(rest, size)):
        numbers = range(first, first + len(some))
        yield first, padded(some, model, numbers)
        first = numbers.stop
    if not first:
        raise ValueError("texts must hold at least one text; got none")
