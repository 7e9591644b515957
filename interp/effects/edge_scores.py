"""Scores of all edges: the change of each writer times the gradient at each reader.

In a model of 1 layer with 2 heads and an MLP, on one text of 3 tokens:

1. The writers are `input, a0.h0, a0.h1, m0`. `changes` is the output of each writer in the other
   run minus its output in this run, [4, 1, 3, d_model].
2. The readers are `a0.h0<q>` to `a0.h1<v>`, `m0` and `logits`. For each reader, `reader_gradients`
   computes the gradient of the metric with respect to the stream before the reader, through this
   reader alone, [8, 3, d_model].
3. The score of an edge is change · gradient, summed over the positions of each group, as `over`
   defines them. One matrix product computes the scores of all writers before a reader.
4. The scores have one column for each reader. A last column contains the attribution of each
   writer: its change times the gradient where it is added. The scores of the writer's edges should
   sum to this attribution.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooks.base import (
    Text,
    all_to_device,
    at_least_float32,
    progress_of,
    require_choice,
    shown,
    to_device,
    wide_dtype,
)
from interp.effects.reader_gradients import Pullbacks, readings_of
from interp.graph import Graph
from interp.runs.gradients import Gradients, require_numbers

# A matrix product with fewer columns spends most of its time reading the changes.
_ENOUGH = 60

# The memory for the scale of one norm and its gradient, in streams.
_STREAMS_OF_NORM = 5

# The memory of texts that are computed together on the CPU. If texts need more memory, a joint
# computation saves no time, because their values do not fit into the caches of the processor.
_CPU_BYTES = 2**24


class ChangedPositions(NamedTuple):
    """The token positions at which writers change.

    Attributes:
        here: the columns of the edited text.
        there: the columns of the other text from which the values are taken.
        group: for each column, the index of the group to whose sum it belongs: one group for all
            positions, for each position or for each span. Columns that must not count have the
            index after the last group. These are repeated columns of a span and, if each position
            is a group, the tokens of answers.
        labels: the labels of the groups; None for one sum over all columns.
        is_whole: whether `here` and `there` contain all columns in order.
    """

    here: Int[Tensor, "batch n"]
    there: Int[Tensor, "batch n"]
    group: Int[Tensor, "batch n"]
    labels: list[int | str] | None
    is_whole: bool

    def change(self, whole: Tensor, by: Float[Tensor, "batch n d_model"]) -> Tensor:
        """Return a copy of a stream with a change added at the columns `here`.

        Args:
            whole: the stream, [batch, pos, d_model].
            by: the change of each column.
        """
        by = by.masked_fill((self.group == self.groups)[..., None], 0)
        row = torch.arange(len(self.here), device=self.here.device)[:, None]
        index, by = all_to_device(((row, self.here), by), whole.device)
        return whole.index_put(index, by.to(whole.dtype), accumulate=True)

    @property
    def groups(self) -> int:
        """The number of groups in the result."""
        return 1 if self.labels is None else len(self.labels)


def changed_positions(
    over: str | None,
    edited: Text,
    source: Text,
    prompts: Bool[Tensor, "batch pos"] | None = None,
) -> ChangedPositions:
    """Return the positions for one value of `over`; see `edge_attribution`.

    Args:
        over: None, `pos` or `span`.
        edited: the text that is edited.
        source: the text from which values are taken.
        prompts: True at the tokens of prompts, and False at answers of several tokens. Default: the
            texts have no answers.

    Raises:
        ValueError: if `over` has another value, or the texts do not fit it.
    """
    require_choice("over", over, (None, "pos", "span"))
    batch, n = edited.tokens.shape
    if over != "span":
        if not edited.is_aligned_with(source):
            raise ValueError(
                "over must be 'span' if positions of the two texts do not correspond; got "
                f"{shown(over)}"
            )
        columns = torch.arange(n, device=edited.tokens.device).expand(batch, n)
        one_group = torch.zeros_like(columns)
        if over is None:
            return ChangedPositions(columns, columns, group=one_group, labels=None, is_whole=True)
        column_of_prompt = columns
        if prompts is not None:
            # Tokens of answers get the index n, and their sum is dropped.
            n = int(prompts.any(0).nonzero().max()) + 1
            column_of_prompt = columns.where(prompts, n)
        return ChangedPositions(
            here=columns,
            there=columns,
            group=column_of_prompt,
            labels=[*range(n)],
            is_whole=True,
        )
    if not edited.spans:
        raise ValueError("over='span' needs Pairs with spans; got pairs without spans")
    here, there, group = [], [], []
    for span, (name, columns) in enumerate(edited.spans.items()):
        occurs_later = (columns[:, :, None] == columns[:, None]).triu(1).any(2)
        here.append(columns)
        there.append(source.spans[name])
        group.append(torch.full_like(columns, span).masked_fill(occurs_later, len(edited.spans)))
    return ChangedPositions(
        here=torch.cat(here, 1),
        there=torch.cat(there, 1),
        group=torch.cat(group, 1),
        labels=[*edited.spans],
        is_whole=False,
    )


class ScoredPoints:
    """The points whose values and gradients are needed for the scores of a graph's edges.

    Args:
        graph: the graph.

    Attributes:
        graph: the graph.
        readings: the readers of each stream, in the order of computation.
        added: the writers that are added to the stream at each point, by the name of the point.
        names: the names of all points.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readings = [*readings_of(graph)]
        self.added = _writers_by_point(graph)
        self.names = [*graph.needed, *self.added]
        for reading in self.readings:
            self.names += [reading.stream, reading.at]


