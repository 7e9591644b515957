"""Singular value decompositions in float64, batched, and what stability analyses read from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.targets import SVDTargets, svd_targets

__all__ = [
    "SVD",
    "SVDTargets",
    "condition_number",
    "decompose",
    "effective_rank",
    "randomized_svd",
    "spectral_gap",
    "stable_rank",
    "svd",
    "svd_targets",
]


@dataclass(frozen=True)
class SVD:
    """A batch of matrices as `u @ diag(s) @ vh`, thin, in float64; `svd[1:]` slices the batch.

    Attributes:
        u: left singular vectors, the columns.
        s: singular values, descending, in the matrix's unit.
        vh: right singular vectors, the rows.
        following: the singular value after the last of `s`; 0 where there is none.
        tolerance: up to which a singular value, or a difference of two, may be error. Of a full
            decomposition that is rounding: max(rows, columns) * eps of the input's dtype * s[0], as in
            numpy's `matrix_rank`. Of a randomised one also what is left of `A v - s u`, the Frobenius
            norm over the vectors found and one more: an angle is known to tolerance / gap (Wedin 1972).
    """

    u: Float[Tensor, "*batch rows k"]
    s: Float[Tensor, "*batch k"]
    vh: Float[Tensor, "*batch k columns"]
    following: Float[Tensor, "*batch"]
    tolerance: Float[Tensor, "*batch"]

    def __getitem__(self, index: Any) -> "SVD":
        """The decompositions at an index of the batch axes."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index or len(index) > self.following.ndim:
            raise IndexError(f"an index is of the {self.following.ndim} batch axes, not {index}")
        parts = (self.u, self.s, self.vh, self.following, self.tolerance)
        return SVD(*(part[index] for part in parts))

    @property
    def rank(self) -> Int[Tensor, "*batch"]:
        """How many of the singular values in `s` are above the tolerance; 0 for a zero matrix."""
        return (self.s > self.tolerance[..., None]).sum(-1)

    @property
    def gaps(self) -> Float[Tensor, "*batch k"]:
        """Each singular value minus the next."""
        return self.s - torch.cat([self.s[..., 1:], self.following[..., None]], -1)


def svd(matrices: Float[Tensor, "*batch rows columns"], name: str = "matrices") -> SVD:
    """The full thin decomposition of each matrix, in float64 whatever the input's type.

    A zero matrix has zero singular values and arbitrary orthonormal vectors. The vectors of equal
    singular values are any orthonormal basis of their common space.

    Args:
        matrices: finite numbers.
        name: what errors call the matrices.

    Raises:
        ValueError: if there are fewer than two axes, no rows or no columns, a number is not finite (it
            names the first such place), or a singular value is beyond float64.
    """
    wide = _checked(matrices, name)
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    if not s.isfinite().all():
        raise ValueError(
            f"{name} have singular values beyond float64: divide them by a number first"
        )
    return SVD(u, s, vh, torch.zeros_like(s[..., 0]), _tolerance(matrices, s))


