"""Edited runs of one batch as rows of larger batches.

Example: a batch has 3 texts with 5 positions. The first run zeros head 2 of `blocks.1.attn.z`, the
second run scales `blocks.1.mlp_out`. Both are one forward pass of 6 rows: rows 0 to 2 are the first
run, rows 3 to 5 the second run (`Text.repeated`).

1. At `blocks.1.attn.z`, the hook receives [6, 5, head, d_head] and passes rows 0 to 2 to the edit
   of the first run, as if they were a separate batch. At `blocks.1.mlp_out`, rows 3 to 5 are passed
   to the edit of the second run (`stacked_edits`, `_edit_rows`).
   An `Edit` writes into the rows of one copy of the value; a function receives a copy of its rows.
2. The metric is computed from the logits at the positions that it reads: for all runs at once, or
   if it is a function of the user, for each run with 3 rows (`Batch.read`, `Batch.measure`).
3. A value without 6 rows, such as the weights of a mask for all texts, cannot be split. Runs that
   edit this value are computed one by one.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import EditedPoint, HookError, Point
from hooks.base import (
    NEVER_FIRED,
    Calls,
    Piece,
    Text,
    columns_of_last,
    number_of_call,
    peak_bytes,
    piece_read,
    reading,
    require_fired,
    skip_token_checks,
    to_device,
    with_first_tensor,
)
from hooks.shared import Edits, Session, first_tensor, hooks_disabled
from interp.edits import Edit
from interp.measuring import Metric, last_of, per_run
from interp.protocol import logits_of

Done = Callable[[float], object]
"""A function that is called with the work just done, in forward passes of one batch."""


Measured = tuple[Sequence["EditedRun"], Float[Tensor, "run batch"]]
"""Some runs, and the metric of each."""


@dataclass(eq=False)
class EditedRun:
    """An edited run of the batch.

    Attributes:
        index: the index of the run in the sweep.
        edits: the edited points.
        pos: the first position that the run computes.
        layer: the first block that the run computes.
        before_blocks, after_blocks: True if the run edits the model before or after its blocks.
        fired: the names of the edited points that the run has reached.
    """

    index: int
    edits: Sequence[EditedPoint]
    pos: int = 0
    layer: int = 0
    before_blocks: bool = False
    after_blocks: bool = False
    fired: set[str] = field(default_factory=set)

    def require_fired(self) -> None:
        """Raise a NeverFiredError if the run did not reach an edited point."""
        require_fired([edited.point.name for edited in self.edits], self.fired, NEVER_FIRED)


class Batch:
    """The texts and the metric of a sweep.

    Args:
        text: the texts.
        metric: a function from logits to one number for each example.

    Attributes:
        text, tokens: the texts.
        mask: the mask of the texts whose logits the metric reads, on the CPU; None without padding.
        columns: the positions that the metric reads, Int[batch last]; None for all.
        axes: for each edited module, the axis along which its value has a row for each text; None
            if there is no such axis.
    """

    def __init__(self, text: Text, metric: Metric) -> None:
        self.text = text
        self.tokens = text.tokens
        self._pieces = dict[int | None, Piece]()
        size, n_pos = text.of_logits.tokens.shape[:2]
        self.mask = text.of_logits.mask_on_cpu()
        last = last_of(metric, self.mask)
        self.columns = columns_of_last(last, n_pos, size, self.mask) if last else None
        self.metric = metric
        self.axes: dict[nn.Module, int | None] = {}

    def reading(self, start: int | None = None) -> AbstractContextManager[None]:
        """Return a context manager inside which edits know the columns of a run, and the padding.

        Args:
            start: the first column that the run computes; None for whole texts.
        """
        return reading(self._pieces.setdefault(start, Piece(start, self.text.attention_mask)))

    def note(self, point: Point, value: Tensor) -> None:
        """Record in `axes` the axis along which a value has one row for each text.

        None is recorded if there is no such axis, or if calls of one module have different axes.

        Args:
            point: the point of the value.
            value: the value in the unedited run.
        """
        dim: int | None = None
        if "batch" in point.axes:
            dim = point.axes.index("batch")
        elif not point.axes:
            dim = 0
        if dim is not None and value.shape[dim : dim + 1] != (len(self.tokens),):
            dim = None
        # A module may run more than once, with values of different axes.
        is_same = self.axes.get(point.module, dim) == dim
        self.axes[point.module] = dim if is_same else None

    def read(
        self, values: Float[Tensor, "rows pos d"], start: int = 0
    ) -> Float[Tensor, "rows _read d"]:
        """Select the positions that the metric reads.

        Args:
            values: the values of one or several runs of the batch, at all positions from `start`
                on.
            start: the first position of the values.
        """
        # The logits of a classifier have only one position, which the metric reads.
        if self.columns is None or values.shape[1] == 1:
            return values
        columns = to_device(self.columns - start, values.device)
        columns = columns.repeat(len(values) // len(columns), 1)[..., None]
        return values.gather(1, columns.expand(-1, -1, values.shape[-1]))

    def measure(self, logits: Float[Tensor, "rows _read vocab"]) -> Float[Tensor, "run batch"]:
        """Return the metric of one or several runs, which may be NaN.

        Raises:
            ValueError: if the metric does not return one number for each example.
        """
        return per_run(self.metric, logits, len(self.tokens))


def stacked_edits(
    jobs: Sequence[EditedRun], batch: Batch, inside: Container[nn.Module] | None = None
) -> Edits:
    """Return forward hooks that edit copies of a batch, one copy for each job.

    Args:
        jobs: the runs, in the order of the copies.
        batch: the batch.
        inside: the modules whose edits are returned, such as the modules of a block. Default: all
            edited modules.
    """
    edits_of_module: dict[nn.Module, list[tuple[int, EditedRun, EditedPoint]]] = {}
    for copy, job in enumerate(jobs):
        for edited in job.edits:
            module = edited.point.module
            if inside is None or module in inside:
                edits_of_module.setdefault(module, []).append((copy, job, edited))
    edit_rows = partial(_edit_rows, len(jobs), batch, Calls())
    return [(module, partial(edit_rows, edits)) for module, edits in edits_of_module.items()]


def _edit_rows(
    n_copies: int,
    batch: Batch,
    calls: Calls,
    edits: list[tuple[int, EditedRun, EditedPoint]],
    output: Any,
) -> Any:
    """Return the output of a module after the edits of several runs.

    Args:
        n_copies: the number of copies of the batch.
        batch: the batch.
        calls: the counter of the module's calls.
        edits: the edits of the module, each with the index of its copy and its run.
        output: the output of the module.
    """
    point = edits[0][2].point
    value = first_tensor(output, point)
    call = calls.next(point.name)
    # A single copy needs no split, so its value may have no axis of texts.
    if n_copies == 1:
        [(_, job, edited)] = edits
        job.fired.add(edited.point.name)
        if are_edits(edited):
            new = value.clone()
            write(edited, new, call)
        else:
            new = edited.apply(value, call)
        return with_first_tensor(output, new)
    dim = batch.axes[point.module]
    size = len(batch.tokens)
    # Check that the axis grew with the number of copies, because an axis may have the size of the
    # batch by chance.
    if dim is None or value.shape[dim : dim + 1] != (n_copies * size,):
        raise NoRowsError(f"{point} must have a row for each text")
    value = value.clone()
    # Each edit receives the rows of one batch.
    with reading(piece_read().of_rows(0, size)):
        for copy, job, edited in edits:
            rows = value.narrow(dim, copy * size, size)
            if are_edits(edited):
                write(edited, rows, call)
            else:
                rows.copy_(edited.apply(rows, call))
            job.fired.add(edited.point.name)
    return with_first_tensor(output, value)


def are_edits(edited: EditedPoint) -> bool:
    """Return True if all hooks at a point are edits of `interp.edits`.

    These edits write in place and keep the shape, so they need no copy of the rows for each hook.
    """
    return all(type(hook) is Edit for hook in edited.hooks)


def write(edited: EditedPoint, rows: Tensor, call: int) -> None:
    """Apply edits in place, in order.

    Args:
        edited: a point and its edits.
        rows: the value that is changed.
        call: the number of the call of the module.
    """
    with number_of_call.set(call):
        for hook in edited.hooks:
            hooks_disabled(hook, rows, edited.point)


class NoRowsError(HookError):
    """An edited value does not have a row for each text of each run."""


class WholeRuns:
    """Edited runs as rows of whole forward passes.

    Args:
        model: any model.
        batch: the texts and the metric.
        jobs: the edited runs.
        max_bytes: a bound on the memory in bytes, not counting the model; None for one run at a
            time.

    Attributes:
        forwards: the work of all runs as a number of forward passes of the batch.

    Raises:
        ValueError: if `max_bytes` is too small for one run.
    """

    def __init__(
        self, model: nn.Module, batch: Batch, jobs: Sequence[EditedRun], max_bytes: int | None
    ) -> None:
        self.model = model
        self.batch = batch
        self.jobs = jobs
        self.forwards = float(len(jobs))
        self._at_once = 1
        if max_bytes is not None and batch.text.goes_by_rows:
            modules: dict[nn.Module, None] = {}
            for job in jobs:
                modules |= dict.fromkeys(edited.point.module for edited in job.edits)
            with acting([(module, copied) for module in modules]):
                _, memory = peak_bytes(self._measure_base)
            if max_bytes < memory:
                raise TooSmallError(max_bytes, memory)
            self._at_once = max_bytes // memory

    def _measure_base(self) -> None:
        """Run the model once and compute the metric, to measure the memory of one run."""
        self.batch.measure(self.batch.read(self._logits(self.batch.text)))

    def _logits(self, text: Text) -> Tensor:
        """Return the logits of the whole model."""
        return logits_of(self.model(text.tokens, **text.arguments(self.model)))

    def run(self, done: Done) -> Iterator[Measured]:
        """Run all jobs, in groups that fit into the memory, and yield each group.

        Args:
            done: a function that is called with the number of jobs that have just run.

        Yields:
            The jobs of a group, and their metrics, [run, batch].
        """
        for start in range(0, len(self.jobs), self._at_once):
            jobs = self.jobs[start : start + self._at_once]
            try:
                values = self._measured(jobs)
            except NoRowsError:
                values = torch.cat([self._measured([job]) for job in jobs])
            done(len(jobs))
            yield jobs, values

    def _measured(self, jobs: Sequence[EditedRun]) -> Float[Tensor, "run batch"]:
        """Return the metric of some runs, computed in one forward pass."""
        # The unedited run has already checked the texts, and a check waits for the device.
        with skip_token_checks(), acting(stacked_edits(jobs, self.batch)):
            logits = self.batch.read(self._logits(self.batch.text.repeated(len(jobs))))
        return self.batch.measure(logits)


def acting(edits: Edits) -> Session:
    """Return a context in which the edits are active, also in runs with a KV cache."""
    session = Session()
    for module, edit in edits:
        session.after(module, edit, edit)
    return session


def copied(output: Any) -> Any:
    """Return a copy of a tensor, with a second copy for a moment.

    An edit needs the memory of two copies. So this hook is used instead of an edit where the peak
    memory of edited runs is measured.
    """
    if not isinstance(output, Tensor):
        return output
    copies = output.clone(), output.clone()
    return copies[0]


class TooSmallError(ValueError):
    """A bound on memory that is too small for one run.

    Args:
        max_bytes: the bound that was given.
        needed: the smallest bound for one run.
        shares: the number of parts into which the user's bound was divided; each number in the
            message is multiplied by it. Default: 1.
    """

    def __init__(self, max_bytes: int, needed: int, shares: int = 1) -> None:
        self.needed = needed
        super().__init__(
            f"max_bytes must be at least {shares * needed:,} for one edited run of this batch; got "
            f"{max_bytes:,}"
        )
