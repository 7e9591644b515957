"""How far singular vectors turn: angles between subspaces, and alignment of single vectors."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.svd import SVD, check_k, place, svd

Side = Literal["left", "right"]
"""Which singular vectors: `left` ones live in the space of rows, `right` ones in that of columns."""


def principal_angles(
    a: Float[Tensor, "*batch dim k"], b: Float[Tensor, "*batch dim l"]
) -> Float[Tensor, "*batch min(k,l)"]:
    """The angles between the spaces that the columns of `a` and of `b` span: radians, ascending.

    Björck & Golub 1973, "Numerical methods for computing angles between linear subspaces". Small
    angles come from sines, large ones from cosines, so both are exact to about 1e-15. Zero is a common
    direction, pi / 2 an orthogonal one.

    Args:
        a, b: bases, not necessarily orthonormal.

    Raises:
        ValueError: as for `svd`, if the shapes do not fit, or the columns of a basis are not linearly
            independent (a zero matrix, for instance): it names the first such matrix.

    >>> import torch
    >>> line, plane = torch.tensor([[1.0], [1.0], [0.0]]), torch.eye(3)[:, 1:]
    >>> principal_angles(line, plane).rad2deg()
    tensor([45.0000], dtype=torch.float64)
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            "bases are [..., dim, k] and [..., dim, l], equal but for the last axis, "
            f"not {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return _angles(_orthonormal(a, "a"), _orthonormal(b, "b"))


def subspace_angles(
    first: SVD, second: SVD, k: int, side: Side = "right"
) -> Float[Tensor, "*batch k"]:
    """Principal angles between the spaces of the top `k` singular vectors: radians, ascending.

    NaN where a matrix has no such space: its rank is below k (a zero matrix has rank 0), or its
    singular values k and k + 1 are equal up to the tolerance. Rounding, and the error of a randomised
    decomposition, can turn a space by the ratio of tolerance and gap, so angles below it say nothing.

    Args:
        first, second: decompositions of the same shape.
        k: how many singular vectors.
        side: which of them.

    Raises:
        ValueError: if shapes differ, the side is neither, k is not 1 to the number of singular values,
            or k is above the rank of every matrix, up to the tolerance.
    """
    pair = _vectors(first, second, k, side)
    for one in (first, second):
        if one.rank.numel() and (highest := int(one.rank.max())) < k:
            raise ValueError(
                f"k is at most the number of singular values above the tolerance, {highest}, not {k}"
            )
    defined = _has_space(first, k) & _has_space(second, k)
    return _angles(*pair).where(defined[..., None], torch.nan)


def drift(decomposition: SVD, k: int, side: Side = "right") -> Float[Tensor, "change *batch k"]:
    """`subspace_angles` between consecutive entries of the first batch axis: steps or checkpoints.

    Args:
        decomposition: of matrices [step, ..., rows, columns], at least two steps.
        k: how many singular vectors.
        side: which of them.

    Raises:
        ValueError: as for `subspace_angles`, or if there are fewer than two steps.
    """
    if decomposition.following.ndim < 1 or len(decomposition.following) < 2:
        raise ValueError(
            "drift needs a batch axis of at least two steps, "
            f"not batch axes of sizes {tuple(decomposition.following.shape)}"
        )
    return subspace_angles(decomposition[:-1], decomposition[1:], k, side)


def alignment(first: SVD, second: SVD, k: int, side: Side = "right") -> Float[Tensor, "*batch k"]:
    """|cosine| between the singular vectors of the same number: 0 to 1, whatever their signs.

    NaN where a vector is not defined: its singular value is 0, or equals a neighbour's, up to the
    tolerance. Arguments and errors as for `subspace_angles`, except that k may be above the rank.
    """
    u, v = _vectors(first, second, k, side)
    defined = _isolated(first, k) & _isolated(second, k)
    return (u * v).sum(-2).abs().clamp(max=1).where(defined, torch.nan)


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Principal angles between the spans of orthonormal columns."""
    a, b = (a, b) if a.shape[-1] >= b.shape[-1] else (b, a)
    product = a.mT @ b
    cosines = torch.linalg.svdvals(product).clamp(0, 1)
    sines = torch.linalg.svdvals(b - a @ product).flip(-1).clamp(0, 1)
    # A cosine near 1 has lost half of the digits of its angle, and so has a sine.
    return torch.where(cosines.square() > 0.5, sines.asin(), cosines.acos())


def _orthonormal(basis: Tensor, name: str) -> Tensor:
    whole = svd(basis, name)
    lacking = whole.rank < basis.shape[-1]
    if lacking.any():
        where = place(lacking)
        raise ValueError(
            f"the columns of a basis are linearly independent, and {name}{where or ''} has rank "
            f"{whole.rank[tuple(where)]} for {basis.shape[-1]} columns"
        )
    return whole.u


def _vectors(first: SVD, second: SVD, k: int, side: Side) -> tuple[Tensor, Tensor]:
    """The top k vectors of both, as columns."""
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', not {side!r}")
    a, b = (one.u if side == "left" else one.vh.mT for one in (first, second))
    if a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            f"{side} singular vectors are compared [..., dim] by [..., dim], "
            f"not {tuple(a.shape[:-1])} by {tuple(b.shape[:-1])}"
        )
    check_k(k, min(a.shape[-1], b.shape[-1]))
    return a[..., :k], b[..., :k]


def _has_space(one: SVD, k: int) -> Bool[Tensor, "*batch"]:
    return one.gaps[..., k - 1] > one.tolerance


def _isolated(one: SVD, k: int) -> Bool[Tensor, "*batch k"]:
    apart = one.gaps[..., :k] > one.tolerance[..., None]
    # The first has no neighbour above it.
    return apart & torch.cat([torch.ones_like(apart[..., :1]), apart[..., :-1]], -1)
