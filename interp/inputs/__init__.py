"""Inputs of analyses: texts, pairs of them, and positions in them."""
