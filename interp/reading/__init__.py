"""Analyses that read the cache of a run, `analysis(model, cache)`, and lenses that are fitted to texts.

Two files hold what several analyses need: read `components` (what each part of a model adds to the stream) before
`decompose`, `logit_attribution` and `attending`, and `affine` (maps of the stream before the unembedding) before `lens`,
`tuned` and `jacobian`. `heads`, `experts` and `maxima` stand alone; `maxima` and the files that fit a lens run the model.
"""
