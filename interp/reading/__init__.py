"""Analyses that read a cache and run no model: `analysis(model, cache, tokens=None)`.

What fits a lens, and `max_activating`, takes texts instead, and runs the model on them.
"""
