"""Attribution graphs: the exact direct effects of features, errors and embeddings on logits.

Read the files in this order: `frozen` (a run with frozen attention and norms, with `branches` for
two answers, `readings` and `padded`), `descent` (carries directions of targets down the layers of
the run), `attribution` (fills the rows of a graph) and `traced` (the graph, with its methods in
`influence`, `attention`, `intervention` and `pruned`). The inputs and outputs are in `transcoders`,
`targets`, `nodes` and `neuronpedia`.
"""

from hooks.base import missing_name as _missing_name
from interp.attribution_graphs.attribution import attribution_graph
from interp.attribution_graphs.nodes import AttentionCell, Link, Node
from interp.attribution_graphs.pruned import PrunedGraph
from interp.attribution_graphs.traced import AttributionGraph

__all__ = ["AttentionCell", "AttributionGraph", "Link", "Node", "PrunedGraph", "attribution_graph"]

__getattr__ = _missing_name(__name__, __all__)
