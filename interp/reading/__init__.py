"""Analyses that read a cache and run no model: `analysis(model, cache, tokens=None)`."""
