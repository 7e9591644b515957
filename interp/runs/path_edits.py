"""Path edits: the changed values if a writer's output of another run takes some paths only.

The algorithm (Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path Patching"; for
`through` Wang et al. 2022, "Interpretability in the Wild"):

1. Run both texts once. `moved` is the output of each writer in the other run minus its output in
   this run.
2. For one edge (`over_edge`): add the writer's `moved` to the stream that the reader reads, and
   compute this reader's sublayer alone. The new output of the sublayer is the edit.
3. For paths from a sender to receivers (`through`): carry the sender's `moved` from block to block.
   Heads do not change it. MLPs change it if they are recomputed. Compute the receivers from the
   stream plus `moved`; their values are the edits.
4. If the reader is the logits, the last stream has changed, and only the unembedding is computed.
5. Otherwise run the edits as a sweep, which computes everything after the edits.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from hooks.base import all_to_device, progress_of, to_device
from hooks.shared import Session
from interp import edits
from interp.graph.graph import Graph
from interp.graph.nodes import Layer
from interp.pairs.pairs import Pairs, PatchingDirection
from interp.results.result import Result
from interp.runs.rows import Batch
from interp.runs.runs import Runs

Carried = dict[str, edits.Edit] | Tensor
"""The change along one path: edits by the names of points, or the stream before the logits."""


class PathEdits:
    """An edited run, and the change of each writer between this run and the other run.

    Args:
        graph: the graph of the model.
        pairs, direction, max_bytes: see `edge_patching`.

    Attributes:
        graph: the graph of the model.
        moved: the output of each writer in the other run minus its output in this run.
    """

    def __init__(
        self, graph: Graph, pairs: Pairs, direction: PatchingDirection, max_bytes: int
    ) -> None:
        self.graph, self.model = graph, graph.model
        self.runs = runs = Runs(graph.runner().model, pairs, direction, max_bytes // 2)
        text = runs.text
        if not text.is_aligned_with(runs.other):
            raise ValueError(
                "paths need texts whose positions correspond; got texts that are not aligned"
            )
        read = {branch.reads for block in self.model.blocks for branch in block.branches}
        source = runs.source(graph.needed)
        self.cache = runs.cache([*graph.needed, *(graph.names[point] for point in read)])
        self.moved = graph.added(source) - graph.added(self.cache)
        context = self.model.context(text.tokens, **text.kwargs)
        self.contexts = {n.device: all_to_device(context, n.device) for n in graph.layers}
        self.batch = Batch(text, runs.metric)
        # Nothing changes before the first difference of the two texts, unless earlier positions
        # read later positions.
        differ = (text.tokens != runs.other.tokens).any(0).nonzero()
        is_causal = getattr(context, "is_causal", True)
        self.later = slice(int(differ[0]) if len(differ) and is_causal else 0, None)

    def value(self, point: nn.Module) -> Tensor:
        """Return the value of a point in the edited run."""
        return self.cache[self.graph.names[point]]

    def replaced(self, point: nn.Module, value: Tensor, **where: Any) -> dict[str, edits.Edit]:
        """Return an edit that replaces the value of a point, by the name of the point."""
        return {self.graph.names[point]: edits.replace(value, pos=self.later, **where)}

    def over_edge(self, writer: int, reader: int) -> Carried:
        """Return the change of an edge: the output of its reader's sublayer, or the last stream."""
        moved = self.moved[writer]
        for layer in self.graph.layers:
            attention, mlp = layer.attention, layer.mlp
            if mlp is not None and reader == mlp.reader:
                return self.replaced(mlp.branch.added, mlp.branch(self.seen(mlp.branch, moved)))
            for part, at in enumerate((layer.q, layer.k, layer.v)):
                if at.start <= reader < at.stop:
                    heads = [one.clone() for one in self.projected(attention)]
                    head = (slice(None), slice(None), reader - at.start)
                    heads[part][head] = self.projected(attention, moved)[part][head]
                    mixed = attention.sublayer.mix(*heads, self.contexts[layer.device])
                    return self.replaced(attention.added, attention.finished(mixed))
        return self._sum(self.graph.points[-1], moved)

    def seen(self, branch: Any, moved: Tensor | None = None) -> Tensor:
        """Return the input stream of a branch plus `moved`."""
        return self._sum(branch.reads, moved)

    def projected(self, attention: Any, moved: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the queries, keys and values of the input stream plus `moved`."""
        return attention.sublayer.project(attention.norm(self.seen(attention, moved)))

    def _sum(self, point: nn.Module, moved: Tensor | None) -> Tensor:
        value = self.value(point)
        return value if moved is None else value + to_device(moved, value.device)

    def through(self, sender: int, receivers: set[int], recomputed: bool) -> Carried:
        """Return the changes of the receivers by a sender along paths that pass no other head."""
        graph, changes = self.graph, dict[str, edits.Edit]()
        moved: Tensor | None = self.moved[sender] if sender < graph.layers[0].heads.start else None
        for layer in graph.layers:
            before = moved
            if moved is not None:
                changes |= self._heads(layer, moved, receivers)
            if layer.heads.start <= sender < layer.heads.stop or sender == layer.bias:
                moved = self.moved[sender]
            if layer.mlp is None:
                continue
            writer, reader, mlp = layer.mlp
            seen = before if layer.is_parallel else moved
            if seen is not None and (recomputed or reader in receivers):
                added = mlp(self.seen(mlp, seen))
                if reader in receivers:
                    changes |= self.replaced(mlp.added, added)
                if recomputed and moved is not None:
                    moved = to_device(moved, added.device) + added - self.value(mlp.added)
            if sender == writer:
                moved = self.moved[sender]
        if moved is not None and len(graph.readers) - 1 in receivers:
            return self._sum(graph.points[-1], moved)
        return changes

    def _heads(self, layer: Layer, moved: Tensor, receivers: set[int]) -> dict[str, edits.Edit]:
        """Return the edits of the receivers among the heads of a block, given a moved stream."""
        attn, values = layer.attention.sublayer, dict[str, Tensor]()
        heads = {
            part: [n - at.start for n in range(at.start, at.stop) if n in receivers]
            for part, at in (("q", layer.q), ("k", layer.k), ("v", layer.v))
        }
        if not any(heads.values()):
            return {}
        with Session() as session:
            for part in heads:
                session.after(getattr(attn, part), partial(values.__setitem__, part))
            attn.mix(*self.projected(layer.attention, moved), self.contexts[layer.device])
        changes: dict[str, edits.Edit] = {}
        for part, chosen in heads.items():
            if chosen:
                axis = "head" if part == "q" else "kv_head"
                changes |= self.replaced(getattr(attn, part), values[part], **{axis: chosen})
        return changes

    def result(
        self, jobs: Iterator[tuple[int, Carried]], axis: str, labels: Sequence[str], **about: Any
    ) -> Result:
        """Return the effects of all jobs. The number of a job is the index of its label."""
        base = self.runs.base
        values = base.new_empty(len(labels), len(base))
        waiting: dict[int, dict[str, edits.Edit]] = {}
        at_once = max(1, self.runs.max_bytes // self.moved[0].nbytes)
        for n, carried in progress_of(jobs, f"{axis}s", len(labels)):
            if isinstance(carried, Tensor):
                logits = self.model.unembed(self.batch.read(carried))
                values[n] = self.batch.measure(logits) - base
                continue
            waiting[n] = carried
            if sum(map(len, waiting.values())) >= at_once:
                self._sweep(waiting, values)
        self._sweep(waiting, values)
        return self.runs.result(values, {axis: labels}, base, **about)

    def _sweep(self, waiting: dict[int, dict[str, edits.Edit]], values: Tensor) -> None:
        if waiting:
            _, values[[*waiting]] = self.runs.edited([*waiting.values()])
            waiting.clear()
