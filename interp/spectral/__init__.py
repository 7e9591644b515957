"""Singular values and vectors of what attention computes.

`spectral.svd(matrices)` decomposes any matrices. All names are also in `interp`.

Here: the other files stand on `singular`, which knows no model, and not on one another.
"""

from interp.spectral.singular import svd

__all__ = ["svd"]
