"""Sweeps: many edited runs of one batch, computed as rows of a few forward passes.

The algorithm (no paper; the result equals the result of separate runs):

1. Run the model once without edits. Cache the stream before each block, and the keys and values of
   each block. Try each edit on the values of this run, so that errors are raised before the edited
   runs (`unedited`).
2. For each edit, find the first block and the first position that the edit may change.
3. Begin each edited run at this block and this position. Runs that begin at the same position are
   rows of one batch, as many as the memory allows (`resume`). Each edit changes only its own rows
   (`rows`).
4. If the model cannot be resumed, each edited run is some rows of a whole forward pass
   (`rows.WholeRuns`).
5. Unembed only the positions that the metric reads, and subtract the metric of the unedited run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import EditedPoint, HookedRunner, Hooks
from hooks.base import (
    number_of,
    progress_bar,
    require_kind,
    to_device,
    warn,
    without_gradients,
)
from hooks.shared import is_listened_to, one_warning
from interp.edits import Edit
from interp.measuring import metric_of_examples
from interp.numbers.precision import has_nan
from interp.runs.edited import edit_of_texts
from interp.runs.memory import bytes_together
from interp.runs.resume import Resumed
from interp.runs.rows import Batch, EditedRun, WholeRuns
from interp.runs.runs import Runs
from interp.runs.unedited import Unedited

# The default memory of a sweep on the CPU.
_BYTES = 2**30


def effects_of_edits(
    runs: Runs,
    edits: Sequence[Hooks],
    max_bytes: int | None = None,
    *,
    of_rows: bool = False,
) -> tuple[Float[Tensor, " row"], Float[Tensor, "edit row"]]:
    """Return the metric of the unedited run, and the effect of each edit.

    Args:
        runs: the texts and the metric.
        edits: the hooks of each run, in the form of the argument `hooks` of `run_with_hooks`.
        max_bytes: see `interp.sweep`.
        of_rows: whether edits act on rows, each of which contains a text and an answer of several
            tokens. Default: False, for edits of texts, whose positions are positions of prompts.

    Warns:
        UserWarning: if effects are NaN.

    Raises:
        ValueError, HookError: see `interp.sweep`.
    """
    require_kind("max_bytes", max_bytes, (int, float, type(None)), "a number of bytes")
    batch = Batch(runs.text, runs.metric)
    edits_of_runs = [runs.runner.edits(hooks) for hooks in edits]
    prompts = runs.columns_of_prompts
    if prompts is not None and not of_rows:
        edits_of_runs = [_of_texts(edited, prompts) for edited in edits_of_runs]
    with one_warning(), batch.reading():
        base, values = _measured(runs.runner, batch, edits_of_runs, max_bytes=max_bytes)
    effects = values - base
    if has_nan(effects):
        with_nan = effects.isnan().any(1).nonzero()[:, 0].tolist()
        warn(
            f"the effects of {len(with_nan)} of {len(edits)} edits are NaN; the first is edit "
            f"{with_nan[0]}",
        )
    return base, effects


def _of_texts(edited: Sequence[EditedPoint], prompts: list[list[int]]) -> list[EditedPoint]:
    """Return edits that make the same change in all rows of a text, at positions of its prompt.

    A text has a row for each answer, and a row ends with the answer.

    Args:
        edited: the edits of a run.
        prompts: the columns of the tokens of each text's prompt.
    """
    edits_of_texts = []
    for point_edits in edited:
        hooks = tuple(
            edit_of_texts(hook, point_edits.point, prompts) if isinstance(hook, Edit) else hook
            for hook in point_edits.hooks
        )
        edits_of_texts.append(replace(point_edits, hooks=hooks))
    return edits_of_texts


@without_gradients
def _measured(
    runner: HookedRunner,
    batch: Batch,
    edits: Sequence[Sequence[EditedPoint]],
    max_bytes: int | None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "edit batch"]]:
    """Return the metrics of the unedited run and of each edited run.

    Args:
        runner: the runner of the model.
        batch: the texts and the metric.
        edits: the edits of each run.
        max_bytes: see `interp.sweep`.
    """
    model = runner.model
    size, n_pos = batch.tokens.shape[:2]
    jobs = [EditedRun(index, edited) for index, edited in enumerate(edits)]
    for job in jobs:
        # The pixels of an image or the samples of a sound are not positions of activations.
        # Therefore, runs on images and sounds begin at position 0.
        if batch.tokens.ndim == 2:
            job.pos = min((_first(edited, n_pos) for edited in job.edits), default=0)
    is_alone = runs_alone(model)
    unedited = Unedited(runner, batch, jobs)
    base = metric_of_examples(batch.metric, unedited.logits, size, batch.mask)
    if max_bytes is None:
        max_bytes = bytes_together(unedited.logits.device, on_cpu=_BYTES)
    runs: Resumed | WholeRuns
    if is_alone or any(map(_counts_calls, jobs)) or not unedited.is_resumable():
        runs = WholeRuns(model, batch, jobs, max_bytes=None if is_alone else max_bytes)
    else:
        # Blocks share contexts, and each look at a mask waits for the device.
        contexts = {id(context): context for context in unedited.contexts}.values()
        if not all(getattr(context, "is_causal", True) for context in contexts):
            # If a model is not causal, an edit also changes earlier positions, so all positions are
            # computed.
            for job in jobs:
                job.pos = 0
        runs = Resumed(unedited, jobs, max_bytes)
    parts: list[Tensor] = []
    indices: list[int] = []
    title = f"{number_of(len(jobs), 'edit')}, as {runs.forwards:.3g} forward passes"
    with progress_bar(title, total=runs.forwards) as count:
        for jobs_run, metrics in runs.run(count):
            parts.append(to_device(metrics.to(base.dtype), base.device))
            for job in jobs_run:
                indices.append(job.index)
                job.require_fired()
    return base, _in_order(torch.cat(parts), indices)


def _in_order(
    values: Float[Tensor, "edit batch"], indices: Sequence[int]
) -> Float[Tensor, "edit batch"]:
    """Return rows in the order of their indices."""
    if [*indices] == sorted(indices):
        return values
    order = torch.tensor(indices).argsort()
    return values.index_select(0, to_device(order, values.device))


def runs_alone(model: nn.Module) -> bool:
    """Return True if each edited run of a model needs a separate and whole forward pass.

    The result of a hook that is already active may depend on the other rows of the batch. An
    example is the scale of quantised values.
    """
    return is_listened_to(model, parts=False) or any(map(_mixes_rows, model.modules()))


def _counts_calls(job: EditedRun) -> bool:
    """Return True if an edit of a run selects some calls of a module."""
    hooks = itertools.chain(*(edited.hooks for edited in job.edits))
    return any("call" in getattr(hook, "where", ()) for hook in hooks)


def _mixes_rows(module: nn.Module) -> bool:
    """Return True if a module quantises rows together, with one scale or with shared outliers."""
    is_dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
    # The 8-bit linear maps of bitsandbytes find outliers by the threshold in their state.
    finds_outliers = hasattr(getattr(module, "state", None), "threshold")
    return is_dynamic or finds_outliers


def _first(edited: EditedPoint, n_pos: int) -> int:
    """Return the first position that the edits at a point may change.

    A function may change any position.
    """
    firsts = []
    for hook in edited.hooks:
        firsts.append(hook.first(edited.point, n_pos) if isinstance(hook, Edit) else 0)
    return min(firsts)
