"""Numbers: precision, running moments, ranks and intervals, for all packages of `interp`.

No file imports another, so they may be read in any order. `precision` has dtypes and how large rounding may be, `moments`
has running means and products, `ranks` has ranks and the largest numbers, and `intervals` has how sure a mean is.
"""
