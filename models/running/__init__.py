"""Runs of the plain model: their context, masks, cached keys and values, generation and sampling."""
