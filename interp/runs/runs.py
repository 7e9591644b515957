"""Runs of pairs: the texts, the metric and the model that all runs of an analysis share.

`runs_of` creates the runs of an analysis that accepts `edit=` in place of a second run.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, Hooks
from hooks.base import (
    TEXT_AXES,
    Text,
    Texts,
    require_choice,
    require_kind,
    shown,
    to_device,
    true_columns,
    warn,
    without_gradients,
)
from interp.edits import Edit
from interp.graph.graph import Graph
from interp.inputs.copies import digests, groups, hashed_examples
from interp.inputs.parts import part_now
from interp.inputs.texts import require_edits_of_all_texts
from interp.inputs.token_positions import mask_of_columns
from interp.kinds import require_made
from interp.measuring import Metric, measure, name_of, unit_of
from interp.metrics import kl_divergence
from interp.pairs.answers import prompts_of_rows, summed_by_example
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.protocol import has_text_of_logits, logits_of, runner_of
from interp.results.result import Result
from interp.runs.adapters import WithoutAdapter
from interp.runs.edited import require_edits_of_rows
from interp.runs.models import Source, as_source, source_runner


def require_no_direction(source: Source | None, direction: str, default: str) -> None:
    """Check that the user has not chosen a direction in addition to a source.

    Args:
        source: the model whose values are read, if any.
        direction: the direction of patching.
        default: the default direction of the analysis.

    Raises:
        ValueError: if the direction is unknown, or is not the default although there is a source.
    """
    require_choice("direction", direction, ("denoising", "noising"))
    if source is not None and direction != default:
        raise ValueError(
            "direction must be left out with source=, because both models run the clean texts; got "
            f"direction={direction!r}"
        )


class Runs:
    """Runs of one batch: the edited texts, the source texts, the metric and the memory bound.

    The constructor converts the texts to tokens, once for all runs. The modules `sweep`,
    `gradients` and `masked` run these texts. They share no unedited run, because their needs
    differ: edited runs (`sweep`) have no gradients, runs for gradients (`gradients`) need an
    autograd graph, and masked runs (`masked`) compute the blocks themselves. Masked runs raise an
    error if hooks are active; all other runs allow hooks.

    Args:
        model: the model, in evaluation mode.
        pairs: the texts and the metric.
        direction: `denoising` runs the corrupted texts with values of the clean texts; `noising`
            runs the clean texts with values of the corrupted texts. None runs only the clean texts.
        max_bytes: a bound on the memory of edited and masked runs; see `sweep` and `run_circuit`.
        source: another model, or the model without its adapter (`without_adapter`), whose values on
            the clean texts replace values of the model. Corrupted texts are then not used. Without
            answers and a metric, the metric is KL(source || model), the mean over the positions of
            each text, in nats. Default: None, if both runs are runs of the model.
        source_graph: the graph of the source, if `model` is the model of a graph's runner. The
            source then runs the parts of its graph too.

    Attributes:
        runner: the runner of the model.
        pairs: the pairs as tokens.
        rows: the pairs that are run. For answers of several tokens they have a row for each answer;
            otherwise they are `pairs`.
        text: the texts of `rows` that are run and edited.
        base: the metric of `text`; set by `cache`.
        target: the metric of the source texts; set by `source`.
        reads_other: whether values of the source texts are used.

    Raises:
        TypeError: if `pairs` is not a `Pairs`. With a source model, it may also be texts.
        ValueError: if the direction does not exist, the texts to run are missing, or the source
            has other points, sizes or tokens.
        ModeError: if the model is in training mode.
        HookError: if an edit with positions acts on the model, and answers are several tokens.
    """

    base: Float[Tensor, " example"]
    target: Float[Tensor, " example"]

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs | Texts,
        direction: PatchingDirection | None = None,
        max_bytes: int = 2**30,
        source: Source | None = None,
        source_graph: Graph | None = None,
    ) -> None:
        require_kind("max_bytes", max_bytes, (int, float), "a number of bytes")
        self.model = model
        self.runner = runner_of(model)
        self.max_bytes = max_bytes
        require_choice("direction", direction, (None, "denoising", "noising"))
        if source is None:
            require_made("pairs", pairs, Pairs)
            assert isinstance(pairs, Pairs)
        else:
            pairs = (pairs if isinstance(pairs, Pairs) else Pairs(pairs)).clean_only()
            direction = None
        self.pairs = pairs.read_by(model)
        self.rows = self.pairs.rows()
        self.source_model = source
        self.source_runner = self.runner
        if source is not None:
            self.source_runner = source_runner(
                source,
                self.runner,
                texts=pairs.clean,
                text=self.pairs.text,
                graph=source_graph,
            )
        if self.rows is not self.pairs:
            for run_model in {model, self.source_runner.model}:
                require_edits_of_rows(run_model)
        self.direction = direction
        self.has_source = direction is not None or source is not None
        self.reads_other = direction is not None
        self.text = self._edited_text(self.rows)
        # The metric of pairs without a metric. The run of the source model sets it.
        self._divergence: Metric | None = None

    def _edited_text(self, pairs: Pairs) -> Text:
        """Return the texts of pairs that are edited."""
        return pairs.corrupted_text if self.direction == "denoising" else pairs.text

    @property
    def other(self) -> Text:
        """The source texts, whose values replace values of `text`.

        Raises:
            ValueError: if there are no source texts.
        """
        if self.source_model is not None:
            return self.text
        is_denoising = self.direction == "denoising"
        return self.rows.text if is_denoising else self.rows.corrupted_text

    @cached_property
    def _hashes(self) -> list[tuple[str, bool]]:
        """A hash of the texts of each pair, and whether its two texts are the same."""
        texts = (self.pairs.text, self.pairs.other)
        return hashed_examples(*(text for text in texts if text is not None))

    @property
    def digests(self) -> list[str]:
        """A hash of the texts of each pair; see `Pairs.digests`."""
        return [digest for digest, _ in self._hashes]

    @property
    def edited_prompts(self) -> Text:
        """The edited texts, without the tokens of answers that have several tokens."""
        return self._edited_text(self.pairs)

    @property
    def other_prompts(self) -> Text:
        """The source texts, without the tokens of answers that have several tokens."""
        if self.source_model is not None:
            return self.pairs.text
        return self.pairs.texts(self.direction or "noising")[1]

    @cached_property
    def prompts(self) -> Bool[Tensor, "row column"]:
        """True at the tokens of prompts, and False at answers of several tokens and at padding."""
        return prompts_of_rows(self.edited_prompts, self.text)

    @cached_property
    def columns_of_prompts(self) -> list[list[int]] | None:
        """The columns of the tokens of each text's prompt; None if a text has only one row."""
        if self.rows is self.pairs:
            return None
        return true_columns(self.prompts[: len(self.pairs)])

    def per_example(self, values: Float[Tensor, "*axes row"]) -> Float[Tensor, "*axes example"]:
        """Return the value of each example: the sum over its rows, one for each answer."""
        return summed_by_example(values, len(self.pairs))

    @property
    def groups(self) -> tuple[int, ...] | None:
        """For each example, the number of its text, so that copies have the same number.

        If the runs use the source texts, examples are copies only if both texts are the same. The
        value is None if there are no copies.
        """
        if self.reads_other:
            return groups(self.digests)
        return groups(digests(self.edited_prompts))

    @property
    def metric(self) -> Metric:
        """The metric of the rows.

        For pairs without a metric, it is KL(source || model), after the run of the source model.
        """
        return self.rows.metric if self._divergence is None else self._divergence

    def capture(self, text: Text, names: str | Iterable[str]) -> ActivationCache:
        """Return values of a text at some points. The run stops after the last point.

        Args:
            text: the text.
            names: the names of the points, or a pattern.
        """
        names = names if isinstance(names, str) else [*names]
        return self.runner.capture(text.tokens, names=names, **text.arguments(self.model))

    @without_gradients
    def source(self, names: Iterable[str]) -> ActivationCache:
        """Return values at some points of the source run, and set `target`."""
        with as_source(self.source_model):
            self.target, cache = self._measured(self.source_runner, self.other, names)
        return cache

    @without_gradients
    def cache(self, names: Iterable[str]) -> ActivationCache:
        """Return values at some points of the run to edit, and set `base`."""
        self.base, cache = self._measured(self.runner, self.text, names)
        return cache

    def _measured(
        self, runner: HookedRunner, text: Text, names: Iterable[str]
    ) -> tuple[Tensor, ActivationCache]:
        """Return the metric of a run, and its values at some points."""
        arguments = text.arguments(runner.model)
        output, cache = runner.run_with_cache(text.tokens, names=[*names], **arguments)
        logits, mask = logits_of(output), text.of_logits.attention_mask
        needs_reference = self.source_model is not None and not self.rows.has_metric
        if needs_reference and self._divergence is None:
            # Analyses run the source model first, so these logits are the logits of the source.
            self._divergence = kl_divergence(logits, None, attention_mask=mask)
        return measure(self.metric, logits, mask_of_columns(logits, mask)), cache

    def logits(
        self, hooks: Hooks, rows: slice | Int[Tensor, " row"] = slice(None)
    ) -> Float[Tensor, "row pos vocab"]:
        """Return the logits of an edited run of some examples. Gradients flow through the run.

        Args:
            hooks: the edits, in the form of the argument `hooks` of `run_with_hooks`.
            rows: the examples. Default: all.

        Raises:
            HookError: if only some examples run, and an active edit selects some of the texts.
        """
        text = self.text.rows(rows)
        if isinstance(rows, Tensor) or len(text.tokens) < len(self.text.tokens):
            require_edits_of_all_texts(self.model)
        arguments = text.arguments(self.model)
        return logits_of(self.runner.run_with_hooks(text.tokens, hooks=hooks, **arguments))

    def result(
        self,
        values: Float[Tensor, "*axes row"],
        labels: Mapping[str, Sequence[Any]],
        base: Float[Tensor, " row"],
        has_words: bool = True,
        point: str | None = None,
        **about: Any,
    ) -> Result:
        """Return a `Result` of effects, with labels, the metric of the unedited run and more facts.

        The values of an example are the sums over its rows.

        Args:
            values: the effects of each row, with the axes of `labels`.
            labels: the labels by axis.
            base: the metric of each row in the unedited run.
            has_words: whether positions are labelled with the words of the texts. False if the
                positions are not positions of tokens, such as patches of an image.
            point: the name of a point with the positions of the result; see `exists`. Default: the
                positions are positions of the prompts.
            about: more facts.
        """
        words = self._words(labels) if has_words else {}
        facts: dict[str, Any] = {"metric": name_of(self.metric)}
        if self.direction is not None:
            facts |= {"direction": self.direction, "texts": self.digests}
            self._warn_of_equal_texts()
        if self.source_model is not None:
            facts["source"] = f"another {type(self.source_model).__name__}"
            if isinstance(self.source_model, WithoutAdapter):
                facts["source"] = repr(self.source_model)
        target = getattr(self, "target", None)
        return Result(
            self.per_example(values),
            axes=(*labels, "example"),
            base=self.per_example(base),
            target=None if target is None else to_device(self.per_example(target), base.device),
            labels=labels,
            unit=unit_of(self.metric),
            about=facts | about,
            words=words,
            groups=self.groups,
            exists=self.exists(labels, base.device, point),
        )

    def _warn_of_equal_texts(self) -> None:
        """Warn if the clean and the corrupted text of an example are the same.

        Warns:
            UserWarning: naming the examples. In a part of many examples, the numbers are unknown.
        """
        equal = [number for number, (_, is_equal) in enumerate(self._hashes) if is_equal]
        if not equal:
            return
        listed = ", ".join(map(str, equal[:5])) + (", ..." if len(equal) > 5 else "")
        which = "of an example" if part_now() is not None else f"of example {listed}"
        warn(
            f"the clean and the corrupted text {which} are equal, so all effects of this example "
            "are 0: leave it out, unless it is a control"
        )

    def exists(
        self,
        labels: Mapping[str, Sequence[Any]],
        device: torch.device,
        point: str | None = None,
    ) -> Bool[Tensor, "..."] | None:
        """Return False where a position is not a token of an example's prompt.

        In a model with an encoder and a decoder, the positions of encoder points and along
        `encoder_pos` are positions of the encoder's texts. The mask has the axes of the result.
        Axes that are not axes of positions have the size 1.

        Args:
            labels: the labels of each axis. For an axis of positions, the labels are the positions.
            device: the device of the result.
            point: the name of a point with these positions. Default: the positions are positions of
                the prompts.

        Returns:
            The mask, or None without axes of positions, or without a mask of the texts.
        """
        n_examples = len(self.pairs)
        exists: Tensor | None = None
        for dim, (axis, columns) in enumerate(labels.items()):
            real = self._real_along(axis, columns, point)
            if real is None:
                continue
            shape = [1] * (len(labels) + 1)
            shape[dim] = len(columns)
            shape[-1] = n_examples
            along = to_device(real, device)[:, [*columns]].T.reshape(shape)
            exists = along if exists is None else exists & along
        return exists

    def _real_along(
        self, axis: str, columns: Sequence[Any], point: str | None
    ) -> Bool[Tensor, "example _column"] | None:
        """Return True at the tokens of each example's text along an axis of a result.

        The result is None if this is no axis of positions in a text, or if the text has no mask.

        Args:
            axis, columns: the axis, and its labels.
            point: see `exists`.
        """
        encoded = self.edited_prompts
        has_columns_of_encoder = axis == "encoder_pos" and encoded.of_logits is not encoded
        if axis in TEXT_AXES and point is not None and point.startswith("encoder."):
            has_columns_of_encoder = True
        if has_columns_of_encoder:
            # The columns of other encoders, such as encoders of sounds, are not columns of a mask.
            is_whole = [*columns] == [*range(encoded.tokens.shape[1])]
            return encoded.real if encoded.attention_mask is not None and is_whole else None
        if axis not in TEXT_AXES or not (point is None or has_text_of_logits(point)):
            return None
        has_padding = encoded.of_logits.attention_mask is not None
        has_answers = self.rows is not self.pairs
        return self.prompts[: len(self.pairs)] if has_padding or has_answers else None

    def _words(self, labels: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Return a list of words for each axis of positions among the axes of a result.

        The list contains the word at each position of the axis. If the clean and the corrupted text
        have different words there, both are joined in this order; see `Text.words`. Without a
        tokenizer, or without axes of positions, the result is empty.

        Args:
            labels: the labels of each axis. For an axis of positions, the labels are the positions.
        """
        axes = [axis for axis in TEXT_AXES if axis in labels]
        if not axes:
            return {}
        has_other = self.direction is not None and self.pairs.corrupted is not None
        prompts = [self.pairs.text, self.pairs.corrupted_text] if has_other else [self.pairs.text]
        words = prompts[0].words(self.model, *prompts[1:])
        if not words:
            return {}
        words_by_axis = {}
        for axis in axes:
            words_by_axis[axis] = [words[n] for n in labels[axis]]
        return words_by_axis


def runs_of(
    model: nn.Module,
    pairs: Pairs | Texts,
    direction: PatchingDirection,
    source: Source | None,
    edit: Edit | None,
) -> Runs:
    """Return the two runs of an analysis, or with an edit the run that is edited.

    Args:
        model, pairs, direction, source, edit: see `activation_patching`.

    Raises:
        TypeError: if `edit` was not made by a function of `interp.edits`, or `pairs` are texts
            without a source model.
        ValueError: if an edit is given together with a source or a direction, or for the reasons of
            `Runs`.
    """
    require_no_direction(source, direction, "denoising")
    if edit is not None:
        _require_one_edit(pairs, edit, direction=direction, source=source)
    return Runs(model, pairs, direction=direction if edit is None else None, source=source)


def _require_one_edit(
    pairs: object, edit: object, *, direction: PatchingDirection, source: Source | None
) -> None:
    """Check the edit of an analysis, and that the call has pairs and no second run.

    Args:
        pairs, edit, direction, source: see `runs_of`.
    """
    if not isinstance(edit, Edit):
        raise TypeError(
            "edit must be made by a function of interp.edits, such as edits.zero(); got "
            f"{shown(edit)} (sweep accepts functions, and edits of several points)"
        )
    if direction != "denoising":
        raise ValueError(
            "an edit always changes the clean run; leave out direction; got "
            f"direction={direction!r}"
        )
    if source is not None:
        raise ValueError("edit and source cannot be used together; got both: leave one out")
    require_kind(
        "pairs",
        pairs,
        Pairs,
        "Pairs",
        call="with an edit, Pairs(texts, metric=cross_entropy(texts)) is enough",
    )
