"""Any analysis of many examples, in parts, on any executor.

Read `over` first, which contains `over_examples`. `division` divides pairs, texts and arguments.
`passes` runs an analysis on all parts: `jobs` runs one part, `interp.store.tasks` runs parts on an
executor, `folder` stores finished parts under names that are hashes of values (`fingerprints`), and
`joining` joins the results. `decisions` contains the analyses that need several passes. An
analysis states in `interp.inputs.parts` which facts it computes over all examples.
"""
