"""Sparse autoencoders, transcoders and other dictionaries: load them, splice them into models, and
measure them.

Read `activations` and `dictionary` (dictionaries of one layer) first, then as needed `transcoders`
(of several layers), `cross_layer`, `crosscoder` (of several models or layers), `matching_pursuit`
and `temporal` (of whole texts), `loading` (from files, with `forms`, `hub` and `bundled`, at the
point from `places`), `saving` (to files) and `splicing` (into a model). The other files measure and
describe dictionaries: `evaluation` (with `score_sums` and `scores`), `cards`, `controls`,
`explanations`, `saebench`, and for crosscoders `members`, `scaling` and `member_cards`.

>>> from interp.features import load_sae, splice
>>> from models import load
>>> model, sae = load("pydoc-4l"), load_sae("pydoc-4l/resid_post")
>>> with splice(model, sae) as runner:
...     cache = runner.capture("part ZQXJ-KV8", names="*.features")
>>> (cache["features", 2] != 0).sum(-1).max()
tensor(32)
"""

from hooks.base import missing_name as _missing_name
from interp.features.activations import Gated, GroupMax, JumpReLU, TopK
from interp.features.cards import FeatureCard, FeatureCards, FeatureExample, feature_cards
from interp.features.controls import purity, stability
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.crosscoder import Crosscoder
from interp.features.dictionary import Dictionary
from interp.features.evaluation import evaluate_sae
from interp.features.explanations import (
    BalancedAccuracy,
    ExplanationScore,
    JudgedExample,
    score_explanation,
)
from interp.features.loading import load_crosscoder, load_sae, load_transcoders
from interp.features.matching_pursuit import MatchingPursuit
from interp.features.member_cards import crosscoder_cards
from interp.features.members import member_values
from interp.features.saebench import for_saebench
from interp.features.scaling import LatentScaling, latent_scaling
from interp.features.scores import DictionaryScores, PointScores
from interp.features.splicing import splice
from interp.features.temporal import AffineMap, ContextAttention, TemporalDictionary
from interp.features.transcoders import Transcoders, TranscoderSet

__all__ = [
    "AffineMap",
    "BalancedAccuracy",
    "ContextAttention",
    "CrossLayerTranscoder",
    "Crosscoder",
    "Dictionary",
    "DictionaryScores",
    "ExplanationScore",
    "FeatureCard",
    "FeatureCards",
    "FeatureExample",
    "Gated",
    "GroupMax",
    "JudgedExample",
    "JumpReLU",
    "LatentScaling",
    "MatchingPursuit",
    "PointScores",
    "TemporalDictionary",
    "TopK",
    "TranscoderSet",
    "Transcoders",
    "crosscoder_cards",
    "evaluate_sae",
    "feature_cards",
    "for_saebench",
    "latent_scaling",
    "load_crosscoder",
    "load_sae",
    "load_transcoders",
    "member_values",
    "purity",
    "score_explanation",
    "splice",
    "stability",
]

__getattr__ = _missing_name(__name__, __all__)
