"""Statistics of points from one pass over any number of rows.

The statistics of several parts are added with `+`, in any order.

1. Means and products of deviations are summed in float64 (`interp.numbers.moments`).
2. The largest values of each column are recorded, with their places.
3. Quantiles are computed from a uniform sample of rows. Each row gets a random key, which depends
   only on the seed, on the number of its text and on its position there. The rows with the smallest
   keys are the sample. Therefore, the sample does not depend on the order of the rows or on the
   parts, and is the same for all points. Quantiles are exact if all rows fit into the sample.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from hooks import Point
from hooks.base import require_integer, storage, unknown_name
from interp.edits.draws import keys_of
from interp.json_form import Table, form
from interp.numbers.moments import Moments
from interp.numbers.ranks import largest_rows

_KIND = "statistics-2"


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Statistics of the values of one point over many tokens.

    Usually each token gives one row. The row is the value of the point at the token, as a vector of
    `d` numbers: several axes, such as `head` and `d_head`, are joined to one. A column is one of
    these `d` numbers at all tokens.

    Attributes:
        n: the number of rows.
        mean: the mean of all rows. It keeps the axes of the point, such as `[head, d_head]`.
        products: for each column, the sum of the squared deviations from the mean, [d]; with
            covariances, the sum of the products of deviations for each pair of columns, [d, d].
        low, high: the smallest and the largest value of each column.
        positive: the number of values above 0 in each column.
        top_values: the largest values of each column, in descending order.
        top_places: the place of each of these values: the number of its text, and its position in
            the text.
        sample: the rows of the sample, from which quantiles are computed.
        keys: a random number from 0 to 1 for each row of the sample. The sample is the rows with
            the smallest numbers. A number depends only on the seed, the text and the position, so
            the sample is the same in every order of the texts.
        room: the largest number of rows in the sample.
        top: the number of largest values to record.

    >>> rows = torch.tensor([[1.0], [3.0], [-1.0]])
    >>> one = Statistics.of(rows, text=torch.tensor([0, 0, 1]), pos=torch.tensor([0, 1, 0]))
    >>> one.mean.item(), one.low.item(), one.high.item(), one.positive.item()
    (1.0, -1.0, 3.0, 2)
    >>> one.top_places[0, 0].tolist()  # the text and the place of the largest value
    [0, 1]
    """

    n: int
    mean: Float[Tensor, "..."]
    products: Float[Tensor, " d"] | Float[Tensor, "d d"]
    low: Float[Tensor, " d"]
    high: Float[Tensor, " d"]
    positive: Int[Tensor, " d"]
    top_values: Float[Tensor, "k d"]
    top_places: Int[Tensor, "k d 2"]
    sample: Float[Tensor, "sampled d"]
    keys: Float[Tensor, " sampled"]
    room: int
    top: int

    @classmethod
    def of(
        cls,
        values: Shaped[Tensor, "row ..."],
        text: Int[Tensor, " row"],
        pos: Int[Tensor, " row"],
        *,
        covariance: bool = False,
        top: int = 10,
        sample: int = 1024,
        seed: int = 0,
    ) -> "Statistics":
        """Return the statistics of some rows.

        Args:
            values: the rows.
            text, pos: the number of the text of each row, and the position of the row in the text.
                Each pair may occur only once.
            covariance: whether to compute the products of all pairs of columns.
            top: the number of largest values to record.
            sample: the largest number of rows in the sample.
            seed: the seed of the sample.

        Raises:
            ValueError: if there is no row.
        """
        require_integer("top", top, least=0)
        require_integer("sample", sample, least=0)
        require_integer("seed", seed, least=-(2**63), most=2**64 - 1)
        if not len(values):
            raise ValueError("statistics need at least one row; got none")
        exact = (
            values.flatten(1).double().cpu() if values.ndim > 1 else values[:, None].double().cpu()
        )
        moments = Moments.of(exact, pairs=covariance)
        places = torch.stack([text, pos], 1).long().cpu()
        rows = largest_rows(exact, top)
        largest = _largest_with_places(exact.gather(0, rows), places[rows], top)
        keys = keys_of(seed, *places.unbind(1))
        chosen = keys.argsort()[:sample]
        return cls(
            n=len(exact),
            mean=moments.mean.view(values.shape[1:]),
            products=moments.products,
            low=exact.amin(0),
            high=exact.amax(0),
            positive=(exact > 0).sum(0),
            top_values=largest[0],
            top_places=largest[1],
            sample=exact[chosen],
            keys=keys[chosen],
            room=sample,
            top=top,
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        """Return the statistics of the rows of both parts.

        Raises:
            ValueError: if the two parts do not have the same columns and the same options.
        """
        first, second = (
            (part.mean.shape, part.products.shape, part.room, part.top) for part in (self, other)
        )
        if first != second:
            raise ValueError(
                f"parts must be made with the same columns and options; got {first} and {second}"
            )
        moments = self.moments + other.moments
        values = torch.cat([self.top_values, other.top_values])
        places = torch.cat([self.top_places, other.top_places])
        largest = _largest_with_places(values, places, self.top)
        keys = torch.cat([self.keys, other.keys])
        chosen = keys.argsort()[: self.room]
        return Statistics(
            n=moments.n,
            mean=moments.mean.view_as(self.mean),
            products=moments.products,
            low=torch.minimum(self.low, other.low),
            high=torch.maximum(self.high, other.high),
            positive=self.positive + other.positive,
            top_values=largest[0],
            top_places=largest[1],
            sample=torch.cat([self.sample, other.sample])[chosen],
            keys=keys[chosen],
            room=self.room,
            top=self.top,
        )

    @property
    def moments(self) -> Moments:
        """The mean and the products of the flattened columns."""
        return Moments(self.n, self.mean.flatten(), self.products)

    @property
    def variance(self) -> Float[Tensor, " d"]:
        """The variance of each column, the mean squared deviation."""
        return (self.products.diagonal() if self.products.ndim == 2 else self.products) / self.n

    @property
    def covariance(self) -> Float[Tensor, "d d"]:
        """The covariance of all pairs of columns, the mean products of deviations.

        Raises:
            ValueError: if the statistics have no covariances, because they were computed without
                `covariance=True`.
        """
        if self.products.ndim < 2:
            raise ValueError(
                "a covariance needs statistics with covariance=True; got statistics without it"
            )
        return self.moments.covariance

    @property
    def density(self) -> Float[Tensor, " d"]:
        """The share of rows with a value above 0; NaN for a column with NaN, as all statistics.

        For a feature, this is the share of active rows.
        """
        return (self.positive.double() / self.n).where(~self.low.isnan(), torch.nan)

    @property
    def error(self) -> Float[Tensor, " d"]:
        """The standard error of each mean for independent rows.

        Rows of one text are not independent.
        """
        return (self.variance / max(1, self.n - 1)).sqrt()

    def quantiles(self, shares: float | Sequence[float]) -> Float[Tensor, "*share d"]:
        """Return the quantiles of each column at these shares, from the sample.

        For the standard error, see `rank_error`.
        """
        return torch.from_numpy(np.quantile(self.sample.numpy(), shares, axis=0))

    @property
    def rank_error(self) -> float:
        """The standard error of quantiles, as a share of rows.

        The median of the sample is about the quantile 0.5 ± `rank_error` of all rows. For other
        quantiles, the error is smaller.
        """
        room = len(self.keys)
        return 0.5 * ((1 / room) * (1 - room / self.n)) ** 0.5

    def as_json(self) -> dict[str, Any]:
        """Return the statistics of each column in the JSON form of all results; see
        `interp.json_form`.
        """
        value = "unit of the point"
        tables = {
            "n": Table(self.n, unit="rows"),
            "mean": Table(self.mean.flatten(), "d", value),
            "error": Table(self.error, "d", value),
            "variance": Table(self.variance, "d", "squared unit of the point"),
            "low": Table(self.low, "d", value),
            "high": Table(self.high, "d", value),
            "density": Table(self.density, "d", "share of rows"),
            "top_values": Table(self.top_values, "top d", value),
            "top_places": Table(self.top_places, "top d place"),
        }
        labels = {"place": ["text", "pos"]}
        tables["top_places"] = Table(self.top_places, "top d place", labels=labels)
        return form("Statistics", tables)

    def __repr__(self) -> str:
        return f"Statistics of {self.n:,} rows [{', '.join(map(str, self.mean.shape))}]"


def _largest_with_places(
    values: Float[Tensor, "n d"], places: Int[Tensor, "n d 2"], k: int
) -> tuple[Float[Tensor, "_k d"], Int[Tensor, "_k d 2"]]:
    """Return the `k` largest values of each column, the largest first, with their places.

    Of equal values, the earliest come first, by text and then by position.
    """
    by_place = ((places[..., 0] << 32) + places[..., 1]).argsort(0)
    rows = by_place.gather(0, largest_rows(values.gather(0, by_place), k))
    return values.gather(0, rows), places.gather(0, rows[..., None].expand(-1, -1, 2))


class StatisticsByPoint(dict[str, Statistics]):
    """Statistics by the names of points. They are an argument of `edits.mean`.

    >>> from hooks import HookedRunner
    >>> from interp import edits
    >>> from interp.store import statistics
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> by_point = statistics(model, ["part KV8", "import os", "class A:"], "*.mlp_out")
    >>> sorted(by_point)[0], by_point["blocks.0.mlp_out"].n  # the number of tokens
    ('blocks.0.mlp_out', 25)
    >>> hooks = {"blocks.0.mlp_out": edits.mean(by_point)}  # mean ablation of an MLP
    >>> logits = HookedRunner(model).run_with_hooks("def f(", hooks=hooks)
    """

    def mean_at(self, point: Point) -> Float[Tensor, "..."]:
        """Return the mean at a point.

        Raises:
            UnknownNameError: if there are no statistics of the point. The error contains close
                matches.
        """
        if point.name not in self:
            raise unknown_name(point.name, self, "point of these statistics")
        return self[point.name].mean

    vector_at = mean_at

    @classmethod
    def of(
        cls,
        rows: Mapping[str, Tensor],
        text: Tensor,
        pos: Tensor,
        *,
        covariance: bool = False,
        top: int = 10,
        sample: int = 1024,
        seed: int = 0,
    ) -> "StatisticsByPoint":
        """Return the statistics of some rows of each point.

        Args:
            rows: the rows of each point, by its name.
            text, pos: the number of the text of each row, and the position of the row in the text.
            covariance, top, sample, seed: see `Statistics.of`.
        """
        by_point = {}
        for name, values in rows.items():
            by_point[name] = Statistics.of(
                values,
                text,
                pos,
                covariance=covariance,
                top=top,
                sample=sample,
                seed=seed,
            )
        return cls(by_point)

    @staticmethod
    def together(parts: Iterable["StatisticsByPoint"]) -> "StatisticsByPoint":
        """Return the statistics of the rows of all parts.

        Raises:
            ValueError: if there are no parts.
        """
        rest = iter(parts)
        if (first := next(rest, None)) is None:
            raise ValueError("statistics need at least one row; got none")
        return reduce(StatisticsByPoint.__add__, rest, first)

    def __add__(self, other: "StatisticsByPoint") -> "StatisticsByPoint":
        """Return the statistics of the rows of both parts.

        Raises:
            ValueError: if the parts have different points.
        """
        if self.keys() != other.keys():
            raise ValueError(f"parts must have the same points; got {[*self]} and {[*other]}")
        return StatisticsByPoint(
            {name: statistics + other[name] for name, statistics in self.items()}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a file, for `load`."""
        storage.save(storage.path_of(path), _KIND, *self.packed())

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the content of a file of `save`: tensors by name, and other values by name.

        A tensor is named `POINT FIELD`, such as `blocks.0.mlp_out mean`. The other values are in
        one mapping for each point. `unpacked` reads both.
        """
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        for name, statistics in self.items():
            facts[name] = {}
            for field in fields(statistics):
                value = getattr(statistics, field.name)
                if isinstance(value, Tensor):
                    tensors[f"{name} {field.name}"] = value
                else:
                    facts[name][field.name] = value
        return tensors, facts

    @classmethod
    def unpacked(
        cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> "StatisticsByPoint":
        """Return the statistics of tensors and facts that `packed` made.

        Args:
            tensors, facts: the two results of `packed`.
        """
        facts_of_point = {name: dict(plain) for name, plain in facts.items()}
        for key, value in tensors.items():
            name, _, field = key.rpartition(" ")
            facts_of_point[name][field] = value
        return cls({name: Statistics(**parts) for name, parts in facts_of_point.items()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StatisticsByPoint":
        """Load statistics from a file of `save`.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged or does not contain statistics.
        """
        with storage.opened(storage.path_of(path), _KIND) as (tensors, facts):
            return cls.unpacked(tensors, facts)
