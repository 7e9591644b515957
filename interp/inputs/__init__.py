"""Inputs of analyses: texts, texts of a cached run, positions, words, and copies of texts.

A batch of texts is one value, a `hooks.base.Text`: it contains the tokens, the mask, and the other
inputs of one run. Read `texts` first, then `cached`, `token_positions`, `words`, `offsets`,
`copies` and `parts`.
"""
