"""Attribution graphs: which features, errors and embeddings make a logit, as exact direct effects.

Read `frozen` (a run with attention and norms frozen), `descent` (directions that are carried down it) and `attribution`
(which fills the rows of a graph) in this order. `traced` has the graph, with its readings in `influence`, `attention`,
`intervention` and `pruned`; `transcoders`, `targets`, `nodes` and `neuronpedia` have what these take and give.
"""

from hooks.base import missing_name as _missing_name
from interp.tracing.attribution import attribution_graph
from interp.tracing.nodes import AttentionCell, Link, Node
from interp.tracing.pruned import PrunedGraph
from interp.tracing.traced import AttributionGraph

__all__ = ["AttentionCell", "AttributionGraph", "Link", "Node", "PrunedGraph", "attribution_graph"]

__getattr__ = _missing_name(__name__, __all__)
