"""Any analysis of many examples, in parts, on any executor.

Read `over` first, which contains `over_examples`. `division` divides pairs, texts and arguments.
`jobs` runs the parts on an executor, and `folder` stores finished parts under names that are hashes
of values (`fingerprints`). `joining` joins the results of all parts. An analysis states in
`interp.inputs.parts` which facts it computes over all examples.
"""
