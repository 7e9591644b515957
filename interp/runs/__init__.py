"""Runs of pairs of texts and of single batches, used by every analysis that intervenes.

Read `runs` first, then the two ways to run: `sweep`, which stacks edited runs as `rows` of a batch
(as many as `memory` allows) and starts them (`resume`) where they first differ from the run in
`unedited`, and `gradients`, which takes gradients at the points of one run. The other files use
these two: `sites` (the places where two runs are compared), `edited` (edits of texts that have a
row for each answer), `estimates` and `trapezoid` (effects from gradients, and means along paths),
`masked` and `circuit_runs` (circuits), `path_edits` (values along edges), and `models` and
`adapters` (values of a second model, or of a model without its adapter).
"""
