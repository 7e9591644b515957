"""The ways to run a model many times: sweeps of edits, masked runs, edits along paths, and gradients.

`sweep` starts from `resume`, which begins runs where they first differ from the run in `unedited`; all stand on
`rows`, which stacks runs as rows of a batch. `masked` runs circuits, `path_edits` moves values along single
edges. `sites` says where two runs are compared. `gradients` has a room of its own.
"""
