"""Pairs of clean and corrupted texts, with their answers and named spans."""

import copy
import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, cast

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.base import (
    HintedClass,
    NoOthers,
    Text,
    Texts,
    as_text,
    each_text,
    explains_calls,
    hides_others,
    is_batch,
    number_of_texts,
    padding_messages,
    real_of,
    refuse,
    require_choice,
    require_readable,
    require_rows,
    shown,
    without_gradients,
    writer_of,
)
from interp import plots
from interp.inputs.copies import digests, numbered
from interp.inputs.texts import require_edits_of_all_texts, text_for
from interp.inputs.token_positions import Tokens, as_positions, last_real, short
from interp.json_form import Table, form
from interp.measuring import (
    Metric,
    TokenMetric,
    Writer,
    in_words,
    last_of,
    metric_of_examples,
    name_of,
)
from interp.metrics import accuracy, log_prob, logit_diff
from interp.pairs import printed
from interp.pairs.answers import (
    Continuations,
    rows_of_answers,
    score_of_rows,
    summed_by_example,
)
from interp.pairs.scoring import scoring_of
from interp.pairs.spans import Spans, aligned, aligned_words, require_equal_numbers
from interp.plots import objects
from interp.protocol import logits_of, runner_of

Answers = Int[Tensor, " batch"] | Int[Tensor, "batch 2"] | int | str | Sequence[Any]
"""The right answer of each text, or the right and the wrong answer, as tokens or as strings."""

PatchingDirection = Literal["denoising", "noising"]
"""The run that is edited.

Denoising patches clean values into the corrupted run, and noising the reverse.
"""

_TOKENS_AT_ONCE = 2048
_IN_PAIRS = ("metric", "answers", "spans", "corrupted_spans", "last_only", "per_token")
"""Arguments of `Pairs` that people pass to analyses."""
P = ParamSpec("P")
R = TypeVar("R")


