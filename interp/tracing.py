"""The former name of `interp.attribution_graphs`. Its import raises an error with the new name."""

raise ImportError("module 'interp' has no module 'tracing'; it is now interp.attribution_graphs")
