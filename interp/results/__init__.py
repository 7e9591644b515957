"""Tables of effects, one number for each place and example, with labels and intervals.

`node` has the names of a graph's nodes, which serve as labels; `entries` has the rows that a table prints. `result`
has the table itself, `Result`: read it last, as it stands on the other two.
"""
