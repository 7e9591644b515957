"""Factored matrices, compared with numpy on the full product."""

import numpy as np
import pytest
import torch

from interp import FactoredMatrix
from interp.spectral import svd
from tests.interp.spectral.drawn import close, randn


def factored(rows, inner, columns, batch=(2, 3), seed=0):
    """Return a random factored matrix, and its product, computed by numpy."""
    left, right = (
        randn(*batch, rows, inner, seed=seed),
        randn(*batch, inner, columns, seed=seed + 1),
    )
    return FactoredMatrix(left, right), np.einsum("...ri,...ic->...rc", left, right)


@pytest.mark.parametrize("shape", [(11, 5, 7), (5, 11, 7), (11, 7, 5)])
def test_norm_and_svd_match_the_formed_product(shape):
    matrix, formed = factored(*shape)
    assert matrix.shape == formed.shape
    close(matrix.form(), formed)
    close(matrix.norm(), np.linalg.norm(formed, axis=(-2, -1)))
    found, k = matrix.svd(), min(shape)
    close(found.s, np.linalg.svd(formed)[1][..., :k])
    close((found.u * found.s[..., None, :]) @ found.vh, formed)
    for vectors in (found.u.mT, found.vh):
        close(vectors @ vectors.mT, np.broadcast_to(np.eye(k), (2, 3, k, k)))
    assert (found.rank == k).all()


@pytest.mark.parametrize("inner", [5, 11])
def test_eigenvalues_and_trace_match_the_formed_product(inner):
    matrix, formed = factored(7, inner, 7)
    close(matrix.trace(), np.trace(formed, axis1=-2, axis2=-1))
    found = matrix.eigenvalues().numpy()
    assert found.shape == (2, 3, min(7, inner))
    assert (np.diff(abs(found)) <= 1e-12).all()
    # Compare the sums of powers of the eigenvalues with traces of powers of the matrix. These sums
    # determine the eigenvalues.
    power = np.broadcast_to(np.eye(7), formed.shape)
    for k in range(1, 8):
        power = power @ formed
        close((found**k).sum(-1), np.trace(power, axis1=-2, axis2=-1))


def test_short_names_match_the_formed_product():
    matrix, formed = factored(7, 5, 11)
    close(matrix.T.form(), formed.swapaxes(-1, -2))
    close(matrix.AB, formed)
    close(matrix.S, np.linalg.svd(formed)[1][..., :5])
    close((matrix.U * matrix.S[..., None, :]) @ matrix.Vh, formed)


def test_a_decomposition_prints_its_sizes():
    values = np.arange(11, 0, -1.0)
    shown = repr(svd(torch.tensor(np.diag(values))))
    assert shown == "SVD of [11, 11]: 11 singular values, 11, 10, 9, 8, 7, 6, 5, 4, ..."
    assert repr(factored(300, 5, 200)[0].svd()) == "SVD of [2, 3, 300, 200]: 5 singular values"


def test_products_and_transposes():
    (one, a), (other, b) = factored(11, 5, 7), factored(7, 3, 13, seed=2)
    dense = randn(7, 2)
    close(one.mT.form(), a.swapaxes(-1, -2))
    close((one @ other).form(), a @ b)
    close((other.mT @ one.mT).form(), (a @ b).swapaxes(-1, -2))
    assert (one @ other).left.shape[-1] == (other.mT @ one.mT).left.shape[-1] == 3
    close((one @ dense).form(), a @ dense.numpy())
    close((dense.mT @ one.mT).form(), dense.numpy().T @ a.swapaxes(-1, -2))
    shared = randn(5, 7)
    close(FactoredMatrix(one.left, shared)[1, 2].form(), one.left[1, 2].numpy() @ shared.numpy())
    with pytest.raises(ValueError, match="vector"):
        one @ randn(7)


def one(at):
    return slice(at, at + 1)


