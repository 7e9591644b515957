"""Forms in which libraries and releases publish dictionaries: what lies in the folder, and who reads it.

Read `common` first, which has what readers share; each other file reads the forms of one library or release, in any order.

A reader takes the folder, or the file where a form is a single file, and gives our form of what is in it. Its other
arguments are what a caller of `load_sae` may have to add, as the files do not say it. A field of a
config is known and honoured, known to change nothing, or refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.forms import (
    circuit_tracer,
    dictionary_learning,
    gemma_scope,
    gemma_scope_clt,
    llama_scope,
    sae_lens,
    saved,
    sparsify,
)

Loaded = Dictionary | dict[str, Dictionary] | CrossLayerTranscoder


@dataclass(frozen=True)
class Form:
    """The files by which a form is recognised, as patterns, and its reader.

    Attributes:
        files: patterns of files, each of which must be in the folder; one of them if a file is a whole dictionary.
        read: the reader.
        single: whether one file is a whole dictionary, and the reader takes its path.
        layers: patterns of files that have one layer each, where a folder has several.
        read_layer: the reader of one such file; None if a layer alone is no dictionary.
    """

    files: tuple[str, ...]
    read: Callable[..., Loaded]
    single: bool = False
    layers: tuple[str, ...] = ()
    read_layer: Callable[..., Dictionary] | None = None


FORMS: Mapping[str, Form] = {
    "sae_lens": Form(("cfg.json", "sae_weights.safetensors"), sae_lens.read),
    "sparsify": Form(("cfg.json", "sae.safetensors"), sparsify.read),
    "dictionary_learning": Form(("config.json", "ae.pt"), dictionary_learning.read),
    "gemma_scope": Form(("params.npz",), gemma_scope.read),
    "gemma_scope_2": Form(("config.json", "params.safetensors"), gemma_scope.read_2),
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
    "saved": Form(("*.pt", "*.pth"), saved.read, single=True),
}
