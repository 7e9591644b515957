"""Analyses that read the cache of a run, `analysis(model, cache)`, and fitted lenses.

Two files are shared by several analyses. Read `components` (the vectors that each part of a model
adds to the stream) before `decompose`, `logit_attribution` and `attending`. Read `affine` (maps of
the stream before the unembedding) before `lens`, `tuned` and `jacobian`, and then `jacobian_fit`,
`published` (files of other libraries) and `lens_vectors` (sparse sums). `heads`, `experts` and
`maxima` do not depend on the other files. `maxima` and the files that fit a lens run the model.
"""
