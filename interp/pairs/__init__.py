"""Pairs of clean and corrupted texts, with the metric of their answers.

The class is in `pairs`. The checks of spans and answers are in `spans`, the conversion of strings
to tokens is in `wording`, and answers of several tokens become rows in `answers`. Read `pairs`
first.
"""
