"""Dictionaries from files: the format is recognised by what lies in a folder."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hooks.errors import unknown_name
from interp.features import formats
from interp.features.bundled import NAMES, bundled
from interp.features.dictionary import CrossLayerTranscoder, Dictionary

Loaded = Dictionary | dict[str, Dictionary] | CrossLayerTranscoder

_READERS: dict[str, tuple[tuple[str, ...], Callable[[Path, float | None], Loaded]]] = {
    "sae_lens": (("cfg.json", "sae_weights.safetensors"), formats.sae_lens),
    "sparsify": (("cfg.json", "sae.safetensors"), formats.sparsify),
    "dictionary_learning": (("config.json", "ae.pt"), formats.dictionary_learning),
    "gemma_scope": (("params.npz",), formats.gemma_scope),
    "gemma_scope_2": (("config.json", "params.safetensors"), formats.gemma_scope_2),
    "circuit_tracer": (("layer_0.safetensors",), formats.circuit_tracer),
    "cross_layer": (("W_enc_0.safetensors", "W_dec_0.safetensors"), formats.cross_layer),
}
Format = Literal[
    "auto",
    "sae_lens",
    "sparsify",
    "dictionary_learning",
    "gemma_scope",
    "gemma_scope_2",
    "circuit_tracer",
    "cross_layer",
]


def load_sae(
    path: str | os.PathLike[str], format: Format = "auto", *, norm_factor: float | None = None
) -> Loaded:
    """Load a sparse autoencoder or transcoders from the files of any of these libraries.

    SAELens 6 and before, sparsify, dictionary_learning, Gemma Scope 1 and 2, and circuit-tracer. Points that the config
    names are given our names. Weights keep their dtype; `.to(device)` moves them.

    Args:
        path: a folder, a file in it, or the name of a bundled dictionary: `pydoc-4l/resid_post` or
            `pydoc-4l/transcoders`.
        format: whose files they are, where a folder has those of several.
        norm_factor: what activations were multiplied by in training, where the files do not have it (SAELens), or what
            they were divided by (dictionary_learning). It goes into the weights.

    Returns:
        A dictionary; or, of several layers, one for each point, as `splice` takes them; or a cross-layer transcoder.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no known files.
        UnknownNameError: if there is no such format.
        ValueError: if files of several formats are there, or a field or a tensor is missing or unknown.

    >>> load_sae("pydoc-4l/resid_post")
    Dictionary(
      128 -> 1024 features -> 128, at blocks.2.resid_post of pydoc-4l
      (activation): TopK(k=32, by='value', relu=True)
    )
    """
    if str(path) in NAMES and not Path(path).exists():
        made = bundled(str(path))
        return made if len(made) > 1 else next(iter(made.values()))
    folder = Path(path)
    folder = folder.parent if folder.is_file() else folder
    if format != "auto" and format not in _READERS:
        raise unknown_name(format, _READERS, "format of dictionaries")
    fitting = [
        name
        for name, (files, _) in _READERS.items()
        if all((folder / file).is_file() for file in files)
    ]
    if format == "auto" and len(fitting) > 1:
        raise ValueError(
            f"format= must say which of the files in {folder} to read; it has those of {' and '.join(fitting)}"
        )
    if not fitting or format not in ("auto", *fitting):
        wanted = _READERS if format == "auto" else {format: _READERS[format]}
        listed = "; ".join(f"{' and '.join(files)} ({name})" for name, (files, _) in wanted.items())
        bundled_too = f"; bundled ones are {' and '.join(NAMES)}" if format == "auto" else ""
        raise FileNotFoundError(f"{folder} must have {listed}{bundled_too}")
    return _READERS[fitting[0] if format == "auto" else format][1](folder, norm_factor)
