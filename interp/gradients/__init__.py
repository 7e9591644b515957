"""Gradients at the points of a run, and estimates of effects that are made of them.

`backward` runs the model; `estimates` and the scores of edges stand on it, and `edge_paths` on `edge_scores`.
`trapezoid` integrates along any path. `attention` and `pullback` run parts of a block again.
"""
