"""The texts and positions where a head, a neuron or a direction is largest."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import index_by_axis
from hooks.base import (
    Index,
    Texts,
    at_least_float32,
    is_integer,
    number_of,
    require_integer,
    shown,
    shows_progress,
    to_device,
    without_gradients,
    writer_of,
)
from interp import plots
from interp.inputs.parts import finished, n_before
from interp.inputs.texts import batches
from interp.json_form import columns, form
from interp.numbers.precision import like
from interp.numbers.ranks import largest_rows
from interp.protocol import runner_of
from interp.runs.sites import SELECTS

# The most places that are printed.
_SHOWN = 36


class Activation(NamedTuple):
    """A value at one position of one text.

    Attributes:
        value: the value at the position.
        text: the number of the text, counted from 0.
        pos: the position in the text.
        tokens: the tokens of the text.
        pieces: the text of each token; None if the model has no tokenizer.
    """

    value: float
    text: int
    pos: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...] | None = None

    @property
    def around(self) -> str:
        """The text around the position, which is marked.

        Characters that cannot be printed are escaped.
        """
        words = [*map(str, self.tokens)] if self.pieces is None else [*self.pieces]
        words[self.pos] = f"«{words[self.pos]}»"
        joined = (" " if self.pieces is None else "").join(
            words[max(0, self.pos - 20) : self.pos + 6]
        )
        return repr(joined)

    def __repr__(self) -> str:
        """Return the value, and the text around the marked position."""
        return f"{self.value:.4g} in text {self.text} at {self.pos}: {self.around}"


class TopActivations(list[Activation], plots.Shown):
    """Positions in texts, the largest value first.

    A printed place shows the words around the token with the value, which is between « and ». If
    the model has no tokenizer, it shows the numbers of the tokens.
    """

    def __repr__(self) -> str:
        lines = [
            f"TopActivations: {number_of(len(self), 'place')}, values in the unit of the point"
        ]
        if any(place.pieces is None for place in self):
            lines.append("  tokens are numbers, because the model has no tokenizer to write words")
        lines += [f"  {place!r}" for place in self[:_SHOWN]]
        if len(self) > _SHOWN:
            lines.append(f"  and {len(self) - _SHOWN} more")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return a row for each position in the JSON form of all results; see `interp.json_form`.

        The columns are the attributes of `Activation`.
        """
        return form("TopActivations", columns("place", self, " ".join(Activation._fields)))

    def view(self) -> plots.View:
        """Draw the values, and the text around them."""
        return plots.View("largest values", [], says=[*map(repr, self)])


