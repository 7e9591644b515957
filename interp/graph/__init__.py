"""The graph of a model's residual stream, and sets of its edges.

`graph` stands on `nodes`, and everything else on `graph`: `circuit` is a set of edges, `circuits` finds one
from scores, `mib` reads and writes files of that benchmark, and `scores` says what scores of attention are sums of.
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
