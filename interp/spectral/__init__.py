"""Spectra: singular values and vectors of attention's matrices, circuits of weights, and subspaces.

Read `singular` first, which does not depend on a model, and then `factored` (a matrix as the
product of two factors) and `subspaces`, which import it. Then read `targets` (the matrices of a
run), `folded` (the weights as they act on the stream), `weights` (circuits of these weights) and
`weight_scores` (scores of heads).
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
    "SVD",
    "alignment",
    "condition_number",
    "drift",
    "effective_rank",
    "principal_angles",
    "randomized_svd",
    "spectral_gap",
    "stable_rank",
    "subspace_angles",
    "subspace_overlap",
    "subspace_projection",
    "svd",
]

__getattr__ = _missing_name(
    __name__,
    __all__,
    moved=dict.fromkeys(
        ("answer_power", "fourier_basis", "frequency_power"), "in examples/studies/cyclic.py"
    ),
)
