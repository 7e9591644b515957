"""Inputs of analyses: texts for a model, texts of a cached run, positions, and copies of texts.

A batch of texts is one value, a `hooks.base.Text`: it contains the tokens, the mask, and the other
inputs of one run. Read `texts` first, then `cached`, `token_positions`, `offsets`, `copies` and
`parts`.
"""
