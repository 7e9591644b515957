"""Spectra: singular values and vectors of what attention computes, circuits of weights, and subspaces.

Read `singular` first, which knows no model; `factored` (a matrix kept as two factors) and `subspaces` stand on it.
`targets` has the matrices of a run; `folded` has the weights as they act on the stream, of which `weights` makes circuits
and `weight_scores` makes scores of heads.
"""

from hooks.base import missing_name as _missing_name
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
    "SVD", "alignment", "condition_number", "drift", "effective_rank", "principal_angles",
    "randomized_svd", "spectral_gap", "stable_rank", "subspace_angles", "subspace_overlap",
    "subspace_projection", "svd",
]  # fmt: skip

__getattr__ = _missing_name(
    __name__,
    __all__,
    moved=dict.fromkeys(
        ("answer_power", "fourier_basis", "frequency_power"), "in examples/studies/cyclic.py"
    ),
)
