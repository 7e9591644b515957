"""The graph from writers of the residual stream to readers, and circuits, which are sets of edges.

Read `graph` first, then `nodes`, the nodes of one block with their outputs, and `norms`, the linear
part of a norm. Then read `circuit`, a set of edges, `circuits`, which finds circuits from scores of
edges, and `mib`, which reads and writes files of the MIB benchmark. `scores` needs only `nodes`; it
decomposes attention scores into sums.
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
