"""Formats of published dictionaries: the files of each format and its reader.

Read `common` first, with the rules and functions for all readers. Then read the file of one library
or release, in any order: `circuit_tracer`, `crosscoders`, `dictionary_learning`, `gemma_scope`,
`gemma_scope_clt`, `hookscope`, `llama_scope`, `sae_lens`, `saved`, `sparsify` or `temporal`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interp.features.crosscoder import Crosscoder
from interp.features.dictionary import Dictionary
from interp.features.forms import (
    circuit_tracer,
    crosscoders,
    dictionary_learning,
    gemma_scope,
    gemma_scope_clt,
    hookscope,
    llama_scope,
    sae_lens,
    saved,
    sparsify,
    temporal,
)
from interp.features.transcoders import Transcoders

Loaded = Dictionary | Transcoders


@dataclass(frozen=True)
class Form:
    """The patterns of files by which a format is recognized, and the reader of the format.

    Attributes:
        files: the patterns of files. A folder must contain a file for each pattern. If `single` is
            True, a file for one of the patterns is enough.
        read: the reader.
        single: whether a single file is a whole dictionary. The reader then takes the path of the
            file. Default: False.
        layers: the patterns of files that contain one of several layers. Default: none.
        read_layer: the reader of a file with one layer, or None if a single layer is no dictionary.
            Default: None.
    """

    files: tuple[str, ...]
    read: Callable[..., Loaded | Crosscoder]
    single: bool = False
    layers: tuple[str, ...] = ()
    read_layer: Callable[..., Dictionary] | None = None


FORMS: Mapping[str, Form] = {
    "sae_lens": Form(("cfg.json", "sae_weights.safetensors"), sae_lens.read),
    "hookscope": Form(("dictionary.safetensors",), hookscope.read),
    "sparsify": Form(("cfg.json", "sae.safetensors"), sparsify.read),
    "dictionary_learning": Form(("config.json", "ae.pt"), dictionary_learning.read),
    "gemma_scope": Form(("params.npz",), gemma_scope.read),
    "gemma_scope_2": Form(("params.safetensors",), gemma_scope.read_2),
    "circuit_tracer": Form(
        ("layer_0.safetensors",),
        circuit_tracer.read,
        layers=("layer_*.safetensors",),
        read_layer=circuit_tracer.read_layer,
    ),
    "cross_layer": Form(
        ("W_enc_0.safetensors", "W_dec_0.safetensors"),
        circuit_tracer.read_cross_layer,
        layers=("W_enc_*.safetensors", "W_dec_*.safetensors"),
    ),
    "gemma_scope_2_clt": Form(
        ("params_layer_0.safetensors",),
        gemma_scope_clt.read,
        layers=("params_layer_*.safetensors",),
    ),
    "llama_scope": Form(("hyperparams.json", "checkpoints/final.safetensors"), llama_scope.read),
    "llama_scope_r1": Form(("config.json", "sae_weights.safetensors"), llama_scope.read_r1),
    "temporal": Form(("conf.yaml", "latest_ckpt.*"), temporal.read),
    "saved": Form(("*.pt", "*.pth"), saved.read, single=True),
}

CROSSCODERS: Mapping[str, Form] = {
    "dictionary_learning": Form(("config.json", "ae.pt"), crosscoders.read),
    "dictionary_learning_end": Form(("config.json", "model_final.pt"), crosscoders.read),
    "dictionary_learning_hub": Form(("config.json", "model.safetensors"), crosscoders.read_hub),
    "gemma_scope_2": Form(
        ("config.json", "params_layer_0.safetensors"),
        crosscoders.read_gemma_scope_2,
        layers=("params_layer_*.safetensors",),
    ),
}
"""The formats of crosscoders. Their files can have the same names as files of other dictionaries,
so only `load_crosscoder` uses them.
"""
