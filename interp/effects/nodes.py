"""Total and direct effects of nodes: with what comes later recomputed, and on the logits alone."""

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
    """Replace what each node writes: for everything that reads it, and for the logits alone.

    The total effect is that of patching the node. The direct one keeps all later nodes as they are,
    and shows what the node itself writes towards the answer. `total - direct` is what later nodes
    do about it: where it has the other sign, they repair (McGrath et al. 2023, "The Hydra Effect").
    The scale of the last norm follows in both.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts, and their metric.
        source, direction, split_embeddings, max_bytes: see `run_circuit`.
        progress: whether to show a bar after two seconds.

    Returns:
        Effects [effect, node, example] in the metric's unit; `effect` is `total`, `direct` or
        `later`, their difference.

    Raises:
        ValueError, HookError, ModeError: as for `run_circuit`.

    >>> from models import load
    >>> model, pairs = load("pydoc-4l"), Pairs("def __ini", "def __nam", ("t", "e"))
    >>> node_effects(model, pairs).select(effect="direct").top(1)
    node m2  -6.748
    """
    graph = Graph(model, split_embeddings)
    masked = MaskedRuns(graph, pairs, source, direction, max_bytes)
    allowed = graph.allowed.float()
    base = masked.metric(torch.zeros_like(allowed))
    effects = []
    places = [n for n, row in enumerate(allowed) if row.any()]
    for place in progress_of(places, "nodes", len(places)):
        total, direct = torch.zeros_like(allowed), torch.zeros_like(allowed)
        total[place] = allowed[place]
        direct[place, -1] = 1
        effects.append([masked.metric(mask) - base for mask in (total, direct)])
    table = torch.stack([torch.stack(each) for each in zip(*effects, strict=True)])
    values = torch.cat([table, table[:1] - table[1:]])
    nodes: list[str] = [graph.writers[place] for place in places]
    labels = {"effect": ["total", "direct", "later"], "node": nodes}
    return masked.runs.result(values, labels, base)
