"""Total and direct effects of nodes: on everything after the node, and on the logits alone."""

import torch
from torch import nn

from hooks.base import progress_of, shows_progress, without_gradients
from interp.graph.graph import Graph
from interp.pairs.pairs import Pairs, PatchingDirection, of_pairs
from interp.results.result import Result
from interp.runs.masked import CircuitSource, MaskedRuns


@shows_progress
@without_gradients
@of_pairs
def node_effects(
    model: nn.Module,
    pairs: Pairs,
    source: CircuitSource = "pair",
    *,
    direction: PatchingDirection = "noising",
    split_embeddings: bool = False,
    max_bytes: int = 2**30,
    progress: bool = True,
) -> Result:
    """Return the total and the direct effect of each node, and their difference.

    For the total effect, the output of a node is replaced for all of its readers. For the direct
    effect, the output is replaced for the logits alone, and all later nodes keep their values. So
    the direct effect measures how much the node itself writes towards the answer. In both effects,
    the scale of the last norm is computed again.

    The difference, total - direct, is the effect through later nodes. If its sign is opposite to
    the sign of the direct effect, later nodes repair the change (McGrath et al. 2023, "The Hydra
    Effect").

    By default, corrupted values replace values of the clean run (`direction="noising"`), which
    shows the loss without a part. This is the question of circuits: the parts outside a circuit are
    replaced in the clean run. Activation and attribution patching do the reverse by default.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts, and their metric.
        source: the source of the replaced values; see `run_circuit`. Default: the other text of
            each pair.
        direction: `noising` runs the clean texts, `denoising` runs the corrupted texts.
        split_embeddings: whether token and position embeddings are two separate nodes.
        max_bytes: a bound on the memory in bytes, not counting the model; see `run_circuit`.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        Effects [effect, node, example] in the metric's unit. The labels of `effect` are `total`,
        `direct` and `later`, the difference.

    Raises:
        ValueError, HookError, ModeError: for the reasons of `run_circuit`.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> effects = node_effects(model, pairs)
    >>> effects.select(node="m0").mean()  # total, direct, later
    tensor([-20.5482,  -2.9812, -17.5670])
    >>> effects.select(effect="direct").top(1)
    node m2  -6.748
    """
    graph = Graph(model, split_embeddings)
    runs = MaskedRuns(graph, pairs, source, direction=direction, max_bytes=max_bytes)
    allowed = graph.allowed.float()
    base = runs.metric(torch.zeros_like(allowed))
    writers = [n for n, edges in enumerate(allowed) if edges.any()]
    totals, directs = [], []
    for writer in progress_of(writers, "nodes", len(writers)):
        # Replace all edges of the writer, and then only its edge to the logits.
        mask = torch.zeros_like(allowed)
        mask[writer] = allowed[writer]
        totals.append(runs.metric(mask) - base)
        mask = torch.zeros_like(allowed)
        mask[writer, -1] = 1
        directs.append(runs.metric(mask) - base)
    total = torch.stack(totals)
    direct = torch.stack(directs)
    values = torch.stack([total, direct, total - direct])
    nodes: list[str] = [graph.writers[writer] for writer in writers]
    labels = {"effect": ["total", "direct", "later"], "node": nodes}
    return runs.runs.result(values, labels, base)
