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
    """Replace the output of each node for all of its readers, and then for the logits alone.

    The total effect is the effect of patching the node. For the direct effect, all later nodes keep
    their values, so it measures how much the node itself writes towards the answer. `later` is
    `total - direct`, the effect through later nodes. If its sign is opposite to the sign of
    `direct`, later nodes repair the change (McGrath et al. 2023, "The Hydra Effect"). In both
    effects, the scale of the last norm is computed again.

    Args:
        model: a model that has a `Graph`, in evaluation mode.
        pairs: the texts, and their metric.
        source, direction, split_embeddings, max_bytes: see `run_circuit`.
        progress: whether to show a bar after two seconds.

    Returns:
        Effects [effect, node, example] in the metric's unit. The labels of `effect` are `total`,
        `direct` and `later`, which is `total - direct`.

    Raises:
        ValueError, HookError, ModeError: for the reasons of `run_circuit`.

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
