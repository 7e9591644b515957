"""The graph that joins writers of the residual stream to readers, and circuits, sets of its edges.

Read `graph` first, then `nodes`, which says what the nodes of one block are and add, and `norms`,
the linear part of a norm. Then read `circuit`, a set of edges, `circuits`, which finds one from
scores of edges, and `mib`, its files in the formats of that benchmark; `scores` stands on `nodes`
alone, and says what scores of attention are sums of.
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