def randomized_svd(
    matrices: Float[Tensor, "*batch rows columns"],
    k: int,
    oversample: int = 10,
    iterations: int = 4,
    seed: int = 0,
    name: str = "matrices",
) -> SVD:
    """The top `k` of each decomposition, by subspace iteration from a random start, in float64.

    Halko, Martinsson & Tropp 2011, "Finding structure with randomness", algorithms 4.4 and 5.1. No
    singular value comes out above the true one, rounding aside. For k above 1 the expected shortfall of
    each value is at most
    `(1 + sqrt(k / (p - 1)) + e sqrt(k + p) / p * sqrt(min(rows, columns) - k)) ** (1 / (2 q + 1))`
    times the true value number k + 1, with p = `oversample` and q = `iterations` (corollary 10.10).
    Usually it is far less: with the defaults, measured on matrices of 64 to 512 rows, a share of at most
    1e-5 of the true value where values fall as 1 / number, and 0.1 where they hardly fall (noise). It
    is exact, up to rounding, where the rank is at most k + p. Vectors are less sure than values: where
    they hardly fall, the top k found may lie 30 degrees and more from the true ones. `tolerance` says
    by how much, so comparisons of such subspaces give NaN. Faster than `svd` from about 64 rows and
    columns on (CPU, k = 8; measured by `tests/bench/svd.py`); below, ask for all.

    Args:
        matrices: finite numbers.
        k: how many singular values and vectors to give.
        oversample: how many more directions to follow than asked for, at least 2.
        iterations: how often to multiply by the matrix and its transpose again, at least 0.
        seed: of the random start.
        name: what errors call the matrices.

    Raises:
        ValueError: as for `svd`, or if k is not 1 to min(rows, columns), or another number is too
            small.
    """
    wide = _checked(matrices, name)
    check_k(k, min(wide.shape[-2:]))
    if oversample < 2:
        raise ValueError(f"oversample is at least 2, not {oversample}")
    if iterations < 0:
        raise ValueError(f"iterations is at least 0, not {iterations}")
    size = k + oversample
    if size >= min(wide.shape[-2:]):
        whole = svd(matrices, name)
        following = whole.s[..., k] if k < whole.s.shape[-1] else whole.following
        return SVD(
            whole.u[..., :k], whole.s[..., :k], whole.vh[..., :k, :], following, whole.tolerance
        )
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(wide.shape[-1], size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(wide @ start.to(wide.device)).Q
    for _ in range(iterations):
        # Orthonormal at every step: powers of the matrix would lose the small directions.
        basis = torch.linalg.qr(wide @ torch.linalg.qr(wide.mT @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.mT @ wide, full_matrices=False)
    left, s, vh = basis @ u[..., : k + 1], s[..., : k + 1], vh[..., : k + 1, :]
    # The transposed equation, `A^T u = s v`, holds exactly.
    residual = wide @ vh.mT - left * s[..., None, :]
    largest = s[..., :1, None].where(s[..., :1, None] > 0, 1)  # or squares could over- or underflow
    error = torch.linalg.matrix_norm(residual / largest) * s[..., 0]
    tolerance = torch.maximum(error, _tolerance(matrices, s))
    return SVD(left[..., :k], s[..., :k], vh[..., :k, :], s[..., k], tolerance)


def decompose(targets: SVDTargets, k: int | None = None) -> Mapping[str, SVD]:
    """The decompositions of the three targets, under `qkt`, `wvwo` and `avwo`.

    Their singular vectors: of `qkt`, left over queries and right over keys; of `wvwo`, left what a
    head reads and right what it writes; of `avwo`, left over positions and right what is written.

    Args:
        targets: of a run.
        k: how many singular values and vectors, by `randomized_svd`; None for all, exactly.

    Raises:
        ValueError: if a number is not finite: it names the target and the first such place; or as
            for `randomized_svd`.
    """
    return {
        name: svd(getattr(targets, name), name)
        if k is None
        else randomized_svd(getattr(targets, name), k, name=name)
        for name in ("qkt", "wvwo", "avwo")
    }


def effective_rank(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """The exponential of the entropy of the singular values' shares: 1 to k, without unit.

    Roy & Vetterli 2007, "The effective rank". k equal singular values give k; a zero matrix, for
    which it is not defined, gives 0.

    Args:
        s: all singular values of a matrix, descending.

    Raises:
        ValueError: if the values are not finite, not descending, negative, or none.

    >>> import torch
    >>> effective_rank(torch.tensor([[2.0, 2.0, 0.0], [4.0, 1.0, 1.0]]))
    tensor([2.0000, 2.3811], dtype=torch.float64)
    """
    s = _checked_values(s)
    largest = s[..., :1]
    s = s / largest.where(largest > 0, 1)  # or the sum could be infinite
    total = s.sum(-1, keepdim=True)
    entropy = torch.special.entr(s / total.where(total > 0, 1)).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0)


def stable_rank(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """The squared Frobenius norm by the squared largest singular value: 1 to k, without unit.

    Rudelson & Vershynin 2007, "Sampling from large matrices" (there: numerical rank). k equal
    singular values give k; a zero matrix, for which it is not defined, gives 0. Arguments and errors
    as for `effective_rank`.
    """
    s = _checked_values(s)
    largest = s[..., :1]
    return (s / largest.where(largest > 0, 1)).square().sum(-1)


def spectral_gap(s: Float[Tensor, "*batch k"], at: int = 1) -> Float[Tensor, "*batch"]:
    """Singular value number `at` minus the next, in the matrix's unit.

    A small change of the matrix turns its top subspace by at most about the size of the change divided
    by this gap (Wedin 1972).
    The last value's next is 0. Repeated singular values and a zero matrix give 0.

    Args:
        s: singular values of a matrix, descending.
        at: counted from 1.

    Raises:
        ValueError: as for `effective_rank`, or if there is no singular value of that number.
    """
    s = _checked_values(s)
    check_k(at, s.shape[-1], "at")
    return s[..., at - 1] - (s[..., at] if at < s.shape[-1] else 0)


def condition_number(s: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """The largest singular value by the smallest: 1 to infinity, without unit; as `numpy.linalg.cond`.

    Equal singular values give 1; a zero matrix gives infinity. A matrix that lacks rank gives
    infinity, or a number near 1 / eps where rounding left the smallest value above 0. Arguments and
    errors as for `effective_rank`.
    """
    s = _checked_values(s)
    return torch.where(s[..., -1] > 0, s[..., 0] / s[..., -1], torch.inf)


def _tolerance(matrices: Tensor, s: Tensor) -> Tensor:
    return max(matrices.shape[-2:]) * torch.finfo(matrices.dtype).eps * s[..., 0]


def _checked(matrices: Tensor, name: str) -> Tensor:
    """The matrices in float64."""
    if matrices.ndim < 2 or 0 in matrices.shape[-2:] or not matrices.is_floating_point():
        raise ValueError(
            f"{name} are floating-point matrices [..., rows, columns] with at least one row and "
            f"column, not {matrices.dtype} of shape {tuple(matrices.shape)}"
        )
    finite = matrices.isfinite()
    if not finite.all():
        where = place(~finite)
        raise ValueError(f"{name} are finite, and {name}{where} is {matrices[tuple(where)].item()}")
    return matrices.double()


def _checked_values(s: Tensor) -> Tensor:
    """Singular values in float64."""
    if s.ndim < 1 or s.shape[-1] == 0:
        raise ValueError(f"singular values are [..., k], at least one, not {tuple(s.shape)}")
    # Comparisons with NaN are false.
    if not (s.isfinite().all() and (s >= 0).all() and (s.diff(dim=-1) <= 0).all()):
        raise ValueError(
            "singular values are finite, at least 0 and descending, and one of these is not: "
            f"{s.flatten()[:8].tolist()}"
        )
    return s.double()


def check_k(k: int, most: int, name: str = "k") -> None:
    """Raises ValueError unless there is a singular value number `k`."""
    if not (isinstance(k, int) and 1 <= k <= most):
        raise ValueError(f"{name} is 1 to {most}, the number of singular values, not {k}")


def place(wrong: Tensor) -> list[int]:
    """The index of the first True."""
    return [int(at) for at in wrong.nonzero()[0]]
