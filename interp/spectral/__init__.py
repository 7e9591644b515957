"""Singular values and vectors of what attention computes, subspaces, and functions of numbers modulo n.

Studies reach these by `interp.spectral`. What reads a model's run is in `interp`: `svd_targets`, `residual_stream`.

Here: the other files stand on `singular`, which knows no model, and not on one another.
"""

from interp.spectral.cyclic import answer_power, fourier_basis, frequency_power
from interp.spectral.singular import (
    SVD,
    condition_number,
    effective_rank,
    randomized_svd,
    spectral_gap,
    stable_rank,
    svd,
)
from interp.spectral.subspaces import (
    alignment,
    drift,
    principal_angles,
    subspace_angles,
    subspace_overlap,
    subspace_projection,
)

__all__ = [
    "SVD", "alignment", "answer_power", "condition_number", "drift", "effective_rank",
    "fourier_basis", "frequency_power", "principal_angles", "randomized_svd", "spectral_gap",
    "stable_rank", "subspace_angles", "subspace_overlap", "subspace_projection", "svd",
]  # fmt: skip
