"""Tables of effects, with one number for each place and example, labels and intervals.

Read `result` last, which contains the table itself, `Result`, because it imports the other two
files. These are `node` (the names of a graph's nodes, which are used as labels) and `entries` (the
rows that a table prints).
"""
