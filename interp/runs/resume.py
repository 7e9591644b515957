"""Resumed runs: edited runs that begin at their first edited block and position.

The algorithm, for the edited runs of a sweep:

1. Find the first block and the first position of each run (`_place`).
2. Group the runs by their first position. A group with too few tokens joins the group that begins
   earlier (`_groups`).
3. Measure the memory of one run, and divide each group into chunks that fit (`_divided`).
4. Compute each chunk block by block as one batch [run * batch, pos, d_model]. At the first edited
   block of a run, the unedited stream before this block is added to the batch. Keys and values of
   earlier positions are taken from the unedited run (`_stream_of`).
5. Unembed some runs at a time, only at the positions that the metric reads (`_measured`).
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import peak_bytes, skip_token_checks, to_device
from hooks.shared import Edits, inside
from interp.measuring import has_batched_runs
from interp.runs.rows import Done, EditedRun, Measured, TooSmallError, acting, copied, stacked_edits
from interp.runs.unedited import Unedited

# A matrix product with fewer rows spends most of its time reading the weights.
_ENOUGH = 256


class Resumed:
    """Edited runs that share all values that their edits do not change.

    A run begins at the first block that is edited in this run, and computes the positions from the
    first edited position on. Runs that begin at the same position are rows of one batch, which
    grows from block to block.

    Args:
        unedited: the model's unedited run.
        jobs: the edited runs.
        max_bytes: a bound on the memory in bytes, not counting the model and the logits of the
            unedited run.

    Attributes:
        forwards: the work of all runs as a number of forward passes of the batch. A run of half of
            the blocks is 0.5.

    Raises:
        ValueError: if `max_bytes` is too small for one run.
    """

    def __init__(self, unedited: Unedited, jobs: Sequence[EditedRun], max_bytes: int) -> None:
        self.model: Any = unedited.language
        self.base = unedited
        self.batch = unedited.batch
        self.size, self.n_pos = self.batch.tokens.shape
        self._inside: list[set[nn.Module]] = [inside(block) for block in self.model.blocks]
        columns = self.batch.columns
        self._first_read = self.n_pos if columns is None else int(columns.min())
        for job in jobs:
            self._place(job)
        self._chunks = list(self._divided(jobs, max_bytes))
        self.forwards = sum(map(self._work, jobs))

    def run(self, done: Done) -> Iterator[Measured]:
        """Run all jobs, several in one batch. Yield the jobs of each batch, with their metrics."""
        for jobs, read_at_once in self._chunks:
            yield from self._measured(jobs, self._stream_of(jobs, done), read_at_once)

    def _place(self, job: EditedRun) -> None:
        """Find the block and the position where a run begins."""
        stages = set().union(*(self.base.stages[edited.point.module] for edited in job.edits))
        blocks = len(self._inside)
        job.before_blocks = -1 in stages
        job.after_blocks = blocks - 0.5 in stages
        edited_layers = [layer for layer in range(blocks) if layer in stages]
        job.layer = 0 if job.before_blocks else min(edited_layers, default=blocks)
        # Edits after the blocks, such as edits of `ln_final`, receive all positions of a text.
        if job.after_blocks:
            job.pos = 0

    def _work(self, job: EditedRun) -> float:
        """Return the work of a run as a share of a forward pass of the batch."""
        n_layers = len(self._inside) - job.layer
        n_positions = self.n_pos - job.pos
        return n_layers / len(self._inside) * n_positions / self.n_pos

    def _divided(
        self, jobs: Sequence[EditedRun], max_bytes: int
    ) -> Iterator[tuple[list[EditedRun], int]]:
        """Divide the jobs into chunks whose blocks run together.

        Yield each chunk with the number of its jobs that are unembedded together.
        """
        base = self.base
        unedited_tensors = (*base.streams, *itertools.chain(*base.past))
        unedited_bytes = sum(tensor.nbytes for tensor in unedited_tensors)
        stream_bytes = base.streams[0].nbytes
        past_bytes = sum(tensor.nbytes for tensor in base.past[0])
        block_bytes, unembed_bytes, metric_bytes = self._peaks(jobs)

        def bytes_of_run(pos: int) -> int:
            """Return the bytes of a run that begins at `pos`.

            These are the streams before and after a block, the values inside the block, and the
            keys and values of earlier positions.
            """
            at_all_positions = 2 * stream_bytes + block_bytes
            earlier_keys = past_bytes if pos else 0
            return at_all_positions * (self.n_pos - pos) // self.n_pos + earlier_keys

        # This memory is needed once, for any number of runs. A function of the user is computed for
        # one run at a time, and so is the first stream of a run with edits before the blocks.
        shared_bytes = stream_bytes * any(job.before_blocks for job in jobs)
        if has_batched_runs(self.batch.metric):
            unembed_bytes += metric_bytes
        else:
            shared_bytes += metric_bytes
        largest_run = max(max(bytes_of_run(job.pos), stream_bytes + unembed_bytes) for job in jobs)
        needed = unedited_bytes + shared_bytes + largest_run
        if max_bytes < needed:
            raise TooSmallError(max_bytes, needed)
        free = max_bytes - unedited_bytes - shared_bytes
        for group in self._groups(jobs):
            n_at_once = free // bytes_of_run(group[0].pos)
            for start in range(0, len(group), n_at_once):
                chunk = group[start : start + n_at_once]
                free_for_logits = free - len(chunk) * stream_bytes
                yield chunk, max(1, free_for_logits // unembed_bytes)

    def _peaks(self, jobs: Sequence[EditedRun]) -> tuple[int, int, int]:
        """Return the peak memory of a block, of the unembedding and of the metric, in bytes.

        Each is measured for one run. The unembedding includes the stream that it reads.
        """
        base = self.base
        edited_modules: set[nn.Module] = set()
        for job in jobs:
            edited_modules |= {edited.point.module for edited in job.edits}
        # Measure only the block with the most edits.
        n_blocks = len(self._inside)
        layer = max(range(n_blocks), key=lambda n: len(self._inside[n] & edited_modules))
        copying: Edits = [(module, copied) for module in edited_modules]
        with acting(copying):
            _, block = peak_bytes(
                lambda: self.model.run_block(layer, base.streams[layer], base.contexts[layer])
            )
        stream = base.streams[-1]
        if not any(job.after_blocks for job in jobs):
            _, unembed = peak_bytes(lambda: self.model.unembed(self.batch.read(stream)))
        else:
            _, unembed = peak_bytes(lambda: self.model.unembed(stream))
            unembed += stream.nbytes
        if any(job.pos > self._first_read for job in jobs):
            unembed += stream.nbytes
        _, metric = peak_bytes(lambda: self.batch.measure(base.logits))
        return block, unembed + base.logits.nbytes, metric

    def _groups(self, jobs: Sequence[EditedRun]) -> list[list[EditedRun]]:
        """Return groups of runs that begin at the same position, sorted by layer.

        A small group joins another group that begins earlier.
        """
        ordered = sorted(jobs, key=lambda job: job.pos, reverse=True)
        groups: list[list[EditedRun]] = []
        n_tokens = _ENOUGH
        for pos, jobs_at_pos in itertools.groupby(ordered, lambda job: job.pos):
            if n_tokens >= _ENOUGH:
                groups.append([])
            groups[-1] += jobs_at_pos
            for job in groups[-1]:
                job.pos = pos
            n_tokens = len(groups[-1]) * self.size * (self.n_pos - pos)
        return [sorted(group, key=lambda job: job.layer) for group in groups]

    def _stream_of(self, jobs: list[EditedRun], done: Done) -> Tensor:
        """Return the output of the last block in some runs, [run * batch, pos, d_model].

        The positions begin at the first position of the runs.

        Args:
            jobs: the runs, sorted by layer, which begin at the same position.
            done: a function that is called with the work just done, in forward passes.
        """
        blocks = self.model.blocks
        pos = jobs[0].pos
        contexts = self.base.contexts_from(pos)
        context = None
        running: list[EditedRun] = []
        # The list contains the streams of all running jobs as one tensor. It is empty until the
        # first job begins.
        stream: list[Tensor] = []
        for layer in range(jobs[0].layer, len(blocks) + 1):
            # Blocks may be on different devices.
            device = self.base.streams[layer].device
            stream = [to_device(part, device) for part in stream]
            joining = [job for job in jobs if job.layer == layer]
            if joining:
                running += joining
                stream = [torch.cat([*stream, *(self._entering(job)[:, pos:] for job in joining)])]
            if layer < len(blocks):
                if joining or contexts[layer] is not context:
                    context = contexts[layer]
                    repeated = context.repeated(len(running))
                edits = stacked_edits(running, self.batch, self._inside[layer])
                with self.batch.reading(pos or None), acting(edits):
                    stream = [self.model.run_block(layer, stream[0], repeated)]
                done(len(running) / len(blocks) * (self.n_pos - pos) / self.n_pos)
        return stream[0]

    def _entering(self, job: EditedRun) -> Tensor:
        """Return the input of the first block of a run, at all positions."""
        if not job.before_blocks:
            return self.base.streams[job.layer]
        # The unedited run has already checked the texts, and a check waits for the device.
        with skip_token_checks(), acting(stacked_edits([job], self.batch)):
            resid = self.model.input_resid(self.batch.tokens, self.base.contexts[0])
        return to_device(resid, self.base.streams[0].device)

    def _measured(
        self, jobs: list[EditedRun], stream: Tensor, read_at_once: int
    ) -> Iterator[Measured]:
        """Yield some runs at a time, with the metric of each.

        Args:
            jobs: the runs.
            stream: the output of the last block in these runs.
            read_at_once: the number of runs to unembed together.
        """
        pos = jobs[0].pos
        streams = dict(zip(jobs, stream.split(self.size), strict=True))
        for job in [job for job in jobs if job.after_blocks]:
            with acting(stacked_edits([job], self.batch)):
                logits = self.model.unembed(streams.pop(job))
            yield [job], self.batch.measure(self.batch.read(logits))
        if len(streams) < len(jobs) and streams:
            stream = torch.cat([*streams.values()])
        remaining = list(streams)
        for start in range(0, len(remaining), read_at_once):
            chunk = remaining[start : start + read_at_once]
            rows = slice(start * self.size, (start + len(chunk)) * self.size)
            logits = self.model.unembed(self._read(stream[rows], pos))
            # If the metric reads all positions, it also needs the logits before `pos`. They are the
            # same as in the unedited run.
            if self.batch.columns is None:
                # A model of `transformers` moves its output to the device of its input.
                earlier_logits = to_device(self.base.logits[:, :pos], logits.device)
                logits = _after(earlier_logits, logits)
            yield chunk, self.batch.measure(logits)

    def _read(self, stream: Tensor, pos: int) -> Tensor:
        """Return the streams of some runs at the positions that the metric reads.

        Args:
            stream: the streams from position `pos` on.
            pos: the first position.
        """
        if pos > self._first_read:
            stream = _after(self.base.streams[-1][:, :pos], stream)
            pos = 0
        return self.batch.read(stream, pos)


def _after(
    earlier: Float[Tensor, "batch _earlier d"], later: Float[Tensor, "rows _later d"]
) -> Float[Tensor, "rows _pos d"]:
    """Concatenate values along the position axis: the earlier values, then the later values.

    Args:
        earlier: the values of a batch at its first positions, which are the same in all runs.
        later: the values of one or several runs of the batch at the next positions. The first axis
            contains the rows of the first run, then the rows of the second run, and so on.
    """
    if not earlier.shape[1]:
        return later
    of_runs = later.unflatten(0, (-1, len(earlier)))
    return torch.cat([earlier.expand(len(of_runs), *earlier.shape), of_runs], 2).flatten(0, 1)
