"""Sweeps: many edited runs of one batch, computed as rows of few forward passes.

The algorithm (no paper; the result is that of separate runs):

1. Run the model once without edits. Keep the stream before each block, and each block's keys and values; try each
   edit on the values of this run, so that errors come before long work (`unedited`).
2. Find for each edit the first block and the first position that it may change.
3. Begin each edited run there, and run those that begin at the same position as rows of one batch, as many as the
   memory allows (`resume`). Each edit acts on its own rows (`rows`).
4. Where the model has no such steps, give each edited run rows of a whole forward pass (`rows.WholeRuns`).
5. Unembed only the positions that the metric reads, and subtract the metric of the unedited run.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from hooks import EditedPoint, Hooks
from hooks.shared import is_listened_to, progress_bar, without_gradients
from interp.edits import Edit
from interp.inputs.pairs import Pairs
from interp.inputs.texts import Text, Texts, text_for, writer_of
from interp.measuring import Metric, evaluate, in_words, metric_for
from interp.protocol import runner_of
from interp.results.result import Result
from interp.runs.resume import Resumed
from interp.runs.rows import Batch, Job, WholeRuns
from interp.runs.unedited import Unedited


@without_gradients
def sweep(
    model: nn.Module,
    texts: Texts | Pairs,
    edits: Sequence[Hooks],
    metric: Metric | None = None,
    *,
    attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    max_bytes: int = 2**30,
    exact: Literal["resume", "rerun"] = "resume",
) -> Result:
    """Measure the effect of each edit on the metric, each as if it had a run of its own.

    A run is resumed where it begins to differ from the unedited one: at the first block and the first
    position that its edits touch. Earlier keys and values are those of the unedited run, and logits are
    computed only at the positions that the metric reads. Runs that are resumed share forward passes as
    further rows of the batch. Effects equal those of separate runs up to rounding, 1e-5 of the largest
    value in float32.

    Functions of your own are called with the rows of one batch, in any order of the runs. They may depend
    on any position, so their runs begin at the first one. In a model without the steps `input_resid`,
    `blocks` and `unembed`, edited runs share whole forward passes. Where hooks act on the model already, each
    edited run has a forward pass of its own.

    Args:
        model: the model, in evaluation mode.
        texts: the texts, or pairs, of which the clean texts are run.
        edits: for each run what `run_with_hooks` takes as `hooks`.
        metric: a function from logits to a number per example; see `interp.metrics`. By default that of
            the pairs.
        attention_mask: which tokens of a tensor [batch, pos] are not padding.
        max_bytes: bounds the memory that the sweep takes beyond the model and one unedited run. What
            functions of your own take is not counted.
        exact: `rerun` runs the whole model for each edit instead.

    Returns:
        Effects [edit, example], metric(edited) - metric(unedited), in the metric's unit. They print what was edited.

    Warns:
        UserWarning: if effects are NaN, because the metric of an edited run is, or two infinities cancel.

    Raises:
        ValueError: if there are no edits, `max_bytes` is too small for one edited run, or the metric of the
            unedited run is not one number per example.
        EditError: if an edit does not fit.
        ModeError: if the model is in training mode.
        NeverFiredError: if a run did not reach an edited point.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> from interp import edits
    >>> without_mlps = [{f"blocks.{n}.mlp_out": edits.zero()} for n in (0, 3)]
    >>> sweep(model, pairs, without_mlps).top(2)
    edit 0 'blocks.0.mlp_out: edits.zero()'  -9.01
    edit 1 'blocks.3.mlp_out: edits.zero()'  -1.602
    """
    if isinstance(texts, Pairs):
        if attention_mask is not None:
            raise ValueError("pairs have their own mask; got another")
        pairs = texts.read_by(model)
        metric = pairs.metric if metric is None else metric
        text = pairs.text
    else:
        text = text_for(model, texts, attention_mask)
    if metric is None:
        raise ValueError("a metric must be given, or pairs with answers; got neither")
    metric = in_words(metric_for(model, metric), writer_of(model))
    _check_edits(edits)
    if exact not in ("resume", "rerun"):
        raise ValueError(f"exact must be 'resume' or 'rerun'; got {exact!r}")
    effects = sweep_text(model, text, edits, metric, max_bytes, exact == "rerun", stacklevel=4)
    return replace(effects, words={"edit": [*map(_described, edits)]})


def sweep_text(
    model: nn.Module,
    text: Text,
    edits: Sequence[Hooks],
    metric: Metric,
    max_bytes: int,
    rerun: bool = False,
    stacklevel: int = 3,
) -> Result:
    """A `sweep` of texts with all arguments of their run, for other analyses."""
    batch = Batch(text, metric)
    with batch.reading():
        base, values = _measured(model, batch, edits, max_bytes, rerun)
    effects = values - base
    if effects.isnan().any():
        wrong = effects.isnan().any(1).nonzero()[:, 0].tolist()
        warnings.warn(
            f"{len(wrong)} of {len(edits)} edits have no effect that is a number (NaN), the first is edit {wrong[0]}",
            stacklevel=stacklevel,
        )
    unit, about = getattr(metric, "unit", ""), {"metric": repr(metric)}
    return Result(effects, ("edit", "example"), base, unit=unit, about=about)


def _measured(
    model: nn.Module, batch: Batch, edits: Sequence[Hooks], max_bytes: int, rerun: bool
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "edit batch"]]:
    """The metric of the unedited run, and of each edited one."""
    runner, (size, n_pos) = runner_of(model), batch.tokens.shape[:2]
    jobs = [Job(index, runner.edits(hooks)) for index, hooks in enumerate(edits)]
    for job in jobs:
        if batch.tokens.ndim == 2:  # images and sounds have positions of their own
            job.pos = min((_first(edited, n_pos) for edited in job.edits), default=0)
    # Hooks that act already may depend on which rows are which, as scales of quantised values do.
    alone = rerun or is_listened_to(model, parts=False) or any(map(_mixes_rows, model.modules()))
    unedited = Unedited(runner, batch, jobs)
    base = evaluate(batch.metric, unedited.logits, size)
    runs: Resumed | WholeRuns
    hooks = [hook for job in jobs for edited in job.edits for hook in edited.hooks]
    counts_calls = any("call" in getattr(hook, "where", ()) for hook in hooks)
    if alone or counts_calls or not unedited.is_resumable():
        runs = WholeRuns(model, batch, jobs, None if alone else max_bytes)
    else:
        if not all(getattr(context, "is_causal", True) for context in unedited.contexts):
            for job in jobs:  # earlier positions read later ones
                job.pos = 0
        runs = Resumed(unedited, jobs, max_bytes)
    values = base.new_empty(len(jobs), size)
    title = f"{len(jobs)} edits, as {runs.forwards:.1f} forward passes"
    with progress_bar(total=runs.forwards, desc=title, delay=1) as bar:
        for job, edited in runs.run(bar.update):
            values[job.index] = edited
            job.require_fired()
    return base, values


def _described(edit: Hooks) -> str:
    """An entry of a sweep in a few words."""
    pairs = edit.items() if isinstance(edit, Mapping) else edit
    named = ([getattr(part, "__name__", part) for part in pair] for pair in pairs)
    text = ", ".join(f"{point}: {change}" for point, change in named)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mixes_rows(module: nn.Module) -> bool:
    """Whether a module quantises rows together: by one scale, or with columns of outliers that are found in all of them."""
    kind = type(module)
    is_dynamic = kind.__module__.startswith("torch.ao.nn.quantized.dynamic")
    return is_dynamic or kind.__name__ == "Linear8bitLt"  # of bitsandbytes


def _check_edits(edits: Sequence[Hooks]) -> None:
    if isinstance(edits, Mapping):
        raise TypeError(
            "edits must be a list, with an entry for each run; got one mapping: [edits]"
        )
    for entry in edits:
        if callable(entry):
            raise TypeError(
                f"an entry of edits must say where, as {{'blocks.*.attn.z': {entry!r}}}; got {entry!r}"
            )
    if not edits:
        raise ValueError("a sweep needs at least one edit; got none")


def _first(edited: EditedPoint, n_pos: int) -> int:
    """The first position that the edits at a point may change. A function may change any."""
    hooks = edited.hooks
    return min(h.first(edited.point, n_pos) if isinstance(h, Edit) else 0 for h in hooks)
