"""Running moments: means and summed products of deviations of rows, in float64; those of parts are put together."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Means and summed products of deviations of rows; those of parts can be put together.

    Attributes:
        n: how many rows there were.
        mean: of each column.
        products: of the deviations of all pairs of columns, or of each column with itself.
        n_labels: how many of the last columns are labels.
    """

    n: int
    mean: Float[Tensor, " d"]
    products: Float[Tensor, "d d"] | Float[Tensor, " d"]
    n_labels: int = 0

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "row d"],
        labels: Shaped[Tensor, "row label"] | None = None,
        *,
        pairs: bool = True,
    ) -> "Moments":
        """Those of some rows, with columns for labels; `pairs` says whether products are of all pairs of columns."""
        rows = values.double()
        if labels is not None:
            rows = torch.cat([rows, labels.to(rows)], 1)
        mean = rows.mean(0)
        apart = rows - mean
        products = apart.mT @ apart if pairs else apart.square().sum(0)
        return cls(len(rows), mean, products, 0 if labels is None else labels.shape[1])

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The mean products of deviations, labels included."""
        return self.products / self.n

    def __add__(self, other: "Moments") -> "Moments":
        """Those of both (Chan et al. 1979, "Updating formulae and a pairwise algorithm")."""
        n, apart = self.n + other.n, other.mean - self.mean
        spread = torch.outer(apart, apart) if self.products.ndim == 2 else apart.square()
        products = self.products + other.products + spread * (self.n * other.n / n)
        return Moments(n, self.mean + apart * (other.n / n), products, self.n_labels)
