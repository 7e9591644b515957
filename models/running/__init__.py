"""Run the plain model: context, masks, cached keys and values, generation and sampling.

Read `context` first, which every run makes from its arguments, then `masks` (padding, later keys
and windows in attention patterns) and `kvcache`. `generation` continues texts with a cache; it uses
`prompts` and `sampling`, and for compiled steps `compiled` and `static_cache`.
"""
