"""Running moments in float64: means and summed products of deviations. Parts can be added."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Means of rows and summed products of their deviations. The moments of two parts can be added.

    Attributes:
        n: the number of rows.
        mean: the mean of each column.
        products: the summed products of the deviations of all pairs of columns, or the summed
            squares of each column.
        n_labels: the number of labels, which are the last columns.

    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 5.0], [8.0, 2.0]])
    >>> both = Moments.of(rows[:1]) + Moments.of(rows[1:])
    >>> both.n, both.mean
    (3, tensor([4., 3.], dtype=torch.float64))
    >>> both.covariance.allclose(rows.T.cov(correction=0).double())
    True
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
        """Return the moments of some rows.

        Args:
            values: the rows.
            labels: labels of the rows, which become the last columns.
            pairs: whether to compute the products of all pairs of columns, not only the squares.
        """
        rows = values.double()
        if labels is not None:
            rows = torch.cat([rows, labels.to(rows)], 1)
        mean = rows.mean(0)
        deviations = rows - mean
        products = deviations.mT @ deviations if pairs else deviations.square().sum(0)
        n_labels = 0 if labels is None else labels.shape[1]
        return cls(n=len(rows), mean=mean, products=products, n_labels=n_labels)

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The mean products of deviations of all pairs of columns, including labels."""
        return self.products / self.n

    def __add__(self, other: "Moments") -> "Moments":
        """Return the moments of the rows of both parts.

        The formula is from Chan et al. 1979, "Updating formulae and a pairwise algorithm".
        """
        n = self.n + other.n
        difference = other.mean - self.mean
        mean = self.mean + difference * (other.n / n)
        if self.products.ndim == 2:
            squares = torch.outer(difference, difference)
        else:
            squares = difference.square()
        products = self.products + other.products + squares * (self.n * other.n / n)
        return Moments(n=n, mean=mean, products=products, n_labels=self.n_labels)
