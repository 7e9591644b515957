"""Sites: the places where runs are compared, and the axes of the result.

A site is the last part of a point's name, such as `resid_pre`. It means the point with this name
in every layer.

Activation patching of `resid_pre` over `layer` and `pos`, in a model of 2 layers and texts of 3
tokens:

1. `named` finds the points: `{0: "blocks.0.resid_pre", 1: "blocks.1.resid_pre"}`.
2. `Sites.places` lists the places along each axis. A place is a label and its selection:
   `{"layer": [(0, {"layer": "blocks.0.resid_pre"}), (1, ...)],
   "pos": [(0, {"pos": slice(0, 1)}), (1, ...), (2, ...)]}`.
3. `Sites.edits` makes six edits, one for each pair of a layer and a position, in order: layer 0 at
   positions 0, 1, 2, then layer 1.
4. `Sites.result` reshapes the six effects to [layer, pos, example], and labels positions with the
   words of both texts.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import ActivationCache, HookedRunner, Point, UnknownNameError
from hooks.base import layer_of, require_integer, require_kind, shown, to_device, unknown_point
from hooks.shared import names_by_layer
from interp.edits import Edit
from interp.edits import replace as replace_values
from interp.inputs.cached import mask_of
from interp.protocol import has_text_of_logits, is_of_text, require_points
from interp.results.result import Result
from interp.runs.edited import edit_of_texts
from interp.runs.runs import Runs

SELECTS: Mapping[str, tuple[str, ...]] = {
    "pos": ("pos",),
    "span": ("pos",),
    "feature": ("feature",),
    "head": ("head", "kv_head"),
    "neuron": ("d_mlp",),
    "expert": ("expert",),
    "query": ("query",),
    "key": ("key",),
    "encoder_pos": ("encoder_pos",),
}
"""The axes of a result besides `layer`, with the matching axes of points."""
_OF_PROMPTS = ("pos", "query", "key")
PatchPlace = tuple[int | str, dict[str, Any]]
"""A label and its selection by axis. The selection along `layer` is the name of a point."""
Some = int | Sequence[int] | None
"""One layer or head, several of them, or None for all."""
T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """A choice of places to compare, from the arguments that all analyses of sites share.

    Attributes:
        site: the point, such as `resid_pre` of each layer.
        over: the axes of the result; None for the usual axes of the site.
        layers, heads: the layers or heads to select; None for all.
        neurons: the number of neighbouring neurons in one place; None for 1.
    """

    site: str = "resid_pre"
    over: Sequence[str] | None = None
    layers: Some = None
    heads: Some = None
    neurons: int | None = None


def named(runner: HookedRunner, choice: Choice) -> dict[int, str]:
    """Return the names of the points of a choice by layer.

    A point outside the layers, such as `embed`, has the key 0.

    Args:
        runner: the runner of the model.
        choice: the choice of places.

    Raises:
        TypeError: if the site is not a name, or the model has no points yet.
        UnknownNameError: if the model does not have the point.
        ValueError: if a layer does not exist.
    """
    if not isinstance(choice.site, str):
        remedy = "pass a metric to Pairs instead"
        if isinstance(choice.site, list | tuple):
            remedy = "call the analysis for each site; `sweep` edits several points together"
        raise TypeError(
            f"site must be a name, such as 'resid_pre'; got {shown(choice.site)} ({remedy})"
        )
    points = runner.points
    if choice.site in points and layer_of(choice.site) is None:
        if choice.layers is not None:
            raise ValueError(
                f"layers must be None for {choice.site!r}, which is not in a layer; got "
                f"{choice.layers}"
            )
        return {0: choice.site}
    try:
        by_layer = names_by_layer(choice.site, points)
    except UnknownNameError:
        # If there are points with this name, the error of `names_by_layer` explains the ambiguity.
        if any(name.endswith(f".{choice.site}") for name in points):
            raise
        require_points(runner)
        raise unknown_point(choice.site, _short_names(choice.site, points), "site") from None
    return _some("layers", by_layer, choice.layers)


def _short_names(site: str, points: Iterable[str]) -> list[str]:
    """Return the names of sites as users write them, for the error of an unknown site.

    They have no layer. If the unknown name has no dot, they also have no module, unless two modules
    have points with the same name.

    >>> _short_names("zz", ["embed", "blocks.0.ln1.scale", "blocks.0.attn.z", "blocks.0.ln2.scale"])
    ['embed', 'ln1.scale', 'z', 'ln2.scale']
    >>> _short_names("atn.z", ["embed", "blocks.0.attn.z"])
    ['embed', 'attn.z']
    """
    sites = [*dict.fromkeys(name.partition(f".{layer_of(name)}.")[2] or name for name in points)]
    if "." in site:
        return sites
    last_parts = Counter(name.rpartition(".")[2] for name in sites)
    short = {name: name.rpartition(".")[2] for name in sites}
    return [short[name] if last_parts[short[name]] == 1 else name for name in sites]


class Sites:
    """The places of one site where two runs are compared, or where an edit is made.

    1. Find the points of the site by layer.
    2. Cache their values in the source run. Without a source, an edit brings the new values; then
       the value of one point in the run to edit is cached to find the sizes.
    3. List the places along each axis of the result. A place is a label and its selection.

    Args:
        runs: the two runs, or one run that is edited, without a source.
        choice: the choice of places.
        edit: the edit that is made at each place. Default: None, if the values of the source
            replace the values at each place.

    Attributes:
        runs: the runs.
        edit: the edit that is made at each place; None for values of the source.
        names: the names of the points, by layer.
        points: the points, by name.
        values: the cached values of step 2.
        places: the places along each axis.
        prompts: True at the tokens of prompts, [row, column], if the texts that the points read are
            continued by answers of several tokens; otherwise None. Places along positions are
            positions of prompts.

    Raises:
        TypeError, UnknownNameError: for the reasons of `named`.
        ValueError: for the reasons of `named`, if the site does not have the axes, if places do not
            correspond, or if two runs are compared and the texts of one run are missing.
    """

    def __init__(self, runs: Runs, choice: Choice, edit: Edit | None = None) -> None:
        self.runs = runs
        self.edit = edit
        self._choice = choice
        self.names = named(runs.runner, choice)
        names = [*self.names.values()]
        self.points = {name: runs.runner.points[name] for name in names}
        has_answers = runs.rows is not runs.pairs and has_text_of_logits(names[0])
        self.prompts = runs.prompts.cpu() if has_answers else None
        is_edit = not runs.has_source
        self._source = None if is_edit else runs.other
        self.values = runs.capture(runs.text, names[0]) if is_edit else runs.source(names)
        value = self.values[names[0]]
        axes = self.values.axes(names[0]) or tuple(map(str, range(value.ndim)))
        sizes = dict(zip(axes, value.shape, strict=True))
        self.places = {axis: self._along(axis, sizes) for axis in self._over(sizes)}

    @property
    def labels(self) -> dict[str, list[int | str]]:
        """The labels along each axis."""
        labels = {}
        for axis, places in self.places.items():
            labels[axis] = [label for label, _ in places]
        return labels

    def edit_at(self, **selected: Any) -> Edit:
        """Return the edit of one place of a point.

        Args:
            selected: the selection of the place, by axis names.
        """
        if self.edit is not None:
            return self.edit.at(**selected)
        return replace_values(self.values, **selected)

    def of_texts(self, edit: Edit, point: Point) -> Edit:
        """Return an edit of the texts as an edit of the rows that are run.

        Edits that replace values by values of the source act on rows already.
        """
        prompts = self.runs.columns_of_prompts
        if self.edit is None or prompts is None:
            return edit
        return edit_of_texts(edit, point, prompts)

    def edits(self) -> list[list[tuple[list[str], Edit]]]:
        """Return the edits of all places in order, in the form that `sweep` needs."""
        jobs = []
        for place_of_each_axis in itertools.product(*self.places.values()):
            selected: dict[str, Any] = {}
            for _, selected_along_axis in place_of_each_axis:
                selected |= self._in_prompts(selected_along_axis)
            names = [selected.pop("layer")] if "layer" in selected else [*self.names.values()]
            jobs.append([(names, self.edit_at(**selected))])
        return jobs

    def _in_prompts(self, selected: Mapping[str, Any]) -> dict[str, Any]:
        """Return a selection of a place, restricted to the tokens of prompts.

        If answers are several tokens, a column may contain a token of the prompt in one row and a
        token of the answer in another row. Then the column is selected only in the first. This
        holds for two runs. An edit acts on texts and not on rows; see `effects_of_edits`.
        """
        in_prompts = {}
        for axis, index in selected.items():
            if axis in _OF_PROMPTS and isinstance(index, slice) and self.prompts is not None:
                is_prompt = self.prompts[:, index.start].tolist()
                if self.runs.has_source and not all(is_prompt):
                    index = [[index.start] if is_in_row else [] for is_in_row in is_prompt]
            in_prompts[axis] = index
        return in_prompts

    def _layers(self) -> str:
        """Return the layers that are changed together, as text."""
        if self._choice.layers is None:
            return f"all {len(self.names)} layers"
        return f"layers {', '.join(map(str, self.names))}"

    def result(
        self, base: Float[Tensor, " example"], effects: Float[Tensor, "... example"], **about: Any
    ) -> Result:
        """Return a `Result` of effects with the labels of the places.

        Args:
            base: the metric of the unedited run.
            effects: the effects of all places in order. The axes of places may be flattened.
            about: more facts for the result.
        """
        facts: dict[str, Any] = {"site": self._choice.site}
        if "layer" not in self.places and len(self.names) == 1:
            facts["layer"] = layer_of(next(iter(self.names.values())))
        elif "layer" not in self.places:
            facts["together"] = self._layers()
        if self._choice.neurons is not None:
            facts["neurons"] = self._choice.neurons
        if self.edit is not None:
            facts["edit"] = repr(self.edit)
        values = effects.view(*map(len, self.places.values()), -1)
        has_words = all(map(is_of_text, self.names.values()))
        return self.runs.result(
            values,
            self.labels,
            base,
            has_words=has_words,
            point=next(iter(self.names.values())),
            **facts,
            **about,
        )

    def _over(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes of the result.

        Args:
            sizes: the axes of the first point, with their sizes.

        Raises:
            ValueError: if the axes of the choice do not fit the points or the texts.
        """
        name = next(iter(self.names.values()))
        choice = self._choice
        is_in_layer = layer_of(name) is not None
        is_aligned = self._source is None or self.runs.text.is_aligned_with(self._source)
        uses_spans = not is_aligned or bool(self.runs.text.spans)
        usual = _usual_axes(sizes, is_in_layer, uses_spans)
        over = usual if choice.over is None else choice.over
        require_kind("over", over, (str, tuple, list), "a name of an axis, or several names")
        over = (over,) if isinstance(over, str) else tuple(over)
        if "layer" in over and not is_in_layer:
            raise ValueError(
                f"over must not contain 'layer' at {name}, which is not in a layer; got {over}"
            )
        if not over or len(set(over)) < len(over):
            raise ValueError(f"over must be at least one axis, without repetition; got {over}")
        if {"pos", "span"} <= {*over}:
            raise ValueError(f"over must contain 'pos' or 'span', not both; got {over}")
        for axis, selected in (("head", choice.heads), ("neuron", choice.neurons)):
            if selected is not None and axis not in over:
                raise ValueError(f"over must contain {axis!r} if {axis}s= is given; got {over}")
        if "span" not in over and not is_aligned:
            if "pos" not in sizes:
                raise ValueError(
                    "site must have the axis 'pos' if positions do not correspond; got "
                    f"{choice.site!r}, with the axes {', '.join(sizes)}"
                )
            raise ValueError(
                f"over must contain 'span' if positions of the two texts do not correspond; got "
                f"{over}; write over={[*usual]}"
            )
        return over

    def _along(self, axis: str, sizes: Mapping[str, int]) -> list[PatchPlace]:
        """Return the places along one axis of the result. For `feature`, only active features.

        Args:
            axis: the axis of the result.
            sizes: the axes of the first point, with their sizes.
        """
        if axis == "layer":
            return [(layer, {"layer": name}) for layer, name in self.names.items()]
        point_axis = next((name for name in SELECTS.get(axis, ()) if name in sizes), None)
        if point_axis is None:
            possible = [name for name, axes in SELECTS.items() if not sizes.keys().isdisjoint(axes)]
            raise ValueError(
                f"over may contain layer, {', '.join(possible)} at {self._choice.site}; got "
                f"{shown(axis)}"
            )
        if axis == "span":
            return self._spans(point_axis)
        if axis == "neuron":
            return self._groups_of_neurons(point_axis, sizes[point_axis])
        if axis == "feature":
            return [(n, {point_axis: n}) for n in self._active_features()]
        indices = {n: n for n in range(sizes[point_axis])}
        if axis == "head":
            return [(n, {point_axis: n}) for n in _some("heads", indices, self._choice.heads)]
        if point_axis in _OF_PROMPTS and self.prompts is not None:
            is_column_of_prompt = self.prompts.any(0).tolist()
            indices = {n: n for n in indices if is_column_of_prompt[n]}
        # A column may be padding in some texts. A slice may include padding; an integer would raise
        # an error.
        return [(n, {point_axis: slice(n, n + 1)}) for n in indices]

    def _spans(self, point_axis: str) -> list[PatchPlace]:
        """Return the named spans of the texts, with the matching positions of the source."""
        spans = self.runs.text.spans
        if not spans:
            raise ValueError("over=['span'] needs Pairs with spans; got pairs without spans")
        places: list[PatchPlace] = []
        for name, columns in spans.items():
            # An edit acts on texts, and an exchange between two runs on rows.
            selected: dict[str, Any] = {point_axis: columns[: len(self.runs.pairs)]}
            if self._source is not None:
                selected = {point_axis: columns, "source_pos": self._source.spans[name]}
            places.append((name, selected))
        return places

    def _groups_of_neurons(self, point_axis: str, n_neurons: int) -> list[PatchPlace]:
        """Return groups of neighbouring neurons, with the group size of the choice."""
        size = 1 if self._choice.neurons is None else self._choice.neurons
        require_integer("neurons", size)
        groups = [range(n_neurons)[n : n + size] for n in range(0, n_neurons, size)]
        return [(_label(group), {point_axis: slice(group.start, group.stop)}) for group in groups]

    def _active_features(self) -> list[int]:
        """Return the features that are not 0 at a real token of one of the two runs."""
        names = [*self.names.values()]
        run = self.runs.capture(self.runs.text, names)
        values = []
        for cache in (run, self.values):
            for name in names:
                if name in cache:
                    values.append(_without_padding(cache, name))
        sizes = {value.shape[-1] for value in values}
        if len(sizes) > 1:
            raise ValueError(
                f"all layers must have the same number of features; got {sizes}; choose layers="
            )
        active = torch.stack([(value != 0).flatten(0, -2).any(0).cpu() for value in values])
        if not active.any():
            raise ValueError(f"no feature of {names[0]} is active in these texts")
        numbers: list[int] = active.any(0).nonzero()[:, 0].tolist()
        return numbers


