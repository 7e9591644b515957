"""Inputs of analyses: the texts that a model reads, the texts of a cache, and positions in texts.

A text is one value, `hooks.base.Text`. Read `texts` first, then `cached`, `token_positions` and
`copies`.
"""
