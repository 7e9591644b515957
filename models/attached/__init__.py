"""Hook points for models of `transformers`, found from a run instead of a list of architectures.

Read `attaching` first, because it contains the algorithm, and then its steps in order: `original`,
`probe`, `stacks`, `layout` with `parts` and `experts`, `points` with `attention`, and `checks`. A
run of the attached model goes through `forward` (with `generating` inside `generate`), `unchanged`,
`context` and `padding` (in attention patterns, in positions and in `rotary_lengths`), and analyses
use the object from `attached`, which knows its `settings`, or its `view` as blocks with weights.
"""

from models.attached.attached import Attached, detach
from models.attached.attaching import attach
from models.attached.original import AttachError

__all__ = ["AttachError", "Attached", "attach", "detach"]
