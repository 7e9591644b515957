"""Analyses that read a cache, or weights, and run no model: `analysis(model, cache)`.

What fits a lens, and `max_activating`, takes texts instead, and runs the model on them. No file here imports
another: what they share is in `linear` and `spectral`.
"""
