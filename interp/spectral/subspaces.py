"""Rotations of singular vectors: angles between subspaces, and alignment of single vectors."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import require_choice, require_integer
from interp.spectral.singular import SVD, svd

SingularSide = Literal["left", "right"]
"""The side of singular vectors: `left` (columns of u) or `right` (rows of vh)."""


def principal_angles(
    a: Float[Tensor, "*batch dim k"], b: Float[Tensor, "*batch dim l"]
) -> Float[Tensor, "*batch min(k,l)"]:
    """Return the angles between the column spaces of `a` and `b`, in radians, ascending.

    See Björck & Golub 1973, "Numerical methods for computing angles between linear subspaces".
    Small angles are computed from sines and large angles from cosines, so both are exact to about
    1e-15. An angle of 0 is a common direction, and pi / 2 is an orthogonal direction.

    Args:
        a, b: bases, which need not be orthonormal.

    Returns:
        The angles [*batch, min(k, l)], from 0 to pi / 2, in float64.

    Raises:
        ValueError: if a number is not finite, or if the columns of a basis are not linearly
            independent, as in a zero matrix. The error names the first of these matrices.

    >>> line, plane = torch.tensor([[1.0], [1.0], [0.0]]), torch.eye(3)[:, 1:]
    >>> principal_angles(line, plane).rad2deg()
    tensor([45.0000], dtype=torch.float64)
    """
    return _angles(_independent(a, "a"), _independent(b, "b"))


def subspace_angles(
    first: SVD, second: SVD, k: int, side: SingularSide = "right"
) -> Float[Tensor, "*batch k"]:
    """Return the principal angles between the spaces of the top `k` singular vectors, in radians,
    ascending.

    Angles are NaN if the space is not defined: the rank is below k (a zero matrix has rank 0), or
    singular values k and k + 1 are equal up to the tolerance. Rounding, or the error of a
    randomised decomposition, can turn a space by tolerance / gap, so smaller angles have no
    meaning.

    Args:
        first, second: decompositions of matrices of the same shape.
        k: the number of singular vectors.
        side: `left` or `right` singular vectors.

    Returns:
        The angles [*batch, k], from 0 to pi / 2, in float64.

    Raises:
        ValueError: if side is neither `left` nor `right`, or k is not 1 to the number of singular
            values.

    >>> flat = svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> turned = svd(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 0.0]]))
    >>> subspace_angles(flat, turned, k=2).rad2deg()
    tensor([ 0., 90.], dtype=torch.float64)
    """
    first_vectors, second_vectors = _vectors(first, k, side), _vectors(second, k, side)
    defined = _has_space(first, k) & _has_space(second, k)
    return _angles(first_vectors, second_vectors).where(defined[..., None], torch.nan)


def subspace_overlap(
    a: Float[Tensor, "*batch dim k"], b: Float[Tensor, "*batch dim l"]
) -> Float[Tensor, "*batch"]:
    """Return the mean squared cosine of the principal angles between column spaces: 0 to 1.

    The overlap is 1 if one space contains the other space, 0 if the two spaces are orthogonal, and
    about max(k, l) / dim for two random spaces.

    Args:
        a, b: bases, which need not be orthonormal.

    Returns:
        The overlaps [*batch], in float64, without a unit.

    Raises:
        ValueError: if a number of a basis is not finite, or the columns of a basis are not linearly
            independent, as in a zero matrix.

    >>> subspace_overlap(torch.tensor([[1.0], [1.0], [0.0]]), torch.eye(3)[:, 1:])
    tensor(0.5000, dtype=torch.float64)
    """
    product = _independent(a, "a").mT @ _independent(b, "b")
    return product.square().sum((-2, -1)) / min(product.shape[-2:])


def subspace_projection(
    vectors: Float[Tensor, "*axes dim"], basis: Float[Tensor, "dim k"]
) -> Float[Tensor, "*axes dim"]:
    """Return the part of each vector within the column space of a basis, in the vectors' dtype.

    The squared length of this part, divided by the squared length of the vector, is the share of
    the vector that the space explains.

    Args:
        vectors: any vectors.
        basis: a matrix whose columns span the space; they need not be orthonormal.

    Returns:
        The projected vectors [*axes, dim], in the unit of `vectors`.

    Raises:
        ValueError: if a number of a basis is not finite, or the columns of a basis are not linearly
            independent, as in a zero matrix.

    >>> subspace_projection(torch.tensor([3.0, 4.0, 5.0]), torch.eye(3)[:, :2])
    tensor([3., 4., 0.])
    """
    directions = _independent(basis, "basis")
    return (vectors.double() @ directions @ directions.mT).to(vectors.dtype)


def drift(
    decomposition: SVD, k: int, side: SingularSide = "right"
) -> Float[Tensor, "change *batch k"]:
    """Return the `subspace_angles` between consecutive entries of the first batch axis: steps or
    checkpoints.

    Args:
        decomposition: the decomposition of matrices [step, ..., rows, columns].
        k: the number of singular vectors.
        side: `left` or `right` singular vectors.

    Returns:
        The angles [change, *batch, k] in radians, ascending, with change = step - 1. Entry i
        compares step i with step i + 1.

    Raises:
        ValueError: if side is neither `left` nor `right`, or k is not 1 to the number of singular
            values.

    >>> steps = torch.diag_embed(torch.tensor([[3.0, 1.0], [1.0, 3.0], [1.0, 3.0]]))
    >>> drift(svd(steps), k=1).rad2deg()
    tensor([[90.],
            [ 0.]], dtype=torch.float64)
    """
    return subspace_angles(decomposition[:-1], decomposition[1:], k=k, side=side)


def alignment(
    first: SVD, second: SVD, k: int, side: SingularSide = "right"
) -> Float[Tensor, "*batch k"]:
    """Return the absolute cosine between singular vectors of the same index: 0 to 1.

    The cosine is NaN if a singular vector is not defined: if its singular value is 0 up to the
    tolerance, or equals the next or the previous singular value up to the tolerance.

    Args:
        first, second: decompositions of matrices of the same shape.
        k: the number of singular vectors.
        side: `left` or `right` singular vectors.

    Returns:
        The cosines [*batch, k], in float64, in the order of the singular values.

    Raises:
        ValueError: if side is neither `left` nor `right`, or k is not 1 to the number of singular
            values.

    >>> flat = svd(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    >>> turned = svd(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 0.0]]))
    >>> alignment(flat, turned, k=3)
    tensor([1., 0., 0.], dtype=torch.float64)
    """
    cosines = (_vectors(first, k, side) * _vectors(second, k, side)).sum(-2)
    defined = _isolated(first, k) & _isolated(second, k)
    return cosines.abs().clamp(max=1).where(defined, torch.nan)


def _angles(a: Tensor, b: Tensor) -> Tensor:
    """Return the principal angles between the spans of orthonormal columns."""
    # Let b be the smaller space, because the sines are computed from the part of b outside of a.
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    product = a.mT @ b
    cosines = torch.linalg.svdvals(product).clamp(0, 1)
    sines = torch.linalg.svdvals(b - a @ product).flip(-1).clamp(0, 1)
    # A cosine near 1 keeps only half of the digits of its angle, and so does a sine near 1.
    return torch.where(cosines.square() > 0.5, sines.asin(), cosines.acos())


def _independent(basis: Tensor, name: str) -> Tensor:
    """Return an orthonormal basis of the column space of each matrix.

    Raises:
        ValueError: if the columns of a matrix are not linearly independent.
    """
    decomposition = svd(basis, name)
    lacking = decomposition.rank < basis.shape[-1]
    if lacking.any():
        where = lacking.nonzero()[0].tolist()
        raise ValueError(
            f"the columns of a basis must be linearly independent; got {name}{where or ''} of rank "
            f"{decomposition.rank[tuple(where)]} with {basis.shape[-1]} columns"
        )
    return decomposition.u


def _vectors(decomposition: SVD, k: int, side: SingularSide) -> Tensor:
    """Return the top k vectors, as columns."""
    require_choice("side", side, ("left", "right"))
    require_integer("k", k, most=decomposition.s.shape[-1])
    return (decomposition.u if side == "left" else decomposition.vh.mT)[..., :k]


def _has_space(decomposition: SVD, k: int) -> Bool[Tensor, "*batch"]:
    """Return True for matrices whose singular values k and k + 1 differ."""
    return decomposition.gaps[..., k - 1] > decomposition.tolerance


def _isolated(decomposition: SVD, k: int) -> Bool[Tensor, "*batch k"]:
    """Return True for each singular value that differs from its two neighbours by more than the
    tolerance.
    """
    apart = decomposition.gaps[..., :k] > decomposition.tolerance[..., None]
    # No singular value is larger than the first.
    return apart & torch.cat([torch.ones_like(apart[..., :1]), apart[..., :-1]], -1)