@pytest.mark.parametrize(
    ("index", "same"),
    [
        (1, 1),
        ((slice(None), 2), (slice(None), 2)),
        ((1, one(0), slice(2, 9, 3)), (1, one(0), slice(2, 9, 3))),
        ((1, 2, [3, 1, 4], [6, 0]), (1, 2, [[3], [1], [4]], [[6, 0]])),
        ((..., slice(4, 5), [0, 6]), (..., slice(4, 5), [0, 6])),
        ((0, ..., torch.tensor([2, 2])), (0, ..., [2, 2])),
        ((..., torch.arange(11) > 4, one(1)), (..., slice(5, None), one(1))),
        (..., ...),
        ((torch.tensor([1, 0, 1]), 2), ([1, 0, 1], 2)),
        ((1, 2, 3, 4), (1, 2, one(3), one(4))),
        ((..., -2, slice(None)), (..., one(9), slice(None))),
        ((torch.tensor(1), 2, np.int64(3), torch.tensor(4)), (1, 2, one(3), one(4))),
    ],
)
def test_slices_match_the_formed_product(index, same):
    """A slice of a factored matrix equals the slice of the product. A single row or column keeps
    its axis.
    """
    matrix, formed = factored(11, 5, 7)
    close(matrix[index].form(), torch.from_numpy(formed)[same])


@pytest.mark.parametrize(
    "index", [(1, 2, 3, 4, 5), (None, 1, 2, 3), (torch.ones(2, 3) > 0, 3), (..., 1, ...)]
)
def test_indices_that_are_not_of_one_axis_each_are_refused(index):
    with pytest.raises(IndexError, match="axes|axis"):
        factored(11, 5, 7)[0][index]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("at_once", "k"), [(2**23, 9), (15, 9), (15, 20), (1, 77)])
def test_top_entries_are_found_a_few_rows_at_a_time(largest, at_once, k, monkeypatch):
    monkeypatch.setattr("interp.spectral.factored._ENTRIES_AT_ONCE", at_once)
    matrix, formed = factored(11, 5, 7, batch=())
    found = matrix.top(k, largest)
    order = formed.argsort(axis=None)
    order = order[::-1][:k] if largest else order[:k]
    close(found.values, formed.flatten()[order])
    assert found.rows.tolist() == (order // 7).tolist()
    assert found.columns.tolist() == (order % 7).tolist()


def test_a_sum_that_nearly_cancels_keeps_its_digits():
    """The entries of the product are differences of about 1e-9. A norm that is computed from
    squares of the factors, which are about 1, would lose them.
    """
    left, right = torch.ones(7, 2).double(), torch.ones(2, 5).double()
    right[1] = -1 + 2.0**-30
    assert FactoredMatrix(left, right).norm() * 2**30 == pytest.approx(35**0.5, rel=1e-5)


def test_bad_products_are_refused(unchecked):
    with pytest.raises(ValueError, match="as many columns"):
        FactoredMatrix(randn(3, 5), randn(7, 2))
    matrix = FactoredMatrix(randn(3, 5), randn(5, 2))
    for asked in (matrix.trace, matrix.eigenvalues):
        with pytest.raises(ValueError, match="square"):
            asked()
    for k in (0, 7):
        with pytest.raises(ValueError, match="1 to 6"):
            matrix.top(k)
    with pytest.raises(ValueError, match="one matrix"):
        factored(3, 5, 2)[0].top(1)
    for vector in [(randn(5), randn(5, 2)), (randn(3, 5), randn(5))]:
        with pytest.raises(ValueError, match="vector"):
            FactoredMatrix(*vector)


def test_numbers_that_are_not_finite_are_refused():
    """Without this error, the linear algebra library would end the process."""
    matrix = FactoredMatrix(randn(3, 5), randn(5, 3) / 0)
    for asked in (matrix.svd, matrix.eigenvalues, lambda: matrix.top(1)):
        with pytest.raises(ValueError, match="right must be finite"):
            asked()
