"""Dictionaries of Gemma Scope, 1 and 2."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from interp.features.activations import JumpReLU
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, require


def read(folder: Path) -> Dictionary:
    """Gemma Scope 1: `params.npz`.

    A folder `embedding` has those that read embeddings scaled by √d_model. A repository `...-transcoders` has those that
    read what the norm before the MLP gives, before its gain; see `Dictionary.with_input_gain`.
    """
    with np.load(folder / "params.npz") as file:
        weights = {name: torch.from_numpy(file[name]) for name in file}
    names = {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
    weights = {"W_" + n[2:] if n.startswith("w_") else n: weight for n, weight in weights.items()}
    require(weights, names, "params.npz")
    root = weights["W_enc"].shape[0] ** 0.5 if "embedding" in folder.parts[-3:] else 1.0
    is_transcoder = any(part.endswith("-transcoders") for part in folder.parts[-6:])
    return Dictionary(
        weights["W_enc"] / root, weights["W_dec"] * root, weights["b_enc"], weights["b_dec"], JumpReLU(weights["threshold"]),
        reads="ln2.normalized before its gain" if is_transcoder else None,
    )  # fmt: skip


def read_2(folder: Path) -> Dictionary:
    """Gemma Scope 2: `params.safetensors` and `config.json`."""
    config, weights = json_of(folder / "config.json"), load_file(folder / "params.safetensors")
    if config.get("architecture") != "jump_relu":
        raise ValueError(f"architecture must be 'jump_relu'; got {config.get('architecture')!r}")
    skip = weights.keys() & {"affine_skip_connection"}
    require(weights, {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"} | skip, "config.json")
    # Modules of transformers: who splices a transcoder says which points of ours they are.
    reads = config.get("hf_hook_point_in")
    writes = config.get("hf_hook_point_out", reads)
    return Dictionary(
        weights["w_enc"], weights["w_dec"], weights["b_enc"], weights["b_dec"], JumpReLU(weights["threshold"]),
        W_skip=weights.get("affine_skip_connection"), reads=reads, writes=writes, config=config,
    )  # fmt: skip
