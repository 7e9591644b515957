"""Sparse autoencoders and transcoders: loaded from any format, spliced into any model, and measured."""

from interp.features.activations import Gated, GroupMax, JumpReLU, TopK
from interp.features.dictionary import CrossLayerTranscoder, Dictionary, MatchingPursuit

__all__ = [
    "CrossLayerTranscoder",
    "Dictionary",
    "Gated",
    "GroupMax",
    "JumpReLU",
    "MatchingPursuit",
    "TopK",
]
