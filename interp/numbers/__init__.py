"""Functions on numbers for all packages of `interp`: finiteness, moments, ranks and intervals.

Read the files in any order, because no file imports another. They are `precision` (finite numbers,
and distances of distributions), `moments` (running means and products), `ranks` (ranks and the
largest numbers) and `intervals` (confidence intervals of means).
"""