class Pairs(plots.Shown, metaclass=HintedClass):
    """Clean texts, corrupted texts to compare them with, and the metric of an analysis.

    Without spans, a position of the clean text corresponds to the same position of the corrupted
    text, so both texts must have the same shape and padding. With spans, only the positions of a
    span correspond, and the lengths may differ.

    Texts may be strings: `Pairs("Anne lost to", "Mark lost to", (" Mary", " John"))`. An
    analysis converts the strings to tokens with the model's tokenizer. `read_by(model)` returns the
    converted pairs.

    Answers may be several tokens: `Pairs("The capital of France is", "The capital of Italy is",
    (" Paris, the city", " Rome, the city"))`. An analysis then runs a row for each answer, which
    contains the text and the answer (`rows`). Positions of edits and results are positions of the
    texts. An edit without positions also changes the positions of the answer. If it patches values
    from the other text, these come from a row with the other text and the same answer.

    Args:
        clean: the clean texts, as tokens [batch, pos] or in any form that `model.to_tokens`
            accepts. For a model whose first input is an image or a sound, a tensor [batch, ...].
            For several inputs, a mapping of the model's arguments, such as the output of a
            processor: first `input_ids` (or another first input), then `attention_mask` and
            arguments such as `pixel_values`, `decoder_input_ids` or `query_key_mask`. If pairs are
            selected or reordered, so are the rows of an argument with a row for each text, and the
            batch axis of `position_ids` [section, batch, pos]. If a model reads the images of all
            texts as one tensor without a row for each text, pass a list with a tensor for each
            text. The model receives these tensors joined.
        corrupted: the corrupted texts. If they are not a mapping, they use the mask and the other
            arguments of the clean texts. Default: None, for an analysis whose values come from an
            edit or a source.
        answers: the right answer of each clean text, or the right and the wrong answer. If each
            answer is one token, this may be a tensor [batch] or [batch, 2]. Otherwise pass one
            answer or one tuple (right, wrong) for all texts, or a list of them with one for each
            text. An answer is a string of any number of tokens, a token, or a tensor of tokens [n].
            A string that does not begin with a space could be a new word, which follows a space, or
            the rest of a word. If only one of these two forms is one token, the answer is this
            form. Otherwise, if the text contains the string as a word, the answer is a new word.
            Default: None, for a metric that needs no answers.
        attention_mask: True or 1 at the real tokens of the texts. Default: None, if there is no
            padding, or if the texts are mappings that contain masks.
        spans: a mapping from the name of a span to its positions in the clean text of each example:
            a list or a tensor of integers for each example, or a mask [batch, pos]. -1 is the last
            real token; positions from 0 count columns. For strings, a span is a part of the text,
            or a tuple (clean part, corrupted part), or a list with one of these for each text; the
            positions are all tokens that overlap the part. For chats (`models.chat`), pass the
            names of their spans, such as `["assistant"]`. Patching and attribution of values then
            have the axis `span` by default. Analyses without positions, such as scores of edges
            without `over`, use spans only if you name them: `over="span"`. Default: no spans.
        metric: a function from logits to a number for each example. Default: the logit difference
            of right and wrong answers, or the log-probability of the right answers if there are no
            wrong ones. If an answer is several tokens: the log-probability of the right answer
            given the text, minus the log-probability of the wrong answer if there is one.
        corrupted_spans: the positions of the spans in the corrupted texts. Default: the same
            positions as in the clean texts.
        last_only: whether to use only the last position of each span. If False, a span must have
            the same number of positions in both texts. Default: False.
        pos: the position of the answers, whose logits are measured: one for all texts, or a list or
            tensor with one for each text, as in `logit_diff`. -1 is the last real token of a text,
            as in edits. (In edits, a list selects the same columns in every text.) Default: the
            last real token, or the mask token for a model that reads texts in both directions.
            Answers of several tokens always follow the last real token.
        per_token: whether to divide the log-probability of an answer of several tokens by its
            number of tokens. Default: False.

    Use `clean` and `corrupted` for tokens or strings. Functions of your own that run a model need
    the mask and the other inputs too: after `read_by(model)`, `text` is the clean text with them,
    `other` is the corrupted text, and `texts(direction)` returns both, first the text whose run is
    edited.

    Attributes:
        is_read: whether texts, answers and spans are tokens and positions, as in the result of
            `read_by`.
        answers: the answers as they were given. After a model has read the pairs, a tensor of
            tokens or, if an answer is several tokens, `Continuations`.
        continuations: the answers of several tokens that the metric scores: the argument `answers`,
            or the strings of a metric such as `log_prob(" Paris, the city")`. None if all answers
            are one token, and for metrics that score no answers of several tokens.
        pos: the position of the answers. If no position was given, it is None until a model reads
            the pairs.
        solved_of: the number of pairs from which `solved` selected these pairs. None for all other
            pairs.

    Raises:
        ValueError: if texts, answers, masks or spans do not fit each other. For strings, only
            different numbers of texts and wrong numbers of answers are found at once. Other errors
            are raised when a model reads the pairs. Also if a model reads texts in both directions,
            and a text does not have exactly one mask token.
        TypeError: if the metric is not a function.

    >>> clean = torch.tensor([[3, 1, 4], [2, 1, 5]])
    >>> corrupted = torch.tensor([[3, 6, 4], [2, 6, 5]])
    >>> pairs = Pairs(clean, corrupted, torch.tensor([[7, 8], [9, 8]]), spans={"name": [[1], [1]]})
    >>> pairs
    Pairs: 2, read: clean [2, 3], corrupted [2, 3], spans name
      first clean: [3, 1, 4]
      first corrupted: [3, 6, 4]
      first answer: right 7, wrong 8
    >>> pairs.metric
    logit_diff([7, 9], [8, 8], pos=-1)
    """

    answers: Any
    solved_of: int | None = None
    continuations: Continuations | None = None
    last_only: bool
    pos: int | Int[Tensor, " batch"] | None
    per_token: bool
    is_read: bool

    @explains_calls
    @hides_others
    def __init__(
        self,
        clean: "Texts",
        corrupted: "Texts | None" = None,
        answers: "Answers | None" = None,
        *,
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
        spans: Mapping[str, Any] | Sequence[str] | None = None,
        metric: "Metric | None" = None,
        corrupted_spans: "Spans | None" = None,
        last_only: bool = False,
        pos: "Tokens | None" = None,
        per_token: bool = False,
        **others: Unpack[NoOthers],
    ) -> None:
        refuse(others, Pairs.__init__, "Pairs")
        _require_texts(clean=clean, corrupted=corrupted)
        _require_answers(answers, number_of_texts(clean))
        if metric is not None:
            _require_metric(metric, pos)
        self._metric = metric
        # Answers of several tokens are measured by their log-probability. If the same call also has
        # a metric, it is unclear which of the two is meant, and a model that reads the pairs raises
        # an error. A metric of `measured_by` replaces the log-probability.
        self._has_both = metric is not None and answers is not None
        self.last_only = last_only
        self.pos = None if pos is None else as_positions(pos)
        # The function that converts tokens to strings. It is known when a model reads the pairs.
        self._write: Writer | None = None
        # Both are a `Text`, or texts that a model must read first.
        self._clean = _with_mask(as_text(clean), attention_mask, clean)
        self._corrupted = _corrupted_text(corrupted, self._clean)
        if corrupted is not None:
            _require_as_many(clean, corrupted)
        self.answers = answers
        self.per_token = per_token
        self._spans: Any = spans or {}
        are_tokens = isinstance(self._clean, Text) and isinstance(self._corrupted, Text | None)
        has_columns = are_tokens and isinstance(spans, Mapping | None)
        self.is_read = has_columns and not _must_be_read(answers)
        # Positions of corrupted texts are columns of tensors. Other spans may be parts of strings.
        self._has_spans = self.is_read or (has_columns and corrupted_spans is not None)
        if self._has_spans:
            self._clean, self._corrupted = aligned(
                self._clean,
                self._corrupted,
                spans=cast(Spans, self._spans),
                corrupted_spans=corrupted_spans,
                last_only=last_only,
            )
        elif corrupted_spans is not None:
            raise ValueError("corrupted_spans needs texts that are tensors; got strings or lists")
        if self.is_read:
            self.answers = _as_tensor(answers, self._clean.tokens)
        if isinstance(self.answers, Tensor):
            _require_one_or_two(self.answers, len(self))

    @explains_calls
    def read_by(self, model: nn.Module) -> "Pairs":
        """Return these pairs with all texts and answers as tokens. Analyses call this method.

        Args:
            model: the model whose tokenizer converts strings.

        Raises:
            ValueError: if an answer is empty, or could be both a new word and the rest of a word;
                if a metric needs one token and its string is several tokens; if a span does not
                occur exactly once in its text; or if the two texts of a pair do not fit each other.
                For answers of several tokens also if `pos` or another metric is given, or if the
                model reads texts in both directions.
            TypeError: if the model can read only tensors.

        >>> from models import load
        >>> pairs = Pairs("def __ini", "def __nam", ("t", "e"))
        >>> pairs
        Pairs: 1, not read by a model yet
          clean: 'def __ini'
          corrupted: 'def __nam'
          answer: right 't', wrong 'e'
        >>> pairs.read_by(load("pydoc-4l"))
        Pairs: 1, read: clean [1, 9], corrupted [1, 9]
          clean: 'def __ini'
          corrupted: 'def __nam'
          answer: right 't', wrong 'e'
        """
        clean = text_for(model, self._clean)
        corrupted = None if self._corrupted is None else text_for(model, self._corrupted)
        if not self._has_spans:
            clean, corrupted = aligned_words(
                model, clean, corrupted, spans=self._spans, last_only=self.last_only
            )
        scoring = scoring_of(
            model,
            clean,
            corrupted,
            answers=self.answers,
            metric=self._metric,
            pos=self.pos,
            per_token=self.per_token,
        )
        if self._has_both and isinstance(scoring.answers, Continuations):
            raise ValueError(
                "metric must be left out for answers of several tokens, whose metric is their "
                f"log-probability; got {self._metric!r}"
            )
        pairs = copy.copy(self)
        pairs._clean = clean
        pairs._corrupted = corrupted
        pairs.answers = scoring.answers
        pairs.continuations = scoring.continuations or self.continuations
        pairs._metric = scoring.metric
        pairs.pos = scoring.pos
        # The texts contain the positions of the spans now, so a part of the pairs keeps them.
        pairs._has_spans = True
        pairs.is_read = True
        pairs._write = self._write or writer_of(model)
        return pairs

    def rows(self) -> "Pairs":
        """Return the pairs with one row for each answer, as analyses run them.

        A row contains a prompt and all tokens of an answer except the last token. The rows of the
        right answers come first. The metric of a row is the log-probability of its answer, which is
        multiplied by -1 for a wrong answer.

        If each answer is one token, the method returns the pairs unchanged.

        Raises:
            ValueError: if no model has read the pairs yet, or if an argument of the model has a
                number for each position of a prompt.

        >>> from models import load
        >>> pairs = Pairs("def __ini", answers=(" of", " a")).read_by(load("pydoc-4l"))
        >>> pairs.rows()
        Pairs: 2, read: clean [2, 11]
          first clean: 'def __ini o'
          metric: log_prob(' of') - log_prob(' a')
        >>> pairs.metric
        log_prob(' of') - log_prob(' a')
        """
        self._require_read()
        answers = self.continuations
        if answers is None:
            return self
        rows = copy.copy(self)
        rows._clean = rows_of_answers(self._clean, answers)
        if self._corrupted is not None:
            rows._corrupted = rows_of_answers(self._corrupted, answers)
        rows._metric = score_of_rows(answers, rows._clean)
        rows.answers = None
        rows.continuations = None
        return rows

    @property
    def clean(self) -> Any:
        """The clean texts: tokens, or the strings of pairs that no model has read."""
        return self._clean.tokens if isinstance(self._clean, Text) else self._clean

    @property
    def corrupted(self) -> Any:
        """The corrupted texts: tokens, or the strings of pairs that no model has read.

        None if there are no corrupted texts.
        """
        return self._corrupted.tokens if isinstance(self._corrupted, Text) else self._corrupted

    @property
    def spans(self) -> Any:
        """The spans of the clean texts: a mapping from names to columns [batch, n].

        Before a model has read strings, the result is the spans as they were given. n is the
        largest number of positions in an example. If an example has fewer, its last column is
        repeated.
        """
        return self._clean.spans if self.is_read else self._spans

    @property
    def text(self) -> Text:
        """The clean texts as tokens, with their mask and their other inputs.

        Raises:
            ValueError: if no model has read them yet.
        """
        self._require_read()
        return self._clean

    @property
    def other(self) -> Text | None:
        """The corrupted texts as tokens; None if there are no corrupted texts.

        Raises:
            ValueError: if no model has read them yet.
        """
        self._require_read()
        return self._corrupted

    @property
    def corrupted_text(self) -> Text:
        """The corrupted texts as tokens, for analyses that compare two texts.

        Raises:
            ValueError: if there are no corrupted texts, or no model has read them yet.
        """
        if self.other is None:
            raise ValueError(
                "pairs must have corrupted texts for a comparison; got only clean texts: pass "
                "Pairs(clean, corrupted), or edit= to an analysis that accepts it, such as "
                "attribution_patching(model, pairs, edit=edits.zero())"
            )
        return self.other

    def _require_read(self) -> None:
        """Raise an error if no model has read the pairs yet."""
        if not self.is_read:
            has_strings = not isinstance(self._clean, Text) or not isinstance(
                self._corrupted, Text | None
            )
            what = "pairs of strings" if has_strings else "pairs with answers of several tokens"
            raise ValueError(f"{what} must be read by a model first: pairs.read_by(model)")

    @property
    def metric(self) -> Metric:
        """The metric that was given, or the default metric of the answers.

        Raises:
            ValueError: if the pairs have no metric and no answers, or if no metric was given and no
                model has read the pairs yet.
        """
        metric = self._metric
        if metric is None:
            self._require_read()
            if self.continuations is not None:
                metric_of_rows = self.rows().metric
                assert isinstance(metric_of_rows, TokenMetric)
                return replace(metric_of_rows, n_texts=len(self))
            if self.answers is None:
                raise ValueError("pairs must have answers or a metric; got None for both")
            pos = self._listed_pos()
            if self.answers.ndim == 2:
                right, wrong = self.answers.unbind(1)
                metric = logit_diff(right, wrong, pos=pos)
            else:
                metric = log_prob(self.answers, pos=pos)
        metric = in_words(metric, self._write)
        is_padded = self.is_read and any(
            text.of_logits.attention_mask is not None
            for text in filter(None, (self.text, self.other))
        )
        if is_padded and isinstance(metric, TokenMetric):
            metric = replace(metric, masks=self._masks)
        return metric

    def _masks(self) -> list[Tensor]:
        """Return the different masks of the clean and the corrupted texts."""
        masks: list[Tensor] = []
        for pair_text in filter(None, (self.text, self.other)):
            text = pair_text.of_logits
            mask = real_of(text.mask_on_cpu(), text.tokens.shape[:2])
            if not any(torch.equal(mask, other) for other in masks):
                masks.append(mask)
        return masks

    def _listed_pos(self) -> int | list[int]:
        """Return the position of the answers as an integer or a list."""
        if self.pos is None:
            return -1
        return self.pos.tolist() if isinstance(self.pos, Tensor) else self.pos

    @property
    def has_metric(self) -> bool:
        """True if the pairs have a metric or answers."""
        return self._metric is not None or self.answers is not None

    def clean_only(self) -> "Pairs":
        """Return the pairs without their corrupted texts."""
        pairs = copy.copy(self)
        pairs._corrupted = None
        return pairs

    def measured_by(self, metric: Metric) -> "Pairs":
        """Return the same pairs with another metric."""
        pairs = copy.copy(self)
        pairs._metric = metric
        pairs._has_both = False
        pairs.continuations = None
        return pairs

    def with_answers_of(self, numbers: Int[Tensor, " pair"]) -> "Pairs":
        """Return the same texts with other answers: each pair gets the answers of some pair.

        Args:
            numbers: for each pair, the index of the pair whose answers it gets.
        """

        def drawn(value: Tensor) -> Tensor:
            return value[numbers.to(value.device)]

        pairs = copy.copy(self)
        pairs.answers = _changed_answers(self.answers, drawn)
        pairs.continuations = _changed_answers(self.continuations, drawn)
        return pairs

    def texts(self, direction: PatchingDirection) -> tuple[Text, Text]:
        """Return the texts of the run that is edited, and of the run that values are taken from.

        Args:
            direction: `denoising` edits the corrupted run, `noising` edits the clean run.

        Raises:
            ValueError: if the direction is unknown, or if there are no corrupted texts.
        """
        require_choice("direction", direction, ("denoising", "noising"))
        texts = self.text, self.corrupted_text
        return texts if direction == "noising" else texts[::-1]

    @without_gradients
    def solved(self, model: nn.Module, metric: Metric | None = None) -> "Pairs":
        """Return the pairs that the model answers correctly.

        The repr of the result tells how many pairs these are, such as `17 of 20 solved`.

        Args:
            model: a model in evaluation mode.
            metric: a metric that must be above 0 on the clean text. Default: the metric of the
                pairs. If the pairs have no metric and no wrong answers, the right answer must be
                the most probable token.

        Raises:
            ValueError: if no pair is correct, or if the pairs have neither answers nor a metric.
            ModeError: if the model is in training mode.

        >>> from models import load
        >>> pairs = Pairs(["def __ini", "import o"], answers=[("t", "e"), ("s", "f")])
        >>> pairs.solved(load("pydoc-4l"))
        Pairs: 1 of 2 solved, read: clean [1, 9]
          clean: 'def __ini'
          answer: right 't', wrong 'e'
        """
        read = self.read_by(model)
        pairs = read
        if metric is not None:
            pairs = pairs.measured_by(metric).read_by(model)
        elif pairs._has_only_right_answers():
            pairs = pairs._by_accuracy()
        rows = pairs.rows()
        metric = rows.metric
        # Creating a runner raises an error if the model is in training mode.
        runner_of(model)
        last = last_of(metric, rows.text.of_logits.attention_mask)
        n_rows = max(1, _TOKENS_AT_ONCE // rows.text.tokens.shape[1])
        mask = rows.text.of_logits.mask_on_cpu()
        if len(rows) > n_rows:
            require_edits_of_all_texts(model)
        logits = []
        for start in range(0, len(rows), n_rows):
            text = rows.text.rows(slice(start, start + n_rows))
            output = model(text.tokens, **text.arguments(model))
            logits.append(last_real(logits_of(output), last, text.of_logits.attention_mask))
        values = summed_by_example(
            metric_of_examples(metric, torch.cat(logits), len(rows), mask), len(pairs)
        )
        if not (values > 0).any():
            raise ValueError(
                f"the model must solve at least one pair; got 0 of {len(self)} by {metric!r}"
            )
        solved = read[values > 0]
        solved.solved_of = len(read)
        return solved

    def _has_only_right_answers(self) -> bool:
        """Return True if the default metric measures right answers without wrong answers."""
        if self.continuations is not None:
            return self.continuations.n_answers == 1
        return self._metric is None and self.answers is not None and self.answers.ndim == 1

    def _by_accuracy(self) -> "Pairs":
        """Return pairs with only right answers, measured by the accuracy of greedy decoding."""
        if self.continuations is None:
            return self.measured_by(accuracy(self.answers, pos=self._listed_pos()))
        pairs = copy.copy(self)
        pairs.continuations = replace(self.continuations, score="accuracy")
        return pairs

    def split(self, seed: int = 0, share: float = 0.5) -> tuple["Pairs", "Pairs"]:
        """Divide the pairs at random into two parts, for example to find and to measure a circuit.

        Copies are pairs with the same clean and the same corrupted text, whatever their padding and
        answers. All copies of a pair are put into the same part.

        Args:
            seed: the seed of the random order. Default: 0.
            share: the share of the pairs that are put into the first part. Copies count as one
                pair. Default: 0.5.

        Raises:
            ValueError: if a part would be empty.

        >>> pairs = Pairs(torch.tensor([[3, 1], [2, 1], [5, 1], [4, 1]]))
        >>> first, second = pairs.split(share=0.75)
        >>> len(first), len(second)
        (3, 1)
        """
        texts = torch.tensor(numbered(self.digests()))
        n_texts = int(texts.max()) + 1
        n_first = round(share * n_texts)
        if not 0 < n_first < n_texts:
            raise ValueError(
                f"each part must have at least one different pair; got {n_first} and "
                f"{n_texts - n_first} different pairs"
            )
        order = torch.randperm(n_texts, generator=torch.Generator().manual_seed(seed))
        is_first = torch.isin(texts, order[:n_first])
        return self[is_first], self[~is_first]

    def digests(self) -> list[str]:
        """Return a hash of the texts of each pair."""
        return digests(*filter(None, (self.text, self.other)))

    def view(self) -> plots.View:
        """Return a view of the first pairs, in which tokens that differ between the two texts are
        marked.

        If the pairs contain strings that no model has read, the view shows the texts, answers and
        spans as they were given.
        """
        if self.is_read and self.clean.ndim > 2:
            return plots.View(printed.title(self), [])
        if self.is_read:
            write = self._write or (lambda tokens: [*map(str, tokens)])
            return objects.pairs(self, printed.title(self), write)
        lines = []
        for name in ("clean", "corrupted", "answers", "spans"):
            value = getattr(self, name)
            if value not in (None, {}):
                lines.append(f"{name}: {short(value)}")
        return plots.View(printed.title(self), [], says=lines)

    def __len__(self) -> int:
        return len(self.clean) if self.is_read else sum(1 for _ in each_text(self.clean))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> "Pairs":
        """Return some of the pairs.

        A metric with tokens of each example, such as `logit_diff([3, 1], [4, 5])`, becomes the
        metric of these pairs. If the metric is a function of your own, the new pairs have the same
        function. If this function has a method `rows`, the method returns the metric of the new
        pairs.

        Args:
            index: an index, a slice, a list, or a tensor of indices or booleans.

        Raises:
            ValueError: if no pair is selected, or if no model has read the pairs yet.
        """
        index = index.cpu() if isinstance(index, Tensor) else index
        rows = torch.arange(len(self))[index].view(-1)
        if not len(rows):
            raise ValueError(
                f"an index of pairs must select at least one pair; got 0 of {len(self)}"
            )
        for text in filter(None, (self.text, self.other)):
            require_rows(text.more, text.tokens.shape[:2])
        part = self._mapped(lambda value: value[rows.to(value.device)])
        part.solved_of = None
        if callable(select := getattr(self._metric, "rows", None)):
            part._metric = select(rows)
        return part

    def to(self, device: torch.device | str) -> "Pairs":
        """Return the pairs on a device."""
        return self._mapped(lambda value: value.to(device))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        """Return pairs in which every tensor has been replaced by `change(tensor)`."""
        changed = copy.copy(self)
        changed._clean = self.text.changed(change)
        changed._corrupted = None if self.other is None else self.other.changed(change)
        changed.answers = _changed_answers(self.answers, change)
        changed.continuations = _changed_answers(self.continuations, change)
        changed.pos = change(self.pos) if isinstance(self.pos, Tensor) else self.pos
        return changed

    def as_json(self) -> dict[str, Any]:
        """Return the tokens of both texts, in the JSON form of all results; see `interp.json_form`.

        If the pairs were made from strings, a model must read them first: `pairs.read_by(model)`.

        Raises:
            ValueError: if no model has read the pairs.
        """
        if not self.is_read:
            raise ValueError("pairs must be read by a model first; got texts: use read_by(model)")
        tables = {"clean": Table(self.text.listed(), "example")}
        if self.other is not None:
            tables["corrupted"] = Table(self.other.listed(), "example")
        about: dict[str, Any] = {"solved_of": self.solved_of, "spans": [*self.spans]}
        if self._metric is not None or self.answers is not None:
            about["metric"] = name_of(self.metric)
        return form("Pairs", tables, about)

    def __repr__(self) -> str:
        return printed.printed(self, self._write)


def _changed_answers(answers: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return tokens or `Continuations` after a change, such as a selection of examples.

    Args:
        answers: the answers of each example; None if there are no answers.
        change: a function that changes any tensor whose first axis is the example.
    """
    if answers is None:
        return None
    return answers.changed(change) if isinstance(answers, Continuations) else change(answers)


def _must_be_read(answers: Any) -> bool:
    """Return True if a model must convert the answers: strings, or a list of tensors of tokens."""
    if isinstance(answers, (list, tuple)):
        return any(isinstance(answer, Tensor) or _must_be_read(answer) for answer in answers)
    return isinstance(answers, str)


def _require_texts(**given: Any) -> None:
    """Check that clean and corrupted texts are not numbers, a model, a cache, a set or bytes."""
    for name, texts in given.items():
        if isinstance(texts, int | float | nn.Module | ActivationCache):
            raise TypeError(f"{name} must be texts; got {shown(texts)}")
        require_readable(texts)


def _require_as_many(clean: Texts, corrupted: Texts) -> None:
    """Check that there are as many corrupted texts as clean texts, if both numbers are known.

    The number of texts of a mapping of lists is unknown until a model reads them.
    """
    n_clean, n_corrupted = number_of_texts(clean), number_of_texts(corrupted)
    if n_clean is not None and n_corrupted is not None:
        require_equal_numbers([n_clean, n_corrupted])


def _require_answers(answers: Any, n_texts: int | None) -> None:
    """Check that answers are one for all texts, or one for each text.

    Args:
        answers: the answers as they were given.
        n_texts: the number of texts; None if it is unknown until a model reads the texts.

    Raises:
        TypeError: if answers have no order.
        ValueError: if there are too few or too many answers.
    """
    if isinstance(answers, Set | Mapping):
        raise TypeError(
            f"answers must be one answer, a tuple (right, wrong) or a list; got {shown(answers)}"
        )
    if isinstance(answers, tuple) and len(answers) not in (1, 2):
        raise ValueError(
            "a tuple of answers must be (right, wrong), for all texts; got "
            f"{len(answers)} answers: pass a list with one for each text"
        )
    if isinstance(answers, tuple) and any(isinstance(part, list | tuple) for part in answers):
        raise ValueError(
            "a tuple of answers must be (right, wrong), for all texts; got "
            f"{shown(answers)}: for other answers of each text, pass a list of tuples, such as "
            "[*zip(right_answers, wrong_answers)]"
        )
    if isinstance(answers, list) and n_texts is not None and len(answers) != n_texts:
        raise ValueError(
            f"answers must be a list with one answer for each of {n_texts} texts, or a tuple "
            f"(right, wrong); got {len(answers)} answers"
        )


def _as_tensor(answers: Any, tokens: Shaped[Tensor, "batch *size"]) -> Tensor | None:
    """Return answers that are tokens as a tensor; None if there are no answers.

    Args:
        answers: the answers as they were given. One answer, or one tuple (right, wrong), is used
            for every text.
        tokens: the tokens of the texts.
    """
    if isinstance(answers, Tensor | None):
        return answers
    is_shared = isinstance(answers, (int, tuple))
    answers = [answers] * len(tokens) if is_shared else answers
    try:
        return torch.as_tensor(answers, device=tokens.device)
    except ValueError as error:
        raise ValueError(
            "answers must be the same number of tokens for each text, and an answer of several "
            "tokens must be a tensor, such as (torch.tensor([3, 5]), torch.tensor([4])); got "
            f"{reprlib.repr(answers)}"
        ) from error


def _require_one_or_two(answers: Tensor, n_texts: int) -> None:
    """Check that answers are one token or two tokens for each text.

    Args:
        answers: the tokens.
        n_texts: the number of texts.

    Raises:
        ValueError: if there are too few or too many tokens, or a token is negative.
    """
    if answers.shape not in ((n_texts,), (n_texts, 2)):
        raise ValueError(
            f"answers must be right tokens [{n_texts}], or right and wrong tokens [{n_texts}, 2]; "
            f"got {list(answers.shape)}"
        )
    if int(answers.min()) < 0:
        raise ValueError(f"answers must be at least 0; got {int(answers.min())}")


def _require_metric(metric: Metric, pos: Tokens | None) -> None:
    """Check that a metric is a function, and that no position is given in addition to the metric.

    Raises:
        TypeError: if the metric is not a function.
        ValueError: if a position is given.
    """
    last_of(metric)
    if pos is not None:
        raise ValueError(
            f"pos must be None if metric is given, because {metric!r} has its own; got pos={pos!r}"
        )


def _with_mask(text: Any, attention_mask: Tensor | None, clean: Texts) -> Any:
    """Return clean texts with their mask, if a mask is given.

    Args:
        text: the clean texts as a `Text`, or texts that a model must read first.
        attention_mask: the mask.
        clean: the clean texts as they were given, for the error.

    Raises:
        ValueError: if a mask is given, and the texts are not tensors or already have a mask.
    """
    if attention_mask is None:
        return text
    if not isinstance(text, Text) or text.attention_mask is not None:
        got = "texts with a mask" if isinstance(text, Text) else f"a {type(clean).__name__}"
        raise ValueError(padding_messages.second_mask(got))
    return replace(text, attention_mask=attention_mask)


def _corrupted_text(corrupted: Texts | None, clean: Any) -> Any:
    """Return corrupted texts as a `Text`, or as texts that a model must read first.

    A tensor of corrupted tokens uses the mask and the other arguments of the clean texts.

    Args:
        corrupted: the corrupted texts as they were given.
        clean: the clean texts as a `Text`, or texts that a model must read first.

    Raises:
        ValueError: if both texts are tensors, and the corrupted tensor is not [batch, pos].
    """
    if not (isinstance(clean, Text) and isinstance(corrupted, Tensor)):
        return as_text(corrupted)
    if not is_batch(corrupted):
        got = f"{list(corrupted.shape)}: pass one text as torch.as_tensor(text)[None]"
        raise ValueError(f"corrupted must be a tensor [batch, pos]; got {got}")
    return replace(clean, tokens=corrupted)


def of_pairs(analysis: Callable[P, R]) -> Callable[P, R]:
    """Decorate an analysis of pairs, which gets its metric, answers and spans from the pairs.

    A call with one of these keywords raises a TypeError, which says to pass it to `Pairs`.
    """
    explained = explains_calls(analysis)

    @functools.wraps(analysis)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in _IN_PAIRS:
            if name in kwargs:
                raise TypeError(
                    f"{analysis.__name__} has no {name}=, because the pairs contain it: "
                    f"Pairs(..., {name}=...)"
                )
        return explained(*args, **kwargs)

    return run
