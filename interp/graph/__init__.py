"""The graph of a model's residual stream, sets of its edges, and runs in which values move along edges.

`graph` stands on `nodes`, and everything else on `graph`: `circuit` is a set of edges, `circuits` finds one
from scores, `masked` runs one, `carried` moves values along single edges, and `parts` keeps what each node
wrote as factors.
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