@shows_progress
@without_gradients
def max_activating(
    model: nn.Module,
    texts: "Texts",
    point: str,
    *,
    head: int | None = None,
    neuron: int | None = None,
    feature: int | None = None,
    vector: Float[Tensor, " d"] | None = None,
    pos: "Index | None" = None,
    k: int = 10,
    batch: int = 16,
    progress: bool = True,
) -> TopActivations:
    """Return the `k` positions of many texts where a neuron, a feature or a direction is largest.

    The model runs on the texts. The value is an entry of a neuron or a feature, or the dot product
    with a direction. Without a direction, the value of a vector is its L2 norm.

    Args:
        model: any model in evaluation mode with hook points.
        texts: strings or tokens. They are read once, so a generator is possible.
        point: the name of a point with the axes `batch` and `pos`.
        head: the number of a head, for a point with heads.
        neuron: the number of a neuron, for a point with neurons.
        feature: the number of a feature of a dictionary, for its point inside `splice`.
        vector: a direction along the last axis that is left after head and neuron are selected.
        pos: the positions of each text that are searched. Position 0 is the first token that is not
            padding, and negative positions count from the last. Default: all positions.
        k: the number of positions to return. Default: 10.
        batch: the number of texts that are read together. Default: 16.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        The positions, the largest value first. Of equal values, the earlier position is first.

    Raises:
        UnknownNameError: if the point does not exist (the error names close matches), or a
            requested axis is missing.
        ValueError: if more than one vector is left at each position, a value is NaN, `k` or `batch`
            is below 1, there are no texts, or a text is empty.
        ModeError: if the model is in training mode.

    >>> import torch
    >>> from hooks import HookPoint
    >>> model = nn.Sequential(nn.Embedding(7, 2), HookPoint("batch pos d_model")).eval()
    >>> model[0].weight.data = torch.arange(14.0).view(7, 2)
    >>> max_activating(model, [[3, 1], [4, 2]], "1", vector=torch.tensor([1.0, 0.0]), k=1)
    TopActivations: 1 place, values in the unit of the point
      tokens are numbers, because the model has no tokenizer to write words
      8 in text 1 at 0: '«4» 2'

    With a tokenizer, the words around the token are printed:

    >>> from models import load
    >>> max_activating(load("pydoc-4l"), "part KV8 and part K", "blocks.2.mlp.post", neuron=5, k=1)
    TopActivations: 1 place, values in the unit of the point
      0.9327 in text 0 at 3: 'par«t» KV8 '
    """
    require_integer("k", k)
    runner = runner_of(model)
    chosen = {"head": head, "neuron": neuron, "feature": feature}
    for name, index in chosen.items():
        if index is not None and not is_integer(index):
            raise TypeError(f"{name} must be a whole number; got {shown(index)}")
    largest = TopActivations()
    for first, text in batches(texts, model, batch):
        cache = runner.capture(text.tokens, names=point, **text.arguments(model))
        strength = _values(
            cache[point], cache.axes(point), point=point, chosen=chosen, vector=vector
        )
        inside = to_device(text.at(pos), strength.device)
        activations = strength[inside]
        places = inside.nonzero()
        if bool(activations.isnan().any()):
            raise ValueError(f"values must be numbers; got NaN at {point} in texts from {first} on")
        order = largest_rows(activations, k)
        tokens = text.listed()
        for value, (row, column) in zip(
            activations[order].tolist(), places[order].tolist(), strict=True
        ):
            number = n_before() + first + row
            tokens_of_text = tuple(tokens[row])
            largest.append(Activation(value, text=number, pos=column, tokens=tokens_of_text))
        largest = largest_of(largest, k)
    if (write := writer_of(model)) is not None:
        largest = TopActivations(
            place._replace(pieces=tuple(write([*place.tokens]))) for place in largest
        )
    return finished(largest, largest_of, k=k)


def largest_of(places: TopActivations, k: int) -> TopActivations:
    """Return the `k` largest values, the largest first. Of equal values, the first is first."""
    values = torch.tensor([place.value for place in places], dtype=torch.float64)
    return TopActivations(places[number] for number in largest_rows(values, k).tolist())


def _values(
    value: Tensor,
    axes: tuple[str, ...],
    point: str,
    chosen: Mapping[str, int | None],
    vector: Tensor | None,
) -> Float[Tensor, "batch pos"]:
    """Return one number for each position, by which positions are ranked.

    It is the value itself if the choice leaves one number at each position, the dot product with
    `vector` if there is a vector, and otherwise the norm of the remaining vector.

    Args:
        value: the value of the point.
        axes: the axes of the value.
        point: the name of the point, for errors.
        chosen: the index along axes such as `head` and `neuron`; None for axes without a choice.
        vector: the direction; None without one.

    Raises:
        ValueError: if more than one vector remains at each position.
    """
    where = {}
    for name, index in chosen.items():
        if index is not None:
            # A point may have a related axis in place of the requested one, such as `kv_head` for
            # `head`. If it has no such axis, `index_by_axis` raises an error with the requested
            # name.
            axis = next((declared for declared in SELECTS[name] if declared in axes), name)
            where[axis] = index
    rest = [axis for axis in axes if axis not in where]
    vectors = len(rest) == 3 or (len(rest) == 2 and vector is None)
    if rest[:2] != ["batch", "pos"] or not vectors:
        raise ValueError(
            "a head, a neuron or a vector must leave one number for each batch and pos at "
            f"{point}; got the axes {' '.join(rest) or 'of no HookPoint'}"
        )
    activations = at_least_float32(value[index_by_axis(axes, where, point)])
    if vector is not None:
        return activations @ like(vector, activations)
    return activations if activations.ndim == 2 else activations.norm(dim=-1)
