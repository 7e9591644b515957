"""Pairs of clean and corrupted texts, with the metric of their answers.

Read `pairs` first, which contains the class. Then read the other files in the order in which an
analysis uses them: `spans` (the columns of spans, and checks that two texts fit each other),
`scoring` (answers and metrics as tokens of a model), `answers` (answers of several tokens as rows)
and `printed` (the text of `print(pairs)`).
"""
