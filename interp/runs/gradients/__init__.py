"""Gradients at the points of a run, and estimates of effects that are made of them.

`backward`, `estimates`, `trapezoid`, `attention` and `pullback` import none of this room. `edge_scores` stands
on some of them, and `edge_paths` on `edge_scores`.
"""
