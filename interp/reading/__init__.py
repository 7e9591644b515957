"""Tables that read a cached run and run nothing: `table(model, cache, tokens=None)`."""
