"""Results: tables of effects, with one number for each place and example, labels and intervals.

A place is one index of the table, such as layer 3 and head 5. The base is the metric of the run
that is edited, before the edit. The target is the metric of the run that the values come from. In
activation patching with the direction `denoising`, the base is the corrupted run, and the target is
the clean run.
"""

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
from jaxtyping import Bool, Float
from torch import Tensor

from hooks.base import (
    WordsOfTexts,
    are_metric_rounding,
    explains_calls,
    is_cancelled,
    is_rounding,
    library,
    number_of,
    require_integer,
    require_kind,
    shown,
    storage,
    unknown_name,
    warn,
    without_hashes,
)
from interp import plots
from interp.inputs.token_positions import short
from interp.json_form import Table, form
from interp.numbers.intervals import (
    Interval,
    auroc_interval,
    interval,
    interval_text,
    share_interval,
)
from interp.plots.view import FIGURES
from interp.results.entries import Entries, Entry, sizes_in_words
from interp.results.node import NodeName, as_fact, from_fact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from interp.plots.figure import Picture

_FORMAT = "hookscope-result-2"
_TUPLES = ("axes", "bounds", "counts", "groups")
_LARGEST_SHARE = 10
# The printed result explains a share beyond this number.
_USUAL_SHARE = 1.5
_SHARES = "shares of target - base"
_BEYOND = (
    "a share beyond 1 is a change of the metric that is larger than target - base; other places "
    "work against it, or target - base is small"
)
_TEXTS_OF_RUNS = {
    "denoising": (" (corrupted texts)", " (clean texts)"),
    "noising": (" (clean texts)", " (corrupted texts)"),
}
"""The texts of the base run and of the target run, by the direction of patching."""

# `help` prints these names instead of the types.
LabelsByAxis = Mapping[str, Sequence[Any]]
MaskOfValues = Bool[Tensor, "*#axes #example"]


