"""Inputs of analyses: texts that a model reads, texts of a cache, and positions in them.

A text is one value, `hooks.base.Text`. Read `texts` first, then `cached`, `token_positions` and
`copies`.
"""
