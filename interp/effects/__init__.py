"""Effects of changing values inside a model, measured or estimated: one file for each analysis.

Read `patching` first, then `paths`, `nodes`, `evaluation`, `curves` and `acdc`, which measure; then
`attribution` with its `qk_correction`, `integrated_gradients`, `top`, and `edges` with
`edge_scores` and `reader_gradients`, which estimate; and last `comparison` and `patch_top_k`, which
hold an estimate against exact effects. No analysis imports another: everything that several of them
need is in `runs` and `graph`.
"""
