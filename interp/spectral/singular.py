"""Batched singular value decompositions in float64, and numbers that summarize singular values.

`svd` is LAPACK's decomposition. `randomized_svd` computes the top k (Halko, Martinsson & Tropp
2011, algorithms 4.4 and 5.1):

1. Multiply the matrix [rows, columns] with k + `oversample` random vectors, and orthonormalize the
   results.
2. Repeatedly multiply by the transpose and by the matrix, and orthonormalize each time. The basis
   turns towards the largest directions.
3. Decompose the small matrix in this basis.
4. Measure the error: the residual `A v - s u` determines the `tolerance` for comparisons of
   subspaces.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooks.base import explains_calls, require_integer, require_kind, seeded
from interp.json_form import Table, form
from interp.numbers.precision import finite


@dataclass(frozen=True, repr=False)
class SVD:
    """Thin decompositions `u @ diag(s) @ vh` of a batch of matrices, in float64.

    `decomposition[1:]` slices the batch.

    Attributes:
        u: left singular vectors, the columns.
        s: singular values, descending, in the matrix's unit.
        vh: right singular vectors, the rows.
        next_value: the singular value after the last one in `s`; 0 if there is none.
        tolerance: the possible error of a singular value, or of the difference of two singular
            values, in the matrix's unit. For a full decomposition it is the rounding error
            `max(rows, columns) * eps * s[0]`, as in numpy's `matrix_rank`, with the `eps` of the
            input's dtype. For the top k of `randomized_svd` it is the residual, if this is larger:
            the Frobenius norm of the matrix `A @ V - U * s`, where U, V and s are the first k + 1
            computed vectors and values of the matrix A. Such an error can turn the space of the top
            k vectors by an angle of `tolerance / (s[k - 1] - s[k])` in radians (Wedin 1972).

    >>> svd(torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
    SVD of [2, 2]: 2 singular values, 3, 0
    """

    u: Float[Tensor, "*batch rows k"]
    s: Float[Tensor, "*batch k"]
    vh: Float[Tensor, "*batch k columns"]
    next_value: Float[Tensor, "*batch"]
    tolerance: Float[Tensor, "*batch"]

    def __getitem__(self, index: Any) -> "SVD":
        """Return the decompositions at an index of the batch axes."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            raise IndexError(
                f"an index must be for the batch axes, without an ellipsis; got {index}"
            )
        parts = (self.u, self.s, self.vh, self.next_value, self.tolerance)
        return SVD(*(part[index] for part in parts))

    def top(self, k: int) -> "SVD":
        """Return the `k` largest singular values and their vectors.

        Raises:
            ValueError: if there are fewer singular values.
        """
        require_integer("k", k, most=self.s.shape[-1])
        next_value = self.s[..., k] if k < self.s.shape[-1] else self.next_value
        return SVD(
            u=self.u[..., :k],
            s=self.s[..., :k],
            vh=self.vh[..., :k, :],
            next_value=next_value,
            tolerance=self.tolerance,
        )

    @property
    def rank(self) -> Int[Tensor, "*batch"]:
        """The number of singular values in `s` above the tolerance; 0 for a zero matrix."""
        return (self.s > self.tolerance[..., None]).sum(-1)

    def as_json(self) -> dict[str, Any]:
        """Return the singular values, the possible error and the rank of each matrix, in the JSON
        form of all results; see `interp.json_form`.
        """
        batch = " ".join(f"batch{number}" for number in range(self.s.ndim - 1))
        tables = {
            "s": Table(self.s, f"{batch} k", "singular value"),
            "next_value": Table(self.next_value, batch, "singular value"),
            "tolerance": Table(self.tolerance, batch, "singular value"),
            "rank": Table(self.rank, batch, "rank"),
        }
        return form("SVD", tables)

    def __repr__(self) -> str:
        """Return the sizes, and the first singular values of a single matrix."""
        *batch, rows, k = self.u.shape
        title = f"SVD of {[*batch, rows, self.vh.shape[-1]]}: {k} singular values"
        if batch:
            return title
        shown = ", ".join(f"{value:.4g}" for value in self.s[:8].tolist())
        return f"{title}, {shown}{', ...' * (k > 8)}"

    @property
    def gaps(self) -> Float[Tensor, "*batch k"]:
        """Each singular value minus the next."""
        return self.s - torch.cat([self.s[..., 1:], self.next_value[..., None]], -1)


