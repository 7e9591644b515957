"""Pairs of clean and corrupted texts, checked for alignment, with their answers and named spans."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, Unpack

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    NoOthers,
    Text,
    Texts,
    as_text,
    each_text,
    is_batch,
    refuse,
    refuse_unbound,
    require_choice,
    require_rows,
    shown,
    without_gradients,
    writer_of,
)
from interp import pictures
from interp.inputs.copies import digests, numbered
from interp.inputs.token_positions import Tokens, as_positions, is_worded, last_real, short
from interp.kinds import require_made
from interp.measuring import Metric, Writer, evaluate, in_words, last_of, metric_for
from interp.metrics import accuracy, log_prob, logit_diff
from interp.pairs.spans import Spans, aligned
from interp.pairs.wording import answer_positions, tokens_of_pairs
from interp.pictures import objects
from interp.protocol import logits_of, runner_of

Answers = Int[Tensor, " batch"] | Int[Tensor, "batch 2"] | int | str | Sequence[Any]
"""The right token of each text, or the right and the wrong one, as numbers or as text."""

PatchingDirection = Literal["denoising", "noising"]
"""Denoising edits the corrupted run, with values of the clean one; noising the clean run."""

_TOKENS_AT_ONCE = 2048
P = ParamSpec("P")
R = TypeVar("R")


class Pairs(pictures.Shown):
    """Texts to analyse: clean ones and, where two runs are compared, corrupted ones; and what is measured on them.

    Without spans, a position of the clean text corresponds to the same position of the corrupted one, so
    the two have the same shape and padding. With spans, only the positions of a span correspond, and
    lengths may differ.

    Texts may be strings: `Pairs("Anne lost to", "Mark lost to", ("Mary", "John"))`. Then the analyses read them by
    the model's tokenizer, or `read_by(model)` does.

    Args:
        clean: the texts, [batch, pos] or in any form that `model.to_tokens` takes; or images or sounds [batch, ...], for a model
            that reads these first. Or a mapping of the model's arguments, such as a processor gives: `input_ids` (or what else is
            first), `attention_mask`, and others such as `pixel_values`, `decoder_input_ids` or `query_key_mask`. Tensors
            with a row for each text go with the texts, and so do positions [section, batch, pos]. Where a model reads the images of all texts in a row, give a list
            with a tensor for each text.
        corrupted: other texts; if they are no mapping, with the mask and other arguments of the clean ones. None where no analysis
            needs them, because values come from an edit or a source.
        answers: the right token of each clean text, or the right and the wrong one, as a tensor; or a token, or a
            tuple (right, wrong), for all texts, or a list of these. An answer that is a word of the text is that
            word with a space before it, where that is one token.
        attention_mask: True or 1 at real tokens of the texts; None if there is no padding, or texts are mappings with masks.
        spans: by name, positions for each example in the clean text, or a mask of them. -1 is the last real
            token. Of strings: a part of the text, or a tuple (of the clean one, of the corrupted one), or a list of
            these; all tokens that it touches. Of chats (`models.chat`): names of their spans, such as `["assistant"]`.
        metric: a function from logits to a number per example. By default the logit difference of right and
            wrong answers, or the log-probability of the right ones.
        corrupted_spans: the same for the corrupted texts; by default as in the clean ones.
        last_only: keep only the last position of each span. Otherwise a span has as many positions in
            the clean text as in the corrupted one.
        pos: the position of the answers, one for all texts or one for each, as for `logit_diff`. By default
            the last real token or, for a model that reads texts in both directions, the mask token.

    Attributes:
        is_read: whether all are tokens, as those of `read_by` are.
        answers: as they were given, and a tensor of tokens once they are read.
        pos: the position of the answers; None until a model reads the pairs, if it was not given.
        solved_of: from how many pairs `solved` chose these; None if it did not, and for parts of these.

    Raises:
        ValueError: if texts, answers, masks or spans do not fit each other; of strings when a model reads them.
            If a model reads texts in both directions, and they do not have one mask token each.
        TypeError: if the metric is no function.

    >>> clean, corrupted = torch.tensor([[3, 1, 4], [2, 1, 5]]), torch.tensor([[3, 6, 4], [2, 6, 5]])
    >>> pairs = Pairs(clean, corrupted, torch.tensor([[7, 8], [9, 8]]), spans={"name": [[1], [1]]})
    >>> pairs
    Pairs: 2, clean [2, 3], corrupted [2, 3], spans name
    >>> pairs.metric
    logit_diff([7, 9], [8, 8], pos=-1)
    """

    answers: Any
    solved_of: int | None = None

    def __init__(
        self,
        clean: Texts,
        corrupted: Texts | None = None,
        answers: Answers | None = None,
        *,
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
        spans: Mapping[str, Any] | Sequence[str] | None = None,
        metric: Metric | None = None,
        corrupted_spans: Spans | None = None,
        last_only: bool = False,
        pos: Tokens | None = None,
        **others: Unpack[NoOthers],
    ) -> None:
        refuse(others, Pairs.__init__, "Pairs")
        for name, texts in (("clean", clean), ("corrupted", corrupted)):
            if isinstance(texts, int | float | nn.Module | ActivationCache):
                raise TypeError(f"{name} must be texts; got {shown(texts)}")
        if metric is not None:
            last_of(metric)  # refuses what is no function
            if pos is not None:
                raise ValueError(
                    f"pos must be given to the metric, as in {metric!r}; got pos={pos!r}"
                )
        self._metric, self.last_only = metric, last_only
        self.pos = None if pos is None else as_positions(pos)
        # Gives the text of tokens, once a model has read the pairs.
        self._write: Writer | None = None
        # Each is a `Text`, or what a model must read first.
        one, other = as_text(clean), as_text(corrupted)
        if attention_mask is not None:
            if not isinstance(one, Text) or one.attention_mask is not None:
                got = "some with a mask of their own"
                got = got if isinstance(one, Text) else f"a {type(clean).__name__}"
                raise ValueError(f"attention_mask needs texts that are tensors alone; got {got}")
            one = replace(one, attention_mask=attention_mask)
        if isinstance(one, Text) and isinstance(corrupted, Tensor):  # the words alone are others
            if not is_batch(corrupted):
                got = f"{list(corrupted.shape)}: one text is torch.as_tensor(text)[None]"
                raise ValueError(f"corrupted must be a tensor [batch, pos]; got {got}")
            other = replace(one, tokens=corrupted)
        are_tokens = isinstance(one, Text) and isinstance(other, Text | None)
        self.is_read = are_tokens and not is_worded(answers) and isinstance(spans, Mapping | None)
        if self.is_read:
            named: Any = spans or {}
            one, other, answers = aligned(one, other, answers, named, corrupted_spans, last_only)
        elif corrupted_spans is not None:
            raise ValueError("corrupted_spans needs texts and answers that are tensors")
        self._one, self._other, self.answers, self._spans = one, other, answers, spans or {}

    def read_by(self, model: nn.Module) -> "Pairs":
        """These pairs as tokens of a model, as which analyses run them.

        Raises:
            ValueError: if an answer or a token of the metric is several tokens or may be two, a span is not in
                its text once, or texts do not correspond.
            TypeError: if the model reads tensors only.
        """
        pairs = copy.copy(self)
        if not self.is_read:
            read = tokens_of_pairs(model, self._one, self._other, self.answers, self._spans)
            pairs._one, pairs._other, pairs.answers = aligned(*read, self.last_only)
            pairs.is_read = True
        if pairs.pos is None and pairs.answers is not None and self._metric is None:
            pairs.pos = answer_positions(model, pairs._one, pairs._other)
        pairs._metric = self._metric and metric_for(model, self._metric)
        pairs._write = self._write or writer_of(model)
        return pairs

    @property
    def clean(self) -> Any:
        """The clean texts as they were given, or their tokens."""
        return self._one.tokens if isinstance(self._one, Text) else self._one

    @property
    def corrupted(self) -> Any:
        """The corrupted texts, likewise; None without any."""
        return self._other.tokens if isinstance(self._other, Text) else self._other

    @property
    def spans(self) -> Any:
        """The spans of the clean texts as they were given or, once they are read, positions [batch, n] by name.

        Where an example has fewer than n, its last one is repeated.
        """
        return self._one.spans if self.is_read else self._spans

    @property
    def text(self) -> Text:
        """The clean texts.

        Raises:
            ValueError: if no model has read them yet.
        """
        self._require_read()
        return self._one

    @property
    def other(self) -> Text | None:
        """The corrupted texts, if there are any; see `text`."""
        self._require_read()
        return self._other

    def _require_read(self) -> None:
        if not self.is_read:
            raise ValueError("pairs of strings must be read by a model first: pairs.read_by(model)")

    @property
    def metric(self) -> Metric:
        """The metric: that which was given, or that of the answers.

        Raises:
            ValueError: if there is neither.
        """
        metric = self._metric
        if metric is None:
            self._require_read()
            if self.answers is None:
                raise ValueError("pairs must have answers or a metric; got neither")
            pos = self._listed_pos()
            if self.answers.ndim == 2:
                right, wrong = self.answers.unbind(1)
                metric = logit_diff(right, wrong, pos=pos)
            else:
                metric = log_prob(self.answers, pos=pos)
        return in_words(metric, self._write)

    def _listed_pos(self) -> int | list[int]:
        """The position of the answers as metrics take it."""
        if self.pos is None:
            return -1
        return self.pos.tolist() if isinstance(self.pos, Tensor) else self.pos

    def measured_by(self, metric: Metric) -> "Pairs":
        """The same pairs with another metric."""
        same = copy.copy(self)
        same._metric = metric
        return same

    def texts(self, direction: PatchingDirection) -> tuple[Text, Text]:
        """The text of the run that is edited, and that of the run that values come from.

        Raises:
            ValueError: if there is no such direction, or there are no corrupted texts.
        """
        require_choice("direction", direction, ("denoising", "noising"))
        other = self.other
        if other is None:
            raise ValueError(
                "pairs must have corrupted texts to compare with; got clean ones alone"
            )
        return (self.text, other) if direction == "noising" else (other, self.text)

    @without_gradients
    def solved(self, model: nn.Module, metric: Metric | None = None) -> "Pairs":
        """The pairs that the model gets right. They print how many they were of, as `17 of 20`.

        Args:
            model: a model in evaluation mode.
            metric: what must be above 0 on the clean text. By default the right answer must be likelier
                than the wrong one or, without wrong ones, the likeliest token.

        Raises:
            ValueError: if the model gets none right, or there are neither answers nor a metric.
            ModeError: if the model is in training mode.
        """
        pairs = self.read_by(model)
        right, every = pairs.answers, pairs.text
        if metric is None and self._metric is None and right is not None and right.ndim == 1:
            metric = accuracy(right, pos=pairs._listed_pos())
        metric = pairs.metric if metric is None else metric_for(model, metric)
        runner_of(model)  # refuses dropout
        last = last_of(metric, every.of_logits.attention_mask)
        logits, n_rows = [], max(1, _TOKENS_AT_ONCE // every.tokens.shape[1])
        for start in range(0, len(pairs), n_rows):
            text = every.rows(slice(start, start + n_rows))
            output = model(text.tokens, **text.arguments(model))
            logits.append(last_real(logits_of(output), last, text.of_logits.attention_mask))
        values = evaluate(metric, torch.cat(logits), len(pairs))
        if not (values > 0).any():
            raise ValueError(
                f"the model must get a pair right; got none of {len(self)} by {metric!r}"
            )
        kept = pairs[values > 0]
        kept.solved_of = len(pairs)
        return kept

    def split(self, seed: int = 0, share: float = 0.5) -> tuple["Pairs", "Pairs"]:
        """Two parts drawn at random, without replacement: `share` of the pairs, and the others.

        Copies, which are pairs with the same clean and corrupted tokens, go into the same part. Then
        `share` is the share of the different pairs. Padding and answers do not count.

        Raises:
            ValueError: if a part would be empty.
        """
        texts = torch.tensor(numbered(self.digests()))
        n_texts = int(texts.max()) + 1
        n = round(share * n_texts)
        if not 0 < n < n_texts:
            raise ValueError(
                f"each part must have a pair, and copies stay together; got {n} and {n_texts - n} "
                "different pairs"
            )
        order = torch.randperm(n_texts, generator=torch.Generator().manual_seed(seed))
        is_first = torch.isin(texts, order[:n])
        return self[is_first], self[~is_first]

    def digests(self) -> list[str]:
        """A hash of the texts of each pair, by which it can be recognised."""
        return digests(*filter(None, (self.text, self.other)))

    def view(self) -> pictures.View:
        """The first texts, with a mark at the tokens that differ."""
        if self.is_read and self.clean.ndim > 2:
            return pictures.View(repr(self), [])
        if self.is_read:
            return objects.pairs(self, self._write or (lambda tokens: [*map(str, tokens)]))
        parts = ((name, getattr(self, name)) for name in ("clean", "corrupted", "answers", "spans"))
        says = [f"{name}: {short(value)}" for name, value in parts if value not in (None, {})]
        return pictures.View(repr(self), [], says=says)

    def __len__(self) -> int:
        return len(self.clean) if self.is_read else sum(1 for _ in each_text(self.clean))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Pairs":
        """Some of the pairs: an index, a slice, a list, or a tensor of indices or booleans."""
        at = index.cpu() if isinstance(index, Tensor) else index
        rows = torch.arange(len(self))[at].view(-1)
        if not len(rows):
            raise ValueError(f"some of the pairs must be selected; got none of {len(self)}")
        for text in filter(None, (self.text, self.other)):
            require_rows(text.more, text.tokens.shape[:2])
        part = self._mapped(lambda value: value[rows.to(value.device)])
        part.solved_of = None
        return part

    def to(self, device: torch.device | str) -> "Pairs":
        """The pairs on another device."""
        return self._mapped(lambda value: value.to(device))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        changed = copy.copy(self)
        changed._one, changed._other = (
            text and text.changed(change) for text in (self.text, self.other)
        )
        changed.answers = None if self.answers is None else change(self.answers)
        changed.pos = change(self.pos) if isinstance(self.pos, Tensor) else self.pos
        return changed

    def __repr__(self) -> str:
        if not self.is_read:
            return f"Pairs: {len(self)}, of texts that a model will read"
        count = (
            f"{len(self)}" if self.solved_of is None else f"{len(self)} of {self.solved_of} solved"
        )
        parts = [count, f"clean {list(self.clean.shape)}"]
        if self.corrupted is not None:
            parts.append(f"corrupted {list(self.corrupted.shape)}")
        if self.spans:
            parts.append(f"spans {', '.join(self.spans)}")
        return f"Pairs: {', '.join(parts)}"


def of_pairs(analysis: Callable[P, R]) -> Callable[P, R]:
    """An analysis of pairs whose error for `metric=` says that the pairs hold it."""

    @functools.wraps(analysis)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "metric" in kwargs:
            raise TypeError(
                f"{analysis.__name__} takes no metric=, because the pairs hold it: Pairs(..., metric=...)"
            )
        try:
            return analysis(*args, **kwargs)
        except TypeError as error:
            refuse_unbound(analysis, args, kwargs, error)
            raise

    return run


def pairs_for(model: nn.Module, pairs: Pairs) -> Pairs:
    """The pairs as tokens of a model, after a check that they are not something else.

    Raises:
        TypeError: if they are.
        ValueError: as for `Pairs.read_by`.
    """
    require_made("pairs", pairs, Pairs)
    return pairs.read_by(model)
