"""Transcoders by layer, of one layer or across layers: dictionaries, with what their features write to later layers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from interp.features.activations import Gated
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.matching_pursuit import MatchingPursuit
from interp.kinds import require_made

Transcoders = Mapping[str, Dictionary] | Dictionary | CrossLayerTranscoder
"""Transcoders by `blocks.L.mlp_out`, or one that says where it belongs, or one across layers."""


class LayerTranscoder(NamedTuple):
    """The features of one layer.

    Attributes:
        dictionary: what they read, and what they write to this layer.
        decoders: what they write to this layer, the next, ...
    """

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
        return _across(transcoders, places)
    if not isinstance(transcoders, Mapping):
        require_made("transcoders", transcoders, Dictionary)
    made = _of_one_layer(transcoders, places)
    return {layer: made[layer] for layer in sorted(made)}


def _of_one_layer(
    transcoders: Mapping[str, Dictionary], places: Mapping[str, int]
) -> dict[int, LayerTranscoder]:
    for name, dictionary in transcoders.items():
        require_made(f"the transcoder at {name}", dictionary, Dictionary)
        if name not in places:
            raise ValueError(
                f"a transcoder must stand where an MLP writes, such as {next(iter(places), None)}; got {name!r}"
            )
        steps = isinstance(dictionary, MatchingPursuit)
        if steps or dictionary.norm != "none" or isinstance(dictionary.activation, Gated):
            raise ValueError(
                f"features must be linear readings, without a norm, a gate or steps; got others at {name}"
            )
    return {places[name]: LayerTranscoder(d, [d.W_dec]) for name, d in transcoders.items()}


def _across(
    transcoder: CrossLayerTranscoder, places: Mapping[str, int]
) -> dict[int, LayerTranscoder]:
    layers = range(transcoder.n_layers)
    if sorted(places.values()) != [*layers]:
        raise ValueError(
            f"a cross-layer transcoder must have features for each layer with an MLP, {len(places)}; "
            f"got {transcoder.n_layers}"
        )
    return {
        n: LayerTranscoder(transcoder.dictionary(n), transcoder.W_dec[n].unbind(1)) for n in layers
    }
