"""Edge attribution: estimate the effects of all edges of a model at once, from gradients.

The algorithm (Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery"; the
two methods along paths are from Hanna et al. 2024, "Have Faith in Faithfulness"):

1. Run the other text, and cache the output of each writer to the residual stream.
2. Run the edited text, with gradients at the input of every reader and at the output of every
   writer.
3. Propagate the gradient of each reader back through its norm to the stream (`reader_gradients`).
4. The score of an edge is the change of its writer, target - base, times the gradient at its reader
   (`edge_scores`).
5. For the two `eap_ig` methods, repeat steps 2 to 4 at points on the path from base to target, and
   take the mean (`Paths`).
6. Check the sums: the scores of a writer's edges add up to the writer's change times the gradient
   where the writer is added.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import Point
from hooks.base import (
    Texts,
    all_to_device,
    require_choice,
    require_kind,
    shows_progress,
    to_device,
    warn,
    without_gradients,
)
from interp.effects.edge_scores import EdgeScores, ScoredPoints, changed_positions
from interp.graph import Graph
from interp.inputs.parts import UNFINISHED, finished
from interp.measuring import Metric, per_example
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.gradients import Gradients, warn_of_flat
from interp.runs.memory import bytes_together
from interp.runs.models import Source, source_graph_of
from interp.runs.runs import Runs, require_no_direction
from interp.runs.trapezoid import TOLERANCE, PathSteps, averaged

EdgeMethod = Literal["eap", "eap_ig_inputs", "eap_ig_activations"]

# The largest number of tokens in one batch of several runs.
_TOKENS = 1024
# The default memory of the changes and gradients on the CPU.
_BYTES = 2**29


@shows_progress
@without_gradients
@of_pairs
def edge_attribution(
    model: nn.Module,
    pairs: "Pairs | Texts",
    method: EdgeMethod = "eap",
    over: Literal["pos", "span"] | None = None,
    *,
    steps: PathSteps = "auto",
    direction: PatchingDirection = "noising",
    source: Source | None = None,
    split_embeddings: bool = False,
    max_bytes: int | None = None,
    progress: bool = True,
) -> Result:
    """Return an estimate of the effect of every edge of a `Graph`.

    An edge leads from a writer, a node that adds its output to the stream, to a reader, an input
    that is computed from the stream, such as the queries of a head.

    The effect of an edge is the effect of replacing the output of its writer for its reader alone.
    The score of an edge is the writer's change, target - base, times the gradient of the metric
    with respect to the stream before the reader's norm, through this reader alone. The gradient
    includes the whole derivative of the norm.

    - `eap` takes gradients at the base run: two forward passes and one backward pass for all edges
      (Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery"). The score
      is the derivative of the metric of `run_circuit` with respect to the mask.
    - `eap_ig_inputs` takes the mean gradient while the stream that enters the first block moves
      from base to target (Hanna et al. 2024, "Have Faith in Faithfulness"). The scores of the edges
      of `input` then add up to the effect of replacing the input.
    - `eap_ig_activations` has a path for each writer: only the output of this writer moves from
      base to target. It takes the mean gradient along this path. The scores of each writer's edges
      add up to the effect of replacing the writer. Every step of a path needs one run for each
      writer.

    Besides the gradients of a run, the memory contains the changes of all writers: one residual
    stream for each writer. On a GPU, the changes of as many examples as `max_bytes` allows are
    computed together. On the CPU, only small examples are computed together, because this saves no
    time for large examples. For `eap_ig_activations`, the memory contains the changes of all
    examples.

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part. This is the question of circuits: the parts outside a circuit are
    replaced in the clean run. Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`. Its weights need no gradients and receive none.
        pairs: clean and corrupted texts, and the metric, which must be differentiable; see
            `activation_patching`.
        method: `eap`, `eap_ig_inputs` or `eap_ig_activations`.
        over: `pos` returns one score for each position at which the reader reads, `span` one score
            for each named span. Default: the sum over all positions.
        steps: the number of steps of each path, or a list with a number for each path, such as
            `about["steps"]`. `auto` doubles the number until the gap of every example is at most
            0.01 of the mean absolute difference of target and base, up to 1024 steps. The method
            `eap` has no steps.
        direction: `noising` edits the clean run, as circuits do; `denoising` edits the corrupted
            run.
        source: another model, whose values are used instead of a run on other texts; see
            `activation_patching`. The outputs of its writers are computed with its own weights.
            Gradients are gradients of `model`. Biases have no edges, so no score contains
            a difference of biases.
        split_embeddings: whether token and position embeddings are two separate writers; see
            `Graph`. For `eap_ig_inputs`, both together are the input.
        max_bytes: a bound on the memory of changes and gradients that are computed together, in
            bytes. The model, the runs and the scores do not count, and for `eap_ig_activations` the
            changes of all examples do not count either. An example that does not fit is computed in
            parts, a few positions at a time. Each group of examples starts the kernels of the
            scores again. Default: 512 MiB on the CPU; half of the free memory on a GPU, at least
            512 MiB and at most 8 GiB.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Scores [edge, example], [edge, pos, example] or [edge, span, example] in the metric's unit,
        in at least float32 and in the order of `Graph.edges`. `about` contains:

        - `node_gap`: the largest difference between the sum of a writer's edges and the writer's
          attribution, as a share of the largest attribution. This gap should be rounding.
        - `steps` and `gaps`, for the methods along paths: the steps of each path, and the gap of
          each example. For `eap_ig_activations`, this is the largest gap of all writers.
        - `texts`: the digests of these texts (`Pairs.digests`). A circuit that is made from the
          scores keeps them, so that measures such as `faithfulness` can warn about the same texts.

    Raises:
        ValueError: if the method does not exist or has no steps, if texts, positions or steps do
            not fit, the metric has no gradient, gradients or scores are not finite, `max_bytes` is
            too small for one position of one example, or for the reasons of `Graph`.
        TypeError: if the model lacks a part that a `Graph` needs.
        HookError: if hooks act on the model, or a dictionary is spliced in with another `error`
            than "live".
        ModeError: if the model is in training mode.

    Warns:
        UserWarning: if a gap is larger than 0.01.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> edge_attribution(model, pairs, "eap_ig_inputs").top(1)
    edge m0->m1  -14.65
    >>> from interp import edge_patching
    >>> edge_patching(model, pairs, ["m0->m1"]).top(1)  # the exact effect
    edge m0->m1  -13.83
    """
    require_choice("method", method, get_args(EdgeMethod))
    if method == "eap" and steps != "auto":
        raise ValueError(f"steps must be left out for method 'eap', which has none; got {steps!r}")
    require_no_direction(source, direction, "noising")
    require_kind("max_bytes", max_bytes, (int, float, type(None)), "a number of bytes")
    graph = Graph(model, split_embeddings)
    source_graph = source_graph_of(source, graph)
    runs = Runs(
        graph.runner(for_gradients=True).model,
        pairs,
        direction=direction,
        source=source,
        source_graph=source_graph,
    )
    source_values = runs.source(graph.needed)
    prompts = None if runs.rows is runs.pairs else runs.prompts
    where = changed_positions(over, runs.text, runs.other, prompts)
    points = ScoredPoints(graph)
    start = Gradients(runs.runner, runs.text, metric=runs.metric, names=points.names)
    base = start.base
    edge_scores = EdgeScores(
        points,
        where,
        source=source_values,
        source_graph=source_graph,
        base=start.values,
        device=base.device,
        max_bytes=bytes_together(base.device, on_cpu=_BYTES) if max_bytes is None else max_bytes,
    )
    scored = PathScores(edge_scores.of_all(start))
    difference = to_device(runs.target, base.device) - base
    if method == "eap":
        warn_of_flat(start)
    # Free the autograd graph of the first run before the runs along paths.
    del start
    if method != "eap":
        size = difference.abs().mean()
        paths = Paths(runs, edge_scores, base=base, size=size, steps=steps)
        scored = paths.mean(method, scored.scores)
    sums = _sums(graph, scored, difference)
    values = _of_edges(graph, scored.scores)
    values = values.squeeze(1) if over is None else values
    labels: dict[str, Any] = {"edge": graph.edges}
    if over is not None:
        labels[over] = where.labels
    result = runs.result(values, labels, base, estimate=method, unfinished=sums)
    return finished(result, with_gaps)


def _of_edges(
    graph: Graph, scores: Float[Tensor, "writer column group batch"]
) -> Float[Tensor, "edge group batch"]:
    """Return the scores of the edges of the graph."""
    # Indices that come from the CPU need no wait, and masks on the device do.
    writer, reader = all_to_device(graph.allowed.nonzero(as_tuple=True), scores.device)
    return scores[writer, reader]


def _sums(
    graph: Graph, scored: "PathScores", difference: Float[Tensor, " batch"]
) -> dict[str, dict[str, Any]]:
    """Return the differences between the sums of edges and their expected values.

    `with_gaps` computes the gaps of all examples from them.

    Args:
        graph: the graph.
        scored: the scores of all edges, and the attribution of each writer.
        difference: the difference of the metrics of the two runs.

    Raises:
        ValueError: if a score or the difference of the metrics is not finite.
    """
    # Writers without edges are biases, which are equal in two runs of one model and differ in runs
    # of two models.
    with_edges = to_device(graph.allowed.any(1).nonzero()[:, 0], scored.scores.device)
    scores = scored.scores[with_edges]
    edges = scores[:, :-1]
    nodes = scores[:, -1]
    gap = (edges.sum(1) - nodes).abs().max()
    changes = difference.abs()
    gaps = difference[:0] if scored.gaps is None else (scored.gaps * changes.mean()).flatten()
    # Read all numbers from the device at once. The gap of a score that is not finite is not finite.
    numbers = torch.stack([gap, nodes.abs().max()])
    gap_of_node, node, *read = torch.cat([numbers, changes, gaps]).tolist()
    if not all(map(math.isfinite, (gap_of_node, *read[: len(difference)]))):
        raise ValueError("scores and metrics must be finite; got numbers that are not finite")
    largest: dict[str, Any] = {"gap_of_node": gap_of_node, "node": node}
    examples = {}
    if scored.gaps is not None:
        largest["steps"] = scored.steps
        rows = torch.tensor(read, dtype=torch.float64).view(-1, len(difference)).tolist()
        examples = {"gaps": rows[1:], "changes": rows[:1] * len(rows[1:])}
    return {"largest": largest, "examples": examples}


def with_gaps(result: Result) -> Result:
    """Return edge scores with the gaps of their sums in `about`, and warn of a large gap.

    Args:
        result: the scores, whose `about` contains the numbers of `_sums`.
    """
    assert result.base is not None
    assert result.target is not None
    about = dict(result.about)
    sums = about.pop(UNFINISHED)
    largest = sums["largest"]
    node_gap = largest["gap_of_node"] / largest["node"] if largest["node"] else 0.0
    about["node_gap"] = _rounded(node_gap)
    gap = node_gap
    if "steps" in largest:
        size = float((result.target - result.base).abs().mean())
        largest_gaps = map(max, *sums["examples"]["gaps"], [0.0] * len(result.base))
        gaps = [absolute / size if size else 0.0 for absolute in largest_gaps]
        about |= {"steps": largest["steps"], "gaps": [*map(_rounded, gaps)]}
        gap = max(gap, *gaps)
    if gap > TOLERANCE:
        rule = f"scores of edges should add up to within {TOLERANCE} of the change of the metric"
        warn(f"{rule}; got a gap of {gap:.2g}")
    return replace(result, about=about)


def _rounded(share: float) -> float:
    """Return a share with two digits."""
    return float(f"{share:.2g}")


class PathScores(NamedTuple):
    """The scores of all edges, from one run or from the mean along paths.

    Attributes:
        scores: the scores; the last column is the attribution of each writer.
        steps: the number of steps of each path.
        gaps: for each path and example, the difference between the sum of the scores and the change
            of the metric, as a share; None for one run.
    """

    scores: Float[Tensor, "writer column group batch"]
    steps: int | list[int] = 0
    gaps: Float[Tensor, "path batch"] | None = None


class Paths:
    """Paths from the edited run to runs in which writers have moved to their values at target.

    Args:
        runs: the texts and the metric.
        scores: computes the scores of edges.
        base: the metric of the edited run.
        size: the number by which gaps are divided.
        steps: see `edge_attribution`.
    """

    def __init__(
        self,
        runs: Runs,
        scores: EdgeScores,
        base: Float[Tensor, " batch"],
        size: Float[Tensor, ""],
        steps: PathSteps,
    ) -> None:
        self._runs = runs
        self._scores = scores
        self._batch = len(base)
        self._averaged = partial(averaged, base=base, steps=steps, size=size)

    def mean(self, method: str, first: Float[Tensor, "writer column group batch"]) -> PathScores:
        """Return the mean scores of all edges along the paths of a method.

        Args:
            method: `eap_ig_inputs` or `eap_ig_activations`.
            first: the scores at the start of all paths.
        """
        return self.of_input(first) if method == "eap_ig_inputs" else self.of_writers(first)

    def of_input(self, first: Float[Tensor, "writer column group batch"]) -> PathScores:
        """Return the mean scores of all edges while the input moves along its path.

        Args:
            first: the scores at the start of the path.
        """
        # The first writers are the embeddings, which move together. So the change of the metric is
        # known only for the sum over all edges of these writers. This sum leaves out the last
        # column, which is not an edge.
        n_inputs = self._scores.graph.n_inputs
        change = self._scores.changes()[:n_inputs].sum(0, keepdim=True)

        def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
            run = self._run(paths, change, share)
            return self._scores.of_all(run)[None], run.base[None]

        def added(means: Tensor) -> Tensor:
            return means[:, :n_inputs, :-1].sum((1, 2, 3))

        mean = self._averaged(at, first[None], added=added)
        return PathScores(mean.values[0], mean.steps[0], mean.gaps)

    def of_writers(self, first: Float[Tensor, "writer column group batch"]) -> PathScores:
        """Return the mean scores of each writer's edges while this writer alone moves.

        Args:
            first: the scores at the start of all paths.
        """
        changes = self._scores.changes()
        batch = self._batch
        n_at_once = max(1, _TOKENS // self._runs.text.tokens.numel())

        def at(paths: Sequence[int], share: float) -> tuple[Tensor, Tensor]:
            scores, metrics = [], []
            for start in range(0, len(paths), n_at_once):
                writers = paths[start : start + n_at_once]
                run = self._run(writers, changes, share)
                scores.append(self._scores.of_copies(run, writers, changes[writers]))
                metrics.append(run.base.view(-1, batch))
            return torch.cat(scores), torch.cat(metrics)

        def added(means: Tensor) -> Tensor:
            return means[:, :-1].sum((1, 2))

        mean = self._averaged(at, first, added=added)
        return PathScores(mean.values, mean.steps, mean.gaps)

    def _run(self, writers: Sequence[int], changes: Tensor, share: float) -> Gradients:
        """Return a run of copies of the text. In each copy, one writer has moved along its path.

        Args:
            writers: the writer that moves in each copy.
            changes: the change of each writer along the whole path.
            share: the share of the path.
        """
        writers_by_point = self._scores.points.added
        batch = self._batch

        def moved(value: Tensor, point: Point) -> Tensor:
            writers_here = writers_by_point[point.name]
            copies = []
            for rows, writer in zip(value.split(batch), writers, strict=True):
                if writer in writers_here:
                    rows = self._scores.where.change(rows, share * changes[writer])
                copies.append(rows)
            return torch.cat(copies)

        hooks = {}
        for name, writers_here in writers_by_point.items():
            if {*writers_here} & {*writers}:
                hooks[name] = moved
        runs = self._runs
        with runs.runner.hooks(hooks):
            text = runs.text.repeated(len(writers))
            metric = _Copies(runs.metric, batch)
            names = self._scores.points.names
            return Gradients(runs.runner, text, metric=metric, names=names)


class _Copies:
    """The metric of several copies of a batch. The metric is called once for each copy."""

    def __init__(self, metric: Metric, batch: int) -> None:
        self.last = getattr(metric, "last", 0)
        self.unmasked = getattr(metric, "unmasked", False)
        self._metric = metric
        self._batch = batch

    def __call__(self, logits: Float[Tensor, "rows pos vocab"]) -> Float[Tensor, " rows"]:
        copies = logits.split(self._batch)
        return torch.cat([per_example(self._metric, part, self._batch) for part in copies])

    def __repr__(self) -> str:
        return repr(self._metric)
