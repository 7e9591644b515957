"""Effects of changing values inside a model: measured exactly, or estimated from gradients.

No file here imports another: what they share is in `runs` and `graph`.
"""
