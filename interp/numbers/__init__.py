"""Functions on numbers for all packages of `interp`: finiteness, moments, ranks and intervals.

No file imports another file of this folder, so you can read them in any order. `precision` checks
that numbers are finite and compares distributions, `moments` contains running means and products,
`ranks` contains ranks and the largest numbers, and `intervals` contains confidence intervals of
means.
"""
