"""Results: tables of effects, one number for each place and example, with labels and intervals."""

import fnmatch
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

from hooks.base import (
    is_cancelled,
    require_integer,
    shown,
    storage,
    strict_json,
    unknown_name,
    warn,
)
from interp import pictures
from interp.inputs.token_positions import short
from interp.numbers.intervals import Interval, auroc_interval, interval, share_interval
from interp.results.entries import Entries, Entry
from interp.results.node import NodeName, as_fact, from_fact

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
        _check(self)
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
        agree = is_cancelled(scale, size)
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
        return shares._at("example", (~agree).nonzero().flatten().tolist())

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
            result = result._select(axis, asked)
        return result

    def _select(self, axis: str, asked: Any) -> "Result":
        """The part at a label of an axis, without the axis; or at several labels, or at a pattern's."""
        if axis not in self.axes:
            raise unknown_name(axis, self.axes, "axis of this result")
        is_list = isinstance(asked, (list, tuple, range))
        indices: list[int] = []
        for label in asked if is_list else [asked]:
            indices += self._indices(axis, label)
        part = self._at(axis, indices)
        if is_list or axis == "example" or self._is_pattern(axis, asked):
            return part
        values = part.values.squeeze(self.axes.index(axis))
        return part._without(axis, values, about={**self.about, axis: part.labels[axis][0]})

    def _at(self, axis: str, indices: Sequence[int]) -> "Result":
        """The part at some indices of an axis, which stays."""
        indices = [*indices]
        values = self.values[(slice(None),) * self.axes.index(axis) + (indices,)]
        labels = {**self.labels, axis: [self.labels[axis][index] for index in indices]}
        words = {**self.words}
        if axis in words:
            words[axis] = [words[axis][index] for index in indices]
        if axis != "example":
            return replace(self, values=values, labels=labels, words=words)
        part = replace(
            self,
            values=values,
            labels=labels,
            base=None if self.base is None else self.base[indices],
            target=None if self.target is None else self.target[indices],
            groups=None if self.groups is None else tuple(self.groups[index] for index in indices),
        )
        # Over fewer examples, the mean of target - base is another one.
        return part.normalized() if self.is_ratio else part

    def _without(self, axis: str, values: Tensor, **changes: Any) -> "Result":
        """A result with these values, which lack an axis of this result."""
        labels = {other: known for other, known in self.labels.items() if other != axis}
        words = {other: known for other, known in self.words.items() if other != axis}
        return replace(
            self, values=values, axes=tuple(labels), labels=labels, words=words, **changes
        )

    def _is_pattern(self, axis: str, label: Any) -> bool:
        """Whether a label is a pattern: no label or word of the axis, and with a wildcard."""
        is_name = label in self.labels[axis] or label in self.words.get(axis, ())
        return isinstance(label, str) and not is_name and ("*" in label or "?" in label)

    def _indices(self, axis: str, label: Any) -> list[int]:
        """The index of a label or word, or the indices of all labels that a pattern matches."""
        known = self.labels[axis]
        if self._is_pattern(axis, label):
            matching = [n for n, name in enumerate(known) if fnmatch.fnmatchcase(str(name), label)]
            if not matching:
                raise ValueError(f"{axis} must match a label of {short(known)}; got {shown(label)}")
            return matching
        for labels in (known, self.words.get(axis, ())):
            if labels.count(label) == 1:
                return [labels.index(label)]
        raise ValueError(f"{axis} must be a unique label of {short(known)}; got {shown(label)}")

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
        ways = ("layer", "head", "neuron", "expert")
        if what not in ways:
            raise unknown_name(what, ways, "way to regroup")
        axis, index_of = self._nodes(what)
        second = "part" if what == "layer" else what
        layers = sorted({layer for layer, _ in index_of})
        places = [*dict.fromkeys(place for _, place in index_of)]
        places = places if second == "part" else sorted(places)
        index = torch.tensor(
            [[index_of.get((layer, place), -1) for place in places] for layer in layers],
            device=self.values.device,
        )
        dim = self.axes.index(axis)
        values = self.values.movedim(dim, 0)[index]  # [layer, place, *other axes]
        is_there = index.view(*index.shape, *[1] * (values.ndim - 2)) >= 0
        values = values.where(is_there, torch.nan)
        labels = {**self.labels, "layer": layers, second: places}
        words = {**self.words}
        for known in (labels, words):
            known.pop(axis, None)
        return replace(
            self,
            values=values.movedim((0, 1), (dim, dim + 1)),
            axes=(*self.axes[:dim], "layer", second, *self.axes[dim + 1 :]),
            labels=labels,
            words=words,
        )

    def _nodes(self, what: str) -> tuple[str, dict[tuple[int, Any], int]]:
        """The first axis of nodes of a kind, or of any kind for `layer`; and their indices.

        The keys of the indices are the layer and the part of the block, or the number of the node.
        """
        for axis in self.axes[:-1]:
            index_of: dict[tuple[int, Any], int] = {}
            for n, node in enumerate(self.labels[axis]):
                if not isinstance(node, NodeName) or node.layer is None:
                    continue
                if what == "layer":
                    index_of[node.layer, node.part] = n
                elif node.kind == what:
                    index_of[node.layer, node.number] = n
            if index_of:
                return axis, index_of
        raise ValueError(
            f"by({what!r}) needs an axis of nodes, with labels that know a {what} (NodeName); "
            f"got {self.axes}"
        )

    def sum(self, axis: str) -> "Result":
        """The effects added up along an axis, such as those of all heads.

        Raises:
            UnknownNameError: if there is no such axis.
            ValueError: if it is `example`, which has means.
        """
        if axis not in self.axes:
            raise unknown_name(axis, self.axes, "axis of this result")
        if axis == "example":
            raise ValueError("examples are not added up: mean() is their mean")
        values = self.values.sum(self.axes.index(axis))
        return self._without(axis, values, bounds=None, counts=None)

    def __sub__(self, other: "Result") -> "Result":
        """The difference of the effects of each example, where both have the same axes, labels, unit and texts.

        It has the base, the target and the facts that both share.

        Raises:
            ValueError: if the two differ in one of these, or are normalized by other runs.
        """
        if not isinstance(other, Result):
            return NotImplemented
        for name in ("axes", "labels", "unit"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ValueError(
                    f"both must have the same {name}; got {ours!s:.60} and {theirs!s:.60}"
                )
        texts = [result.about["texts"] for result in (self, other) if "texts" in result.about]
        if len(texts) == 2 and texts[0] != texts[1]:
            raise ValueError("both must be of the same texts, example for example; got others")
        base = _same(self.base, other.base)
        target = _same(self.target, other.target)
        if self.is_ratio and (base is None or target is None):
            raise ValueError(
                "shares must be of the same runs: subtract effects, and then normalize"
            )
        bounds = None
        if self.bounds is not None and other.bounds is not None:
            bounds = self.bounds[0] - other.bounds[1], self.bounds[1] - other.bounds[0]
        return replace(
            self,
            values=self.values - other.values,
            base=base,
            target=target,
            about={
                name: fact for name, fact in self.about.items() if other.about.get(name) == fact
            },
            words={
                axis: words for axis, words in self.words.items() if other.words.get(axis) == words
            },
            bounds=bounds,
            counts=None,
            groups=other.groups if self.groups is None else self.groups,
        )

    def top(self, k: int = 10) -> Entries:
        """The `k` places with the largest mean effects, by absolute value, with their 95% intervals.

        Raises:
            ValueError: if `k` is below 1.
        """
        require_integer("k", k)
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
        tensors = {name: _numbers(getattr(self, name)) for name in ("values", "base", "target")}
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


def _check(result: Result) -> None:
    """Refuse axes, labels, words, base, target or groups that do not fit the values.

    Raises:
        ValueError: if they do not, or there are no values.
    """
    axes, shape = result.axes, result.values.shape
    if len(axes) != len(shape) or axes[-1:] != ("example",) or len(set(axes)) < len(axes):
        raise ValueError(
            f"axes must name each axis of values {list(shape)}, the last 'example'; got {axes}"
        )
    if not result.values.numel():
        raise ValueError(f"values must have at least one place and example; got {list(shape)}")
    for name, metrics in (("base", result.base), ("target", result.target)):
        if metrics is not None and metrics.shape != shape[-1:]:
            raise ValueError(
                f"{name} must have one number for each example, [{shape[-1]}]; "
                f"got the shape {list(metrics.shape)}"
            )
    if result.groups is not None and len(result.groups) != shape[-1]:
        raise ValueError(
            f"groups must have a number for each example, {shape[-1]}; got {len(result.groups)}"
        )
    sizes = dict(zip(axes, shape, strict=True))
    for axis, labels in [*result.labels.items(), *result.words.items()]:
        plain = all(isinstance(label, (str, int, float)) for label in labels)
        if not plain or sizes.get(axis) != len(labels):
            raise ValueError(
                f"labels must be numbers or text, one for each index of {sizes}; "
                f"got {len(labels)} for {axis!r}, {short(labels)}"
            )


def _same(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Our metric of a run, where both results have it and it is the same; None otherwise."""
    if ours is None or theirs is None or not torch.allclose(ours, theirs):
        return None
    return ours


def _numbers(values: Tensor | None) -> Any:
    """The numbers of a tensor in lists; None, JSON's null, in place of NaN and infinity."""
    if values is None:
        return None
    flat = values.detach().cpu().double().numpy()
    plain = flat.astype(object)
    plain[~np.isfinite(flat)] = None
    return plain.tolist()
