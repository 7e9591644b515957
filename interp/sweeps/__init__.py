"""Many edited runs of one batch in few forward passes.

`sweep` starts from `resume`, which begins runs where they first differ from the run in `unedited`. All of
them stand on `rows`, which stacks runs as rows of a batch.
"""
