"""Pairs of clean and corrupted texts, with the metric of their answers.

The class is in `pairs`. `spans` finds the columns of spans and checks that two texts fit each
other, `words` converts answers and words of metrics to tokens, and in `answers`, answers of several
tokens become rows. Read `pairs` first.
"""