@dataclass(frozen=True, eq=False, repr=False)
class Result(plots.Shown):
    """Effects, metric(edited) - metric(base), at labelled places, for each example.

    A place has one label along each axis except `example`, such as layer 23 and head 3. Means and
    intervals are over examples, usually texts: each text counts alike, whatever its length. A
    printed result shows the three places with the largest absolute mean effects; `top(k)` returns
    more, and `to_dataframe()` all of them.

    Attributes:
        values: the effects, in `unit`. The last axis is `example`. If an effect is NaN, the mean
            and the interval of its place are NaN, and the place is the last in `top`.
        axes: the names of the axes of `values`.
        base: for each example, the metric of the run that is edited, without the edit; None without
            such a run.
        target: for each example, the metric of the run that values are taken from; None without
            such a run.
        labels: by axis, a number or a text for each index. Default: numbers from 0.
        words: by axis, the text at each index, such as the token at a position. If the texts have
            two different tokens there, both, as in "Mary|John": for one pair, the token of the
            clean text comes first. Empty if the texts have more than two tokens there. `select`
            accepts a token that no text has at another index.
        unit: the unit of the metric, such as `logits`; values, base and target have this unit.
        about: other facts that fit JSON, such as the metric, the direction and the site.
        is_ratio: whether the effects were divided by the mean of target - base; see `normalized`.
            Intervals then take into account that this mean is uncertain too.
        bounds: the smallest and the largest possible value; None without bounds.
        counts: for AUROCs of folds, the mean number of different texts of each kind in a fold.
        groups: the number of each example's text. Examples of one text share a number, and
            intervals count them once. None if all examples have different texts.
        exists: True at the values that exist, with the axes of `values`. An axis has the size 1 if
            its indices do not differ. For example, texts of unequal lengths do not have all
            positions: the values at padding are 0, and means, intervals, `top` and tables of places
            leave them out. None if all values exist.

    Raises:
        ValueError: if axes, labels, base, target, groups or exists do not fit the values, or there
            are no values.

    >>> values = torch.tensor([[1.0, 3.0, 2.5, 1.5], [0.0, -0.5, 0.0, -0.5]])  # [layer, example]
    >>> base, target = torch.tensor([-1.0, -2.0, -1.0, -2.0]), torch.tensor([3.0, 2.0, 2.0, 3.0])
    >>> result = Result(values, ("layer", "example"), base, target, {"layer": [4, 5]}, "logits")
    >>> result.mean(), result.normalized().mean()
    (tensor([ 2.0000, -0.2500]), tensor([ 0.5000, -0.0625]))
    >>> result
    Result: 2 layers, mean logits of 4 texts
      base -1.5, target +2.5
      layer 4  +2  [+0.5474, +3.453]
      layer 5  -0.25  [-0.7093, +0.2093]

    The second of two texts has only one position:

    >>> exists = torch.tensor([[True, True], [True, False]])
    >>> Result(torch.tensor([[2.0, 4.0], [1.0, 0.0]]), ("pos", "example"), exists=exists).top()
    pos 0  +3
    pos 1  +1 (1 of 2 texts)
    """

    values: Float[Tensor, "*axes example"]
    axes: tuple[str, ...]
    base: Float[Tensor, " example"] | None = None
    target: Float[Tensor, " example"] | None = None
    labels: "LabelsByAxis" = field(default_factory=dict)
    unit: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    is_ratio: bool = False
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    counts: tuple[float, float] | None = None
    groups: tuple[int, ...] | None = None
    exists: "MaskOfValues | None" = None

    is_plot = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        if self.groups is not None:
            object.__setattr__(self, "groups", tuple(map(int, self.groups)))
        _check(self)
        if self.exists is not None and self.exists.all():
            object.__setattr__(self, "exists", None)
        sizes = zip(self.axes, self.values.shape, strict=True)
        labels = {axis: tuple(self.labels.get(axis, range(size))) for axis, size in sizes}
        object.__setattr__(self, "labels", labels)
        if self.is_ratio:
            self._runs()

    @property
    def shape(self) -> torch.Size:
        """The shape of `values`."""
        return self.values.shape

    def __getitem__(self, index: Any) -> Any:
        """Raise an error, because a result cannot be indexed.

        The error names `select` for a label or a word, and otherwise `values` and `mean`.
        """
        for axis in self.axes:
            if index in (*self.labels[axis], *self.words.get(axis, ())) and isinstance(index, str):
                raise TypeError(f"a result cannot be indexed: write .select({axis}={index!r})")
        raise TypeError(
            "a result cannot be indexed: use .values[...] with the axes "
            f"{' '.join(self.axes)}, .mean(), .top(k), or .select with an axis and a label"
        )

    @explains_calls
    def mean(self) -> Float[Tensor, "*axes"]:
        """Return the mean effect over examples, in `unit`.

        The mean of a place is over the examples in which the place exists. It is NaN if the place
        exists in no example.

        >>> Result(torch.tensor([[1.0, 3.0], [0.0, -1.0]]), ("layer", "example")).mean()
        tensor([ 2.0000, -0.5000])
        """
        if self.exists is None:
            return self.values.mean(-1)
        exists = self.exists
        count = exists.expand(self.values.shape).sum(-1)
        mean = self.values.where(exists, 0).sum(-1) / count
        if not self.is_ratio:
            return mean
        # A share is a mean divided by the mean of target - base over the same examples.
        base, target = self._runs()
        gaps = (target - base).expand(self.values.shape)
        return mean / (gaps.where(exists, 0).sum(-1) / count)

    def _rows(self) -> tuple[Float[Tensor, "place example"], Bool[Tensor, "place example"] | None]:
        """Return the values of each place, and whether they exist; None if all exist."""
        n_examples = self.values.shape[-1]
        exists = self.exists
        if exists is not None:
            exists = exists.expand(self.values.shape).reshape(-1, n_examples)
        return self.values.reshape(-1, n_examples), exists

    def existing(self, order: Sequence[int]) -> list[int]:
        """Return the places of a list that exist in an example, in the same order.

        Args:
            order: the numbers of the places, counted over all axes except `example`.
        """
        exists = self._rows()[1]
        if exists is None:
            return [*order]
        is_existing = exists.any(-1).tolist()
        return [place for place in order if is_existing[place]]

    @explains_calls
    def interval(self, confidence: float = 0.95) -> Interval:
        """Return the confidence interval of `mean()` at each place, in `unit`.

        The interval is Student's or, for a ratio, Fieller's, and is widened for skewed examples.
        Shares, AUROCs and other numbers with bounds have intervals inside these bounds, such as
        Wilson's. Examples of one text count once, see `groups`. The ends are NaN with fewer than
        three texts, or four texts for `normalized()`, because these are too few for an interval.
        The ends are infinite if target - base is so uncertain that the ratio has no bound. See
        `interp.numbers.intervals`.

        Args:
            confidence: the probability that the interval contains the true mean, between 0 and 1.
                Default: 0.95.

        Returns:
            The lower and the upper ends, `low` and `high`, with the axes of `mean()`.

        Raises:
            ValueError: if confidence is not between 0 and 1.
        """
        ends = self._interval(*self._rows(), confidence)
        return Interval(*(end.to(self.values).view(self.values.shape[:-1]) for end in ends))

    def _interval(
        self,
        rows: Float[Tensor, "place example"],
        exists: Bool[Tensor, "place example"] | None,
        confidence: float = 0.95,
    ) -> Interval:
        """Return the interval of the mean of each row, of the kind that fits this result.

        Args:
            rows: the values of some places.
            exists: True at the values that exist; None if all exist.
            confidence: the probability with which intervals contain the true mean, such as 0.95.
        """
        if exists is None:
            return self._interval_of(rows, slice(None), confidence)
        ends = torch.full((2, len(rows)), math.nan, dtype=torch.float64)
        # Places that exist in the same examples are computed together.
        patterns, pattern_of_row = exists.cpu().unique(dim=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            examples = pattern.nonzero().flatten().tolist()
            if examples:
                places = (pattern_of_row == number).nonzero().flatten()
                part = rows[places.to(rows.device)][:, examples]
                ends[:, places] = torch.stack(self._interval_of(part, examples, confidence))
        return Interval(*ends)

    def _interval_of(
        self,
        rows: Float[Tensor, "place _n"],
        examples: "slice | list[int]",
        confidence: float,
    ) -> Interval:
        """Return the interval of the mean of each row over some examples.

        Args:
            rows: the values of these examples at some places.
            examples: the examples.
            confidence: the probability with which intervals contain the true mean, such as 0.95.
        """
        groups = self.groups
        if groups is not None and not isinstance(examples, slice):
            groups = tuple(groups[example] for example in examples)
        gap = None
        if self.counts is not None:
            return auroc_interval(rows, self.counts, confidence)
        if self.bounds is not None:
            return share_interval(rows, self.bounds, confidence=confidence, groups=groups)
        if self.is_ratio:
            base, target = self._runs()
            gap = (target - base)[examples]
        return interval(rows, gap=gap, confidence=confidence, groups=groups)

    def _runs(self) -> tuple[Float[Tensor, " example"], Float[Tensor, " example"]]:
        """Return the base and the target, or raise an error if one of them is missing."""
        if self.base is None or self.target is None:
            missing = [name for name in ("base", "target") if getattr(self, name) is None]
            raise ValueError(
                "normalized() needs a result with a base and a target, such as the result of "
                'sweep(model, pairs, edits, direction="denoising"); got a result without '
                f"{' and '.join(missing)}"
            )
        return self.base, self.target

    @explains_calls
    def normalized(self, per_example: bool = False) -> "Result":
        """Return the effects as shares of target - base: 0 is the base run and 1 is the target run.

        All values are divided by the mean of target - base, so means and intervals belong to the
        ratio. A mean of the shares of single examples would depend most on the examples with nearly
        equal runs. At a place that only some texts have, `mean` divides the mean effect on these
        texts by the mean of target - base of these texts.

        Args:
            per_example: whether to divide the effects of each example by its own target - base
                instead.

        Warns:
            UserWarning: if base and target are equal up to rounding. If their means are equal, all
                shares are NaN. With `per_example`, examples with equal base and target are left
                out. Also if the mean of target - base is small: the mean effect of a place is more
                than 10 times as large, or its 95% interval, of at least four texts, contains 0.

        Raises:
            ValueError: if base or target is missing, or they are equal in all examples.

        >>> base, target = torch.tensor([-1.0, -2.0]), torch.tensor([3.0, 4.0])
        >>> effects = Result(torch.tensor([[1.0, 3.0]]), ("layer", "example"), base, target)
        >>> effects.normalized().mean()  # the mean effect 2 divided by the mean difference 5
        tensor([0.4000])

        A printed result says which run is 0 and which is 1. In a result of `activation_patching`,
        the base is the run that is edited, and the target is the run that the values come from:

        >>> print(str(effects.normalized()).splitlines()[0])
        Result: 1 layer, mean of 2 texts, in shares of target - base (0: base, 1: target)
        """
        result = shares_of(self, per_example)
        # Shares were divided before.
        if not self.is_ratio:
            _warn_of_small_gap(self)
        return result

    def select(self, **where: Any) -> "Result":
        """Return the part at some labels: `result.select(layer=3, head=[0, 5], component="m*")`.

        A single label removes its axis and is recorded in `about`. A list keeps the axis. A pattern
        with the wildcards `*` and `?` keeps the axis too, and selects all matching labels. The axis
        `example` is always kept.

        Args:
            where: by axis, a label, a word, a list of these, or a pattern.

        Raises:
            UnknownNameError: if the result does not have the axis.
            ValueError: if an axis does not have the label, or has it more than once; or if a text
                has the word at another place of the axis. The error names these places.

        >>> result = Result(torch.zeros(2, 3, 5), ("layer", "head", "example"))
        >>> result.select(layer=1, head=[0, 2]).axes
        ('head', 'example')
        """
        result = self
        for axis, selected in where.items():
            result = result._select(axis, selected)
        return result

    def _select(self, axis: str, selected: Any) -> "Result":
        """Return the part at some labels of one axis; see `select`."""
        if axis not in self.axes:
            raise unknown_name(axis, self.axes, "axis of this result")
        is_list = isinstance(selected, (list, tuple, range))
        indices: list[int] = []
        for label in selected if is_list else [selected]:
            indices += self._indices(axis, label)
        part = self._at(axis, indices)
        if is_list or axis == "example" or self._is_pattern(axis, selected):
            return part
        dim = self.axes.index(axis)
        exists = None if part.exists is None else part.exists.squeeze(dim)
        about = {**self.about, axis: part.labels[axis][0]}
        return part._without(axis, part.values.squeeze(dim), exists=exists, about=about)

    def _at(self, axis: str, indices: Sequence[int]) -> "Result":
        """Return the part at some indices of an axis, and keep the axis."""
        indices = [*indices]
        dim = self.axes.index(axis)
        at = (slice(None),) * dim + (indices,)
        values = self.values[at]
        exists = self.exists
        if exists is not None and exists.shape[dim] > 1:
            exists = exists[at]
        labels = {**self.labels, axis: [self.labels[axis][index] for index in indices]}
        words = {**self.words}
        if axis in words:
            words[axis] = [words[axis][index] for index in indices]
        if axis != "example":
            return replace(self, values=values, exists=exists, labels=labels, words=words)
        part = replace(
            self,
            values=values,
            exists=exists,
            labels=labels,
            base=None if self.base is None else self.base[indices],
            target=None if self.target is None else self.target[indices],
            groups=None if self.groups is None else tuple(self.groups[index] for index in indices),
        )
        # Divide again, because the mean of target - base is now over fewer examples.
        return part.normalized() if self.is_ratio else part

    def _without(
        self, axis: str, values: Tensor, exists: Tensor | None, **changes: Any
    ) -> "Result":
        """Return a result without one axis.

        Args:
            axis: the axis.
            values, exists: the values without this axis, and whether they exist.
            changes: other changed attributes.
        """
        labels = {**self.labels}
        words = {**self.words}
        del labels[axis]
        words.pop(axis, None)
        return replace(
            self,
            values=values,
            exists=exists,
            axes=tuple(labels),
            labels=labels,
            words=words,
            **changes,
        )

    def _is_pattern(self, axis: str, label: Any) -> bool:
        """Return True for a text with a wildcard that is not itself a label or word of the axis."""
        is_known = label in self.labels[axis] or label in self.words.get(axis, ())
        return isinstance(label, str) and not is_known and ("*" in label or "?" in label)

    def _indices(self, axis: str, label: Any) -> list[int]:
        """Return the index of a label or word; for a pattern, the indices of all matching labels.

        Raises:
            ValueError: if no label matches, or if several labels are equal to the label.
        """
        labels = self.labels[axis]
        if self._is_pattern(axis, label):
            texts = enumerate(map(str, labels))
            matches = [index for index, text in texts if fnmatch.fnmatchcase(text, label)]
            if not matches:
                raise ValueError(
                    f"{axis} must match a label of {short(labels)}; got {shown(label)}"
                )
            return matches
        if labels.count(label) == 1:
            return [labels.index(label)]
        words = self.words.get(axis, ())
        matches = []
        for index, word in enumerate(words):
            # The label of an index is empty if the texts have more than two words there.
            if label and label in (word, *_words_of_texts(word)):
                matches.append(index)
        if len(matches) == 1:
            return matches
        if matches:
            places = [repr(labels[index]) for index in matches]
            calls = " or ".join(f"{axis}={place}" for place in places)
            raise ValueError(
                f"{axis} must be one place; got {shown(label)}, which texts have at "
                f"{' and '.join(places)}: write {calls}"
            )
        known = [word for word in words if word]
        of_words = f" or a unique word of {short(known)}" if known else ""
        hint = ""
        if isinstance(label, int) and label < 0 and len(labels) >= -label:
            hint = f"; counted from the end, this is {labels[label]!r}"
        raise ValueError(
            f"{axis} must be a unique label of {short(labels)}{of_words}; got {shown(label)}{hint}"
        )

    @explains_calls
    def by(self, what: Literal["layer", "head", "neuron", "expert"]) -> "Result":
        """Return the result with the axis `layer` and another axis instead of an axis of nodes.

        The nodes, such as `a2.h1` and `m2`, are components, or writers of a graph.

        Args:
            what: the nodes to return. `head`: the heads as [layer, head]. `neuron`: the neurons as
                [layer, neuron]. `expert`: the experts as [layer, expert]. `layer`: all nodes of
                layers as [layer, part], where parts are names without the layer, such as `a.h1` and
                `m`.

        Returns:
            The result with the two axes in the place of the axis of nodes. No values are added up;
            `.by("layer").sum("part")` is the sum of each layer. Values are NaN for a node that is
            missing in a layer.

            All other nodes are left out: with `layer`, the nodes outside of the layers, such as
            `embed` and `ln_final.bias`. So the sum over the result is not the sum over all nodes.
            `about` and the printed result say which nodes were left out.

        Raises:
            UnknownNameError: if `what` is unknown.
            ValueError: if no axis has nodes of this kind.

        >>> from interp.results.node import NodeName, node_name
        >>> heads = [node_name(layer, "head", head) for layer in (0, 1) for head in (0, 1)]
        >>> nodes = [NodeName("embed"), *heads, node_name(0, "mlp"), node_name(1, "mlp")]
        >>> values, axes = torch.arange(7.0)[:, None], ("component", "example")
        >>> result = Result(values, axes, labels={"component": nodes})
        >>> result.by("head").mean()
        tensor([[1., 2.],
                [3., 4.]])
        >>> result.by("head").about["left out"]
        'embed, 2 mlps'
        >>> result.by("layer").select(part="m").mean()
        tensor([5., 6.])
        >>> result.by("layer").about["left out"]
        'embed'
        """
        ways = ("layer", "head", "neuron", "expert")
        if what not in ways:
            raise unknown_name(what, ways, "way to regroup")
        axis, index_of = self._nodes(what)
        part_axis = "part" if what == "layer" else what
        layers = sorted({layer for layer, _ in index_of})
        parts = [*dict.fromkeys(part for _, part in index_of)]
        if part_axis != "part":
            parts = sorted(parts)
        indices = []
        for layer in layers:
            indices.append([index_of.get((layer, part), -1) for part in parts])
        index = torch.tensor(indices, device=self.values.device)
        dim = self.axes.index(axis)
        values = self.values.movedim(dim, 0)[index]  # [layer, part, *other axes]
        is_node = index.view(*index.shape, *[1] * (values.ndim - 2)) >= 0
        values = values.where(is_node, torch.nan)
        exists = self.exists
        if exists is not None:
            # No axis of nodes has padding, so the two new axes have the size 1.
            exists = exists.unsqueeze(dim)
        about = dict(self.about)
        kept = {*index_of.values()}
        left_out = [node for n, node in enumerate(self.labels[axis]) if n not in kept]
        if left_out:
            about["left out"] = _nodes_in_words(left_out)
        labels = {**self.labels, "layer": layers, part_axis: parts}
        words = {**self.words}
        labels.pop(axis, None)
        words.pop(axis, None)
        return replace(
            self,
            values=values.movedim((0, 1), (dim, dim + 1)),
            exists=exists,
            axes=(*self.axes[:dim], "layer", part_axis, *self.axes[dim + 1 :]),
            about=about,
            labels=labels,
            words=words,
        )

    def _nodes(self, what: str) -> tuple[str, dict[tuple[int, Any], int]]:
        """Return the first axis with nodes of a kind, and the indices of these nodes.

        Args:
            what: the kind of the nodes; `layer` stands for all kinds.

        Returns:
            The name of the axis, and the index of each node by its layer and its number. For
            `layer`, the part of the block, such as `a.h1`, is in the place of the number.
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
            f"by({what!r}) needs an axis whose labels are nodes (NodeName) with a {what}; "
            f"got {self.axes}"
        )

    @explains_calls
    def sum(self, axis: str) -> "Result":
        """Return the effects added up along an axis, for example over all heads.

        Values that do not exist, such as effects at padding, add 0.

        Args:
            axis: the axis, which the returned result does not have.

        Raises:
            UnknownNameError: if the axis does not exist.
            ValueError: if the axis is `example`, for which there is `mean`.

        >>> heads = Result(torch.tensor([[[1.0], [2.0]]]), ("layer", "head", "example"))
        >>> heads.sum("head").mean()
        tensor([3.])
        """
        if axis not in self.axes:
            raise unknown_name(axis, self.axes, "axis of this result")
        if axis == "example":
            raise ValueError("axis must not be 'example': use mean() for the mean over examples")
        dim = self.axes.index(axis)
        values = self.values
        exists = None
        if self.exists is not None:
            values = values.where(self.exists, 0)
            exists = self.exists.any(dim)
        return self._without(axis, values.sum(dim), exists=exists, bounds=None, counts=None)

    def __sub__(self, other: "Result") -> "Result":
        """Return the difference between the effects of two results, for each example.

        Both results have the same axes, labels, unit and texts. The difference has the base, the
        target and the facts that are the same in both results.

        Raises:
            ValueError: if axes, labels, unit or texts differ, or the results are normalized by
                different runs.
        """
        if not isinstance(other, Result):
            return NotImplemented
        _require_comparable(self, other)
        base = _same(self.base, other.base)
        target = _same(self.target, other.target)
        if self.is_ratio and (base is None or target is None):
            raise ValueError(
                "shares must be normalized by the same runs: subtract the effects first, then "
                "normalize"
            )
        bounds = None
        if self.bounds is not None and other.bounds is not None:
            bounds = self.bounds[0] - other.bounds[1], self.bounds[1] - other.bounds[0]
        return replace(
            self,
            values=self.values - other.values,
            base=base,
            target=target,
            about=_common(self.about, other.about),
            words=_common(self.words, other.words),
            bounds=bounds,
            counts=None,
            groups=other.groups if self.groups is None else self.groups,
            exists=_both(self.exists, other.exists),
        )

    @explains_calls
    def top(self, k: int = 10, largest: bool | None = None) -> Entries:
        """Return the `k` places with the largest absolute mean effects, with their 95% intervals.

        Places that exist in no example are left out. Places whose mean is NaN come last, and are
        printed as `NaN, not ranked`.

        Args:
            k: the number of places. Default: 10.
            largest: True ranks by the mean effect, the largest first. False ranks by the mean
                effect, the smallest first, so negative effects come before positive effects.
                Default: None, the largest absolute value first.

        Returns:
            Entries with the labels, the mean effect and the ends of the interval.

        Raises:
            ValueError: if `k` is below 1.
            TypeError: if `largest` is not True, False or None.

        >>> result = Result(torch.tensor([[1.0, 3.0], [0.0, -1.0]]), ("layer", "example"))
        >>> result.top(1)
        layer 0  +2
        >>> result.top(1, largest=False)
        layer 1  -0.5
        """
        require_integer("k", k)
        require_kind("largest", largest, (bool, type(None)), "True, False or None")
        means = self.mean().flatten()
        ranked = means.abs()
        if largest is not None:
            ranked = means if largest else -means
        order = ranked.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True).tolist()
        return self.places(self.existing(order)[:k])

    def places(self, indices: Sequence[int]) -> Entries:
        """Return the entries of some places.

        Args:
            indices: the numbers of the places, counted over all axes except `example`.
        """
        rows, exists = self._rows()
        examples = [""] * len(rows)
        if exists is not None:
            n_examples = rows.shape[-1]
            for place, count in enumerate(exists.sum(-1).tolist()):
                if count < n_examples:
                    examples[place] = f"{count} of {n_examples} texts"
        rows = rows[indices]
        low, high = self._interval(rows, None if exists is None else exists[indices])
        means = self.mean().flatten()[indices]
        numbers = zip(means.tolist(), low.tolist(), high.tolist(), strict=True)
        are_small = self._are_rounding(rows)
        places = []
        for place, (mean, start, end), is_small in zip(indices, numbers, are_small, strict=True):
            index_along_axes = map(int, np.unravel_index(place, self.values.shape[:-1]))
            index = dict(zip(self.axes[:-1], index_along_axes, strict=True))
            entry = Entry(
                where={axis: self.labels[axis][n] for axis, n in index.items()},
                effect=mean,
                low=start,
                high=end,
                words={
                    axis: self.words[axis][n] for axis, n in index.items() if axis in self.words
                },
                together=self.about.get("together", ""),
                is_rounding=is_small,
                examples=examples[place],
            )
            places.append(entry)
        return Entries(places)

    def _are_rounding(self, rows: Float[Tensor, "place example"]) -> list[bool]:
        """Return whether the effects of each place are only the rounding of the metric.

        This is known for effects on a metric of logits: its unit is `logits` or `nats`.
        """
        if self.base is None or self.unit not in ("logits", "nats"):
            return [False] * len(rows)
        return are_metric_rounding(rows, self.base).tolist()

    @explains_calls
    def plot(
        self,
        facet: str | None = None,
        *,
        title: str | None = None,
        limit: float | None = None,
        ax: "Axes | None" = None,
    ) -> "Figure | Picture":
        """Plot the mean effects: a heat map for two axes, or bars with 95% intervals for one axis.

        White is 0. If target and base exist, the range of colours includes their difference, so
        that small effects look small. It does not if the largest effect is between 0.5 % and 10 %
        of the difference, because all effects would be white. The range includes values below 0
        only if a mean is below 0. This needs the extra `plots`.

        One axis with all heads of several layers, such as senders of `path_patching`, is drawn as a
        heat map of layers and heads, as by `by("head")`.

        The result is a figure of matplotlib, which you can change: `figure.set_size_inches(4, 3)`
        is its size, and `figure.save("heads.pdf")` writes a file.

        Args:
            facet: for three axes, the axis with a heat map for each label.
            title: the title. Default: a sentence for the logit difference and for log
                probabilities, such as "Share of the logit difference restored, by head", with other
                facts in parentheses; otherwise a list of the facts in `about`.
            limit: the end of the range of colours, in the unit of the result: from -limit to limit,
                or from 0 if no mean is below 0. Larger effects have the last colour, and the scale
                then ends in an arrow. For bars, the end of the axis. Default: see above.
            ax: axes of a figure of your own to draw in, for a plot that is one panel of several.
                Default: the axes of a new figure.

        Raises:
            UnknownNameError: if the axis does not exist.
            ValueError: if the result does not have one or two axes besides `example` and the facet,
                the limit is not a positive number, or both `ax` and a facet are given.
            TypeError: if `ax` is not the axes of a figure, or the limit is not a number.
        """
        from interp.plots.matplotlib_figures import effects

        return effects(self, facet, title=title, limit=limit, ax=ax)

    def to_dataframe(self) -> Any:
        """Return a pandas table with a row for each place that exists in an example.

        The columns are the labels and words of each axis, `effect` (the mean), and `low` and `high`
        (the 95% interval). This needs the extra `tables` (pandas).

        Raises:
            ImportError: if pandas is not installed.
        """
        pandas = library("pandas", extra="tables")
        rows = []
        for place in self.places(self.existing(range(self.values[..., 0].numel()))):
            words = {f"{axis}_word": word for axis, word in place.words.items()}
            numbers = {"effect": place.effect, "low": place.low, "high": place.high}
            rows.append({**place.where, **words, **numbers})
        return pandas.DataFrame(rows)

    def tables(self, name: str = "effect") -> dict[str, Table]:
        """Return the tables of this result in the JSON form; see `interp.json_form`.

        Args:
            name: the name of the table of `values`, which begins the names of the other tables.
        """
        axes = " ".join(self.axes[:-1])
        low, high = self.interval()
        of_places = {"mean": self.mean(), "low": low, "high": high}
        values = self.values
        if self.exists is not None:
            values = values.where(self.exists, torch.nan)
        tables = {name: Table(values, " ".join(self.axes), self.unit, self.labels)}
        for part, values in of_places.items():
            tables[f"{name}.{part}"] = Table(values, axes, self.unit, self.labels)
        for part in ("base", "target"):
            if (values := getattr(self, part)) is not None:
                tables[f"{name}.{part}"] = Table(values, "example", self.unit, self.labels)
        for axis, words in self.words.items():
            tables[f"{name}.words.{axis}"] = Table([*words], axis, labels=self.labels)
        return tables

    def as_json(self) -> dict[str, Any]:
        """Return the result in the JSON form of all results; see `interp.json_form`.

        The tables are `effect`, with a number for each example, `effect.mean`, `effect.low` and
        `effect.high` and, if they are known, `effect.base`, `effect.target` and the words of axes.
        """
        return form("Result", self.tables(), self.about)

    def _writers(self) -> dict[str, Callable[[Path], object]]:
        """Return the functions that `save` can call, by suffix."""
        files = dict.fromkeys(storage.SAFETENSORS, self._save)
        return {**super()._writers(), **files, ".csv": self._save_csv}

    def _save_csv(self, path: Path) -> None:
        """Write a table with a row for each place."""
        table = self.to_dataframe()
        with storage.replacing(path) as partial:
            table.to_csv(partial, index=False)

    def _save(self, path: Path) -> None:
        """Write the whole result as tensors and facts, which `load` reads."""
        storage.save(path, _FORMAT, *self.packed())

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the whole result as tensors and facts for a file; see `unpacked`."""
        tensors = {}
        for name in ("values", "base", "target", "exists"):
            if getattr(self, name) is not None:
                tensors[name] = getattr(self, name).detach()
        names = ("axes", "labels", "unit", "about", "is_ratio", "words", *_TUPLES[1:])
        facts = {name: getattr(self, name) for name in names} | {"words": {}}
        facts["labels"] = {axis: [*map(as_fact, labels)] for axis, labels in self.labels.items()}
        for axis, words in self.words.items():
            facts["words"][axis] = [*map(_word_as_fact, words)]
        return tensors, facts

    @classmethod
    def unpacked(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> "Result":
        """Return the result of tensors and facts that `packed` made.

        Args:
            tensors, facts: the two results of `packed`.
        """
        # JSON has lists instead of tuples.
        tuples = {name: tuple(fact) for name, fact in facts.items() if name in _TUPLES and fact}
        labels_by_axis = facts["labels"].items()
        labels = {axis: [*map(from_fact, labels)] for axis, labels in labels_by_axis}
        words = {}
        for axis, facts_of_words in facts["words"].items():
            words[axis] = [*map(_word_from_fact, facts_of_words)]
        attributes: dict[str, Any] = {**tensors, **facts, **tuples, "labels": labels}
        attributes["words"] = words
        return cls(**attributes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Load a result that `save` wrote.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: if the file does not exist.
            CacheError: if the file is damaged, or `save` did not write it.
            ValueError: if `save` wrote another format to the file, which cannot be loaded.
        """
        suffix = storage.path_of(path).suffix.lower()
        if suffix in (".json", ".html", ".csv", *FIGURES):
            raise ValueError(
                "path must be a file that save wrote with the suffix .safetensors, or without a "
                f"suffix; got {os.fspath(path)}, which is for other programs"
            )
        with storage.opened(storage.path_of(path), _FORMAT) as (tensors, facts):
            return cls.unpacked(tensors, facts)

    def view(self) -> plots.View:
        """Return a picture of the mean effects.

        A result with one axis besides `example` is drawn as bars, with two axes as a heat map, and
        with three axes as one heat map for each label of the first axis. With any other number of
        axes, the view is a text that lists the largest means.
        """
        if 2 <= len(self.axes) <= 4:
            return plots.effects(self)
        return plots.View("mean effects", [], says=repr(self).splitlines())

    def __repr__(self) -> str:
        facts = []
        for name, fact in without_hashes(self.about).items():
            facts.append(f"{name}: {fact if isinstance(fact, str) else reprlib.repr(fact)}")
        runs = []
        texts = _TEXTS_OF_RUNS.get(self.about.get("direction", ""), ("", ""))
        metrics = (self.base, self.target)
        for name, text, metric in zip(("base", "target"), texts, metrics, strict=True):
            if metric is not None:
                runs.append(f"{name} {metric.mean().item():+.4g}{text}")
        top = self.top(3)
        lines = [", ".join(facts), ", ".join(runs), *repr(top).splitlines()]
        if self.unit == _SHARES and any(abs(entry.effect) > _USUAL_SHARE for entry in top):
            lines.append(_BEYOND)
        n_places = len(self.existing(range(self.values[..., 0].numel())))
        if n_places > len(top):
            lines.append(f"{len(top)} of {n_places} places; .top(k) shows more")
        return "\n  ".join([self._title(), *filter(None, lines)])

    def _title(self) -> str:
        """Return the first line of the printed result: the axes, the texts and the unit.

        With several texts, it says that the effects are means over texts.
        """
        shape = self.values.shape
        n_examples = shape[-1]
        unit = f", in {self.unit}" if self.unit else ""
        if self.unit == _SHARES:
            unit += " (0: base, 1: target)"
        if n_examples == 1:
            return f"Result: {sizes_in_words(self.axes, shape)}{unit}"
        # The examples of AUROCs are folds.
        examples = number_of(n_examples, "text" if self.counts is None else "fold")
        n_texts = n_examples if self.groups is None else len({*self.groups})
        if n_texts < n_examples:
            examples += f" ({n_texts} different)"
        means = f"mean of {examples}{unit}"
        if self.unit.isalpha():
            means = f"mean {self.unit} of {examples}"
        sizes = sizes_in_words(self.axes[:-1], shape[:-1])
        return f"Result: {', '.join(filter(None, [sizes, means]))}"


def _words_of_texts(word: str) -> tuple[str, ...]:
    """Return the different words of the texts at a position, or the only text of another label."""
    return word.different if isinstance(word, WordsOfTexts) else (word,)


def _word_as_fact(word: str) -> str | list[str]:
    """Return a word for a file: a list of the different words of the texts, or another label."""
    return [*word.different] if isinstance(word, WordsOfTexts) else word


def _word_from_fact(fact: str | list[str]) -> str:
    """Return the word that `_word_as_fact` described."""
    return WordsOfTexts(fact) if isinstance(fact, list) else fact


def _nodes_in_words(nodes: Sequence[Any]) -> str:
    """Return the names of nodes outside of the layers, and the numbers of nodes inside by kind."""
    names = []
    counts: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, NodeName) and node.layer is not None:
            counts[node.kind] = counts.get(node.kind, 0) + 1
        else:
            names.append(str(node))
    return ", ".join([*names, *(number_of(count, kind) for kind, count in counts.items())])


def shares_of(result: Result, per_example: bool = False) -> Result:
    """Return the effects as shares of target - base, without a warning if this mean is small.

    Args:
        result: the effects, with a base and a target.
        per_example: whether to divide the effects of each example by its own target - base.
    """
    base, target = result._runs()
    gap = target - base
    size = torch.maximum(target.abs(), base.abs())
    scale = gap
    if not per_example:
        scale = gap.mean()
        size = size.mean()
    are_equal = is_cancelled(scale, size)
    scale = scale.where(~are_equal, math.nan)
    shares = replace(
        result,
        values=result.values / scale,
        base=torch.zeros_like(base),
        target=gap / scale,
        unit=_SHARES,
        is_ratio=not per_example,
        bounds=None,
        counts=None,
    )
    if not are_equal.any():
        return shares
    if not per_example:
        warn("base and target agree on average: shares are NaN")
        return shares
    n_equal = int(are_equal.sum())
    warn(f"base and target agree in {n_equal} of {len(gap)} examples, which are left out")
    return shares._at("example", (~are_equal).nonzero().flatten().tolist())


def _warn_of_small_gap(result: Result) -> None:
    """Warn if the mean of target - base is too small for shares; see `Result.normalized`."""
    base, target = result._runs()
    gap = target - base
    mean = gap.mean()
    if is_cancelled(mean, torch.maximum(target.abs(), base.abs()).mean()):
        return
    is_small = bool((result.mean().abs() > _LARGEST_SHARE * mean.abs()).any())
    low = high = math.nan
    n_texts = len(gap) if result.groups is None else len({*result.groups})
    # The interval of a ratio begins with four texts.
    if n_texts > 3:
        low, high = (float(end) for end in interval(gap[None], groups=result.groups))
    if is_small or low <= 0 <= high:
        unit = f" {result.unit}" if result.unit else ""
        warn(
            f"the gap between the runs is {mean.item():.2g}{unit}"
            f"{interval_text(low, high, '.2g')}, so shares are not reliable; "
            "use the effects themselves"
        )


def _check(result: Result) -> None:
    """Check that axes, labels, words, base, target and groups fit the values.

    Raises:
        ValueError: if one of them does not fit, or there are no values.
    """
    axes = result.axes
    shape = result.values.shape
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
            f"groups must contain one number for each example, {shape[-1]}; got "
            f"{len(result.groups)}"
        )
    if result.exists is not None:
        sizes_of_mask = [*result.exists.shape]
        fits = len(sizes_of_mask) == len(shape) and all(
            n in (1, size) for n, size in zip(sizes_of_mask, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"exists must have the axes of values {list(shape)}, or the size 1 along an axis; "
                f"got {sizes_of_mask}"
            )
    sizes = dict(zip(axes, shape, strict=True))
    for axis, labels in [*result.labels.items(), *result.words.items()]:
        are_plain = all(isinstance(label, (str, int, float)) for label in labels)
        if not are_plain or sizes.get(axis) != len(labels):
            raise ValueError(
                f"labels must be numbers or text, one for each index of {sizes}; "
                f"got {len(labels)} for {axis!r}, {short(labels)}"
            )


def _require_comparable(first: Result, second: Result) -> None:
    """Check that two results have the same axes, labels, unit and, if these are known, texts.

    Raises:
        ValueError: if one of them differs.
    """
    for name in ("axes", "labels", "unit"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            raise ValueError(f"both must have the same {name}; got {ours!s:.60} and {theirs!s:.60}")
    texts = [result.about["texts"] for result in (first, second) if "texts" in result.about]
    if len(texts) == 2 and texts[0] != texts[1]:
        raise ValueError(
            "both results must have the same texts in the same order; got different texts"
        )


def _same(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """Return the metric of a run if both results have the same metric; None otherwise."""
    if ours is None or theirs is None or not is_rounding(ours, theirs).all():
        return None
    return ours


def _both(ours: MaskOfValues | None, theirs: MaskOfValues | None) -> MaskOfValues | None:
    """Return whether the values exist in both of two results; None if all exist."""
    if ours is None or theirs is None:
        return theirs if ours is None else ours
    return ours & theirs.to(ours.device)


def _common(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are the same in two mappings."""
    return {name: fact for name, fact in ours.items() if theirs.get(name) == fact}
