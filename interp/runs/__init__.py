"""Runs of pairs of texts and of single batches, used by every analysis that intervenes.

Read `runs` first, then the two ways to run. `sweep` stacks edited runs as `rows` of a batch and
starts them (`resume`) where they first differ from the run in `unedited`. `gradients` takes
gradients at the points of one run. The other files use these two: `sites` are the places where two
runs are compared; `estimates` are computed at sites from gradients, and `trapezoid` takes means
along paths; `masked` runs circuits, and `circuit_runs` compares them; `path_edits` moves values
along edges. `models` checks a second model whose values are read, and `adapters` switches the
adapter of a model off, so that one model is both.
"""
