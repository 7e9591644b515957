"""Suppressed steps: the effect on later steps when no later position attends to one step.

The algorithm (Bogdan et al. 2025, "Thought Anchors", arXiv 2506.19143, section 6):

1. Run the model once. Keep the stream before the first chosen layer and after the last layer, and
   the keys and values (`_Base`).
2. For each step, block attention from all later positions to the keys of the step, in the chosen
   layers and heads. Begin after the step and at the first chosen layer, because earlier
   values do not change (`_Base._resumed`). A mask hides the keys, so the fused kernel runs, and no
   attention pattern is formed (`_Base._masked`). Each block computes some positions at a time
   (`_in_pieces`), so values inside a block exist for a piece of the text only.
3. At each of these positions, compute the divergence of the next-token distribution from the
   unedited run. Unembed some positions at a time (`_Base.divergences`).
4. Average the divergences over the tokens of each later step (`_means`).
"""

import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks import HookedRunner
from hooks.base import (
    at_least_float32,
    peak_bytes,
    progress_of,
    require_kind,
    shows_progress,
    to_device,
    unknown_name,
    without_gradients,
)
from interp import edits
from interp.edits import Edit
from interp.kinds import require_made
from interp.numbers.precision import divergence
from interp.protocol import is_of_text, logits_of, n_logits, of, runner_of
from interp.results.result import Result
from interp.runs.rows import Batch, EditedRun, acting, stacked_edits
from interp.runs.sweep import runs_alone
from interp.runs.unedited import Unedited
from interp.steps.stepping import Steps

HiddenAttention = str | Sequence[str] | Mapping[int, int | Sequence[int] | None] | None
"""Points of attention such as `blocks.2.attn`, or heads by layer; None for all heads."""

# The tensors [pos, vocab] that exist at the same time: log-probabilities of two runs, and logits or
# products of a part of the positions.
_COPIES = 4

# The number of tokens with which edits are tried.
_TRIED = 2

# A matrix product with fewer positions spends most of its time reading the weights. On an
# accelerator, blocks with fewer positions spend most of their time starting kernels.
_ENOUGH = 256
_ENOUGH_ON_ACCELERATORS = 2048


@shows_progress
@without_gradients
def suppressed(
    model: nn.Module,
    steps: Steps,
    attention: HiddenAttention = None,
    *,
    max_bytes: int = 2**25,
    progress: bool = True,
) -> Result:
    """Return the effect of hiding each step on each later step, in nats.

    A hidden step is not attended to: in the chosen layers and heads, all positions after the step
    have no weight on its keys, and their other weights are renormalised. The effect on a later step
    is KL(unedited ‖ edited) of the next-token distributions, as the mean over the tokens of the
    later step. The distribution for a token is read at the position before the token.

    A divergence is never negative, so it does not show whether the hidden step makes the later step
    more likely or less likely. For a chosen answer, `sweep` with `edits.knockout` and `log_prob`
    shows the sign.

    The effect on the next step is too small. The first token of the next step is predicted at the
    last position of the hidden step, which does not change. So its divergence is 0, and the mean
    over the next step contains this 0. Effects on all other later steps are complete.

    In many models, all positions attend to the first token of a text without reading its meaning.
    Hiding the first step also hides this token, so put a sentence that you do not ask about first.

    Args:
        model: the model, in evaluation mode.
        steps: the text and its steps.
        attention: the layers and heads where the step is hidden: names of points or patterns, such
            as `blocks.2.attn`; or a mapping from layers to a head, several heads or None for all
            heads. Default: all heads of all layers.
        max_bytes: a bound on the memory of the values that are computed together, in bytes: the
            logits of some positions with their divergences, or the values inside a block at some
            positions. A block computes at least 256 positions together (2,048 on an accelerator).
            Four streams, and the keys and values of one run and of one layer, are stored in
            addition. Attention patterns are formed only in a model that cannot be resumed, and for
            the positions of a block in an attached model with an `attention` of single heads.
            Default: 32 MiB.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [step, later, example] in nats, with one example. Row `step` is the hidden step, and
        column `later` is the step that is predicted. Effects on the step itself and on earlier
        steps are 0.

    Raises:
        ValueError: if there are fewer than two steps, or `max_bytes` is too small for the logits of
            one position.
        UnknownNameError: if a layer or a point of `attention` does not exist.
        EditError: if a head does not exist.
        ModeError: if the model is in training mode.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> steps = Steps(model, "Open the file. Read it.", " Return the text.")
    >>> suppressed(model, steps).top(1)
    step 0 'Open the file.', later 1 ' Read it.'  +0.5298
    """
    require_made("steps", steps, Steps)
    if len(steps) < 2:
        raise ValueError(f"steps must be at least 2; got {len(steps)}")
    runner = runner_of(model)
    heads_by_point = _heads_by_point(runner, attention)
    logits_bytes = _COPIES * 4 * n_logits(model)
    if max_bytes < logits_bytes:
        raise ValueError(
            f"max_bytes must be at least {logits_bytes:,} for the logits of one position; got "
            f"{max_bytes:,}"
        )
    base = _Base(runner, steps, heads_by_point, max_bytes)
    values = torch.zeros(len(steps), len(steps), 1)
    for number in progress_of(range(len(steps) - 1), "steps", len(steps) - 1):
        values[number, :, 0] = _means(steps, base.divergences(number))
    names = {"step": steps.words, "later": steps.words}
    about = {"kind": "suppressed", "attention": _described(heads_by_point, attention)}
    return Result(values, ("step", "later", "example"), unit="nats", words=names, about=about)