@explains_calls
def svd(matrices: Float[Tensor, "*batch rows columns"], name: str = "matrices") -> SVD:
    """Return the full thin decomposition of each matrix, in float64 for any input dtype.

    A zero matrix has zero singular values and arbitrary orthonormal vectors. The vectors of equal
    singular values are any orthonormal basis of their common space.

    Args:
        matrices: finite numbers.
        name: the name of the matrices in errors.

    Returns:
        The decomposition, with k = min(rows, columns): `u` [*batch, rows, k], `s` [*batch, k] in
        the unit of the matrices, `vh` [*batch, k, columns].

    Raises:
        ValueError: if a number is not finite. The error names the first place.

    >>> svd(torch.tensor([[0.0, 3.0], [-4.0, 0.0], [0.0, 0.0]])).s
    tensor([4., 3.], dtype=torch.float64)
    """
    u, s, vh = torch.linalg.svd(finite(matrices, name).double(), full_matrices=False)
    return SVD(
        u=u, s=s, vh=vh, next_value=torch.zeros_like(s[..., 0]), tolerance=_tolerance(matrices, s)
    )


@explains_calls
def randomized_svd(
    matrices: Float[Tensor, "*batch rows columns"],
    k: int,
    oversample: int = 10,
    iterations: int = 4,
    seed: int = 0,
    name: str = "matrices",
) -> SVD:
    """Return the `k` largest singular values of each matrix and their vectors, in float64,
    approximately.

    `randomized_svd` is faster than `svd` for matrices with at least about 64 rows and columns (CPU,
    k = 8). The method is subspace iteration from a random start (Halko, Martinsson & Tropp 2011,
    "Finding structure with randomness", algorithms 4.4 and 5.1).

    The error of a singular value depends on the matrix:

    - If the rank is at most `k + oversample`, the result is exact up to rounding.
    - Otherwise the values may be too small, but apart from rounding they are never too large. With
      the defaults, for matrices of 64 to 512 rows, the error is at most 1e-5 of the true value if
      value i is proportional to 1 / i, and 0.1 of the true value if values hardly fall (noise).

    For k above 1, theory bounds the expected error (corollary 10.10): it is at most a factor times
    the largest true singular value that is not returned. Usually the error is much smaller. The
    factor is this number to the power of `1 / (2 * iterations + 1)`:

        1 + sqrt(k / (oversample - 1))
          + 2.72 * sqrt(k + oversample) / oversample * sqrt(min(rows, columns) - k)

    Vectors are less exact than values. For noise, the space of the top k may be 30 degrees or more
    from the true space. The attribute `tolerance` of the result, the possible error of a singular
    value, is then large, and functions that compare such spaces, for example `subspace_angles`,
    return NaN.

    Args:
        matrices: finite numbers.
        k: the number of singular values and vectors.
        oversample: the number of extra directions, at least 2.
        iterations: the number of further multiplications by the transpose and the matrix.
        seed: the seed of the random start.
        name: the name of the matrices in errors.

    Returns:
        The decomposition: `u` [*batch, rows, k], `s` [*batch, k] in the unit of the matrices, `vh`
        [*batch, k, columns].

    Raises:
        ValueError: if a number is not finite (the error names the first place), if k is not 1 to
            min(rows, columns), or if oversample is below 2.

    >>> randomized_svd(torch.diag(torch.tensor([4.0, 3.0, 2.0])), k=2).s
    tensor([4., 3.], dtype=torch.float64)
    """
    float64 = finite(matrices, name).double()
    require_integer("k", k, most=min(float64.shape[-2:]))
    require_integer("oversample", oversample, least=2)
    require_integer("iterations", iterations, least=0)
    generator = seeded(seed)
    size = k + oversample
    if size >= min(float64.shape[-2:]):
        return svd(matrices, name).top(k)
    start = torch.randn(float64.shape[-1], size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(float64 @ start.to(float64.device)).Q
    for _ in range(iterations):
        # Orthonormalize in every step, because powers of the matrix would lose the small
        # directions.
        basis = torch.linalg.qr(float64 @ torch.linalg.qr(float64.mT @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.mT @ float64, full_matrices=False)
    left = basis @ u[..., : k + 1]
    s = s[..., : k + 1]
    vh = vh[..., : k + 1, :]
    # `A v = s u` holds only approximately. `A^T u = s v` holds up to rounding, because u and v are
    # the singular vectors of the matrix in the basis.
    residual = float64 @ vh.mT - left * s[..., None, :]
    # Divide by the largest value, because squares could overflow or underflow.
    largest = s[..., :1, None].where(s[..., :1, None] > 0, 1)
    error = torch.linalg.matrix_norm(residual / largest) * s[..., 0]
    tolerance = torch.maximum(error, _tolerance(matrices, s))
    return SVD(
        u=left[..., :k], s=s[..., :k], vh=vh[..., :k, :], next_value=s[..., k], tolerance=tolerance
    )


@explains_calls
def effective_rank(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Return the effective rank, the exponential of the entropy of `s / sum(s)`, from 1 to k.

    See Roy & Vetterli 2007, "The effective rank". It is k for k equal singular values, and 0 for a
    zero matrix.

    Args:
        s: all singular values of a matrix, descending.

    Returns:
        The ranks [*batch], in float64, as a number of dimensions.

    Raises:
        ValueError: if the values are not finite, not descending, or negative.

    >>> effective_rank(torch.tensor([[2.0, 2.0, 0.0], [4.0, 1.0, 1.0]]))
    tensor([2.0000, 2.3811], dtype=torch.float64)
    """
    s = _checked_values(s)
    largest = s[..., :1]
    # Divide by the largest value, because the sum could overflow.
    s = s / largest.where(largest > 0, 1)
    total = s.sum(-1, keepdim=True)
    entropy = torch.special.entr(s / total.where(total > 0, 1)).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0)


@explains_calls
def stable_rank(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Return the stable rank, the squared Frobenius norm over the squared largest singular value.

    See Rudelson & Vershynin 2007, "Sampling from large matrices" (there: numerical rank). The
    stable rank is 1 to k: it is k for k equal singular values. For a zero matrix it is 0.

    Args:
        s: all singular values of a matrix, descending.

    Returns:
        The ranks [*batch], in float64, as a number of dimensions.

    Raises:
        ValueError: if the values are not finite, not descending, or negative.

    >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
    tensor(1.5000, dtype=torch.float64)
    """
    s = _checked_values(s)
    largest = s[..., :1]
    return (s / largest.where(largest > 0, 1)).square().sum(-1)


@explains_calls
def spectral_gap(s: Float[Tensor, "*batch n"], k: int = 1) -> Float[Tensor, "*batch"]:
    """Return singular value number `k` minus the next singular value, in the matrix's unit.

    A small change of the matrix turns the subspace of its top k singular vectors by at most about
    the size of the change divided by this gap (Wedin 1972). The value after the last one is 0. The
    gap is 0 for repeated values and for a zero matrix.

    Args:
        s: singular values of a matrix, descending.
        k: the number of the singular value, counted from 1.

    Returns:
        The gaps [*batch], at least 0, in float64.

    Raises:
        ValueError: if the values are not finite, not descending, or negative; or if there is no
            singular value k.

    >>> spectral_gap(torch.tensor([5.0, 3.0, 2.5]), k=2)
    tensor(0.5000, dtype=torch.float64)
    """
    s = _checked_values(s)
    require_integer("k", k, most=s.shape[-1])
    return s[..., k - 1] - (s[..., k] if k < s.shape[-1] else 0)


@explains_calls
def condition_number(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Return the condition number, the largest singular value over the smallest: 1 to infinity.

    The number is defined as in `numpy.linalg.cond`. The number is 1 for equal singular values, and
    infinity for a zero matrix. For a matrix without full rank it is infinity, or a number near 1 /
    eps if rounding left the smallest value above 0.

    Args:
        s: all singular values of a matrix, descending.

    Returns:
        The ratios [*batch], in float64, without a unit.

    Raises:
        ValueError: if the values are not finite, not descending, or negative.

    >>> condition_number(torch.tensor([5.0, 3.0, 2.0]))
    tensor(2.5000, dtype=torch.float64)
    """
    s = _checked_values(s)
    return torch.where(s[..., -1] > 0, s[..., 0] / s[..., -1], torch.inf)


def _tolerance(matrices: Tensor, s: Tensor) -> Tensor:
    """Return the size of rounding errors of the singular values of each matrix."""
    return max(matrices.shape[-2:]) * torch.finfo(matrices.dtype).eps * s[..., 0]


def _checked_values(s: Tensor) -> Tensor:
    """Return singular values in float64, after a check that they are finite, descending and not
    negative.
    """
    require_kind(
        "s", s, kind=Tensor, words="a tensor of singular values", call="svd(matrix).s has them"
    )
    # Comparisons with NaN are false.
    if not (s.isfinite().all() and (s >= 0).all() and (s.diff(dim=-1) <= 0).all()):
        first = s.flatten()[:8].tolist()
        raise ValueError(f"singular values must be finite, at least 0 and descending; got {first}")
    return s.double()
