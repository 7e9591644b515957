"""Runs of pairs of texts, which every analysis that intervenes begins with, and runs of one batch.

Read `runs` first, then its ways: `sweep`, which stacks edited runs as `rows` of a batch and begins
them (`resume`) where they first differ from the run in `unedited`; and `gradients`, which takes
gradients at the points of one run. On these stand `sites`, where two runs are compared; `estimates`
at sites, from gradients, and means along paths (`trapezoid`); `masked`, which runs circuits, and
`circuit_runs`, which compares them; and `path_edits`, which moves values along edges.
"""
