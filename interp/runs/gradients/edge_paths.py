"""Mean scores of edges along paths: while the input moves to another run's, or one writer at a time."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import Point
from interp.measuring import Metric, per_example
from interp.runs.gradients.backward import Gradients
from interp.runs.gradients.edge_scores import EdgeScores
from interp.runs.gradients.estimates import Steps, averaged
from interp.runs.runs import Runs

_TOKENS = 1024  # of runs that are rows of one batch


class PathScores(NamedTuple):
    """Scores, with the steps of each path, and how far off its sum is for each example."""

    scores: Float[Tensor, "writer column group batch"]
    steps: int | list[int] = 0
    gaps: Float[Tensor, " batch"] | None = None


class Paths:
    """Paths from a run to one with other values.

    Args:
        runs: the texts and the metric.
        scores: the scores of its edges.
        base: the metric of the run.
        size: what gaps are a share of.
        steps: see `edge_attribution`.
    """

    def __init__(
        self,
        runs: Runs,
        scores: EdgeScores,
        base: Float[Tensor, " batch"],
        size: Float[Tensor, ""],
        steps: Steps,
    ) -> None:
        self._runs, self._scores, self._batch = runs, scores, len(base)
        self._averaged = partial(averaged, base=base, steps=steps, size=size)

    def of_input(self, first: Float[Tensor, "writer column group batch"]) -> PathScores:
        """The scores of all edges, from their values at the start of the path."""
        # The input is the first writers, and only their edges have a known sum. The last column is no edge.
        n = self._scores.graph.layers[0].heads.start
        change = self._scores.changes(slice(None))[:n].sum(0, keepdim=True)

        def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
            run = self._run(paths, change, share)
            return self._scores.of_all(run)[None], run.base[None]

        mean = self._averaged(at, first[None], added=lambda means: means[:, :n, :-1].sum((1, 2, 3)))
        return PathScores(mean.values[0], mean.steps[0], mean.gaps[0])

    def of_writers(self, first: Float[Tensor, "writer column group batch"]) -> PathScores:
        """The scores of each writer's edges on a path of its own."""
        changes, batch = self._scores.changes(slice(None)), self._batch
        at_once = max(1, _TOKENS // self._runs.text.tokens.numel())

        def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
            scores, metrics = [], []
            for start in range(0, len(paths), at_once):
                some = paths[start : start + at_once]
                run = self._run(some, changes, share)
                parts = ((w, n * batch, changes[w][None]) for n, w in enumerate(some))
                scores.append(self._scores.of(run, parts)[some])
                metrics.append(run.base.view(-1, batch))
            return torch.cat(scores), torch.cat(metrics)

        mean = self._averaged(at, first, added=lambda means: means[:, :-1].sum((1, 2)))
        return PathScores(mean.values, mean.steps, mean.gaps.amax(0))

    def _run(self, writers: Sequence[int], changes: Tensor, share: float) -> Gradients:
        """A run of copies of the text, in each of which one writer has moved."""
        added, batch, n = self._scores.added, self._batch, len(writers)

        def moved(value: Tensor, point: Point) -> Tensor:
            move, here = self._scores.where.change, added[point.name]
            copies = zip(value.split(batch), writers, strict=True)
            return torch.cat(
                [move(rows, share * changes[w]) if w in here else rows for rows, w in copies]
            )

        moving = {name: moved for name, here in added.items() if {*here} & {*writers}}
        runs = self._runs
        with runs.runner.hooks(moving):
            text, metric = runs.text.repeated(n), _Copies(runs.metric, batch)
            return Gradients(runs.runner, text, metric, self._scores.names)


class _Copies:
    """A metric of several copies of a batch, which is called once for each."""

    def __init__(self, metric: Metric, batch: int) -> None:
        self.last, self.unmasked = getattr(metric, "last", 0), getattr(metric, "unmasked", False)
        self._metric, self._batch = metric, batch

    def __call__(self, logits: Float[Tensor, "rows pos vocab"]) -> Float[Tensor, " rows"]:
        copies = logits.split(self._batch)
        return torch.cat([per_example(self._metric, part, self._batch) for part in copies])

    def __repr__(self) -> str:
        return repr(self._metric)
