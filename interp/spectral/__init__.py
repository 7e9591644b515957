"""Spectra: singular values and vectors of what attention computes, circuits of weights, and subspaces.

Read `singular` first, which knows no model; `factored` (a matrix kept as two factors) and `subspaces` stand on it.
`targets` has the matrices of a run; `folded` has the weights as they act on the stream, of which `weights` makes circuits
and `weight_scores` makes scores of heads.
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
