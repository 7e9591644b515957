"""The former name of `interp.plots`. Its import raises an error with the new name."""

raise ImportError("module 'interp' has no module 'pictures'; it is now interp.plots")
