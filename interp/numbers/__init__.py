"""Numbers: checks that they are finite, running moments, ranks and intervals, for all packages of `interp`.

No file imports another, so they may be read in any order. `precision` refuses numbers that are not finite and has the
distance of distributions, `moments` has running means and products, `ranks` has ranks and the largest numbers, and
`intervals` has how sure a mean is.
"""
