"""Run the plain model: context, masks, cached keys and values, generation and sampling.

Read `context` first, which every run makes from its arguments, then `masks` (padding, later keys
and windows in attention patterns), `pieces` (blocks that compute some positions at a time) and
`kvcache`. Then read `generation`, which continues texts with a cache, and its parts `prompts`,
`sampling` and, for compiled steps, `compiled` and `static_cache`.
"""
