"""Results: tables of effects, one number for each place and example, with labels and intervals."""

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooks.base import require_whole, storage, strict_json, warn
from interp import pictures
from interp.numbers.intervals import Interval, auroc_interval, interval, share_interval
from interp.results import parts
from interp.results.node import as_fact, from_fact
from interp.results.places import Entries, Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FORMAT = "hookscope-result-2"
_TUPLES = ("axes", "bounds", "counts", "groups")


@dataclass(frozen=True, eq=False, repr=False)
class Result(pictures.Shown):
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
        bounds: the least and the largest number that a value may be, where there are such.
        counts: where values are AUROCs of folds, how many different texts of each kind a fold has, the mean.
        groups: the number of each example's text. Examples of one text share a number, and intervals
            count them once. None if all examples have different texts.

    Raises:
        ValueError: if axes, labels, base, target or groups do not fit the values, or there are no
            values.

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
    bounds: tuple[float, float] | None = None
    counts: tuple[float, float] | None = None
    groups: tuple[int, ...] | None = None

    is_plot = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        parts.check(self)
        sizes = zip(self.axes, self.values.shape, strict=True)
        labels = {axis: tuple(self.labels.get(axis, range(size))) for axis, size in sizes}
        object.__setattr__(self, "labels", labels)
        if self.is_ratio:
            self._runs()

    def __getitem__(self, index: Any) -> Any:
        """Refuses an index, and says where the numbers are."""
        raise TypeError(
            "a result has no items: .values[...] are its numbers, with the axes "
            f"{' '.join(self.axes)}; .mean() and .top(k) read them"
        )

    def mean(self) -> Float[Tensor, "*axes"]:
        """The mean effect over examples."""
        return self.values.mean(-1)

    def interval(self, confidence: float = 0.95) -> Interval:
        """The confidence interval of `mean()`: Student's, or Fieller's of a ratio, widened for skewed examples.

        Shares, AUROCs and other numbers with bounds have intervals that stay between these, such as Wilson's.
        Examples of one text count once, see `groups`.
        The ends are NaN below three texts, of `normalized()` below four, where nothing can be said. They are
        infinite where target - base is so uncertain that a ratio has no bound. See `interp.numbers.intervals`.

        Args:
            confidence: how often such an interval should hold the true mean, between 0 and 1.

        Raises:
            ValueError: if confidence is not between 0 and 1.
        """
        ends = self._interval(self.values.reshape(-1, self.values.shape[-1]), confidence)
        return Interval(*(end.to(self.values).view(self.values.shape[:-1]) for end in ends))

    def _interval(self, rows: Float[Tensor, "place example"], confidence: float = 0.95) -> Interval:
        gap = None
        if self.counts is not None:
            return auroc_interval(rows, self.counts, confidence)
        if self.bounds is not None:
            return share_interval(rows, self.bounds, confidence, self.groups)
        if self.is_ratio:
            base, target = self._runs()
            gap = target - base
        return interval(rows, gap, confidence, self.groups)

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
            bounds=None,
            counts=None,
        )
        if not agree.any():
            return shares
        if not per_example:
            warn("base and target agree on average: shares are NaN")
            return shares
        left = f"{int(agree.sum())} of {len(gap)} examples, which are left out"
        warn(f"base and target agree in {left}")
        return parts.part(shares, "example", (~agree).nonzero().flatten().tolist())

    def select(self, **where: Any) -> "Result":
        """The part at some labels: `result.select(layer=3, head=[0, 5], component="m*")`.

        One label drops its axis, and is noted in `about`. A list keeps the axis, and so does a pattern with the
        wildcards `*` and `?`, which selects all labels that it matches.

        Raises:
            UnknownNameError: if the result has no such axis.
            ValueError: if an axis has no such label, or several.

        >>> Result(torch.zeros(2, 3, 5), ("layer", "head", "example")).select(layer=1, head=[0, 2]).axes
        ('head', 'example')
        """
        result = self
        for axis, asked in where.items():
            result = parts.selected(result, axis, asked)
        return result

    def by(self, what: Literal["layer", "head", "neuron", "expert"]) -> "Result":
        """Regroup entries of nodes, such as `a2.h1` and `m2`, into named axes: of components, and writers of a graph.

        Args:
            what: `head` gives the heads as [layer, head], `neuron` the neurons as [layer, neuron], `expert` the experts likewise, and `layer` all
                nodes of layers as [layer, part], with the names without the layer, such as `a.h1` and `m`.

        Returns:
            The result with these axes in place of that of the nodes. Other nodes, such as `embed`, are left out.
            Nothing is added up. A node that only other layers have is NaN.

        Raises:
            UnknownNameError: if there is no such way to regroup.
            ValueError: if no axis has such nodes.

        >>> from interp.results.node import NodeName, node_name
        >>> heads = [node_name(layer, "head", head) for layer in (0, 1) for head in (0, 1)]
        >>> nodes = [NodeName("embed"), *heads, node_name(0, "mlp"), node_name(1, "mlp")]
        >>> result = Result(torch.arange(7.0)[:, None], ("component", "example"), labels={"component": nodes})
        >>> result.by("head").mean()
        tensor([[1., 2.],
                [3., 4.]])
        >>> result.by("layer").select(part="m").mean()
        tensor([5., 6.])
        """
        return parts.regrouped(self, what)

    def sum(self, axis: str) -> "Result":
        """The effects added up along an axis, such as those of all heads.

        Raises:
            UnknownNameError: if there is no such axis.
            ValueError: if it is `example`, which has means.
        """
        return parts.summed(self, axis)

    def __sub__(self, other: "Result") -> "Result":
        """The difference of the effects of each example, where both have the same axes, labels, unit and texts.

        It has the base, the target and the facts that both share.

        Raises:
            ValueError: if the two differ in one of these, or are normalized by other runs.
        """
        return parts.difference(self, other) if isinstance(other, Result) else NotImplemented

    def top(self, k: int = 10) -> Entries:
        """The `k` places with the largest mean effects, by absolute value, with their 95% intervals.

        Raises:
            ValueError: if `k` is below 1.
        """
        require_whole("k", k)
        size = self.mean().flatten().abs().nan_to_num(nan=-1.0)
        return self.places(size.argsort(descending=True, stable=True)[:k].tolist())

    def places(self, indices: Sequence[int]) -> Entries:
        """The entries at some indices, counted over all axes but `example`."""
        rows = self.values.reshape(-1, self.values.shape[-1])[indices]
        low, high = self._interval(rows)
        means = self.mean().flatten()[indices]
        numbers = zip(means.tolist(), low.tolist(), high.tolist(), strict=True)
        places = []
        for at, (mean, start, end) in zip(indices, numbers, strict=True):
            along = map(int, np.unravel_index(at, self.values.shape[:-1]))
            index = dict(zip(self.axes[:-1], along, strict=True))
            where = {axis: self.labels[axis][n] for axis, n in index.items()}
            words = {axis: self.words[axis][n] for axis, n in index.items() if axis in self.words}
            places.append(Entry(where, mean, start, end, words, self.about.get("together", "")))
        return Entries(places)

    def plot(self, facet: str | None = None) -> "Figure":
        """The mean effects: a heat map of two axes, or bars with 95% intervals of one.

        White is 0. Colours reach at least the difference of target and base, where there are both, and have
        no range below 0 where no mean is. It needs the extra `plots`.

        Args:
            facet: of three axes, the one that has a heat map for each label.

        Raises:
            UnknownNameError: if there is no such axis.
            ValueError: if there are not one or two axes besides `example` and the facet.
        """
        from interp.pictures.plots import effects

        return effects(self, facet)

    def to_dataframe(self) -> Any:
        """A table of pandas, with a row for each place: its labels and words, mean effect and 95% interval."""
        import pandas

        rows = []
        for place in self.places(range(self.values[..., 0].numel())):
            words = {f"{axis}_word": word for axis, word in place.words.items()}
            numbers = {"effect": place.effect, "low": place.low, "high": place.high}
            rows.append({**place.where, **words, **numbers})
        return pandas.DataFrame(rows)

    def as_json(self) -> dict[str, Any]:
        """Axes, labels, values, base, target, unit and facts for JSON. None stands for NaN and infinity."""
        tensors = {
            name: parts.numbers(getattr(self, name)) for name in ("values", "base", "target")
        }
        facts = {
            "axes": [*self.axes],
            "labels": dict(self.labels),
            **tensors,
            "unit": self.unit,
            "about": dict(self.about),
        }
        return dict(strict_json.finite(facts))

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        files = dict.fromkeys(storage.SAFETENSORS, self._save)
        return {**super()._writers(), **files, ".json": self._save_json, ".csv": self._save_csv}

    def _save_json(self, path: Path) -> None:
        with storage.replacing(path) as partial:
            partial.write_text(strict_json.dumps(self.as_json()), encoding="utf-8")

    def _save_csv(self, path: Path) -> None:
        table = self.to_dataframe()
        with storage.replacing(path) as partial:
            table.to_csv(partial, index=False)

    def _save(self, path: Path) -> None:
        tensors = {name: getattr(self, name) for name in ("values", "base", "target")}
        held = {name: value.detach() for name, value in tensors.items() if value is not None}
        names = ("axes", "labels", "unit", "about", "is_ratio", "words", *_TUPLES[1:])
        facts = {name: getattr(self, name) for name in names}
        facts["labels"] = {axis: [*map(as_fact, labels)] for axis, labels in self.labels.items()}
        storage.save(path, _FORMAT, held, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Reads a result that `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            CacheError: if the file is damaged, or `save` did not write it.
        """
        with storage.opened(storage.path_of(path), _FORMAT) as (tensors, facts):
            tuples = {name: tuple(fact) for name, fact in facts.items() if name in _TUPLES and fact}
            labels = facts["labels"].items()
            facts["labels"] = {axis: [*map(from_fact, each)] for axis, each in labels}
            return cls(**tensors, **facts | tuples)

    def view(self) -> pictures.View:
        """Its means: bars, a heat map or several; of more axes, the largest ones as text."""
        if 2 <= len(self.axes) <= 4:
            return pictures.effects(self)
        return pictures.View("mean effects", [], says=repr(self).splitlines())

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
