"""Results: tables of effects, one number for each place and example, with labels and intervals."""

import itertools
import math
import os
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import storage
from hooks.errors import unknown_name
from interp.inputs.token_positions import short
from interp.results.intervals import Interval, interval
from interp.results.places import Place, Places

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "hookscope-result-2"


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
        words: by axis, the text at each index, such as the token at a position. `select` takes it too, where it is
            there once.
        unit: the unit of the metric, such as `logits`; values, base and target are in it.
        about: other facts that fit JSON, such as the metric, the direction and the site.
        is_ratio: whether the unit is the mean of target - base over these same examples; see `normalized`.

    Raises:
        ValueError: if axes, labels, base or target do not fit the values, or there are none.

    >>> values = torch.tensor([[1.0, 3.0, 2.5, 1.5], [0.0, -0.5, 0.0, -0.5]])  # [layer, example]
    >>> base, target = torch.tensor([-1.0, -2.0, -1.0, -2.0]), torch.tensor([3.0, 2.0, 2.0, 3.0])
    >>> result = Result(values, ("layer", "example"), base, target, {"layer": [4, 5]}, "logits")
    >>> result.mean(), result.normalized().mean()
    (tensor([ 2.0000, -0.2500]), tensor([ 0.5000, -0.0625]))
    >>> result
    Result [layer 2, example 4] in logits
      base -1.5, target +2.5
      layer 4  +2  [+0.5474, +3.453]
      layer 5  -0.25  [-0.7093, +0.2093]
    """

    values: Float[Tensor, "*axes example"]
    axes: tuple[str, ...]
    base: Float[Tensor, " example"] | None = None
    target: Float[Tensor, " example"] | None = None
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unit: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    is_ratio: bool = False
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        axes, shape = tuple(self.axes), self.values.shape
        if len(axes) != len(shape) or axes[-1:] != ("example",) or len(set(axes)) < len(axes):
            raise ValueError(
                f"axes must name each axis of values {list(shape)}, the last 'example'; got {axes}"
            )
        if not self.values.numel():
            raise ValueError(f"values must have at least one place and example; got {list(shape)}")
        for name, given in (("base", self.base), ("target", self.target)):
            if given is not None and given.shape != shape[-1:]:
                raise ValueError(
                    f"{name} must have one number for each example, [{shape[-1]}]; "
                    f"got the shape {list(given.shape)}"
                )
        sizes = dict(zip(axes, shape, strict=True))
        for axis, own in [*self.labels.items(), *self.words.items()]:
            plain = all(isinstance(label, (str, int, float)) for label in own)
            if not plain or sizes.get(axis) != len(own):
                raise ValueError(
                    f"labels must be numbers or text, one for each index of {sizes}; "
                    f"got {len(own)} for {axis!r}, {short(own)}"
                )
        labels = {axis: tuple(self.labels.get(axis, range(size))) for axis, size in sizes.items()}
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "labels", labels)
        if self.is_ratio:
            self._runs()

    def mean(self) -> Float[Tensor, "*axes"]:
        """The mean effect over examples."""
        return self.values.mean(-1)

    def interval(self, confidence: float = 0.95) -> Interval:
        """The confidence interval of `mean()`: Student's, or Fieller's of a ratio, widened for skewed examples.

        The ends are NaN below three examples, of `normalized()` below four, where nothing can be said. They are
        infinite where target - base is so uncertain that a ratio has no bound. See `interp.results.intervals`.

        Args:
            confidence: how often such an interval should hold the true mean, between 0 and 1.

        Raises:
            ValueError: if confidence is not between 0 and 1.
        """
        ends = self._interval(self.values.reshape(-1, self.values.shape[-1]), confidence)
        return Interval(*(end.to(self.values).view(self.values.shape[:-1]) for end in ends))

    def _interval(self, rows: Float[Tensor, "place example"], confidence: float = 0.95) -> Interval:
        gap = None
        if self.is_ratio:
            base, target = self._runs()
            gap = target - base
        return interval(rows, gap, confidence)

    def _runs(self) -> tuple[Float[Tensor, " example"], Float[Tensor, " example"]]:
        if self.base is None or self.target is None:
            raise ValueError("a result must have a base and a target to be normalized; it has not")
        return self.base, self.target

    def normalized(self, per_example: bool = False) -> "Result":
        """The effects as shares of target - base: 0 is the base run and 1 the target run.

        All values are divided by the mean of target - base, so means and intervals are those of the ratio. A mean
        of each example's own shares would follow the examples where the two runs hardly differ.

        Args:
            per_example: divide the effects of each example by its own target - base instead.

        Warns:
            UserWarning: if base and target agree up to rounding. If their means do, shares are NaN. Of
                shares per example, those are left out where they do.

        Raises:
            ValueError: if there is no base or no target, or they agree in all examples.
        """
        base, target = self._runs()
        gap, size = target - base, torch.maximum(target.abs(), base.abs())
        scale, size = (gap, size) if per_example else (gap.mean(), size.mean())
        agree = scale.abs() <= 100 * torch.finfo(gap.dtype).eps * size
        scale = scale.where(~agree, math.nan)
        shares = replace(
            self,
            values=self.values / scale,
            base=torch.zeros_like(base),
            target=gap / scale,
            unit="shares of target - base",
            is_ratio=not per_example,
        )
        if not agree.any():
            return shares
        if not per_example:
            warnings.warn("base and target agree on average: shares are NaN", stacklevel=2)
            return shares
        left = f"{int(agree.sum())} of {len(gap)} examples, which are left out"
        warnings.warn(f"base and target agree in {left}", stacklevel=2)
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
        words = {other: own for other, own in self.words.items() if other != axis}
        return replace(
            part, values=values, axes=tuple(labels), labels=labels, about=about, words=words
        )

    def _part(self, axis: str, indices: list[int]) -> "Result":
        """The part at some indices of an axis, which stays."""
        values = self.values[(slice(None),) * self.axes.index(axis) + (indices,)]
        labels = {**self.labels, axis: [self.labels[axis][at] for at in indices]}
        words = {**self.words}
        if axis in words:
            words[axis] = [words[axis][at] for at in indices]
        if axis != "example":
            return replace(self, values=values, labels=labels, words=words)
        base, target = (x if x is None else x[indices] for x in (self.base, self.target))
        part = replace(self, values=values, labels=labels, base=base, target=target)
        # Over fewer examples, the mean of target - base is another one.
        return part.normalized() if self.is_ratio else part

    def _index(self, axis: str, label: Any) -> int:
        for labels in (self.labels[axis], self.words.get(axis, ())):
            if labels.count(label) == 1:
                return labels.index(label)
        raise ValueError(
            f"{axis} must be a unique label of {short(self.labels[axis])}; got {label!r}"
        )

    def top(self, k: int = 10) -> Places:
        """The `k` places with the largest mean effects, by absolute value, with their 95% intervals.

        Raises:
            ValueError: if `k` is below 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1; got {k}")
        size = self.mean().flatten().abs().nan_to_num(nan=-1.0)
        return self.places(size.argsort(descending=True, stable=True)[:k].tolist())

    def places(self, indices: Sequence[int]) -> Places:
        """The entries at some indices, counted over all axes but `example`."""
        rows = self.values.reshape(-1, self.values.shape[-1])[indices]
        low, high = self._interval(rows)
        labels = list(itertools.product(*(self.labels[axis] for axis in self.axes[:-1])))
        texts = [
            *itertools.product(
                *(self.words.get(axis) or self.labels[axis] for axis in self.axes[:-1])
            )
        ]
        where = [dict(zip(self.axes[:-1], labels[at], strict=True)) for at in indices]
        said = [dict(zip(self.axes[:-1], texts[at], strict=True)) for at in indices]
        words = [{axis: own[axis] for axis in self.words} for own in said]
        columns = self.mean().flatten()[indices].tolist(), low.tolist(), high.tolist()
        return Places(map(Place, where, *columns, words))

    def plot(self) -> "Figure":
        """The mean effects: a heat map of two axes, or bars with 95% intervals of one.

        White is 0. Colours reach at least the difference of target and base, where there are both, and have
        no range below 0 where no mean is. It needs the extra `report`.

        Raises:
            ValueError: if there are not one or two axes besides `example`.
        """
        from interp.pictures import plots

        labels = {axis: self._shown(axis) for axis in self.axes[:-1]}
        unit = f"mean ({self.unit})" if self.unit else "mean"
        title = ", ".join(f"{name}: {value}" for name, value in self.about.items())
        mean = self.mean()
        if mean.ndim == 1:
            return plots.bars(mean, *self.interval(), labels, unit, title)
        if mean.ndim == 2:
            base, target = self.base, self.target
            reach = 0.0 if base is None or target is None else (target - base).mean().abs().item()
            return plots.heat_map(mean, labels, unit, title, reach)
        raise ValueError(
            f"a plot must have one or two axes besides example; got {self.axes[:-1]}: use select()"
        )

    def _shown(self, axis: str) -> list[Any]:
        """The labels of an axis, with its words."""
        labels = self.labels[axis]
        pairs = zip(labels, self.words.get(axis) or [""] * len(labels), strict=True)
        return [f"{label} {word!r}" if word else label for label, word in pairs]

    def to_dataframe(self) -> Any:
        """A table of pandas, with a row for each place: its labels and words, mean effect and 95% interval."""
        import pandas

        places = [p._asdict() for p in self.places(range(self.values[..., 0].numel()))]
        return pandas.DataFrame(
            [
                place.pop("where")
                | {f"{axis}_word": word for axis, word in place.pop("words").items()}
                | place
                for place in places
            ]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the result as safetensors, completely or not at all.

        Raises:
            FileNotFoundError: if there is no such directory.
            TypeError: if `about` or a label does not fit JSON.
        """
        tensors = {name: getattr(self, name) for name in ("values", "base", "target")}
        held = {name: value.detach() for name, value in tensors.items() if value is not None}
        names = ("axes", "labels", "unit", "about", "is_ratio", "words")
        facts = {name: getattr(self, name) for name in names}
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
        about = [
            (name, value if isinstance(value, str) else reprlib.repr(value))
            for name, value in self.about.items()
        ]
        facts = [f"{name}: {value}" for name, value in about]
        runs = [f"{name} {x.mean().item():+.4g}" for name, x in means if x is not None]
        lines = [", ".join(facts), ", ".join(runs), *repr(self.top(3)).splitlines()]
        unit = f" in {self.unit}" if self.unit else ""
        return "\n  ".join([title + unit, *filter(None, lines)])
