"""Compare two models: their predictions, their residual streams and their weights, with controls.

1. `compare_models` converts the texts to tokens with both models, which must have the same points
   and read the same tokens (`twins`).
2. Both models read the texts. Predictions and streams are compared at every token (`streams`). For
   several checkpoints, this is repeated, and `curves` contains one number for each checkpoint,
   layer and text.
3. The result reads the models again only on request: `lens`, `difference` and `weights`.

A large difference is not an important one. So each table has controls: the same number for random
directions, for the next text, and for models that are exchanged.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hooks.base import (
    HintsAtNames,
    Texts,
    aligned_rows,
    each_text,
    number_of,
    require_integer,
    shown,
    shows_progress,
    without_gradients,
    without_handle,
    writer_of,
)
from interp import plots
from interp.diffing.matrices import (
    MatrixChange,
    WeightChanges,
    changed_outside_layers,
    weight_changes,
    with_other_names,
)
from interp.diffing.means import means_of
from interp.diffing.promoted import DifferenceLens, directions_of, promoted
from interp.diffing.streams import Controls, StreamChange, stream_change
from interp.diffing.twins import TwoModels
from interp.directions import Direction
from interp.json_form import Table, columns, form
from interp.protocol import is_maker
from interp.results.result import Result
from interp.runs.adapters import WithoutAdapter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Checkpoints = (
    nn.Module
    | Mapping[Any, Any]
    | Iterable[nn.Module | Callable[[], nn.Module]]
    | Callable[[], Iterable[nn.Module]]
)
"""One tuned model or several checkpoints; see `compare_models`."""

_TEXTS_SHOWN = 3
_LAYERS_SHOWN = 5
_NAMES_SHOWN = 5


class _LayerNumbers(NamedTuple):
    """The fields of `LayerChange`. A named tuple cannot have another base class."""

    layer: int
    difference: float
    next_text: float


class LayerChange(HintsAtNames, _LayerNumbers):
    """The mean difference of the stream in one layer.

    Attributes:
        layer: the layer.
        difference: the mean over all tokens of the difference, relative to the base.
        next_text: the same number between the base on the next text and the base on the text.
    """


class TokenChange(NamedTuple):
    """The divergence of the prediction after one token.

    Attributes:
        text, pos: the number of the text, and the position in it.
        token: the text of the token, or its number without a tokenizer.
        kl: KL(tuned ‖ base) in nats.
        random: the same number for the base with a random direction of the size of the difference.
    """

    text: int
    pos: int
    token: Any
    kl: float
    random: float


@dataclass(frozen=True, eq=False, repr=False)
class TopChanges:
    """The layers, the weights and the tokens that changed most.

    Attributes:
        layers: the layers with the largest difference of the stream; only layers with a difference.
        weights: the weights with the largest relative change; only weights that changed.
        tokens: the tokens after which the predictions differ most.
    """

    layers: list[LayerChange]
    weights: list[MatrixChange]
    tokens: list[TokenChange]

    def as_json(self) -> dict[str, Any]:
        """Return the three lists in the JSON form of all results; see `interp.json_form`."""
        tables: dict[str, Table] = {}
        lists = (("layer", self.layers, LayerChange), ("token", self.tokens, TokenChange))
        units = {"difference": "norms of the base", "next_text": "norms of the base"}
        units |= {"kl": "nats", "random": "nats"}
        for axis, changes, kind in lists:
            tables |= columns(axis, changes, " ".join(kind._fields), units)
        weights = WeightChanges(tuple(self.weights)).as_json()
        listed = form("TopChanges", tables)
        return {**listed, "tables": listed["tables"] | weights["tables"]}

    def __repr__(self) -> str:
        lines = [] if self.layers else ["layers: no difference of the stream"]
        for layer, difference, next_text in self.layers:
            control = "" if math.isnan(next_text) else f" (next text {next_text:.4g})"
            lines.append(f"layer {layer}: difference of the stream {difference:.4g}{control}")
        for weight in self.weights:
            parts = weight.parts_in_words()
            lines.append(f"{weight.name}: relative change {weight.relative:.4g}{parts}")
        for text, pos, token, kl, random in self.tokens:
            control = "" if math.isnan(random) else f" (random {random:.4g})"
            lines.append(f"text {text}, pos {pos} {token!r}: KL {kl:.4g} nats{control}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class ModelChange(plots.Shown):
    """Differences between a tuned model and its base on some texts.

    Positions count the tokens of each text: position 0 is the first token, also if a text is padded
    on the left. Numbers at padding are NaN. At a position that some texts do not have, the mean of
    a `Result` is over the other texts. `curves` contains means over the tokens of each text.

    `save` writes pages and numbers for other programs. To keep the numbers, save each `Result`,
    such as `change.stream.save("stream")`, and load it with `Result.load`.

    Attributes:
        kl: KL(tuned ‖ base) of the predictions at each position, in nats: `Result` [pos, example].
        stream: the norm of the difference of `resid_post`, the stream after a layer, divided by the
            norm of the base: `Result` [layer, pos, example].
        curves: the mean of `stream` over the tokens of each text: `Result` [checkpoint, layer,
            example]. A single model is one checkpoint. All other attributes and methods belong to
            the last checkpoint.
        kl_curve: the mean of `kl` over the tokens of each text: `Result` [checkpoint, example].
        controls: by `kl` and `stream`, the same numbers for controls, in place of the tuned model.
            `base on the next text` and `tuned on the next text`: this model at the same position of
            the next text; the text after the last text is the first. `random`, for `kl`: the base
            with a random direction of the size of the difference, added to its last stream; NaN if
            the model has no `unembed`. (A random direction of this size has the same number in
            `stream`.)
        outside_layers: the names of changed weights outside the layers, such as the unembedding,
            which changes predictions and not the stream, unless it is tied to the embedding. None
            if this is not known: for a model without blocks, for weights with different names or
            shapes, and for weights that are quantized or stored elsewhere.

    >>> import copy
    >>> from interp import compare_models
    >>> from models import load
    >>> base = load("pydoc-4l")
    >>> tuned = copy.deepcopy(base)
    >>> with torch.no_grad():  # layer 3 now writes the direction of the token Q
    ...     _ = tuned.blocks[3].mlp.output.bias.add_(8 * tuned.W_U[:, base.encoded("Q")[0]])
    >>> compare_models(tuned, base, ["def f(x):", "Return the"])
    ModelChange on 2 texts, 19 tokens
                            tuned   random  base on the next text  tuned on the next text
      KL(tuned ‖ base)      3.466   0.1766  5.023                  6.658
      stream after layer 0  0               1.109                  1.109
      stream after layer 1  0               1.077                  1.077
      stream after layer 2  0               1.05                   1.05
      stream after layer 3  0.5453          1.384                  1.496
      KL in nats; stream: norm of the difference ÷ norm of the base
      changed weights outside the layers: none
    """

    kl: Result
    stream: Result
    curves: Result
    kl_curve: Result
    controls: Mapping[str, Controls]
    outside_layers: tuple[str, ...] | None
    _other_names: Mapping[str, tuple[str, ...]]
    _models: TwoModels
    _rows: list[list[int]]
    _batch: int
    _seed: int

    is_plot = True

    @cached_property
    @without_gradients
    def weights(self) -> WeightChanges:
        """The change of each weight, tuned - base. It is computed at the first access.

        Each change has its size relative to the weight of the base, its effective rank next to the
        effective rank of a random matrix of the same shape, and its largest singular directions.
        If the matrix writes to the residual stream, it also has the tokens whose logits these
        directions raise, next to the same tokens for random directions.

        Raises:
            ValueError: if the models have weights with different names or shapes, or if the matrix
                of an adapter cannot be computed.
        """
        return weight_changes(self._models, self._rows[0], seed=self._seed)

    def top(self, k: int = 3) -> TopChanges:
        """Return the layers, the weights and the tokens that changed most, next to controls.

        Args:
            k: the number of layers, of weights and of tokens.

        Raises:
            ValueError: if `k` is below 1, or for the reasons of `weights`.
        """
        require_integer("k", k)
        other = self.controls["stream"]["base on the next text"].values
        by_layer = zip(self.stream.labels["layer"], self.stream.values, other, strict=True)
        layers = [LayerChange(n, _mean(values), _mean(others)) for n, values, others in by_layer]
        layers = [layer for layer in layers if layer.difference > 0]
        layers.sort(key=lambda layer: layer.difference, reverse=True)
        write = writer_of(self._models.tuned)
        random = self.controls["kl"]["random"].values
        kl = self.kl.values.nan_to_num(-1.0)
        tokens = []
        for index in kl.flatten().topk(min(k, sum(map(len, self._rows)))).indices.tolist():
            pos, text = divmod(index, kl.shape[1])
            token = self._rows[text][pos]
            word = token if write is None else write([token])[0]
            numbers = float(kl[pos, text]), float(random[pos, text])
            tokens.append(TokenChange(text, pos, word, *numbers))
        changed = [weight for weight in self.weights.changes if weight.relative > 0]
        return TopChanges(layers[:k], changed[:k], tokens)

    @without_gradients
    def lens(self, layer: int, first: int = 5, *, draws: int = 3) -> DifferenceLens:
        """Return the tokens that the mean difference over the first tokens of the texts promotes.

        The texts need not be about the subject of the fine-tuning: these tokens often name this
        subject on any texts (Minder et al. 2025, arXiv 2510.13900). Compare them with the tokens
        of the controls.

        Args:
            layer: the layer of `resid_post`; negative layers count from the last one.
            first: the number of first tokens of each text.
            draws: the number of random directions, and of random exchanges of the models. Two texts
                have only two different exchanges.

        Raises:
            ValueError: if the layer does not exist, if its streams are equal in both models, or if
                `first` is below 1.
            TypeError: if the model has no `unembed`.
        """
        means = means_of(
            self._models,
            self._rows,
            site="resid_post",
            layer=layer,
            first=first,
            batch=self._batch,
        )
        if not means.difference().any():
            raise ValueError(
                f"layer must be a layer whose streams differ; got {layer}, where they are equal in "
                "both models (change.stream has the difference of each layer)"
            )
        directions = directions_of(means, draws=draws, seed=self._seed)
        return promoted(self._models, means.name, directions)

    @without_gradients
    def difference(
        self, site: str = "resid_post", layer: int = -1, first: int | None = None
    ) -> Direction:
        """Return the mean difference of a value, tuned - base, as a direction.

        `edits.add` steers both models along this direction. The point halfway between the means of
        the two models has the score 0; see `Direction.scores`.

        Args:
            site: the last part of the name of the point, such as `resid_post` or `z`. Axes after
                `pos` are flattened.
            layer: the layer; negative layers count from the last one.
            first: the number of first tokens of each text that are read. Default: all tokens.

        Raises:
            UnknownNameError: if the site is unknown.
            ValueError: if the layer does not exist, or the value has no axis `pos` after `batch`.
        """
        means = means_of(
            self._models, self._rows, site=site, layer=layer, first=first, batch=self._batch
        )
        vector = means.difference()
        middle = (means.mean("tuned") + means.mean("base")) / 2
        exchanged = means.exchanged(1, self._seed)
        about = {
            "by": "difference of models",
            "site": site,
            "tokens": int(means.counts.sum()),
        }
        if exchanged:
            about["length for exchanged models"] = round(float(exchanged[0].norm()), 6)
        return Direction({means.name: vector.float()}, {means.name: -float(middle @ vector)}, about)

    def plot(self) -> "Figure":
        """Plot the stream's relative difference by layer and position; see `Result.plot`."""
        return _over_texts(self.stream).plot()

    def view(self) -> plots.View:
        """Draw the texts with the largest divergence, coloured by divergence; the difference of the
        stream by layer and position; and the spectra of the largest changes of weights.
        """
        pages: dict[str, Any] = {}
        means = self.kl.values.nanmean(0)
        for number in means.argsort(descending=True)[:_TEXTS_SHOWN].tolist():
            row = self._rows[number]
            write = writer_of(self._models.tuned)
            words = [*map(str, row)] if write is None else write(row)
            values = self.kl.values[: len(row), number]
            heading = f"KL(tuned ‖ base) at each token of text {number}"
            pages[heading] = plots.text(words, values, unit="nats", title=heading)
        heading = "difference of the stream, relative to the base"
        pages[heading] = _over_texts(self.stream)
        pages["changes of weights"] = self.weights.view()
        page = plots.together("differences between two models", pages)
        return plots.View(page.title, page.parts, says=repr(self).splitlines())

    def _writers(self) -> dict[str, Any]:
        """Return the functions that write files: no figures, because the view has none."""
        writers = super()._writers()
        return {suffix: writers[suffix] for suffix in (".html", ".json")}

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of predictions and of the stream, with the controls, in the JSON form
        of all results; see `interp.json_form`.

        `weights.as_json()` returns the changes of the weights.
        """
        tables: dict[str, Table] = {}
        for name in ("kl", "stream", "curves", "kl_curve"):
            tables |= getattr(self, name).tables(name)
        for name, controls in self.controls.items():
            for control, result in controls.items():
                tables |= result.tables(f"{name}.{control}")
        about = {
            "texts": len(self._rows),
            "tokens": sum(map(len, self._rows)),
            "weights outside the layers": self.outside_layers,
        }
        return form("ModelChange", tables, about)

    def _layer_rows(self) -> tuple[list[list[str]], str]:
        """Return a row for each of the layers that changed most, and a line about the others."""
        layers = self.stream.labels["layer"]
        sizes = [_mean(values) for values in self.stream.values]
        order = sorted(range(len(layers)), key=sizes.__getitem__, reverse=True)
        if sizes[order[0]] == 0:
            empty = [""] * len(self.controls["kl"])
            return [[f"stream after all {number_of(len(layers), 'layer')}", "0", *empty]], ""
        rows = []
        for index in sorted(order[:_LAYERS_SHOWN]):
            row = [f"stream after layer {layers[index]}", f"{sizes[index]:.4g}"]
            for name in self.controls["kl"]:
                control = self.controls["stream"].get(name)
                row.append("" if control is None else _number(_mean(control.values[index])))
            rows.append(row)
        others = order[_LAYERS_SHOWN:]
        if not others:
            return rows, ""
        return rows, f"  … {number_of(len(others), 'more layer')}, at most {sizes[others[0]]:.4g}"

    def _outside_in_words(self) -> str:
        """Return a line about changed weights outside the layers."""
        if self.outside_layers is None:
            return "  changed weights outside the layers: not known"
        names = [
            with_other_names(name, self._other_names) for name in self.outside_layers[:_NAMES_SHOWN]
        ]
        if n_more := len(self.outside_layers) - len(names):
            names.append(f"… {n_more} more")
        all_names = " (all changed weights: .weights.changed)" if names else ""
        return f"  changed weights outside the layers: {', '.join(names) or 'none'}{all_names}"

    def __repr__(self) -> str:
        n_texts = len(self._rows)
        n_tokens = sum(map(len, self._rows))
        n_checkpoints = len(self.curves.labels["checkpoint"])
        title = f"ModelChange on {number_of(n_texts, 'text')}, {number_of(n_tokens, 'token')}"
        if n_checkpoints > 1:
            title += f", the last of {n_checkpoints} checkpoints"
        controls = self.controls["kl"]
        kl = [_number(_mean(result.values)) for result in (self.kl, *controls.values())]
        rows, others = self._layer_rows()
        table = [["", "tuned", *controls], ["KL(tuned ‖ base)", *kl], *rows]
        # Without a column for a control that does not exist.
        filled = [column for column in zip(*table, strict=True) if any(column[1:])]
        lines = [title, *(f"  {row}" for row in aligned_rows([*zip(*filled, strict=True)])), others]
        lines.append("  KL in nats; stream: norm of the difference ÷ norm of the base")
        lines.append(self._outside_in_words())
        if controls["base on the next text"].values.isnan().all():
            lines.append("  the controls on the next text need a second text")
        if controls["random"].values.isnan().all():
            lines.append("  the control 'random' is missing, because the base has no `unembed`")
        elif self.kl.values.nan_to_num().any() and not self.stream.values.nan_to_num().any():
            lines.append("  the control 'random' says nothing, because the streams are equal")
        return "\n".join(filter(None, lines))


@shows_progress
@without_gradients
def compare_models(
    tuned: "Checkpoints",
    base: nn.Module | WithoutAdapter | None = None,
    texts: Texts | None = None,
    *,
    batch: int = 8,
    seed: int = 0,
    progress: bool = True,
) -> ModelChange:
    """Return the differences between a tuned model and its base on some texts.

    The differences are in the predictions, in the residual stream of each layer, and in the
    weights. Both models must have the same points, axes and sizes. They may be on two devices:
    values of the base are then moved.

    One model with an adapter of peft is enough: attach it with `models.attach`, and leave out
    `base`. The base is then the same model with its adapter switched off.

    Both models run one layer after another, so memory contains only the residual stream of one
    layer and one batch for each model. There are two exceptions. An attached base runs twice. If
    the base has hooks, or its blocks cannot be called one by one, memory contains all layers of the
    tuned model.

    Args:
        tuned: the tuned model; or several checkpoints of it, as a list, an iterator, or a mapping
            whose keys are labels, such as steps. A checkpoint is a model, or a function that loads
            a model. With functions, only one checkpoint is in memory at a time. A function that
            returns a list or an iterator is allowed too.
        base: the base model. Default: each tuned model with its adapters switched off, as with
            `without_adapter(tuned)`.
        texts: the texts on which the models are compared. They need not be related to the
            fine-tuning.
        batch: the largest number of texts in a batch. Each of several batches also reads the text
            after its last text, for the controls on the next text. With another `batch`, the
            control `random` has other draws.
        seed: the seed of the controls.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The differences, tables [pos, example] in nats and [layer, pos, example] as shares of the
        base, with controls; see `ModelChange`.

    Raises:
        ValueError: if names, axes or sizes of the models differ (the error names the first
            difference), if their tokenizers return different tokens for a text, or if `base` is
            None and the model has no adapter that can be switched off.
        TypeError: if a model has no hook points, or there are no texts.
        ModeError: if a model is in training mode.

    >>> import copy
    >>> from models import load
    >>> base = load("pydoc-4l")
    >>> tuned = copy.deepcopy(base)
    >>> with torch.no_grad():
    ...     _ = tuned.blocks[2].mlp.output.weight.mul_(1.3)
    >>> change = compare_models(tuned, base, ["def f(x):", "Return the"])
    >>> change.weights.changed
    ['blocks.2.mlp.output.weight']
    >>> change.stream.select(layer=1).values.nan_to_num().max()
    tensor(0.)
    >>> change.top(1)
    layer 3: difference of the stream 0.1349 (next text 1.384)
    blocks.2.mlp.output.weight: relative change 0.3
    text 0, pos 6 'x': KL 0.1076 nats (random 0.02551)
    """
    if texts is None:
        raise TypeError("texts must be one or several texts; got None")
    require_integer("seed", seed, least=-(2**63), most=2**64 - 1)
    texts = [*each_text(texts)]
    labels, curves, kl_curve = [], [], []
    models: TwoModels | None = None
    measured: StreamChange | None = None
    for label, load in _checkpoints(tuned):
        # Free the earlier checkpoint before the next one is loaded. Only the last is needed later.
        models = None
        models = TwoModels(load(), base)
        rows = models.read(texts)
        measured = stream_change(models, rows, batch=batch, seed=seed)
        labels.append(label)
        curves.append(_over_positions(measured.stream))
        kl_curve.append(_over_positions(measured.kl))
    if models is None or measured is None:
        raise ValueError("tuned must contain at least one model; got none")
    outside = changed_outside_layers(models)
    return ModelChange(
        kl=measured.kl,
        stream=measured.stream,
        curves=_over_checkpoints(curves, labels, measured.stream),
        kl_curve=_over_checkpoints(kl_curve, labels, measured.kl),
        controls=measured.controls,
        outside_layers=None if outside is None else tuple(outside),
        _other_names=outside or {},
        _models=models,
        _rows=rows,
        _batch=batch,
        _seed=seed,
    )


def _over_positions(table: Result) -> Tensor:
    """Return the mean over the positions of each text, without padding."""
    return table.values.nanmean(table.axes.index("pos"))


def _over_checkpoints(values: Sequence[Tensor], labels: Sequence[Any], last: Result) -> Result:
    """Return the values of all checkpoints as one table.

    Args:
        values: for each checkpoint, means over positions.
        labels: the label of each checkpoint.
        last: the table of the last checkpoint, with positions.
    """
    axes = [axis for axis in last.axes if axis != "pos"]
    return Result(
        torch.stack([*values]),
        ("checkpoint", *axes),
        labels={"checkpoint": labels, **{axis: last.labels[axis] for axis in axes[:-1]}},
        unit=last.unit,
        bounds=last.bounds,
        about=last.about,
    )


def _checkpoints(tuned: Any) -> Iterator[tuple[Any, Callable[[], nn.Module]]]:
    """Yield a label and a function that returns the model, for each checkpoint.

    Args:
        tuned: one model, or several; see `compare_models`.

    Raises:
        TypeError: if this is not a model, and contains no models.
    """
    if isinstance(tuned, nn.Module):
        yield "tuned", lambda: tuned
        return
    several = tuned() if is_maker(tuned) else tuned
    if not isinstance(several, Iterable):
        raise TypeError(
            "tuned must be a model, or several models: a list, a mapping, an iterator or a "
            f"function that returns one; got {shown(tuned)}"
        )
    items = several.items() if isinstance(several, Mapping) else enumerate(several)
    for label, item in items:
        yield label, _loader(item)


def _loader(item: Any) -> Callable[[], nn.Module]:
    """Return a function that returns the model of a checkpoint: the item, if it is no model."""
    return lambda: without_handle(item() if is_maker(item) else item)


def _over_texts(result: Result) -> Result:
    """Return the mean over the texts that have a token at each position, as one example."""
    return Result(
        result.mean()[..., None],
        result.axes,
        labels={axis: labels for axis, labels in result.labels.items() if axis != "example"},
        unit=result.unit,
        words=result.words,
        about=result.about,
    )


def _number(value: float) -> str:
    """Return a number as text; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.4g}"


def _mean(values: Tensor) -> float:
    """Return the mean of all numbers that exist."""
    return float(values.nanmean())
