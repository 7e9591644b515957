"""Edits that change a value only along some directions, or only in a subspace."""

from functools import partial
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hooks import EditError
from hooks.base import Index, explains_calls, require_kind, shown, to_device, wide_dtype
from interp.edits.edit import Change, Edit
from interp.edits.places import Region
from interp.edits.sources import Values, source_of


@runtime_checkable
class Features(Protocol):
    """Features of values that can be replaced by features of another run."""

    def interchanged(
        self, value: Shaped[Tensor, "*rows d"], source: Shaped[Tensor, "*rows d"]
    ) -> Shaped[Tensor, "*rows d"]:
        """Return the value with the features of the source.

        Args:
            value: the value of the edited run.
            source: the value of the source.
        """


@explains_calls
def interchange(
    source: "Values",
    subspace: Float[Tensor, "dim *k"] | Features,
    *,
    source_pos: "Index | None" = None,
    **where: Index,
) -> Edit:
    """Return an edit that replaces the part of a value in a subspace by the part of a source.

    The subspace belongs to the last axis. The rest of the value does not change. This is a
    distributed interchange intervention: Geiger et al. 2024, "Finding Alignments Between
    Interpretable Causal Variables and Distributed Neural Representations".

    Args:
        source: the values whose part is written, such as a cache or a tensor; see `replace`.
        source_pos: the columns of the source for the selected positions; see `replace`. Default:
            the same positions.
        subspace: a direction; columns that span the subspace, which need not be orthonormal; or
            features of the values, such as the features of `interp.alignment`.
        where: the place that is changed, by axis.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. A value x at the place becomes
        `x - P x + P s`, where P projects on the subspace and s is the value of the source. Features
        of `interp.alignment` replace P by their encoder and decoder.

    Raises:
        ValueError: if the columns are not linearly independent.

    >>> from hooks import Point
    >>> edit = interchange(torch.tensor([[5.0, 6.0]]), subspace=torch.tensor([0.0, 1.0]))
    >>> edit(torch.ones(1, 2), Point("any", ("batch", "d_model")))
    tensor([[1., 6.]])
    """
    arguments = {"0": source, "1": subspace}
    values = source_of(source, source_pos)
    if isinstance(subspace, Tensor):
        change: Change = partial(_interchanged, basis=orthonormal(subspace))
    else:
        if not hasattr(subspace, "interchanged"):
            raise TypeError(
                "subspace must be a tensor of columns [d_model, k], or features of "
                "interp.alignment; "
                f"got {shown(subspace)}"
            )
        change = partial(_with_features, features=subspace)
    return Edit("interchange", change, arguments=arguments, source=values).at(**where)


def _interchanged(region: Tensor, value: Tensor, place: Region, basis: Tensor) -> Tensor:
    """Return the region with the part of the source inside the span of a basis."""
    return region + _inside(value - region, basis)


def _with_features(region: Tensor, value: Tensor, place: Region, features: Features) -> Tensor:
    """Return the region with the features of the source."""
    return features.interchanged(region, value)


@explains_calls
def project_out(directions: Float[Tensor, "dim *k"], **where: Index) -> Edit:
    """Return an edit that removes the part of a value inside the span of some directions.

    The directions belong to the last axis of the point.

    Args:
        directions: a direction, or several directions as columns, which need not be orthonormal.
        where: the place that is changed, by axis.

    Returns:
        The edit, a hook for runs, generation, sweeps and circuits. A value x at the place becomes
        `x - P x`, where P projects on the span of the directions.

    Raises:
        ValueError: if the directions are not linearly independent.

    >>> from hooks import Point
    >>> edit = project_out(torch.tensor([0.0, 2.0]))
    >>> edit(torch.tensor([[3.0, 4.0]]), Point("any", ("batch", "d_model")))
    tensor([[3., 0.]])
    """
    outside = partial(_outside, basis=orthonormal(directions))
    return Edit("project_out", outside, {"0": directions}).at(**where)


def _outside(region: Tensor, value: Tensor, place: Region, basis: Tensor) -> Tensor:
    """Return the part of the region outside the span of a basis."""
    return region - _inside(region, basis)


def orthonormal(directions: Tensor) -> Float[Tensor, "dim _k"]:
    """Return an orthonormal basis of the span of columns, in float64.

    Args:
        directions: one direction [dim], or several directions as columns [dim, k].

    Raises:
        ValueError: if the columns are not linearly independent.

    >>> orthonormal(torch.tensor([[2.0, 1.0], [0.0, 1.0]])).abs()
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    require_kind("directions", directions, Tensor, "a tensor of columns [d_model, k]")
    columns = directions.double().reshape(len(directions), -1)
    basis, triangle = torch.linalg.qr(columns)
    least = torch.finfo(wide_dtype(directions.dtype)).eps ** 0.75
    # The diagonal contains the length of the part of each column outside the span of the previous
    # columns. The column is independent if this part is not only rounding.
    is_new = triangle.diagonal().abs() > least * columns.norm(dim=0)[: len(triangle)]
    if not (columns.numel() and columns.shape[1] <= len(columns) and is_new.all()):
        rule = "directions must be one or more linearly independent columns"
        raise ValueError(f"{rule}; got {list(directions.shape)}")
    return basis


def _inside(x: Tensor, basis: Tensor) -> Tensor:
    """Return the part of vectors along the last axis that is inside the span of a basis."""
    if x.shape[-1] != len(basis):
        hint = " (one number is selected: use edits.zero)" if x.shape[-1] == 1 else ""
        raise EditError(f"directions must have {x.shape[-1]} numbers here; got {len(basis)}{hint}")
    precision = wide_dtype(x.dtype)
    basis = to_device(basis.to(precision), x.device)
    return (x.to(precision) @ basis @ basis.mT).to(x.dtype)
