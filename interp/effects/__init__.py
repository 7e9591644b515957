"""Effects of changing values inside a model, measured or estimated: one file for each analysis.

Read `patching` first, then `paths`, `nodes`, `evaluation`, `curves` and `acdc`, which measure; then
`attribution` with its `qk_correction`, `integrated_gradients`, `top`, and `edges` with
`edge_scores` and `reader_gradients`, which estimate; and last `comparison` and `patch_top_k`, which
compare an estimate with exact effects. No analysis imports another: the code that several analyses
need is in `runs` and `graph`.
"""
