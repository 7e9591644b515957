"""Hook points for models of `transformers`, found from a run instead of a list of architectures.

Read `attaching` first, because it contains the algorithm. Then read its steps in order: `settings`,
`original`, `probe`, `stacks` with their `ends`, `layout` with `parts` and `experts` (or `streams`,
for blocks with several vectors of each token), `points` with `wires` and `attention`, and `checks`.
A run of the attached model goes through `forward` (with `padded_positions`), `context` and
`pattern` (padding in attention patterns). Analyses use the object from `attached`, or its `view` as
blocks with weights, and `writing` continues texts.
"""

from models.attached.attached import Attached, detach
from models.attached.attaching import attach

__all__ = ["Attached", "attach", "detach"]
