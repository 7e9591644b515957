"""Erasing: the least change of values after which no linear reading knows a concept (LEACE).

Belrose et al. 2023, "LEACE: Perfect linear concept erasure in closed form". With the covariance Σ of values x and their
cross-covariance Σxz with labels z, W = Σ^(-1/2) whitens, and P projects on the columns of W Σxz. Then
x - W⁺ P W (x - E[x]) has no covariance with z, and no smaller change has none.

All is computed in float64 from exact sums. Nothing is shrunk. Directions without variance, such as the mean that a norm
removes, are left out of Σ by their eigenvalues. So are those that vary by no more than rounding in float32, beside the one
that varies most: there Σ^(-1/2) would make numbers of 1e7 from it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class Moments:
    """Means and summed products of deviations of values and labels; those of parts can be put together.

    Attributes:
        n: how many rows were seen.
        mean, label_mean: of values and labels.
        products: of the deviations of values with each other.
        label_products: of the deviations of values with those of labels.
    """

    n: int
    mean: Float[Tensor, " d"]
    label_mean: Float[Tensor, " label"]
    products: Float[Tensor, "d d"]
    label_products: Float[Tensor, "d label"]

    @classmethod
    def of(cls, values: Float[Tensor, "row d"], labels: Float[Tensor, "row label"]) -> "Moments":
        """Those of some rows, in float64."""
        x, z = values.double(), labels.double()
        x_apart, z_apart = x - x.mean(0), z - z.mean(0)
        return cls(len(x), x.mean(0), z.mean(0), x_apart.mT @ x_apart, x_apart.mT @ z_apart)

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The covariance of values: the mean of the products."""
        return self.products / self.n

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both (Chan et al. 1979, "Updating formulae and a pairwise algorithm")."""
        n = self.n + other.n
        share, apart, labels_apart = (
            other.n / n,
            other.mean - self.mean,
            other.label_mean - self.label_mean,
        )
        weight = self.n * share
        return Moments(
            n,
            self.mean + share * apart,
            self.label_mean + share * labels_apart,
            self.products + other.products + weight * torch.outer(apart, apart),
            self.label_products + other.label_products + weight * torch.outer(apart, labels_apart),
        )


@dataclass(frozen=True, eq=False)
class Eraser:
    """Takes a concept out of values: `x - (x - mean) @ right @ left`.

    Attributes:
        right, left: of the projection, of few columns and rows.
        mean: of the values it was fitted on.

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
        """Return the values without the concept, in their dtype."""
        precision = torch.promote_types(x.dtype, torch.float32)
        right, left, mean = (
            part.to(x.device, precision) for part in (self.right, self.left, self.mean)
        )
        wide = x.to(precision)
        return (wide - (wide - mean) @ right @ left).to(x.dtype)


def leace(moments: Moments) -> Eraser:
    """The eraser of a concept.

    Args:
        moments: of values and labels; a label of several classes has a column for each.

    Raises:
        ValueError: if there are fewer than two rows.
    """
    if moments.n < 2:
        raise ValueError(f"a concept is erased from at least 2 rows; got {moments.n}")
    sizes, vectors = torch.linalg.eigh(moments.covariance)
    deviation = 10 * torch.finfo(torch.float32).eps
    kept = sizes > deviation**2 * sizes.max()
    roots, vectors = sizes[kept].sqrt(), vectors[:, kept]
    whiten, colour = (vectors / roots) @ vectors.mT, (vectors * roots) @ vectors.mT
    seen = whiten @ (moments.label_products / moments.n)
    columns, strengths, _ = torch.linalg.svd(seen, full_matrices=False)
    columns = columns[:, strengths > 1e-12 * max(1.0, float(strengths.max()))]
    return Eraser(whiten @ columns, columns.mT @ colour, moments.mean)
