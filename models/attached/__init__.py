"""Hook points for models of `transformers`, found from a run instead of a list of architectures.

Read `attaching` first, which is the algorithm, and then its steps in order: `original`, `probe`,
`stacks`, `layout` with `parts` and `experts`, `points` with `wires` and `attention`, and `checks`.
A run of the attached model goes through `forward` and `context`, and analyses use the object of
`attached`, or the `view` of it as blocks with weights.
"""

from models.attached.attached import Attached, detach
from models.attached.attaching import attach

__all__ = ["Attached", "attach", "detach"]
