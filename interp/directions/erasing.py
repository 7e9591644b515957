"""Erase a concept: the smallest change of values after which no linear probe predicts it (LEACE).

Belrose et al. 2023, "LEACE: Perfect linear concept erasure in closed form".

1. Let Σ be the covariance of values x, and Σxz their cross-covariance with labels z.
2. W = Σ^(-1/2) whitens the values, and P projects on the columns of W Σxz.
3. Then x - W⁺ P W (x - E[x]) has no covariance with z. No smaller change has this property.

The eraser is computed in float64 from exact sums, without shrinkage. If the values do not vary
along an eigenvector of Σ, the eigenvector is left out. The output of a LayerNorm has one such
eigenvector, because the norm subtracts the mean over components. Eigenvectors along which values
vary only by float32 rounding (compared with the largest variation) are left out too: Σ^(-1/2) would
multiply the rounding by factors of 1e7.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import float32_rounding, wide_dtype
from interp.numbers.moments import Moments


@dataclass(frozen=True, eq=False)
class Eraser:
    """An edit that removes a concept from values: `x - (x - mean) @ right @ left`.

    Attributes:
        right, left: the two factors of the matrix that is applied to `x - mean`. Their rank is at
            most the number of columns of labels.
        mean: the mean of the values that the eraser was fitted on.

    >>> values = torch.tensor([[1.0, 5.0], [3.0, 3.0], [5.0, 3.0], [7.0, 5.0]])
    >>> eraser = leace(Moments.of(values, torch.tensor([[0.0], [0.0], [1.0], [1.0]])))
    >>> eraser(values).round()
    tensor([[4., 5.],
            [4., 3.],
            [4., 3.],
            [4., 5.]])
    """

    right: Float[Tensor, "d rank"]
    left: Float[Tensor, "rank d"]
    mean: Float[Tensor, " d"]

    def __call__(self, x: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows d"]:
        """Return the values without the concept, in the dtype of the values."""
        precision = wide_dtype(x.dtype)
        right, left, mean = (
            part.to(x.device, precision) for part in (self.right, self.left, self.mean)
        )
        exact = x.to(precision)
        return (exact - (exact - mean) @ right @ left).to(x.dtype)


def leace(moments: Moments) -> Eraser:
    """Return the eraser of a concept, from the moments of values and labels.

    Args:
        moments: the moments of values and labels. A label with several classes has a column for
            each class.

    Returns:
        The eraser, an edit of values [*rows, d] in the unit of these values. After the edit, no
        linear function of the values predicts the labels better than a constant, in squared error
        on the values of the moments.

    Raises:
        ValueError: if there are fewer than two rows.

    >>> values = torch.tensor([[1.0, 5.0], [3.0, 3.0], [5.0, 3.0], [7.0, 5.0]])
    >>> labels = torch.tensor([[0.0], [0.0], [1.0], [1.0]])
    >>> erased = leace(Moments.of(values, labels))(values)
    >>> values[labels[:, 0] == 1].mean(0), values[labels[:, 0] == 0].mean(0)  # they differ
    (tensor([6., 4.]), tensor([2., 4.]))
    >>> erased[labels[:, 0] == 1].mean(0).round(), erased[labels[:, 0] == 0].mean(0).round()
    (tensor([4., 4.]), tensor([4., 4.]))
    """
    if moments.n < 2:
        raise ValueError(f"moments must be of at least 2 rows to erase a concept; got {moments.n}")
    size = len(moments.mean) - moments.n_labels
    sizes, vectors = torch.linalg.eigh(moments.covariance[:size, :size])
    varies = sizes > float32_rounding() ** 2 * sizes.max()
    roots = sizes[varies].sqrt()
    vectors = vectors[:, varies]
    whiten = (vectors / roots) @ vectors.mT
    colour = (vectors * roots) @ vectors.mT
    correlations = whiten @ moments.covariance[:size, size:]
    columns, strengths, _ = torch.linalg.svd(correlations, full_matrices=False)
    columns = columns[:, strengths > 1e-12 * max(1.0, float(strengths.max()))]
    return Eraser(whiten @ columns, columns.mT @ colour, moments.mean[:size])
