"""Results: tables of effects, one number for each place and example, with labels and intervals."""

import itertools
import math
import os
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import storage
from hooks.errors import unknown_name
from interp.columns import short
from interp.results.bootstrap import Interval, bootstrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "hookscope-result-1"


class Place(NamedTuple):
    """One entry of a result: its labels by axis, its mean effect and the 95% interval."""

    where: Mapping[str, Any]
    effect: float
    low: float
    high: float


class Places(tuple[Place, ...]):
    """Entries of a result. They print one a line."""

    __slots__ = ()

    def __repr__(self) -> str:
        names = [", ".join(f"{axis} {label}" for axis, label in p.where.items()) for p in self]
        width = max(map(len, names), default=0)
        spreads = ["" if math.isnan(p.low) else f"  [{p.low:+.4g}, {p.high:+.4g}]" for p in self]
        rows = zip(names, self, spreads, strict=True)
        return "\n".join(f"{name:<{width}}  {p.effect:+.4g}{spread}" for name, p, spread in rows)


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """Effects, metric(edited) - metric(base), at labelled places, for each example.

    Attributes:
        values: the effects, in `unit`. The last axis is `example`. A place where one is NaN has no mean
            and no interval, but NaN, and is the last of `top`.
        axes: the names of the axes of `values`.
        base: the metric of the run that is edited; None where there is no such run.
        target: the metric of the run that values come from; None where there is no such run.
        labels: by axis, a label for each index, numbers or text. By default they count from 0.
        unit: the unit of the metric, such as `logits`.
        about: other facts that fit JSON, such as the metric, the direction and the site.
        gap: what the mean over examples is divided by the mean of; see `normalized`.

    Raises:
        ValueError: if axes, labels, base, target or gap do not fit the values, or there are none.

    >>> values = torch.tensor([[1.0, 3.0], [0.0, -0.5]])  # [layer, example]
    >>> base, target = torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 2.0])
    >>> result = Result(values, ("layer", "example"), base, target, {"layer": [4, 5]}, "logits")
    >>> result.mean(), result.normalized().mean()
    (tensor([ 2.0000, -0.2500]), tensor([ 0.5000, -0.0625]))
    >>> result
    Result [layer 2, example 2] in logits
      base -1.5, target +2.5
      layer 4  +2  [+1, +3]
      layer 5  -0.25  [-0.5, +0]
    """

    values: Float[Tensor, "*axes example"]
    axes: tuple[str, ...]
    base: Float[Tensor, " example"] | None = None
    target: Float[Tensor, " example"] | None = None
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unit: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    gap: Float[Tensor, " example"] | None = None

    def __post_init__(self) -> None:
        axes, shape = tuple(self.axes), self.values.shape
        if len(axes) != len(shape) or axes[-1:] != ("example",) or len(set(axes)) < len(axes):
            raise ValueError(
                f"axes must name each axis of values {list(shape)}, the last 'example'; got {axes}"
            )
        if not self.values.numel():
            raise ValueError(f"values must have at least one place and example; got {list(shape)}")
        for name, given in (("base", self.base), ("target", self.target), ("gap", self.gap)):
            if given is not None and given.shape != shape[-1:]:
                raise ValueError(
                    f"{name} must have one number for each example, [{shape[-1]}]; "
                    f"got the shape {list(given.shape)}"
                )
        sizes = dict(zip(axes, shape, strict=True))
        for axis, own in self.labels.items():
            plain = all(isinstance(label, (str, int, float)) for label in own)
            if not plain or sizes.get(axis) != len(own):
                raise ValueError(
                    f"labels must be numbers or text, one for each index of {sizes}; "
                    f"got {len(own)} for {axis!r}, {short(own)}"
                )
        labels = {axis: tuple(self.labels.get(axis, range(size))) for axis, size in sizes.items()}
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "about", dict(self.about))

    def mean(self) -> Float[Tensor, "*axes"]:
        """The mean effect over examples; where there is a gap, divided by the mean gap."""
        mean = self.values.mean(-1)
        return mean if self.gap is None else mean / self.gap.mean()

    def interval(self, confidence: float = 0.95, *, seed: int = 0, n: int = 2000) -> Interval:
        """The percentile bootstrap interval of `mean()` over examples (Efron & Tibshirani 1993).

        All places share the drawn examples, and so does the gap. With one example the ends are NaN.

        Args:
            confidence: how often such an interval should hold the true mean, between 0 and 1.
            seed: the seed of the draws.
            n: how many samples of all examples are drawn.

        Raises:
            ValueError: if confidence is not between 0 and 1.
        """
        rows = self.values.reshape(-1, self.values.shape[-1])
        ends = bootstrap(rows, self.gap, confidence, seed, n)
        return Interval(*(end.to(self.values).view(self.values.shape[:-1]) for end in ends))

    def normalized(self, per_example: bool = False) -> "Result":
        """The effects as shares of target - base: 0 is the base run and 1 the target run.

        The mean of this result is the mean effect divided by the mean of target - base, and its interval
        is that of the ratio. A mean of shares would follow the examples where the two runs hardly
        differ.

        Args:
            per_example: return a result with the share of each example as its values instead.

        Warns:
            UserWarning: if base and target agree up to rounding. If their means do, shares are NaN. Of
                shares per example, those are left out where they do.

        Raises:
            ValueError: if there is no base or no target, or they agree in all examples.
        """
        if self.base is None or self.target is None:
            raise ValueError("a result must have a base and a target to be normalized; it has not")
        gap, size = self.target - self.base, torch.maximum(self.target.abs(), self.base.abs())
        least, unit = 100 * torch.finfo(gap.dtype).eps, "shares of target - base"
        if not per_example:
            if gap.mean().abs() <= least * size.mean():
                warnings.warn("base and target agree on average: shares are NaN", stacklevel=2)
                gap = torch.full_like(gap, math.nan)
            return replace(self, unit=unit, gap=gap)
        agree = gap.abs() <= least * size
        if agree.any():
            left = f"{int(agree.sum())} of {len(gap)} examples, which are left out"
            warnings.warn(f"base and target agree in {left}", stacklevel=2)
        values, base, target = self.values / gap, torch.zeros_like(gap), torch.ones_like(gap)
        shares = replace(self, values=values, base=base, target=target, unit=unit, gap=None)
        return shares._part("example", (~agree).nonzero().flatten().tolist())

    def select(self, **where: Any) -> "Result":
        """The part at some labels: `result.select(layer=3, head=[0, 5])`.

        One label drops its axis, and is noted in `about`. A list keeps the axis.

        Raises:
            UnknownNameError: if the result has no such axis.
            ValueError: if an axis has no such label, or several.

        >>> Result(torch.zeros(2, 3, 5), ("layer", "head", "example")).select(layer=1, head=[0, 2]).axes
        ('head', 'example')
        """
        selected = self
        for axis, asked in where.items():
            selected = selected._selected(axis, asked)
        return selected

    def _selected(self, axis: str, asked: Any) -> "Result":
        if axis not in self.axes:
            raise unknown_name(axis, self.axes, "axis of this result")
        several = isinstance(asked, (list, tuple, range))
        part = self._part(axis, [self._index(axis, one) for one in (asked if several else [asked])])
        if several or axis == "example":
            return part
        values = part.values.squeeze(self.axes.index(axis))
        about = {**self.about, axis: part.labels[axis][0]}
        labels = {other: own for other, own in self.labels.items() if other != axis}
        return replace(part, values=values, axes=tuple(labels), labels=labels, about=about)

    def _part(self, axis: str, indices: list[int]) -> "Result":
        """The part at some indices of an axis, which stays."""
        values = self.values[(slice(None),) * self.axes.index(axis) + (indices,)]
        labels = {**self.labels, axis: [self.labels[axis][at] for at in indices]}
        runs: dict[str, Any] = {"base": self.base, "target": self.target, "gap": self.gap}
        if axis == "example":
            runs = {name: None if x is None else x[indices] for name, x in runs.items()}
        return replace(self, values=values, labels=labels, **runs)

    def _index(self, axis: str, label: Any) -> int:
        labels = self.labels[axis]
        if labels.count(label) != 1:
            unique = ", which are not unique" if label in labels else ""
            raise ValueError(f"{axis} must be one of {short(labels)}{unique}; got {label!r}")
        return labels.index(label)

    def top(self, k: int = 10) -> Places:
        """The `k` places with the largest mean effects, by absolute value, with their 95% intervals.

        Raises:
            ValueError: if `k` is below 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1; got {k}")
        size = self.mean().flatten().abs().nan_to_num(nan=-1.0)
        return self._places(size.argsort(descending=True, stable=True)[:k].tolist())

    def _places(self, indices: Sequence[int]) -> Places:
        """The entries at some indices, counted over all axes but `example`."""
        rows = self.values.reshape(-1, self.values.shape[-1])[indices]
        low, high = bootstrap(rows, self.gap)
        labels = list(itertools.product(*(self.labels[axis] for axis in self.axes[:-1])))
        where = [dict(zip(self.axes[:-1], labels[at], strict=True)) for at in indices]
        columns = self.mean().flatten()[indices].tolist(), low.tolist(), high.tolist()
        return Places(map(Place, where, *columns))

    def plot(self) -> "Figure":
        """The mean effects: a heat map of two axes, or bars with 95% intervals of one.

        White is 0. It needs the extra `report`.

        Raises:
            ValueError: if there are not one or two axes besides `example`.
        """
        from interp.pictures.plots import effects

        return effects(self)

    def to_dataframe(self) -> Any:
        """A pandas table with a row for each place: its labels, mean effect and 95% interval.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_dataframe() needs pandas: pip install pandas") from None
        places = [p._asdict() for p in self._places(range(self.values[..., 0].numel()))]
        return pandas.DataFrame([place.pop("where") | place for place in places])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as safetensors, completely or not at all.

        Raises:
            FileNotFoundError: if there is no such directory.
            TypeError: if `about` or a label does not fit JSON.
        """
        tensors = {name: getattr(self, name) for name in ("values", "base", "target", "gap")}
        held = {name: value.detach() for name, value in tensors.items() if value is not None}
        facts = {name: getattr(self, name) for name in ("axes", "labels", "unit", "about")}
        storage.save(Path(path), _FORMAT, held, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Reads a result that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if the file is damaged, or `save` did not write it.
        """
        with storage.opened(Path(path), _FORMAT) as (tensors, facts):
            return cls(**tensors, **facts | {"axes": tuple(facts["axes"])})

    def __repr__(self) -> str:
        sizes = zip(self.axes, self.values.shape, strict=True)
        title = f"Result [{', '.join(f'{axis} {size}' for axis, size in sizes)}]"
        means = [("base", self.base), ("target", self.target)]
        facts = [f"{name}: {_brief(value)}" for name, value in self.about.items()]
        runs = [f"{name} {x.mean().item():+.4g}" for name, x in means if x is not None]
        lines = [", ".join(facts), ", ".join(runs), *repr(self.top(3)).splitlines()]
        unit = f" in {self.unit}" if self.unit else ""
        return "\n  ".join([title + unit, *filter(None, lines)])


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else reprlib.repr(value)
