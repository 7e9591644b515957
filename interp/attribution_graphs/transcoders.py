"""Transcoders by layer, with the decoders of their features to this and to later layers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from interp.features.activations import Gated
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.matching_pursuit import MatchingPursuit
from interp.features.temporal import TemporalDictionary
from interp.features.transcoders import Transcoders
from interp.kinds import require_made

AnyTranscoders = Transcoders | Mapping[str, Dictionary] | Dictionary
"""Transcoders as `load_transcoders` returns them, dictionaries by `blocks.L.mlp_out`, or a single
transcoder with a known point.
"""


class LayerTranscoder(NamedTuple):
    """The features of one layer.

    Attributes:
        dictionary: the encoder of the features, and their decoder to this layer.
        decoders: the decoders of the features to this layer, to the next layer, and so on.
    """

    dictionary: Dictionary
    decoders: Sequence[Float[Tensor, "feature d_model"]]


def by_layer(transcoders: AnyTranscoders, places: Mapping[str, int]) -> dict[int, LayerTranscoder]:
    """Return the transcoder of each layer that has one, in the order of layers.

    Args:
        transcoders: the transcoders.
        places: the layer of each MLP, by the name of the point of the MLP's output.

    Raises:
        ValueError: if a transcoder writes a point that is no output of an MLP, or its features are
            not a nonlinearity applied to a linear map of the input: if it normalizes its input, is
            gated, uses matching pursuit, or is temporal.
    """
    if isinstance(transcoders, Dictionary):
        transcoders = {transcoders.writes or "": transcoders}
    if isinstance(transcoders, CrossLayerTranscoder):
        return _across(transcoders, places)
    if not isinstance(transcoders, Mapping):
        require_made("transcoders", transcoders, Transcoders)
    assert isinstance(transcoders, Mapping)
    by_block = _of_one_layer(transcoders, places)
    return {layer: by_block[layer] for layer in sorted(by_block)}


def _of_one_layer(
    transcoders: Mapping[str, Dictionary], places: Mapping[str, int]
) -> dict[int, LayerTranscoder]:
    """Check transcoders that each write one layer, and return them by the index of this layer.

    Args:
        transcoders: the transcoders, by the names of the points that they write.
        places: see `by_layer`.

    Raises:
        TypeError: if an object is no dictionary.
        ValueError: if a point is no output of an MLP, or features are not linear in the input.
    """
    for name, dictionary in transcoders.items():
        require_made(f"the transcoder at {name}", dictionary, Dictionary)
        if name not in places:
            raise ValueError(
                "the point of a transcoder must be the output of an MLP, such as "
                f"{next(iter(places), None)}; got {name!r}"
            )
        steps = isinstance(dictionary, MatchingPursuit | TemporalDictionary)
        if steps or dictionary.norm != "none" or isinstance(dictionary.activation, Gated):
            raise ValueError(
                f"the transcoder at {name} must have features that are linear in its input; got a "
                "norm, a gate, steps or attention"
            )
    return {
        places[name]: LayerTranscoder(dictionary, [dictionary.W_dec])
        for name, dictionary in transcoders.items()
    }


def _across(
    transcoder: CrossLayerTranscoder, places: Mapping[str, int]
) -> dict[int, LayerTranscoder]:
    """Return the features of a cross-layer transcoder by layer.

    Args:
        transcoder: the transcoder.
        places: see `by_layer`.

    Raises:
        ValueError: if the transcoder does not have features for each layer with an MLP.
    """
    layers = range(transcoder.n_layers)
    if sorted(places.values()) != [*layers]:
        raise ValueError(
            "a cross-layer transcoder must have features for each layer with an MLP, "
            f"{len(places)}; got {transcoder.n_layers}"
        )
    return {
        layer: LayerTranscoder(transcoder.dictionary(layer), transcoder.W_dec[layer].unbind(1))
        for layer in layers
    }
