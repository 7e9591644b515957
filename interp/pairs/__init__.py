"""Pairs of clean and corrupted texts, with what is measured on them.

`pairs` has the class, `spans` checks that spans and answers fit the texts, and `wording` reads
pairs of strings by a model's tokenizer. Read `pairs` first.
"""
