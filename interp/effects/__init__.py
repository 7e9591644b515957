"""What a model does when values inside it are changed, exactly or as gradients estimate it.

No file here imports another: what they share is in `running` and `graph`.
"""