def _without_padding(cache: ActivationCache, name: str) -> Float[Tensor, "..."]:
    """Return a value with 0 at padding.

    Args:
        cache: the cache of the value.
        name: the name of the point.
    """
    value = cache[name]
    mask = mask_of(cache, value.shape[:2]) if cache.axes(name)[:2] == ("batch", "pos") else None
    if mask is None:
        return value
    return value.where(to_device(mask, value.device).view(*mask.shape, *[1] * (value.ndim - 2)), 0)


def _usual_axes(sizes: Mapping[str, int], is_in_layer: bool, uses_spans: bool) -> tuple[str, ...]:
    """Return the usual axes of a result: the layer, and the feature, expert, head or position.

    If spans are used, `span` replaces `pos`, or is the last axis.

    Args:
        sizes: the axes of the points, with their sizes.
        is_in_layer: whether the points are in layers.
        uses_spans: whether the texts have spans, or positions of the two texts do not correspond.
    """
    axes = ("feature", "expert", "head", "pos")
    existing = [axis for axis in axes if not sizes.keys().isdisjoint(SELECTS[axis])]
    inner_axis = existing[:1]
    if uses_spans and "pos" in sizes:
        inner_axis = [*(axis for axis in inner_axis if axis != "pos"), "span"]
    return ("layer", *inner_axis) if is_in_layer else tuple(inner_axis)


def _label(group: range) -> int | str:
    """Return the label of a group of neurons: a number, or the first and the last number."""
    return group[0] if len(group) == 1 else f"{group[0]}-{group[-1]}"


def _some(what: str, known: Mapping[int, T], selected: Some) -> dict[int, T]:
    """Return the selected entries of `known`, or all entries if `selected` is None.

    Args:
        what: the name of the argument, for the error.
        known: all entries.
        selected: the keys of the entries.
    """
    if selected is None:
        return dict(known)
    keys = [selected] if isinstance(selected, int) else selected
    require_kind(what, keys, Collection, "a number or a list of numbers")
    is_text = isinstance(keys, str)
    if is_text or not keys or not known.keys() >= set(keys):
        error = TypeError if is_text else ValueError
        raise error(f"{what} must be among {[*known]}, or left out for all; got {shown(selected)}")
    return {key: known[key] for key in keys}