class _Base:
    """The unedited run of a text, and the runs with one hidden step.

    Args:
        runner: the runner of the model.
        steps: the text and its steps.
        heads_by_point: the points of scores to edit, with their heads; None for all heads.
        max_bytes: a bound on the memory of the values that are computed together.

    Raises:
        EditError: if a head does not exist.
    """

    def __init__(
        self,
        runner: HookedRunner,
        steps: Steps,
        heads_by_point: Mapping[str, list[int] | None],
        max_bytes: int,
    ) -> None:
        self.runner = runner
        self.model = runner.model
        self.spans = steps.spans
        self._heads_by_point = heads_by_point
        self._batch = Batch(steps.text, _Last())
        self._n_heads, block_bytes = peak_bytes(self._try_edits)
        logits_bytes = _COPIES * 4 * n_logits(self.model)
        self.n_at_once = int(max_bytes // logits_bytes)
        fewest = _ENOUGH if self._batch.tokens.is_cpu else _ENOUGH_ON_ACCELERATORS
        most = int(max_bytes // max(logits_bytes, block_bytes // _TRIED))
        self._in_pieces = partial(_in_pieces, of(self.model), max(fewest, most))
        self._heads_by_layer: dict[int, list[int] | None] = {}
        for name, heads in heads_by_point.items():
            self._heads_by_layer[runner.points[name].layer or 0] = heads
        first = min(self._heads_by_layer)
        # A run that edits nothing forms no attention pattern. Its first position is not 0, so that
        # the keys and values are kept.
        with self._in_pieces():
            self._run = Unedited(
                runner, self._batch, [EditedRun(0, [], pos=1)], last=1, keep=[first]
            )
        contexts_are_causal = self._run.is_resumable() and all(
            getattr(context, "is_causal", True) for context in self._run.contexts
        )
        self._resumes = contexts_are_causal and not runs_alone(self.model)
        self._base_logits: Tensor | None = None
        if self._resumes:
            self._devices = [stream.device for stream in self._run.streams]
            self._before = self._run.streams[first]
            self._after = self._run.streams[-1]
        self._run.free_streams()

    def _try_edits(self) -> dict[int, int]:
        """Check that the model has the chosen heads and reaches their points, with two tokens.

        The edits of all steps have the same form. Return the number of heads of each layer.

        Raises:
            EditError: if a head does not exist.
            NeverFiredError: if the model does not reach a point.
        """
        tokens = self._batch.tokens[:, :_TRIED]
        with self.runner.hooks(self._hooks(range(1))):
            cache = self.runner.capture(tokens, names=[*self._heads_by_point])
        points = self.runner.points
        return {points[name].layer or 0: cache[name].shape[1] for name in self._heads_by_point}

    def _hooks(self, span: range) -> dict[str, Edit]:
        """Return edits of scores that hide a step from all later positions."""
        edit = edits.knockout(query=slice(span.stop, None), key=slice(span.start, span.stop))
        hooks = {}
        for name, heads in self._heads_by_point.items():
            hooks[name] = edit if heads is None else edit.at(head=heads)
        return hooks

    def job(self, number: int) -> EditedRun:
        """Return the run in which a step is hidden."""
        span = self.spans[number]
        return EditedRun(number, self.runner.edits(self._hooks(span)), pos=span.stop)

    def divergences(self, number: int) -> Float[Tensor, " pos"]:
        """Return the divergence of each next-token distribution if a step is hidden.

        Args:
            number: the hidden step.
        """
        first = self.spans[number].stop if self._resumes else 0
        values = torch.zeros(self._batch.tokens.shape[1])
        edited, unedited = self._resumed(number) if self._resumes else self._whole(number)
        for start in range(0, edited.shape[1], self.n_at_once):
            piece = slice(start, start + self.n_at_once)
            found = self._divergence(edited[:, piece], unedited[:, piece])
            values[first + start : first + start + found.shape[0]] = to_device(found, values.device)
        return values

    def _divergence(self, edited: Tensor, unedited: Tensor) -> Float[Tensor, " pos"]:
        """Return the divergence of each next-token distribution from the unedited run.

        Args:
            edited, unedited: the values of some positions, after the last block.
        """
        expected = at_least_float32(self._logits(unedited))[0].log_softmax(-1)
        predicted = at_least_float32(self._logits(edited))[0].log_softmax(-1)
        # The products inside `divergence` are as large as the logits, so compute a quarter of the
        # positions at a time.
        quarters = map(divergence, expected.chunk(4), predicted.chunk(4))
        # Rounding may make a divergence negative.
        return torch.cat([*quarters]).clamp(min=0)

    def _logits(self, values: Tensor) -> Tensor:
        """Return the logits of a piece of a stream. The values of whole runs are logits already."""
        return self._run.language.unembed(values) if self._resumes else values

    def _resumed(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the last stream from the first changed position on: edited, and unedited.

        Args:
            number: the hidden step.
        """
        job = self.job(number)
        contexts = self._run.contexts_from(job.pos)
        masked = self._masked(number, contexts)
        hooks = stacked_edits([job], self._batch) if masked is None else []
        stream = self._before[:, job.pos :]
        with self._batch.reading(job.pos), acting(hooks), self._in_pieces():
            for layer in range(min(self._heads_by_layer), len(contexts)):
                stream = to_device(stream, self._devices[layer])
                context = (masked or contexts)[layer]
                stream = self._run.language.run_block(layer, stream, context)
        return stream, self._after[:, job.pos :]

    def _masked(self, number: int, contexts: Sequence[Any]) -> list[Any] | None:
        """Return the context of each layer with a mask that hides a step.

        The result is None if a context cannot hide keys.

        Args:
            number: the hidden step.
            contexts: the contexts of the positions after the step.
        """
        span = self.spans[number]
        # Layers with the same context and the same heads share a mask.
        hiding: dict[tuple[int, str, int], Any] = {}
        masked = []
        for layer, context in enumerate(contexts):
            if layer not in self._heads_by_layer:
                masked.append(context)
                continue
            heads = self._heads_by_layer[layer]
            key = id(context), str(heads), self._n_heads[layer]
            if key not in hiding:
                hidden = self._hidden(span, heads, self._n_heads[layer])
                hide = getattr(context, "hiding", None)
                hiding[key] = hide and hide(to_device(hidden, self._devices[layer]))
            if hiding[key] is None:
                return None
            masked.append(hiding[key])
        return masked

    def _hidden(
        self, span: range, heads: list[int] | None, n_heads: int
    ) -> Bool[Tensor, "1 _head pos"]:
        """Return True at the keys of a step, for the chosen heads.

        Args:
            span: the positions of the step.
            heads: the heads; None for all heads, which share one row.
            n_heads: the number of heads of the layer.
        """
        n_pos = self._batch.tokens.shape[1]
        hidden = torch.zeros(1, 1 if heads is None else n_heads, n_pos, dtype=torch.bool)
        hidden[:, slice(None) if heads is None else heads, span.start : span.stop] = True
        return hidden

    def _whole(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the logits of whole runs, for models that cannot be resumed.

        Args:
            number: the hidden step.
        """
        job = self.job(number)
        text = self._batch.text
        arguments = text.arguments(self.model)
        if self._base_logits is None:
            self._base_logits = logits_of(self.model(text.tokens, **arguments))
        with acting(stacked_edits([job], self._batch)):
            edited = logits_of(self.model(text.tokens, **arguments))
        return edited, self._base_logits


def _in_pieces(language: Any, n_positions: int) -> AbstractContextManager[None]:
    """Return a context manager inside which blocks compute at most `n_positions` at once.

    Blocks of a model without a method `in_pieces` compute all positions together.
    """
    in_pieces = getattr(language, "in_pieces", None)
    return nullcontext() if in_pieces is None else in_pieces(n_positions)


class _Last:
    """A metric that reads one position, so that the unedited run computes few logits.

    Its number is not used.
    """

    last = 1

    def __call__(self, logits: Tensor) -> Tensor:
        """Return one logit of each text at its last position."""
        return logits[:, -1, 0]


def _means(steps: Steps, divergences: Float[Tensor, " pos"]) -> Float[Tensor, " step"]:
    """Return the mean divergence over the tokens of each step.

    The distribution for a token is read at the position before it. The first token of the text has
    no distribution.
    """
    means = torch.zeros(len(steps))
    for number, span in enumerate(steps.spans):
        predicted = divergences[max(0, span.start - 1) : span.stop - 1]
        if len(predicted):
            means[number] = predicted.mean()
    return means


def _heads_by_point(
    runner: HookedRunner, attention: HiddenAttention
) -> dict[str, list[int] | None]:
    """Return the points of scores where steps are hidden, with their heads; None for all heads.

    Raises:
        UnknownNameError: if the model has no point `scores`, or if a layer or a name has no such
            point.
        TypeError: if `attention` has another class.
    """
    layer_of_point: dict[str, int | None] = {}
    for name, point in runner.points.items():
        if name.rpartition(".")[2] == "scores" and is_of_text(name):
            layer_of_point[name] = point.layer
    if not layer_of_point:
        raise unknown_name("scores", runner.points, "hook point")
    if attention is None:
        return dict.fromkeys(layer_of_point)
    if isinstance(attention, Mapping):
        point_of_layer = {f"{layer}": name for name, layer in layer_of_point.items()}
        heads_by_point: dict[str, list[int] | None] = {}
        for layer, heads in attention.items():
            if f"{layer}" not in point_of_layer:
                raise unknown_name(layer, point_of_layer, "layer with attention")
            if isinstance(heads, int):
                heads = [heads]
            heads_by_point[point_of_layer[f"{layer}"]] = None if heads is None else [*heads]
        return heads_by_point
    require_kind("attention", attention, (str, Sequence), "names of points, or heads by layer")
    chosen: dict[str, list[int] | None] = {}
    for pattern in [attention] if isinstance(attention, str) else attention:
        # A pattern matches the point `scores`, or the module that contains this point.
        matches = []
        for name in layer_of_point:
            if fnmatch.filter([name, name.rpartition(".")[0]], pattern):
                matches.append(name)
        if not matches:
            modules = [name.rpartition(".")[0] for name in layer_of_point]
            raise unknown_name(pattern, modules, "attention")
        chosen |= dict.fromkeys(matches)
    return chosen


def _described(heads_by_point: Mapping[str, Any], attention: HiddenAttention) -> str:
    """Return the layers and heads where steps are hidden, in words."""
    if attention is None:
        return "all heads of all layers"
    parts = []
    for name, heads in heads_by_point.items():
        module = name.rpartition(".")[0]
        parts.append(module if heads is None else f"{module} heads {', '.join(map(str, heads))}")
    return "; ".join(parts)