class _Part(NamedTuple):
    """Some changed positions of some texts, whose scores are computed together.

    Attributes:
        rows: the rows of the run.
        columns: the indices of the changed positions, as in `ChangedPositions.here`.
    """

    rows: slice
    columns: slice


class _Target(NamedTuple):
    """Readers whose gradients are used in one matrix product.

    A target has the readers of one or several consecutive streams, so that its matrix product is
    large enough to be fast.

    Attributes:
        readings: the indices of the streams, as in `ScoredPoints.readings`.
        columns: the columns of these readers in the scores.
        n_writers: the number of writers before the last of these readers.
    """

    readings: range
    columns: slice
    n_writers: int


def _factors(graph: Graph, device: torch.device) -> list[Any]:
    """Return the factors of the heads of each sublayer on a device; see `Graph.all_writers`."""
    return [all_to_device(sublayer.added, device) for sublayer in graph.sublayers]


class EdgeScores:
    """The scores of the edges of a graph, computed from gradients of runs of one text.

    Scores are tensors [writer, column, group, batch]. There is one column for each reader, and then
    a last column: the writer's change times the gradient where the writer is added to the stream.
    For each writer, the columns of the readers should sum to the last column.

    Scores are sums over positions. So the memory is bounded by computing some texts, or some
    positions of one text, at a time. On the CPU, only small texts are computed together.

    Args:
        points: the graph and its points.
        where: the positions at which writers change.
        source: values of the other run, at `graph.needed`.
        source_graph: the graph of the model of the other run.
        base: values of the base run, at `points.names`.
        device: the device on which the scores are computed.
        max_bytes: a bound on the memory of changes and gradients that are computed together.

    Raises:
        ValueError: if `max_bytes` is too small for one position of one text.
    """

    def __init__(
        self,
        points: ScoredPoints,
        where: ChangedPositions,
        source: Mapping[str, Tensor],
        source_graph: Graph,
        base: Mapping[str, Tensor],
        device: torch.device,
        max_bytes: int,
    ) -> None:
        self.points = points
        self.graph = points.graph
        self._device = device
        self._source = source
        self._source_graph = source_graph
        self._base = base
        self._max_bytes = max_bytes
        self.where: ChangedPositions = all_to_device(where, device)
        self._dtype = wide_dtype(source[self.graph.needed[-1]].dtype)
        self._d_model = source[self.graph.needed[-1]].shape[-1]
        self._factors = _factors(self.graph, device)
        self._source_factors = self._factors
        if source_graph is not self.graph:
            self._source_factors = _factors(source_graph, device)
        self._pullbacks = Pullbacks(points.readings, self._d_model, device)
        self._targets = _targets(points)
        self._most_readers = max(
            target.columns.stop - target.columns.start for target in self._targets
        )
        self._allowed = to_device(self.graph.allowed, device)
        # All positions must fit, also for a method that computes each writer separately.
        self._parts(len(where.here), len(self.graph.writers))

    def changes(
        self,
        part: _Part | None = None,
        space: Float[Tensor, "_writer _batch _n _d_model"] | None = None,
    ) -> Float[Tensor, "writer batch n d_model"]:
        """Return the change of each writer between the two runs, at some positions of some texts.

        Args:
            part: the positions. Default: all.
            space: memory for the result, which is overwritten: the result of an earlier call. It is
                used if it has the right shape. Default: new memory.
        """
        graph = self.graph
        source_graph = self._source_graph
        part = part or _Part(slice(None), slice(None))
        base = self._values(graph, self._base, self.where.here, part)
        source = self._values(source_graph, self._source, self.where.there, part)
        stream = base[graph.points[-1]]
        shape = len(graph.writers), *stream.shape
        if space is None or space.shape != shape:
            space = stream.new_empty(shape)
        in_source = source_graph.all_writers(source.__getitem__, added=self._source_factors)
        in_base = graph.all_writers(base.__getitem__, added=self._factors)
        start = 0
        for source_writers, base_writers in zip(in_source, in_base, strict=True):
            stop = start + len(base_writers.names)
            if source_graph is graph:
                # Both runs have the same output weights. So subtract the values before these
                # weights, such as `z`, and apply the weights only to the difference.
                change = source_writers.values - base_writers.values
                source_writers._replace(values=change).put(space[start:stop])
            else:
                space[start:stop] = source_writers.vectors() - base_writers.vectors()
            start = stop
        return space

    def _values(
        self, graph: Graph, values: Mapping[str, Tensor], columns: Tensor, part: _Part
    ) -> dict[nn.Module, Tensor]:
        """Return the values of a run by point, at the positions of one part.

        Args:
            graph: the graph of the model of the run.
            values: the values of whole texts, by the name of the point.
            columns: the columns [text, n] of all changed positions of all texts in this run.
            part: the rows of `values` to return, and the changed positions to return: numbers
                between 0 and n.
        """
        points = zip(graph.points, graph.needed, strict=True)
        return {point: self._here(values[name], columns, part) for point, name in points}

    def _at(self, value: Tensor, columns: Tensor, part: _Part) -> Tensor:
        """Return a value in at least float32 at some positions of some rows of a run.

        Args:
            value: the value at all rows and columns.
            columns: the columns of the positions of each text. Rows of a run may be copies of the
                texts.
            part: the positions.
        """
        if self.where.is_whole:
            return at_least_float32(value[part])
        row = torch.arange(len(value), device=columns.device)[part.rows, None]
        index = row, columns[row[:, 0] % len(columns), part.columns]
        return at_least_float32(value[all_to_device(index, value.device)])

    def _here(self, value: Tensor, columns: Tensor, part: _Part) -> Tensor:
        """Return the same as `_at`, on the device of the scores."""
        return to_device(self._at(value, columns, part), self._device)

    def _parts(self, n_rows: int, n_writers: int) -> list[_Part]:
        """Return the parts of a run that are computed one after another.

        Args:
            n_rows: the number of rows of the run.
            n_writers: the number of writers whose changes are computed together.

        Raises:
            ValueError: if `max_bytes` is too small for one position of one text.
        """
        n_columns = self.where.here.shape[1]
        n_streams = n_writers + self._most_readers + _STREAMS_OF_NORM * len(self.points.readings)
        n_numbers = n_streams * self._d_model
        if self.where.labels is not None:
            n_numbers += n_writers * self._most_readers
        bytes_of_one = n_numbers * self._dtype.itemsize
        n_fitting = int(self._max_bytes // bytes_of_one)
        if n_fitting < 1:
            raise ValueError(
                f"max_bytes must be at least {bytes_of_one:,} for the edges at one position; got "
                f"{self._max_bytes:,}"
            )
        if n_fitting < n_columns:
            parts = []
            for row in range(n_rows):
                for start in range(0, n_columns, n_fitting):
                    parts.append(_Part(slice(row, row + 1), slice(start, start + n_fitting)))
            return parts
        n_together = n_fitting // n_columns
        if self._device.type == "cpu":
            n_together = min(n_together, max(1, _CPU_BYTES // (bytes_of_one * n_columns)))
        # Groups of equal size use the same memory.
        n_together = math.ceil(n_rows / math.ceil(n_rows / n_together))
        starts = range(0, n_rows, n_together)
        return [_Part(slice(n, min(n + n_together, n_rows)), slice(0, n_columns)) for n in starts]

    def of_all(self, run: Gradients) -> Float[Tensor, "writer column group batch"]:
        """Return the scores of all writers, computed from the gradients of one run of the text.

        Raises:
            ValueError: if a gradient is NaN. The error names the point.
        """
        gradients = self._gradients(run)
        n_rows = len(self.where.here)
        scores = self._zeros(n_rows, len(self.graph.writers))
        parts = self._parts(n_rows, len(self.graph.writers))
        # Use the memory of the changes again. On the CPU, allocating new memory would take longer
        # than the computation.
        changes = None
        for part in progress_of(parts, "texts", len(parts)):
            changes = self.changes(part, changes)
            self._add_readers(scores, part, changes=changes, first=0, run=run, gradients=gradients)
            # The last column of the scores is the attribution of each writer.
            for name, writers in self.points.added.items():
                if name in gradients:
                    at = self._here(gradients[name], self.where.here, part)
                    of_writers = changes[writers.start : writers.stop]
                    scores_of_writers = scores[part.rows, :, writers.start : writers.stop, -1:]
                    self._add(scores_of_writers, part, changes=of_writers, gradients=at[None])
        return self._checked(scores, self._allowed, gradients)

    def of_copies(
        self, run: Gradients, writers: Sequence[int], changes: Float[Tensor, "copy batch n d_model"]
    ) -> Float[Tensor, "copy column group batch"]:
        """Return the scores of one writer in each copy of the text.

        Args:
            run: a run of copies of the text.
            writers: the writer of each copy.
            changes: the change of the writer of each copy.

        Raises:
            ValueError: if a gradient is NaN. The error names the point.
        """
        gradients = self._gradients(run)
        batch = len(self.where.here)
        changes_of_rows = changes.flatten(0, 1)
        scores = self._zeros(len(changes_of_rows), 1)
        point_of_writer: dict[int, str] = {}
        for name, writers_here in self.points.added.items():
            point_of_writer |= dict.fromkeys(writers_here, name)
        for part in self._parts(len(changes_of_rows), 1):
            of_rows = changes_of_rows[None, part.rows, part.columns]
            # Writers are in order, so the first one has the most readers.
            first = writers[part.rows.start // batch]
            self._add_readers(
                scores, part, changes=of_rows, first=first, run=run, gradients=gradients
            )
            for copy, writer in enumerate(writers):
                name = point_of_writer[writer]
                start = max(part.rows.start, copy * batch)
                stop = min(part.rows.stop, (copy + 1) * batch)
                if start < stop and name in gradients:
                    rows_of_copy = _Part(slice(start, stop), part.columns)
                    at = self._here(gradients[name], self.where.here, rows_of_copy)
                    self._add(
                        scores[start:stop, ..., -1:],
                        rows_of_copy,
                        changes=changes_of_rows[None, start:stop, part.columns],
                        gradients=at[None],
                    )
        allowed = self._allowed[writers].repeat_interleave(batch, 0)[:, None, None]
        scores = self._checked(scores, allowed, gradients)
        return scores[0].unflatten(-1, (-1, batch)).movedim(-2, 0)

    def _zeros(self, n_rows: int, n_writers: int) -> Float[Tensor, "row sum writer column"]:
        """Return memory for scores, filled with zeros.

        If scores are summed in groups, a sum after the last group contains all other positions.

        Args:
            n_rows: the number of rows of a run.
            n_writers: the number of writers in each row.
        """
        n_sums = 1 if self.where.labels is None else self.where.groups + 1
        size = n_rows, n_sums, n_writers, len(self.graph.readers) + 1
        return torch.zeros(size, dtype=self._dtype, device=self._device)

    def _checked(
        self,
        scores: Float[Tensor, "row sum writer column"],
        allowed: Bool[Tensor, "*row_sum_writer reader"],
        gradients: Mapping[str, Tensor],
    ) -> Float[Tensor, "writer column group row"]:
        """Return scores without the edges that do not exist, after a check for NaN.

        Args:
            scores: the scores.
            allowed: the edges that exist.
            gradients: the gradients by point, from the logits to the input.

        Raises:
            ValueError: if a gradient is NaN. The error names the point.
        """
        # A gradient that is NaN makes scores NaN. So one check is enough if all numbers are finite.
        if not scores.isfinite().all():
            for name, gradient in gradients.items():
                require_numbers(name, gradient)
        scores[..., :-1].masked_fill_(~allowed, 0)
        return rearrange(
            scores[:, : self.where.groups], "row group writer column -> writer column group row"
        )

    def _gradients(self, run: Gradients) -> dict[str, Tensor]:
        """Run the backward pass and return the gradients at readers and writers, by point."""
        by_name: dict[str, Tensor] = {}
        needed = {*self.points.added, *(reading.at for reading in self.points.readings)}

        def receive(name: str, gradient: Tensor) -> None:
            if name in needed:
                by_name[name] = gradient

        run.backward(receive)
        return by_name

    def _add_readers(
        self,
        scores: Float[Tensor, "row sum writer column"],
        part: _Part,
        changes: Float[Tensor, "writer part n d_model"],
        first: int,
        run: Gradients,
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Add the scores of all readers at some positions of some rows.

        Args:
            scores: the scores of all rows.
            part: the rows and the positions.
            changes: the changes of writers at these positions: of all writers, or of one writer in
                each row.
            first: the index of the first writer. Earlier readers are left out.
            run: the run.
            gradients: the gradients by point.
        """
        here = self.where.here
        readings = self.points.readings
        targets = [target for target in self._targets if target.n_writers > first]
        if not targets:
            return
        # The scale of a norm is computed on the device of its output.
        streams = {}
        for n in range(targets[0].readings.start, len(readings)):
            stream = self._at(run.values[readings[n].stream], here, part)
            streams[n] = to_device(stream, run.values[readings[n].at].device)
        scales = self._pullbacks.scales(streams)
        space = changes.new_empty(self._most_readers, *changes.shape[1:])
        for target in targets:
            start = target.columns.start
            for n in target.readings:
                reading = readings[n]
                out = space[reading.readers.start - start : reading.readers.stop - start]
                if reading.at in gradients:
                    at = self._at(gradients[reading.at], here, part)
                    self._pullbacks.put(n, streams[n], gradient=at, scale=scales.get(n), out=out)
                else:
                    out.zero_()
            n_writers = min(target.n_writers, len(changes))
            self._add(
                scores[part.rows, :, :n_writers, target.columns],
                part,
                changes=changes[:n_writers],
                gradients=space[: target.columns.stop - start],
            )

    def _add(
        self,
        scores: Float[Tensor, "part sum writer reader"],
        part: _Part,
        changes: Float[Tensor, "writer part n d_model"],
        gradients: Float[Tensor, "reader part n d_model"],
    ) -> None:
        """Add the products of changes and gradients to scores, summed over positions.

        Args:
            scores: the scores of the rows, writers and readers.
            part: the rows and the positions.
            changes: the change of each writer.
            gradients: the gradient at each reader.
        """
        if self.where.labels is None:
            of_writers = rearrange(changes, "writer part n d_model -> part writer (n d_model)")
            of_readers = rearrange(gradients, "reader part n d_model -> part (n d_model) reader")
            scores[:, 0].baddbmm_(of_writers, of_readers)
            return
        products = torch.einsum("wbnd,rbnd->bnwr", changes, gradients).flatten(0, 1)
        row = torch.arange(part.rows.start, part.rows.stop, device=self._device)
        group = self.where.group[row % len(self.where.group), part.columns]
        n_sums = scores.shape[1]
        index = (row - part.rows.start)[:, None] * n_sums + group
        scores.view(-1, *scores.shape[2:]).index_add_(0, index.flatten(), products)


def _targets(points: ScoredPoints) -> list[_Target]:
    """Return the readers whose gradients are used in one matrix product, in order."""
    readings = points.readings
    targets = []
    first = 0
    for n, reading in enumerate(readings):
        columns = slice(readings[first].readers.start, reading.readers.stop)
        if columns.stop - columns.start >= _ENOUGH or n == len(readings) - 1:
            writers_before = points.graph.allowed[:, columns].any(1).nonzero()
            target = _Target(range(first, n + 1), columns, int(writers_before.max()) + 1)
            targets.append(target)
            first = n + 1
    return targets


def _writers_by_point(graph: Graph) -> dict[str, range]:
    """Return the writers that are added to the stream at each point."""
    by_point = {graph.sublayers[0].branch.reads: range(graph.n_inputs)}
    by_point |= {sublayer.branch.added: sublayer.writers for sublayer in graph.sublayers}
    return {graph.names[point]: writers for point, writers in by_point.items()}
