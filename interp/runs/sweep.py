"""Sweeps: many edited runs of one batch, computed as rows of few forward passes.

The algorithm (no paper; the result is that of separate runs):

1. Run the model once without edits. Keep the stream before each block, and each block's keys and
   values; try each edit on the values of this run, so that errors come before long work
   (`unedited`).
2. Find for each edit the first block and the first position that it may change.
3. Begin each edited run there, and run those that begin at the same position as rows of one batch,
   as many as the memory allows (`resume`). Each edit acts on its own rows (`rows`).
4. Where the model has no such steps, give each edited run rows of a whole forward pass
   (`rows.WholeRuns`).
5. Unembed only the positions that the metric reads, and subtract the metric of the unedited run.
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from hooks import EditedPoint, HookedRunner, Hooks
from hooks.base import progress_bar
from hooks.shared import is_listened_to
from interp.edits import Edit
from interp.measuring import evaluate
from interp.runs.resume import Resumed
from interp.runs.rows import Batch, Job, WholeRuns
from interp.runs.unedited import Unedited


def measured(
    runner: HookedRunner, batch: Batch, edits: Sequence[Hooks], max_bytes: int
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "edit batch"]]:
    """Return the metric of the unedited run, and of each edited run.

    Args:
        runner: the runner of the model.
        batch: the texts and the metric.
        edits, max_bytes: see `sweep`.
    """
    model, (size, n_pos) = runner.model, batch.tokens.shape[:2]
    jobs = [Job(index, runner.edits(hooks)) for index, hooks in enumerate(edits)]
    for job in jobs:
        if batch.tokens.ndim == 2:  # images and sounds have positions of their own
            job.pos = min((_first(edited, n_pos) for edited in job.edits), default=0)
    # Hooks that act already may depend on which rows are which, as scales of quantised values do.
    alone = is_listened_to(model, parts=False) or any(map(_mixes_rows, model.modules()))
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
    with progress_bar(title, total=runs.forwards) as count:
        for job, edited in runs.run(count):
            values[job.index] = edited
            job.require_fired()
    return base, values


def _mixes_rows(module: nn.Module) -> bool:
    """Whether a module quantises rows together, by one scale or with outliers found in all rows."""
    is_dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic")
    # Maps of bitsandbytes in 8 bits find outliers by a threshold, which their state holds.
    finds_outliers = hasattr(getattr(module, "state", None), "threshold")
    return is_dynamic or finds_outliers


def _first(edited: EditedPoint, n_pos: int) -> int:
    """The first position that the edits at a point may change. A function may change any."""
    hooks = edited.hooks
    return min(h.first(edited.point, n_pos) if isinstance(h, Edit) else 0 for h in hooks)
