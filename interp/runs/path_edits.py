"""Path edits: replace a writer's output along some paths, and leave it unchanged on all others.

The new output comes from another run. An edit sets the values at the end of the paths.

The algorithm (Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path Patching"; for
`through` Wang et al. 2022, "Interpretability in the Wild"):

1. Run the model once on each text. `moved` is the output of each writer in the other run minus its
   output in this run.
2. For one edge (`over_edge`): add the writer's `moved` to the stream that the reader reads, and
   compute this reader's sublayer alone. The new output of the sublayer is the edit.
3. For paths from a sender to receivers (`through`): carry the sender's `moved` from block to block.
   Heads leave it unchanged, because paths pass no other head. MLPs before the last receiver add
   the change of their output, if they are recomputed, at the positions that may differ. Compute
   the receivers from the stream plus `moved`; their values are the edits.
4. If the reader is the logits, the last stream has changed, and only the unembedding is computed.
5. Otherwise run the edits as a sweep, which computes everything after the edits.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooks.base import Texts, all_to_device, progress_of, require_kind, to_device
from hooks.shared import Session
from interp import edits
from interp.graph.graph import Graph
from interp.graph.nodes import Sublayer
from interp.graph.sublayers import BlockBranch, reads_context
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.models import Source, source_graph_of
from interp.runs.rows import Batch, TooSmallError
from interp.runs.runs import Runs, require_no_direction
from interp.runs.sweep import effects_of_edits

Carried = dict[str, edits.Edit] | Tensor
"""The change along one path: edits by the names of points, or the stream before the logits."""


class PathEdits:
    """The run that is edited, and the values that paths need from this run and from the other run.

    Args:
        graph: the graph of the model.
        pairs, direction, max_bytes, source: see `edge_patching`.

    Attributes:
        graph: the graph of the model.
        moved: the output of each writer in the other run minus its output in this run.
        cache: values of this run, without edits.
        contexts: the inputs of the blocks besides the stream, by device.
        batch: the texts and the metric.
        later: the positions that may differ between the two runs.

    Raises:
        ValueError: if the positions of the two texts do not correspond.
    """

    def __init__(
        self,
        graph: Graph,
        pairs: Pairs | Texts,
        direction: PatchingDirection,
        max_bytes: int,
        source: Source | None = None,
    ) -> None:
        require_kind("max_bytes", max_bytes, (int, float), "a number of bytes")
        self.graph = graph
        self.model = graph.model
        model = graph.runner().model
        require_no_direction(source, direction, "noising")
        self._max_bytes = max_bytes
        # The outputs of the writers of another model are computed with its own weights.
        source_graph = source_graph_of(source, graph)
        runs = Runs(
            model,
            pairs,
            direction=direction,
            max_bytes=max_bytes // 2,
            source=source,
            source_graph=source_graph,
        )
        self.runs = runs
        text = runs.text
        if not text.is_aligned_with(runs.other):
            raise ValueError(
                "paths need texts whose positions correspond; got texts that are not aligned"
            )
        points_read: set[nn.Module] = set()
        for block in self.model.blocks:
            points_read |= {branch.reads for branch in block.branches}
        source_values = runs.source(graph.needed)
        self.cache = runs.cache([*graph.needed, *(graph.names[point] for point in points_read)])
        self.moved = source_graph.added(source_values) - graph.added(self.cache)
        context = self.model.context(text.tokens, **text.kwargs)
        self.contexts = {
            layer.device: all_to_device(context, layer.device) for layer in graph.layers
        }
        self.batch = Batch(text, runs.metric)
        # Nothing changes before the first difference of the two texts, unless earlier positions
        # read later positions.
        different = (text.tokens != runs.other.tokens).any(0).nonzero()
        is_causal = getattr(context, "is_causal", True)
        first_change = int(different[0]) if len(different) and is_causal else 0
        self.later = slice(first_change, None)

    def value(self, point: nn.Module) -> Tensor:
        """Return the value of a point in this run, without edits."""
        return self.cache[self.graph.names[point]]

    def replaced(self, point: nn.Module, value: Tensor, **where: Any) -> dict[str, edits.Edit]:
        """Return an edit that replaces the value of a point: a dict from the point's name to it.

        The edit changes only the positions that may differ between the two runs, `later`.

        Args:
            point: the point.
            value: the new value of the whole point.
            where: the places that are replaced, by axis, such as `head=[3, 5]`. Default: all.
        """
        return {self.graph.names[point]: edits.replace(value, pos=self.later, **where)}

    def over_edge(self, writer: int, reader: int) -> Carried:
        """Return the change by one edge: a new output of the reader's sublayer, as an edit.

        If the reader is the logits, the result is the new stream before them.

        Args:
            writer, reader: the indices of the nodes in the graph.
        """
        moved = self.moved[writer]
        for layer in self.graph.layers:
            for sublayer in layer.sublayers:
                if sublayer.reads.start <= reader < sublayer.reads.stop:
                    context = self.contexts[layer.device]
                    added = self._added(sublayer, reader, moved, context)
                    return self.replaced(sublayer.branch.added, added)
        last_stream = self.graph.points[-1]
        return self._sum(last_stream, moved)

    def _added(self, sublayer: Sublayer, reader: int, moved: Tensor, context: Any) -> Tensor:
        """Return what a sublayer adds to the stream if one of its readers reads another stream.

        Args:
            sublayer: the sublayer.
            reader: the index of the reader in the graph.
            moved: the change of the stream for this reader.
            context: the other inputs of the block.
        """
        branch = sublayer.branch
        if not sublayer.is_divided:
            return sublayer.output(self.input_of(branch, moved), context)
        projections = [projection.clone() for projection in self.projected(sublayer)]
        changed = self.projected(sublayer, moved)
        for part, readers in enumerate(sublayer.readers):
            if readers.start <= reader < readers.stop:
                head = (slice(None), slice(None), reader - readers.start)
                projections[part][head] = changed[part][head]
        q, k, v = projections
        return branch.finished(sublayer.divided.mix(q, k, v, context))

    def input_of(self, branch: BlockBranch, moved: Tensor | None = None) -> Tensor:
        """Return the input stream of a branch plus `moved`.

        Args:
            branch: the attention or the MLP of a block.
            moved: the change of the stream. Default: no change.
        """
        return self._sum(branch.reads, moved)

    def projected(
        self, sublayer: Sublayer, moved: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the input stream plus `moved`.

        Args:
            sublayer: divided attention.
            moved: the change of the stream. Default: no change.
        """
        branch = sublayer.branch
        return sublayer.divided.project(branch.norm(self.input_of(branch, moved)))

    def _sum(self, point: nn.Module, moved: Tensor | None) -> Tensor:
        """Return the value of a point plus `moved`."""
        value = self.value(point)
        return value if moved is None else value + to_device(moved, value.device)

    def through(self, sender: int, receivers: set[int], recomputed: bool) -> Carried:
        """Return how a sender changes the inputs of its receivers, along paths without heads.

        If `recomputed` is True, a path may lead through MLPs. All other sublayers keep their
        outputs. The result contains an edit for each point of a receiver. If
        the receiver is the logits, the result is the new stream before them.

        Args:
            sender: the index of the sender among the writers.
            receivers: the indices of the receivers among the readers, or only the index of the
                logits.
            recomputed: whether the paths may pass MLPs, which are then computed again.
        """
        graph = self.graph
        changes: dict[str, edits.Edit] = {}
        moved: Tensor | None = self.moved[sender] if sender < graph.n_inputs else None
        moved_input = moved
        reads = None
        for layer in graph.layers:
            context = self.contexts[layer.device]
            for sublayer in layer.sublayers:
                branch = sublayer.branch
                # Sublayers side by side read the same stream.
                if branch.reads is not reads:
                    moved_input, reads = moved, branch.reads
                is_receiver = sublayer.reads.start in receivers
                # No path leads through an MLP after the last receiver.
                is_before = sublayer.reads.start < max(receivers)
                is_passed = recomputed and sublayer.kind == "mlp" and is_before
                if moved_input is not None and sublayer.is_divided:
                    changes |= self._heads(sublayer, moved_input, receivers, context)
                elif moved_input is not None and (is_passed or is_receiver):
                    # The output is only needed where it may differ. But an edit needs whole texts,
                    # and so does a sublayer that reads the context.
                    is_whole = is_receiver or reads_context(branch, sublayer.kind)
                    at = slice(None) if is_whole else self.later
                    # Some MLPs of `transformers` see rows and positions as one axis.
                    stream = self.input_of(branch, moved_input)[:, at].contiguous()
                    added = sublayer.output(stream, context)
                    if is_receiver:
                        changes |= self.replaced(branch.added, added)
                    if is_passed and moved is not None:
                        moved = to_device(moved, added.device).clone()
                        moved[:, at] += added - self.value(branch.added)[:, at]
                if sender in sublayer.writers:
                    moved = self.moved[sender]
        if moved is not None and len(graph.readers) - 1 in receivers:
            return self._sum(graph.points[-1], moved)
        return changes

    def _heads(
        self, sublayer: Sublayer, moved: Tensor, receivers: set[int], context: Any
    ) -> dict[str, edits.Edit]:
        """Return the edits of the receivers among the heads of divided attention.

        Args:
            sublayer: the attention.
            moved: the change of the stream before the attention.
            receivers: the indices of all receivers among the readers.
            context: the other inputs of the block.
        """
        attn = sublayer.divided
        heads: dict[str, list[int]] = {}
        for part, readers in zip("qkv", sublayer.readers, strict=True):
            indices = range(readers.start, readers.stop)
            heads[part] = [index - readers.start for index in indices if index in receivers]
        if not any(heads.values()):
            return {}
        values: dict[str, Tensor] = {}
        with Session() as session:
            for part in heads:
                session.after(getattr(attn, part), partial(values.__setitem__, part))
            attn.mix(*self.projected(sublayer, moved), context)
        changes: dict[str, edits.Edit] = {}
        for part, heads_of_part in heads.items():
            if heads_of_part:
                where = {"head" if part == "q" else "kv_head": heads_of_part}
                changes |= self.replaced(getattr(attn, part), values[part], **where)
        return changes

    def result(
        self, jobs: Iterator[tuple[int, Carried]], axis: str, labels: Sequence[str], **about: Any
    ) -> Result:
        """Run the change along each path, and return the effects, [axis, example].

        Args:
            jobs: the changes, each with the index of its label.
            axis: the name of the first axis.
            labels: the labels of the first axis.
            about: more facts for the result.
        """
        base = self.runs.base
        values = base.new_empty(len(labels), len(base))
        waiting: dict[int, dict[str, edits.Edit]] = {}
        at_once = max(1, self.runs.max_bytes // self.moved[0].nbytes)
        for n, carried in progress_of(jobs, f"{axis}s", len(labels)):
            if isinstance(carried, Tensor):
                logits = self.model.unembed(self.batch.read(carried))
                values[n] = self.batch.measure(logits)[0] - base
                continue
            waiting[n] = carried
            if sum(map(len, waiting.values())) >= at_once:
                self._sweep(waiting, values)
        self._sweep(waiting, values)
        return self.runs.result(values, {axis: labels}, base, **about)

    def _sweep(self, waiting: dict[int, dict[str, edits.Edit]], values: Tensor) -> None:
        """Run the waiting edits, store their effects in `values`, and empty `waiting`."""
        if waiting:
            try:
                _, values[[*waiting]] = effects_of_edits(
                    self.runs,
                    [*waiting.values()],
                    max_bytes=self.runs.max_bytes,
                    of_rows=True,
                )
            except TooSmallError as error:
                # The runs have half of the bound of the user.
                raise TooSmallError(self._max_bytes, error.needed, shares=2) from None
            waiting.clear()
