"""Runs of pairs (`runs`), which every analysis that intervenes begins with, and the ways to run them many times.

`sweep` starts from `resume`, which begins runs where they first differ from the run in `unedited`; all stand on
`rows`, which stacks runs as rows of a batch. `gradients` has a room of its own. On `runs` stand `sites`, where two runs
are compared, `masked`, which runs circuits, and `path_edits`, which moves values along single edges.
"""
