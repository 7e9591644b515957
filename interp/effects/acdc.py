"""ACDC: find a circuit by removing edges one by one while predictions stay close to the model's.

The algorithm (Conmy et al. 2023, "Towards Automated Circuit Discovery for Mechanistic
Interpretability"):

1. Start from the whole graph, whose divergence from the model is 0.
2. Visit the readers against the order of computation, from the logits to the first block. For each
   reader, visit the writers with an edge to the reader, also against the order of computation.
3. For each edge, replace the value that the reader gets from the writer by the writer's value in
   the other run. If the divergence rises by less than the threshold, remove the edge. The rise in
   the next test is then measured from the new divergence. Otherwise keep the edge.
4. If no kept edge leaves the node of a reader, the edges to this reader have no effect. They are
   removed without a test.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooks.base import progress_bar, shown, shows_progress, without_gradients
from interp.graph.circuit import Circuit, feeding
from interp.graph.graph import Graph
from interp.inputs.token_positions import Tokens
from interp.metrics import kl_divergence
from interp.pairs.answers import predicting
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.runs.masked import CircuitSource, MaskedRuns
from interp.runs.runs import Runs


@shows_progress
@without_gradients
@of_pairs
def acdc(
    model: nn.Module,
    pairs: Pairs,
    thresholds: float | Sequence[float],
    source: CircuitSource = "pair",
    *,
    pos: "Tokens | None" = -1,
    direction: PatchingDirection = "noising",
    split_embeddings: bool = False,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> dict[float, Circuit]:
    """Find a circuit: remove edges one by one while predictions stay close to the model's.

    The divergence of a circuit is KL(whole model || circuit), the mean over the pairs. The test of
    an edge is one run. If two thresholds have led to the same decisions so far, they share the next
    test.

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part. This is the question of circuits: the parts outside a circuit are
    replaced in the clean run. Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts; answers are not needed.
        thresholds: the largest increase of the divergence that one removed edge may cause, in nats;
            one number or several. Each threshold is above 0.
        source: the source of the replaced values; see `run_circuit`. Default: the other text of
            each pair.
        direction: `noising` runs the clean texts, `denoising` runs the corrupted texts.
        split_embeddings: whether token and position embeddings are two separate nodes.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        pos: the positions where predictions are compared; see `logit_diff`. None means the mean
            over all positions that are not padding. Default: the last position. For answers of
            several tokens, the mean over the positions that predict their tokens.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        A circuit for each threshold, by the threshold. The score of an edge is minus the increase
        of the divergence when the edge was tested, in nats. Removed edges also have
        scores. The score is NaN if no test was needed.

    Raises:
        ValueError: if there is no threshold, a threshold is not above 0, or for the reasons of
            `run_circuit`.
        HookError, ModeError: for the reasons of `run_circuit`.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam")
    >>> [*acdc(model, pairs, 3.0)[3.0]]
    ['m0->m1', 'm1->logits']
    """
    thresholds = [thresholds] if isinstance(thresholds, int | float) else [*thresholds]
    _require_positive(thresholds)
    whole_model = Runs(model, pairs, direction)
    mask = whole_model.text.attention_mask
    if whole_model.rows is not whole_model.pairs and isinstance(pos, int) and pos == -1:
        pos, mask = None, predicting(whole_model.text, whole_model.prompts)
    metric = kl_divergence(whole_model.logits({}), pos, attention_mask=mask)
    rows = whole_model.rows.measured_by(metric)
    found_on = whole_model.pairs.digests()
    graph = Graph(model, split_embeddings)
    runs = MaskedRuns(graph, rows, source, direction=direction, max_bytes=max_bytes)
    known_divergences: dict[bytes, float] = {}

    def divergence(kept: Bool[Tensor, "writer reader"]) -> float:
        key = kept.numpy().tobytes()
        if key not in known_divergences:
            divergences = runs.metric((graph.allowed & ~kept).float())
            known_divergences[key] = float(divergences.double().mean())
        return known_divergences[key]

    circuits = {}
    n_edges = int(graph.allowed.sum())
    with progress_bar("edges", total=n_edges * len(thresholds)) as count:
        for number, threshold in enumerate(thresholds, 1):
            kept, scores = _tested(graph, threshold, divergence, count)
            circuits[threshold] = Circuit(graph, kept, scores=scores, found_on=found_on)
            # The bar counts all edges, including edges that were removed without a test.
            count(number * n_edges - count.done)
    return circuits


def _require_positive(thresholds: Sequence[Any]) -> None:
    """Check that thresholds are one or more numbers above 0."""
    are_numbers = all(isinstance(threshold, int | float) for threshold in thresholds)
    if not thresholds or not are_numbers or min(thresholds) <= 0:
        error = ValueError if are_numbers else TypeError
        raise error(f"thresholds must be numbers above 0, at least one; got {shown(thresholds)}")


def _tested(
    graph: Graph,
    threshold: float,
    divergence: Callable[[Tensor], float],
    count: Callable[[], object],
) -> tuple[Bool[Tensor, "writer reader"], Float[Tensor, "writer reader"]]:
    """Test the edges with one threshold.

    Return the edges that are kept, and the score of each edge: minus the increase of the divergence
    in the test of the edge. The score is NaN without a test.

    Args:
        graph: the graph of the model.
        threshold: the largest increase of the divergence that a removed edge may cause.
        divergence: returns the divergence of a circuit, given its table of edges.
        count: a function that is called after each test.
    """
    kept = graph.allowed.clone()
    scores = torch.full(kept.shape, torch.nan, dtype=torch.float64)
    current = 0.0
    for writer, reader in _edges(graph, kept):
        kept[writer, reader] = False
        new = divergence(kept)
        scores[writer, reader] = current - new
        if new - current < threshold:
            current = new
        else:
            kept[writer, reader] = True
        count()
    return kept, scores


def _edges(graph: Graph, kept: Bool[Tensor, "writer reader"]) -> Iterator[tuple[int, int]]:
    """Yield the edges to test, each as (index of writer, index of reader).

    The caller removes a tested edge from `kept` before it asks for the next edge. If no kept edge
    leaves the node of a reader, this function removes all edges to the reader from `kept`.
    """
    feeds = feeding(graph)
    # A reader is live if a path of kept edges leads from its node to the logits.
    is_live = torch.zeros(len(graph.readers), dtype=torch.bool)
    is_live[-1] = True
    for reader in reversed(range(len(graph.readers))):
        writers = feeds[:, reader].nonzero().flatten()
        is_live[reader] |= (kept[writers] & is_live).any()
        if not is_live[reader]:
            kept[:, reader] = False
        for writer in reversed(kept[:, reader].nonzero().flatten().tolist()):
            yield writer, reader
