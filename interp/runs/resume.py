"""Resumed runs: edited runs that begin at their first edited block and position.

The algorithm, for the edited runs of a sweep:

1. Find the first block and the first position of each run (`_place`).
2. Group the runs by their first position. A group with too few tokens joins the group that begins
   earlier.
3. Measure the memory of one run, and divide each group into chunks that fit (`_divided`).
4. Compute each chunk block by block as one batch [run * batch, pos, d_model]. A run joins the batch
   at its first block with the unedited stream. Earlier keys and values are taken from the unedited
   run (`_stream_of`).
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
from interp.runs.rows import Done, Job, acting, copied, stacked, too_small
from interp.runs.unedited import Unedited

# A matrix product with fewer rows spends most of its time reading the weights.
_ENOUGH = 256


class Resumed:
    """Edited runs that share all values that their edits do not change.

    A run begins at its first edited block, and computes the positions from its first edited
    position on. Runs that begin at the same position are rows of one batch, which grows from block
    to block.

    Args:
        unedited: the model's unedited run.
        jobs: the edited runs.
        max_bytes: a bound on the memory in bytes, not counting the model and the logits of the
            unedited run.

    Attributes:
        forwards: the work of all runs, in forward passes of the batch.

    Raises:
        ValueError: if `max_bytes` is too small for one run.
    """

    def __init__(self, unedited: Unedited, jobs: Sequence[Job], max_bytes: int) -> None:
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

    def run(self, done: Done) -> Iterator[tuple[Job, Float[Tensor, " batch"]]]:
        """Yield each job with its metric."""
        for jobs, read_at_once in self._chunks:
            yield from self._measured(jobs, self._stream_of(jobs, done), read_at_once)

    def _place(self, job: Job) -> None:
        """Find the block and the position where a run begins."""
        stages = set().union(*(self.base.stages[edited.point.module] for edited in job.edits))
        blocks = len(self._inside)
        job.before_blocks = -1 in stages
        job.after_blocks = blocks - 0.5 in stages
        edited_layers = [layer for layer in range(blocks) if layer in stages]
        job.layer = 0 if job.before_blocks else min(edited_layers, default=blocks)
        # Edits of the unembedding receive whole texts.
        if job.after_blocks:
            job.pos = 0

    def _work(self, job: Job) -> float:
        layers, positions = len(self._inside) - job.layer, self.n_pos - job.pos
        return layers / len(self._inside) * positions / self.n_pos

    def _divided(self, jobs: Sequence[Job], max_bytes: int) -> Iterator[tuple[list[Job], int]]:
        """Yield jobs whose blocks run together, and the number of jobs to unembed together."""
        base = self.base
        held_bytes = sum(tensor.nbytes for tensor in (*base.streams, *itertools.chain(*base.past)))
        free, stream = max_bytes - held_bytes, base.streams[0].nbytes
        past = sum(tensor.nbytes for tensor in base.past[0])
        block, unembed, metric = self._peaks(jobs)

        def running(pos: int) -> int:
            """Return the bytes of one more run: its streams before and after, a block and keys."""
            return (2 * stream + block) * (self.n_pos - pos) // self.n_pos + (past if pos else 0)

        # A run that edits before the blocks computes a separate first stream. The metric is
        # computed for one run at a time.
        once = metric + stream * any(job.before_blocks for job in jobs)
        least = max(max(running(job.pos), stream + unembed) for job in jobs) + once
        if free < least:
            raise too_small(max_bytes, held_bytes + least)
        for group in self._together(jobs):
            at_once = (free - once) // running(group[0].pos)
            for n in range(0, len(group), at_once):
                some = group[n : n + at_once]
                left = free - once - len(some) * stream
                yield some, max(1, left // unembed)

    def _peaks(self, jobs: Sequence[Job]) -> tuple[int, int, int]:
        """Return the bytes of a block, the unembedding and the metric for one run of the batch."""
        base, edited = self.base, {edited.point.module for job in jobs for edited in job.edits}
        # Measure only the block with the most edits.
        layer = max(range(len(self._inside)), key=lambda n: len(self._inside[n] & edited))
        copying: Edits = [(module, copied) for module in edited]
        with acting(copying):
            _, block = peak_bytes(
                lambda: self.model.run_block(layer, base.streams[layer], base.contexts[layer])
            )
        stream = base.streams[-1]
        stream = stream if any(job.after_blocks for job in jobs) else self.batch.read(stream)
        _, unembed = peak_bytes(lambda: self.model.unembed(stream))
        _, metric = peak_bytes(lambda: self.batch.measure(base.logits))
        return block, unembed + base.logits.nbytes, metric

    def _together(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return groups of runs that begin at the same position, sorted by layer.

        A small group joins another group that begins earlier.
        """
        ordered = sorted(jobs, key=lambda job: job.pos, reverse=True)
        groups: list[list[Job]] = []
        tokens = _ENOUGH
        for pos, more in itertools.groupby(ordered, lambda job: job.pos):
            if tokens >= _ENOUGH:
                groups.append([])
            groups[-1] += more
            for job in groups[-1]:
                job.pos = pos
            tokens = len(groups[-1]) * self.size * (self.n_pos - pos)
        return [sorted(group, key=lambda job: job.layer) for group in groups]

    def _stream_of(self, jobs: list[Job], done: Done) -> Tensor:
        """Return the output of the last block in each of these runs, from their first
        position on.
        """
        blocks, pos = self.model.blocks, jobs[0].pos
        contexts, context = self.base.contexts_from(pos), None
        running: list[Job] = []
        stream: list[Tensor] = []
        for layer in range(jobs[0].layer, len(blocks) + 1):
            # Blocks may be on different devices.
            here = self.base.streams[layer].device
            stream = [to_device(part, here) for part in stream]
            joining = [job for job in jobs if job.layer == layer]
            if joining:
                running += joining
                stream = [torch.cat([*stream, *(self._entering(job)[:, pos:] for job in joining)])]
            if layer < len(blocks):
                if joining or contexts[layer] is not context:
                    context = contexts[layer]
                    repeated = context.repeated(len(running))
                edits = stacked(running, self.batch, self._inside[layer])
                with self.batch.reading(pos or None), acting(edits):
                    stream = [self.model.run_block(layer, stream[0], repeated)]
                done(len(running) / len(blocks) * (self.n_pos - pos) / self.n_pos)
        return stream[0]

    def _entering(self, job: Job) -> Tensor:
        """Return the input of the first block of a run, at all positions."""
        if not job.before_blocks:
            return self.base.streams[job.layer]
        # The unedited run has already checked the texts.
        with skip_token_checks(), acting(stacked([job], self.batch)):
            resid = self.model.input_resid(self.batch.tokens, self.base.contexts[0])
        return to_device(resid, self.base.streams[0].device)

    def _measured(
        self, jobs: list[Job], stream: Tensor, read_at_once: int
    ) -> Iterator[tuple[Job, Tensor]]:
        """Yield each run with its metric."""
        pos = jobs[0].pos
        streams = dict(zip(jobs, stream.split(self.size), strict=True))
        for job in [job for job in jobs if job.after_blocks]:
            with acting(stacked([job], self.batch)):
                logits = self.model.unembed(streams.pop(job))
            yield job, self.batch.measure(self.batch.read(logits))
        plain = list(streams)
        before = self.base.logits[:, : pos if self.batch.columns is None else 0]
        for n in range(0, len(plain), read_at_once):
            some = plain[n : n + read_at_once]
            logits = self.model.unembed(torch.cat([self._read(streams[job], pos) for job in some]))
            for job, rows in zip(some, logits.split(self.size), strict=True):
                yield job, self.batch.measure(torch.cat([before, rows], 1))

    def _read(self, stream: Tensor, pos: int) -> Tensor:
        """Return the stream at the positions that the metric reads; `stream` begins at `pos`."""
        if pos > self._first_read:
            stream, pos = torch.cat([self.base.streams[-1][:, :pos], stream], 1), 0
        return self.batch.read(stream, pos)
