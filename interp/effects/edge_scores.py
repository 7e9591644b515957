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

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
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
)
from interp.effects.reader_gradients import Pullback, Pullbacks, readings
from interp.graph import Graph
from interp.runs.gradients import Gradients, require_numbers

# A matrix product with fewer columns spends most of its time reading the changes.
_ENOUGH = 60


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
    """

    here: Int[Tensor, "batch n"]
    there: Int[Tensor, "batch n"]
    group: Int[Tensor, "batch n"]
    labels: list[int | str] | None

    def change(self, whole: Tensor, by: Float[Tensor, "batch n d_model"]) -> Tensor:
        """Return a copy of a stream with a change added at the columns `here`.

        Args:
            whole: the stream, [batch, pos, d_model].
            by: the change of each column.
        """
        row, column = (self.group < self.groups).nonzero(as_tuple=True)
        index = row, self.here[row, column]
        index, by = all_to_device((index, by[row, column]), whole.device)
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
                f"over must be 'span' if positions do not correspond; got {shown(over)}"
            )
        columns = torch.arange(n, device=edited.tokens.device).expand(batch, n)
        one_group = torch.zeros_like(columns)
        if over is None:
            return ChangedPositions(here=columns, there=columns, group=one_group, labels=None)
        column_of_prompt = columns
        if prompts is not None:
            # Tokens of answers get the index n, and their sum is dropped.
            n = int(prompts.any(0).nonzero().max()) + 1
            column_of_prompt = columns.where(prompts, n)
        return ChangedPositions(
            here=columns, there=columns, group=column_of_prompt, labels=[*range(n)]
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
        self.readings = [*readings(graph)]
        self.added = _writers_by_point(graph)
        self.names = [*graph.needed, *self.added]
        for reading in self.readings:
            self.names += [reading.stream, reading.at]


class _Target(NamedTuple):
    """One block of the scores: the gradients at some readers, times the changes of some writers.

    Attributes:
        gradients: a function of a row of a run, some positions of the row and memory for the
            result. It returns the gradients [reader, n, d_model]. The next call may use the same
            memory.
        writers: the writers that come before these readers.
        columns: the columns of these readers in the scores.
    """

    gradients: Callable[[int, Tensor, Tensor], Tensor]
    writers: range
    columns: slice


def _factors(graph: Graph, device: torch.device) -> list[Any]:
    """Return the factors of the heads of each sublayer on a device; see `Graph.all_writers`."""
    return [all_to_device(sublayer.added, device) for sublayer in graph.sublayers]


class EdgeScores:
    """The scores of the edges of a graph, computed from gradients of runs of one text.

    Scores are tensors [writer, column, group, batch]. There is one column for each reader, and then
    a last column: the writer's change times the gradient where the writer is added to the stream.
    For each writer, the columns of the readers should sum to the last column.

    Args:
        points: the graph and its points.
        where: the positions at which writers change.
        source: values of the other run, at `graph.needed`.
        source_graph: the graph of the model of the other run.
        base: values of the base run, at `points.names`.
        device: the device on which the scores are computed.
    """

    def __init__(
        self,
        points: ScoredPoints,
        where: ChangedPositions,
        source: Mapping[str, Tensor],
        source_graph: Graph,
        base: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.points = points
        self.graph = points.graph
        self._device = device
        self._source = source
        self._source_graph = source_graph
        self._base = base
        self.where: ChangedPositions = all_to_device(where, device)
        self._factors = _factors(self.graph, device)
        self._source_factors = _factors(source_graph, device)

    def changes(
        self, rows: slice, space: Float[Tensor, "writer batch n d_model"] | None = None
    ) -> Float[Tensor, "writer batch n d_model"]:
        """Return the change of each writer between the two runs, for some examples.

        Args:
            rows: the examples.
            space: memory for the result, which is overwritten: the result of an earlier call with
                the same number of examples. Default: new memory.
        """
        graph = self.graph
        source_graph = self._source_graph
        base = self._values(graph, self._base, self.where.here, rows)
        source = self._values(source_graph, self._source, self.where.there, rows)
        if space is None:
            stream = base[graph.points[-1]]
            space = stream.new_empty(len(graph.writers), *stream.shape)
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
        self, graph: Graph, values: Mapping[str, Tensor], columns: Tensor, rows: slice
    ) -> dict[nn.Module, Tensor]:
        """Return the values of a run by point, at some columns of some examples.

        Args:
            graph: the graph of the model of the run.
            values: the values of whole texts, by the name of the point.
            columns: the columns of all examples.
            rows: the examples.
        """
        row = torch.arange(len(columns), device=columns.device)[rows, None]

        def at_columns(value: Tensor) -> Tensor:
            index = all_to_device((row, columns[rows]), value.device)
            return to_device(at_least_float32(value[index]), self._device)

        points = zip(graph.points, graph.needed, strict=True)
        return {point: at_columns(values[name]) for point, name in points}

    def of_all(self, run: Gradients) -> Float[Tensor, "writer column group batch"]:
        """Return the scores of all writers, computed from the gradients of one run of the text."""
        examples = range(len(self.where.here))

        # Compute one example at a time and use the memory again. Allocating new memory would take
        # longer than the computation.
        def parts() -> Iterator[tuple[int, int, Tensor]]:
            space = None
            for row in progress_of(examples, "texts", len(examples)):
                space = self.changes(slice(row, row + 1), space)
                yield 0, row, space

        return self.of(run, parts())

    def of(
        self, run: Gradients, parts: Iterable[tuple[int, int, Tensor]]
    ) -> Float[Tensor, "writer column group batch"]:
        """Return the scores for the writers and rows whose changes are given. All others are 0.

        Args:
            run: a run of the text, or of copies of the text.
            parts: the changes of consecutive writers on consecutive rows of the run. A part is
                (index of its first writer, index of its first row, changes [writer, row, n,
                d_model]).
        """
        targets = self._targets(run)
        graph = self.graph
        here, group = self.where.here, self.where.group
        stream = self._source[graph.needed[-1]]
        size = len(graph.writers), len(graph.readers) + 1, self.where.groups, len(here)
        float_dtype = at_least_float32(stream[:0]).dtype
        scores = stream.new_zeros(size, dtype=float_dtype, device=self._device)
        most_readers = max(target.columns.stop - target.columns.start for target in targets)
        space = scores.new_empty(most_readers, here.shape[1], stream.shape[-1])
        for first_writer, first_row, changes in parts:
            end_writer = first_writer + len(changes)
            for row, change in enumerate(changes.unbind(1), first_row):
                # The rows of a run may be copies of the text.
                example = row % len(here)
                for gradients, writers, columns in targets:
                    start = max(first_writer, writers.start)
                    end = min(end_writer, writers.stop)
                    if start < end:
                        product = self._product(
                            change[start - first_writer : end - first_writer],
                            gradients(row, here[example], space),
                            group[example],
                        )
                        scores[start:end, columns, :, example] = product
        scores[:, :-1].masked_fill_(~graph.allowed[..., None, None].to(scores.device), 0)
        return scores

    def _targets(self, run: Gradients) -> list[_Target]:
        """Run the backward pass and return all blocks of the scores."""
        by_name = self._gradients(run)
        targets = self._targets_of_readers(run, by_name)
        # The last column of the scores is the attribution of each writer.
        n_readers = len(self.graph.readers)
        last_column = slice(n_readers, n_readers + 1)
        for name, writers in self.points.added.items():
            if name in by_name:
                gradients = partial(_at, to_device(by_name[name], self._device))
                targets.append(_Target(gradients, writers, last_column))
        return targets

    def _gradients(self, run: Gradients) -> dict[str, Tensor]:
        """Run the backward pass and return the gradients at readers and writers, by point."""
        by_name: dict[str, Tensor] = {}
        needed = {*self.points.added, *(reading.at for reading in self.points.readings)}

        def receive(name: str, gradient: Tensor) -> None:
            if name in needed:
                require_numbers(name, gradient)
                by_name[name] = at_least_float32(gradient)

        run.backward(receive)
        return by_name

    def _targets_of_readers(self, run: Gradients, by_name: Mapping[str, Tensor]) -> list[_Target]:
        """Return the blocks of the scores of all readers.

        A block has the readers of one or several consecutive streams, so that one matrix product is
        large enough to be fast.

        Args:
            run: the run.
            by_name: the gradients at the points of the readers.
        """
        targets, parts = [], []
        for reading in self.points.readings:
            value = run.values[reading.at]
            gradient = by_name.get(reading.at, torch.zeros_like(value))
            stream = run.values[reading.stream]
            pullback = Pullback(reading, stream, gradient=gradient, device=self._device)
            parts.append((reading.readers, pullback))
            readers = slice(parts[0][0].start, reading.readers.stop)
            if readers.stop - readers.start >= _ENOUGH or reading is self.points.readings[-1]:
                writers = self.graph.allowed[:, readers].any(1).nonzero()
                writers_before = range(int(writers.max()) + 1)
                targets.append(_Target(Pullbacks(parts), writers_before, readers))
                parts = []
        return targets

    def _product(
        self,
        change: Float[Tensor, "writer n d_model"],
        gradient: Float[Tensor, "reader n d_model"],
        group: Int[Tensor, " n"],
    ) -> Float[Tensor, "writer reader group"]:
        """Return the products of changes and gradients, summed over the columns of each group."""
        if self.where.labels is None:
            return (change.flatten(1) @ gradient.flatten(1).T)[..., None]
        products = torch.einsum("wnd,rnd->wrn", change, gradient)
        sums = products.new_zeros(*products.shape[:2], self.where.groups + 1)
        return sums.index_add_(2, group, products)[..., :-1]


def _at(gradient: Tensor, row: int, columns: Tensor, space: Tensor) -> Tensor:
    """Return the gradient at some columns of a row, [1, n, d_model]; a function for `_Target`.

    A `_Target` also passes memory for the result, which is not needed here.
    """
    return gradient[row, columns][None]


def _writers_by_point(graph: Graph) -> dict[str, range]:
    """Return the writers that are added to the stream at each point."""
    by_point = {graph.sublayers[0].branch.reads: range(graph.n_inputs)}
    by_point |= {sublayer.branch.added: sublayer.writers for sublayer in graph.sublayers}
    return {graph.names[point]: writers for point, writers in by_point.items()}
