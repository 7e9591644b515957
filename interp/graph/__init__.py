"""The graph from writers of the residual stream to readers, and circuits, which are sets of edges.

Read `graph` first, then `nodes` (the nodes of one block with their outputs), `sublayers` (the parts
of a block, with their types), `norms` (the linear part of a norm) and `scores` (attention scores as
sums over nodes). Then read `circuit` (a set of
edges), `circuits` (finds circuits from scores of edges) and `mib` (files of the MIB benchmark).
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
