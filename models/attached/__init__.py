"""Hook points for models of `transformers`, found from a run and without a list of architectures.

`attach` runs the model once and records its modules, finds the stacks, blocks and sublayers, places the points, checks them,
and returns an `Attached`. Read `attaching` first, which has these steps in order, then a file for each step: `original`,
`probe`, `stacks`, `layout` with `parts` and `experts`, `points` with `wires` and `attention`, and `checks`. A run of the
attached model goes through `forward` and `context`, and analyses use `attached`, or a `view` of it as blocks with weights.
"""

from models.attached.attached import Attached, detach
from models.attached.attaching import attach

__all__ = ["Attached", "attach", "detach"]
