"""Tables of effects, with one number for each place and example, labels and intervals.

`node` contains the names of a graph's nodes, which are used as labels. `entries` contains the rows
that a table prints. `result` contains the table itself, `Result`. Read it last, because it imports
the other two files.
"""
