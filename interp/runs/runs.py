"""Runs of pairs: the texts that they share, and the ways to run them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, Hooks
from hooks.base import Text, require_kind, warn, without_gradients
from interp.inputs.copies import digests, groups
from interp.measuring import Metric, measure
from interp.pairs.pairs import Pairs, PatchingDirection, pairs_for
from interp.protocol import logits_of, runner_of
from interp.results.result import Result
from interp.runs.gradients import Gradients
from interp.runs.rows import Batch
from interp.runs.sweep import measured


class Runs:
    """Runs of one batch: the texts that are run, the texts that give values, metric and memory.

    Texts are read once, here. There is no base run for all: the base run of `edited` is without
    gradients, the base run of `gradients` holds the graph, and masked runs (`masked`) compute the
    blocks themselves, so they refuse hooks that other runs let act.

    Args:
        model: the model, in evaluation mode.
        pairs: the texts and the metric.
        direction: denoising runs the corrupted texts and noising the clean ones, each with values
            of the others. None for clean texts alone.
        max_bytes: bounds the memory of edited and masked runs; see `sweep` and `run_circuit`.

    Attributes:
        runner: the runner of the model.
        pairs: the pairs as tokens.
        text: the texts that are run.
        base: the metric of these texts, after `cache`.
        target: the metric of the texts that values come from, after `source`.
        reads_other: whether values come from the other texts.

    Raises:
        TypeError: if the pairs are something else.
        ValueError: if there is no such direction, or the texts to run are missing.
        ModeError: if the model is in training mode.
    """

    base: Float[Tensor, " example"]
    target: Float[Tensor, " example"]

    def __init__(
        self,
        model: nn.Module,
        pairs: Pairs,
        direction: PatchingDirection | None = None,
        max_bytes: int = 2**30,
    ) -> None:
        require_kind("max_bytes", max_bytes, (int, float), "a number of bytes")
        self.model, self.runner, self.max_bytes = model, runner_of(model), max_bytes
        self.pairs, self.direction = pairs_for(model, pairs), direction
        self.reads_other = direction is not None
        if direction is None or direction == "noising":
            self.text = self.pairs.text
        else:
            self.text = self.pairs.texts(direction)[0]

    @property
    def other(self) -> Text:
        """The texts that values come from.

        Raises:
            ValueError: if there are none.
        """
        return self.pairs.texts(self.direction or "noising")[1]

    @property
    def groups(self) -> tuple[int, ...] | None:
        """The number of each example's text, or of its pair of texts if both are read.

        None if there are no copies.
        """
        return groups(self.pairs.digests() if self.reads_other else digests(self.text))

    @property
    def metric(self) -> Metric:
        """The metric of the pairs."""
        return self.pairs.metric

    def capture(self, text: Text, names: str | Iterable[str]) -> ActivationCache:
        """Return values of a text at some points, from a run that stops after the last of them."""
        names = names if isinstance(names, str) else [*names]
        return self.runner.capture(text.tokens, names=names, **text.arguments(self.model))

    @without_gradients
    def source(self, names: Iterable[str]) -> ActivationCache:
        """Return values at some points of the run that values come from, and set `target`."""
        self.target, cache = self._measured(self.other, names)
        return cache

    @without_gradients
    def cache(self, names: Iterable[str]) -> ActivationCache:
        """Return values at some points of the run that is edited, and set `base`."""
        self.base, cache = self._measured(self.text, names)
        return cache

    def _measured(self, text: Text, names: Iterable[str]) -> tuple[Tensor, ActivationCache]:
        arguments = text.arguments(self.model)
        output, cache = self.runner.run_with_cache(text.tokens, names=[*names], **arguments)
        return measure(self.metric, logits_of(output), text.of_logits.attention_mask), cache

    def edited(
        self, edits: Sequence[Hooks]
    ) -> tuple[Float[Tensor, " example"], Float[Tensor, "edit example"]]:
        """Return the metric of the unedited run, and what each edit adds to it; see `sweep`.

        Args:
            edits: for each run what `run_with_hooks` takes as `hooks`.
        """
        base, values = self._swept(edits)
        effects = values - base
        if effects.isnan().any():
            wrong = effects.isnan().any(1).nonzero()[:, 0].tolist()
            warn(
                f"{len(wrong)} of {len(edits)} edits have no effect that is a number (NaN), the first is edit {wrong[0]}",
            )
        return base, effects

    @without_gradients
    def _swept(self, edits: Sequence[Hooks]) -> tuple[Tensor, Tensor]:
        batch = Batch(self.text, self.metric)
        with batch.reading():
            return measured(self.runner, batch, edits, self.max_bytes)

    def logits(
        self, hooks: Hooks, rows: slice | Int[Tensor, " row"] = slice(None)
    ) -> Float[Tensor, "row pos vocab"]:
        """Return the logits of an edited run of some examples, through which gradients flow."""
        text = self.text.rows(rows)
        arguments = text.arguments(self.model)
        return logits_of(self.runner.run_with_hooks(text.tokens, hooks=hooks, **arguments))

    def gradients(self, names: Iterable[str]) -> Gradients:
        """Return a run that holds the gradients of the metric at some points."""
        return Gradients(self.runner, self.text, self.metric, names)

    def result(
        self,
        values: Float[Tensor, "*axes example"],
        labels: Mapping[str, Sequence[Any]],
        base: Float[Tensor, " example"],
        has_words: bool = True,
        **about: Any,
    ) -> Result:
        """Return effects with labels for each axis, the metric of the unedited run, and more facts.

        Args:
            values: the effects, of the axes of `labels`.
            labels: by axis.
            base: the metric.
            has_words: whether positions are those of the texts.
            about: the facts.
        """
        facts: dict[str, Any] = {"metric": repr(self.metric)}
        texts = [self.text]
        if self.direction is not None:
            facts |= {"direction": self.direction, "texts": self.pairs.digests()}
            texts += [self.other] if self.pairs.corrupted is not None else []
        axes = [axis for axis in ("pos", "query", "key") if axis in labels and has_words]
        words = texts[0].words(self.model, *texts[1:]) if axes else None
        return Result(
            values,
            (*labels, "example"),
            base,
            getattr(self, "target", None),
            labels,
            getattr(self.metric, "unit", ""),
            facts | about,
            words={axis: [words[n] for n in labels[axis]] for axis in axes if words},
            groups=self.groups,
        )
