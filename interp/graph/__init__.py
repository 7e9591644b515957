"""The graph of a model's residual stream, and sets of its edges.

`graph` stands on `nodes`, and everything else on `graph`: `circuit` is a set of edges, `circuits` finds one
from scores, and `components` keeps what each node wrote as factors.
"""

from interp.graph.graph import Graph, writers

__all__ = ["Graph", "writers"]
