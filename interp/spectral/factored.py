"""A matrix of low rank, stored as the product of two factors A B.

1. A = Q R and B^T = P S by QR, so A B = Q (R S^T) P^T. The SVD of the product follows from the SVD
   of the small matrix R S^T.
2. The Frobenius norm is the norm of R B. The trace is the sum of the entries of A times the entries
   of B^T.
3. The eigenvalues are computed from the smaller of A B and B A, because both have the same
   eigenvalues apart from zeros.
4. The largest entries are found a few rows of A at a time.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from hooks.base import require_integer, require_kind
from interp import plots
from interp.json_form import Table, form
from interp.numbers.precision import finite
from interp.numbers.ranks import largest_rows
from interp.spectral.singular import SVD, svd

# The number of entries that are computed together: 16 MiB in float32.
_ENTRIES_AT_ONCE = 2**22


class LargestEntries(NamedTuple):
    """The largest or the smallest entries of a matrix: their values, rows and columns."""

    values: Float[Tensor, " entry"]
    rows: Int[Tensor, " entry"]
    columns: Int[Tensor, " entry"]


@dataclass(frozen=True, eq=False, repr=False)
class FactoredMatrix(plots.Shown):
    """The product `left @ right` of rank at most `inner`, stored as its two factors.

    Decompositions and norms are in float64 for any dtype; their cost depends on the factors' sizes
    only. Leading axes, such as layer and head, are batch axes. The batch axes of the factors
    broadcast.

    Attributes:
        left, right: the factors.

    Raises:
        ValueError: if the factors' inner sizes differ, or a factor is a vector.

    >>> matrix = FactoredMatrix(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0]]))
    >>> matrix.form()
    tensor([[3., 4.],
            [6., 8.]])
    >>> matrix.eigenvalues(), matrix.norm()
    (tensor([11.+0.j], dtype=torch.complex128), tensor(11.1803, dtype=torch.float64))
    """

    left: Float[Tensor, "*_left rows inner"]
    right: Float[Tensor, "*_right _inner columns"]

    def __post_init__(self) -> None:
        left, right = _matrix(self.left), _matrix(self.right)
        if left.shape[-1] != right.shape[-2]:
            raise ValueError(
                f"left must have as many columns as right has rows, {right.shape[-2]}; "
                f"got {left.shape[-1]}"
            )
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        object.__setattr__(self, "left", left.expand(*batch, *left.shape[-2:]))
        object.__setattr__(self, "right", right.expand(*batch, *right.shape[-2:]))

    def as_json(self) -> dict[str, Any]:
        """Return the Frobenius norm of each matrix in the JSON form of all results; see
        `interp.json_form`.
        """
        batch = " ".join(f"batch{number}" for number in range(len(self.shape) - 2))
        about = {"shape": [*self.shape], "inner": self.left.shape[-1]}
        return form("FactoredMatrix", {"norm": Table(self.norm(), batch, "Frobenius norm")}, about)

    def view(self) -> plots.View:
        """Draw the singular values of at most 12 matrices."""
        places = [*np.ndindex(*self.shape[:-2])]
        # Decompose only a few matrices, because each decomposition takes time.
        drawn = places[:12]
        lines = {}
        for place in drawn:
            matrix = FactoredMatrix(self.left[place], self.right[place])
            lines[" ".join(map(str, place)) or "s"] = matrix.svd().s
        shown = plots.curves(lines, axis="rank", unit="singular value", title="spectrum")
        says = [f"the first {len(drawn)} of {len(places)} matrices"] if places != drawn else []
        return plots.View(f"{self!r}, its spectrum", shown.parts, says=says)

    @property
    def shape(self) -> torch.Size:
        """The shape of the product."""
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    @property
    def mT(self) -> "FactoredMatrix":
        """The transpose of each matrix."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    T = mT

    @property
    def AB(self) -> Float[Tensor, "*batch rows columns"]:
        """The product of both factors as one matrix, which `form()` returns too."""
        return self.form()

    @property
    def U(self) -> Float[Tensor, "*batch rows k"]:
        """The left singular vectors, as columns. `svd()` returns all three together."""
        return self.svd().u

    @property
    def S(self) -> Float[Tensor, "*batch k"]:
        """The singular values, descending."""
        return self.svd().s

    @property
    def Vh(self) -> Float[Tensor, "*batch k columns"]:
        """The right singular vectors, as rows."""
        return self.svd().vh

    def form(self) -> Float[Tensor, "*batch rows columns"]:
        """Return the product itself."""
        return self.left @ self.right

    def __matmul__(self, other: "FactoredMatrix | Tensor") -> "FactoredMatrix":
        """Return the product with another matrix, which may be factored.

        If both matrices are factored, the result gets the smaller of the two inner sizes.

        Raises:
            ValueError: if `other` is a vector.
        """
        if isinstance(other, Tensor):
            return FactoredMatrix(self.left, self.right @ _matrix(other))
        middle = self.right @ other.left
        if middle.shape[-2] > middle.shape[-1]:
            return FactoredMatrix(self.left @ middle, other.right)
        return FactoredMatrix(self.left, middle @ other.right)

    def __rmatmul__(self, other: Tensor) -> "FactoredMatrix":
        """Return the product of a matrix and this matrix."""
        return FactoredMatrix(_matrix(other) @ self.left, self.right)

    def __getitem__(self, index: Any) -> "FactoredMatrix":
        """Return the part at an index of the batch axes, then of rows and columns.

        The result always has rows and columns: the index of a single row or column leaves an axis
        of size 1. A list of rows and a list of columns select the entries of all these rows in all
        these columns, and not pairs as in PyTorch.

        Raises:
            IndexError: if there are more indices than axes, or an index is not a number, a slice,
                or a list of numbers or booleans.
        """
        index = index if isinstance(index, tuple) else (index,)
        n_axes = len(self.shape)
        dots = [axis for axis, entry in enumerate(index) if entry is Ellipsis] or [len(index)]
        index = *index[: dots[0]], *index[dots[0] + 1 :]
        full = (slice(None),) * (n_axes - len(index))
        index = *index[: dots[0]], *full, *index[dots[0] :]
        if len(index) > n_axes:
            raise IndexError(f"an index must be for at most {n_axes} axes; got {len(index)}")
        *batch, rows, columns = map(_of_one_axis, index)
        rows, columns = (
            entry.view(-1) if isinstance(entry, Tensor) else entry for entry in (rows, columns)
        )
        left, right = self.left[tuple(batch)], self.right[tuple(batch)]
        return FactoredMatrix(left[..., rows, :], right[..., columns])

    def svd(self, name: str = "") -> SVD:
        """Return the decomposition, with min(rows, inner, columns) singular values.

        All other singular values of the product are 0.

        Args:
            name: the name of the matrices in errors.

        Raises:
            ValueError: if a number is not finite.
        """
        factors = (
            finite(self.left, f"{name} left".lstrip()),
            finite(self.right, f"{name} right".lstrip()),
        )
        left = torch.linalg.qr(factors[0].double())
        right = torch.linalg.qr(factors[1].double().mT)
        small = svd(left.R @ right.R.mT)
        # The small matrix is in float64, but the factors were rounded in their own dtype. So the
        # tolerance must come from the dtype of the factors.
        eps = max(self.shape[-2:]) * torch.finfo(self.left.dtype).eps
        return SVD(
            u=left.Q @ small.u,
            s=small.s,
            vh=small.vh @ right.Q.mT,
            next_value=small.next_value,
            tolerance=eps * small.s[..., 0],
        )

    def eigenvalues(self) -> Complex[Tensor, "*batch k"]:
        """Return the min(rows, inner) eigenvalues that may differ from 0, largest first, in
        complex128.

        Raises:
            ValueError: if the matrix is not square, or a number is not finite.
        """
        self._require_square("eigenvalues")
        left, right = finite(self.left, "left").double(), finite(self.right, "right").double()
        # AB and BA have the same eigenvalues, apart from zeros.
        smaller = right @ left if left.shape[-1] <= left.shape[-2] else left @ right
        values = torch.linalg.eigvals(smaller)
        return values.gather(-1, values.abs().argsort(-1, descending=True))

    def norm(self) -> Float[Tensor, "*batch"]:
        """Return the Frobenius norm."""
        root = torch.linalg.qr(self.left.double(), mode="r").R
        return torch.linalg.matrix_norm(root @ self.right.double())

    def trace(self) -> Float[Tensor, "*batch"]:
        """Return the sum of the diagonal.

        Raises:
            ValueError: if the matrix is not square.
        """
        self._require_square("a trace")
        return (self.left.double() * self.right.double().mT).sum((-2, -1))

    def top(self, k: int, largest: bool = True) -> LargestEntries:
        """Return the `k` largest entries of one matrix, or the smallest, in order.

        A few rows are formed at a time, so the memory does not grow with rows times columns.

        Args:
            k: the number of entries.
            largest: whether to return the largest entries; otherwise the smallest. Default: True.

        Raises:
            ValueError: if there are batch axes, a number is not finite, or k is not 1 to the number
                of entries.
        """
        if len(self.shape) > 2:
            raise ValueError(f"top needs one matrix; got {self.shape}: index the batch axes first")
        rows, columns = self.shape
        require_integer("k", k, most=rows * columns)
        for name in ("left", "right"):
            finite(getattr(self, name), name)
        sign = 1 if largest else -1
        best = self.left.new_empty(0)
        places = self.left.new_empty(0, dtype=torch.long)
        all_columns = torch.arange(columns, device=places.device)
        size = max(1, _ENTRIES_AT_ONCE // columns)
        for start in range(0, rows, size):
            entries = sign * self.left[start : start + size] @ self.right
            if len(best) == k:
                # Most rows have no entry that is larger than the smallest of the k largest entries
                # so far. Only the other rows are sorted.
                better = (entries.amax(1) > best[-1]).nonzero()[:, 0]
            else:
                better = torch.arange(len(entries), device=places.device)
            numbers = (better[:, None] + start) * columns + all_columns
            best = torch.cat([best, entries[better].flatten()])
            order = largest_rows(best, k)
            best = best[order]
            places = torch.cat([places, numbers.flatten()])[order]
        return LargestEntries(sign * best, places // columns, places % columns)

    def __repr__(self) -> str:
        return f"FactoredMatrix {[*self.shape]}, inner {self.left.shape[-1]}, {self.left.dtype}"

    def _require_square(self, what: str) -> None:
        """Check that the matrix is square.

        Raises:
            ValueError: if the matrix is not square. The error names the operation that needs a
                square matrix.
        """
        if self.shape[-2] != self.shape[-1]:
            raise ValueError(f"a matrix must be square to have {what}; got {[*self.shape]}")


def _matrix(factor: Tensor) -> Tensor:
    """Return a factor, after a check that it is a tensor with at least two axes.

    Raises:
        TypeError: if the factor is no tensor.
        ValueError: if the factor is a vector.
    """
    require_kind("a factor", factor, kind=Tensor, words="a tensor [..., rows, columns]")
    # The product of a vector with batch axes could be mistaken for a matrix.
    if factor.ndim < 2:
        raise ValueError(
            f"a factor must be a matrix, not a vector; got {[*factor.shape]}: use v[:, None] or "
            "v[None]"
        )
    return factor


def _of_one_axis(index: Any) -> slice | Tensor:
    """Return the index of one axis as a slice or a tensor.

    Raises:
        IndexError: if the index is not a number, a slice, or a list.
    """
    if isinstance(index, slice):
        return index
    if index is None or index is Ellipsis or (indices := torch.as_tensor(index)).ndim > 1:
        raise IndexError(f"an index of an axis must be a number, a slice or a list; got {index}")
    return indices
