"""Transcoders by layer, of one layer or across layers: dictionaries, with what their features write to later layers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from interp.features.activations import Gated
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.matching_pursuit import MatchingPursuit

Transcoders = Mapping[str, Dictionary] | Dictionary | CrossLayerTranscoder
"""Transcoders by `blocks.L.mlp_out`, or one that says where it belongs, or one across layers."""


class LayerTranscoder(NamedTuple):
    """The features of one layer.

    Attributes:
        layer: the block where they read.
        dictionary: what they read, and what they write to this layer.
        decoders: what they write to this layer, the next, ...
    """

    layer: int
    dictionary: Dictionary
    decoders: Sequence[Float[Tensor, "feature d_model"]]


def by_layer(transcoders: Transcoders, places: Mapping[str, int]) -> dict[int, LayerTranscoder]:
    """The features of each layer that has some, in the order of layers.

    Args:
        transcoders: the transcoders.
        places: the layers by the names of the points where MLPs write.

    Raises:
        ValueError: if a transcoder stands elsewhere, or has a norm, a gate, or steps, as its features are then no linear
            readings.
    """
    if isinstance(transcoders, Dictionary):
        transcoders = {transcoders.writes or "": transcoders}
    if isinstance(transcoders, CrossLayerTranscoder):
        made = [*_across(transcoders, places)]
    else:
        made = [*_of_one_layer(transcoders, places)]
    return {each.layer: each for each in sorted(made, key=lambda each: each.layer)}


def _of_one_layer(
    transcoders: Mapping[str, Dictionary], places: Mapping[str, int]
) -> Iterator[LayerTranscoder]:
    for name, dictionary in transcoders.items():
        if name not in places:
            raise ValueError(
                f"a transcoder must stand where an MLP writes, such as {next(iter(places), None)}; got {name!r}"
            )
        steps = isinstance(dictionary, MatchingPursuit)
        if steps or dictionary.norm != "none" or isinstance(dictionary.activation, Gated):
            raise ValueError(
                f"features must be linear readings, without a norm, a gate or steps; got others at {name}"
            )
        yield LayerTranscoder(places[name], dictionary, [dictionary.W_dec])


def _across(
    transcoder: CrossLayerTranscoder, places: Mapping[str, int]
) -> Iterator[LayerTranscoder]:
    if sorted(places.values()) != [*range(transcoder.n_layers)]:
        raise ValueError(
            f"a cross-layer transcoder must have features for each layer with an MLP, {len(places)}; "
            f"got {transcoder.n_layers}"
        )
    for layer in range(transcoder.n_layers):
        decoders = transcoder.W_dec[layer].unbind(1)
        yield LayerTranscoder(layer, transcoder.dictionary(layer), decoders)
