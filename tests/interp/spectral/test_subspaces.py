"""Overlaps of subspaces, and projections of vectors on them, compared with numpy."""

import numpy as np
import pytest
import torch

from interp.spectral import principal_angles, subspace_overlap, subspace_projection
from tests.interp.spectral.drawn import close, randn


def test_overlap_is_the_mean_squared_cosine_of_angles():
    a, b = randn(2, 11, 3), randn(2, 11, 5, seed=1)
    close(subspace_overlap(a, b), principal_angles(a, b).cos().square().mean(-1))
    close(subspace_overlap(b, a), subspace_overlap(a, b))
    close(subspace_overlap(torch.eye(7)[:, :2], torch.eye(7)[:, 3:]), 0)


def test_projection_is_the_nearest_point():
    vectors, basis = randn(2, 3, 11), randn(11, 4, seed=1)
    found = subspace_projection(vectors, basis)
    solved = np.linalg.lstsq(basis.numpy(), vectors.reshape(6, 11).T.numpy(), rcond=None)[0]
    close(found, (basis.numpy() @ solved).T.reshape(2, 3, 11))
    assert subspace_projection(vectors.bfloat16(), basis).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="independent"):
        subspace_projection(vectors, basis[:, [0, 0]])
