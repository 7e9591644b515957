"""Singular values and vectors of what attention computes.

`spectral.svd(matrices)` decomposes any matrices. All names are also in `interp`.
"""

from interp.spectral.singular import svd

__all__ = ["svd"]
