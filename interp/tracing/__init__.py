"""Attribution graphs: which features, errors and embeddings make a logit, as exact direct effects."""

from interp.tracing.attribution import attribution_graph
from interp.tracing.nodes import AttentionCell, Link, Node
from interp.tracing.pruned import PrunedGraph
from interp.tracing.traced import AttributionGraph

__all__ = ["AttentionCell", "AttributionGraph", "Link", "Node", "PrunedGraph", "attribution_graph"]
