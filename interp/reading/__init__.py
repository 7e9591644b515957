"""Analyses that read the cache of a run, `analysis(model, cache)`, and fitted lenses.

Read `components` (the vectors that each part of a model adds to the stream) before `decompose`,
`logit_attribution` and `attending`, and `affine` (maps of the stream before the unembedding) before
`lens`, `tuned`, `jacobian`, `jacobian_fit`, `published` (files of other libraries) and
`lens_vectors` (sparse sums). Read `heads`, `experts` and `maxima` in any order, because they use no
other file.
"""
