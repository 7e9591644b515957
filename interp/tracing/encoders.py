"""The features of each layer, of transcoders of one layer or across layers, as linear readings and writings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from interp.features.activations import Gated
from interp.features.dictionary import CrossLayerTranscoder, Dictionary, MatchingPursuit

Transcoders = Mapping[str, Dictionary] | Dictionary | CrossLayerTranscoder
"""Transcoders by `blocks.L.mlp_out`, or one that says where it belongs, or one across layers."""


class Encoder(NamedTuple):
    """The features of one layer: what they read, and what they write to it and to later layers.

    Attributes:
        layer: the block where they read.
        reads: the name of the point that they read, or its last part; None if unknown.
        encode: makes features of values there.
        W_enc, offset: pre-activations are `value @ W_enc + offset`.
        decoders: what they write to this layer, the next, ...
        constant: what is written to this layer whatever is read.
        W_skip: the skip connection of this layer.
    """

    layer: int
    reads: str | None
    encode: Callable[[Tensor], Tensor]
    W_enc: Float[Tensor, "d_model feature"]
    offset: Float[Tensor, " feature"]
    decoders: Sequence[Float[Tensor, "feature d_model"]]
    constant: Float[Tensor, " d_model"]
    W_skip: Float[Tensor, "d_model d_model"] | None = None


def encoders_of(transcoders: Transcoders, places: Mapping[str, int]) -> dict[int, Encoder]:
    """The features of each layer that has some, in the order of layers.

    Args:
        transcoders: the transcoders.
        places: the layers by the names of the points where MLPs write.

    Raises:
        ValueError: if a transcoder stands elsewhere, or has a norm, a gate, or steps, as its features are then no linear
            readings.
    """
    if isinstance(transcoders, CrossLayerTranscoder):
        made = _across(transcoders, places)
    else:
        if isinstance(transcoders, Dictionary):
            transcoders = {transcoders.writes or "": transcoders}
        made = (_of_one(name, each, places) for name, each in transcoders.items())
    return {encoder.layer: encoder for encoder in sorted(made, key=lambda encoder: encoder.layer)}


def _of_one(name: str, dictionary: Dictionary, places: Mapping[str, int]) -> Encoder:
    if name not in places:
        raise ValueError(
            f"a transcoder must stand where an MLP writes, such as {next(iter(places), None)}; got {name!r}"
        )
    steps = isinstance(dictionary, MatchingPursuit)
    if steps or dictionary.norm != "none" or isinstance(dictionary.activation, Gated):
        raise ValueError(
            f"features must be linear readings, without a norm, a gate or steps; got others at {name}"
        )
    offset = dictionary.b_enc
    if dictionary.subtracts_b_dec:
        offset = offset - dictionary.b_dec @ dictionary.W_enc
    return Encoder(
        places[name],
        dictionary.reads,
        dictionary.encode,
        dictionary.W_enc,
        offset,
        [dictionary.W_dec],
        dictionary.b_dec,
        dictionary.W_skip,
    )


def _across(transcoder: CrossLayerTranscoder, places: Mapping[str, int]) -> Iterator[Encoder]:
    if sorted(places.values()) != [*range(len(transcoder.W_enc))]:
        raise ValueError(
            f"a cross-layer transcoder must have features for each layer with an MLP, {len(places)}; "
            f"got {len(transcoder.W_enc)}"
        )
    for n, (W_enc, b_enc) in enumerate(zip(transcoder.W_enc, transcoder.b_enc, strict=True)):
        activation = transcoder.activations[n]

        def encode(
            value: Tensor,
            W: Tensor = W_enc,
            b: Tensor = b_enc,
            activation: Callable[[Tensor], Tensor] = activation,
        ) -> Tensor:
            return activation(value.to(W.dtype) @ W + b)

        decoders = transcoder.W_dec[n].unbind(1)
        skip = transcoder.W_skip[n] if transcoder.W_skip else None
        yield Encoder(
            n, transcoder.reads, encode, W_enc, b_enc, decoders, transcoder.b_dec[n], skip
        )
