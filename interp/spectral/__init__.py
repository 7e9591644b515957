"""Singular values and vectors of what attention computes, subspaces, and functions of numbers modulo n.

Studies reach these by `interp.spectral`. What takes a model's run, `svd_targets` and `spectra`, is also in `interp`.

Here: the other files stand on `singular`, which knows no model, and not on one another.
"""

from interp.spectral.cyclic import answer_power, fourier_basis, frequency_power
from interp.spectral.factored import FactoredMatrix
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
from interp.spectral.targets import (
    ResidualStream,
    SVDTargets,
    residual_stream,
    spectra,
    svd_targets,
    wvwo,
)

__all__ = [
    "SVD",
    "FactoredMatrix",
    "ResidualStream",
    "SVDTargets",
    "alignment",
    "answer_power",
    "condition_number",
    "drift",
    "effective_rank",
    "fourier_basis",
    "frequency_power",
    "principal_angles",
    "randomized_svd",
    "residual_stream",
    "spectra",
    "spectral_gap",
    "stable_rank",
    "subspace_angles",
    "subspace_overlap",
    "subspace_projection",
    "svd",
    "svd_targets",
    "wvwo",
]
