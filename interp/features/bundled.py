"""The dictionaries that are bundled with `pydoc-4l`.

Their files contain weights in 8 bits, with one scale for each feature.
"""

from collections.abc import Mapping
from importlib.resources import files

import torch
from jaxtyping import Shaped
from safetensors.torch import load
from torch import Tensor

from interp.features.activations import TopK
from interp.features.dictionary import Dictionary
from interp.features.transcoders import TranscoderSet

NAMES = ("pydoc-4l/resid_post", "pydoc-4l/transcoders")
"""The names of a sparse autoencoder of the stream after block 2, and of skip transcoders of all
MLPs.
"""


def bundled(name: str) -> Dictionary | TranscoderSet:
    """Return the dictionary or the transcoders with one of the names in `NAMES`.

    The dictionaries were trained by `examples/train_dictionaries.py`.
    """
    file = files("interp.features").joinpath("bundled_files", f"{name}.safetensors")
    dictionaries = unpacked(load(file.read_bytes()))
    if len(dictionaries) == 1:
        return next(iter(dictionaries.values()))
    return TranscoderSet(dictionaries, config={"model_name": "pydoc-4l"})


def packed(dictionaries: Mapping[str, Dictionary]) -> dict[str, Shaped[Tensor, "..."]]:
    """Return the tensors of a file that stores the weights of TopK dictionaries in 8 bits.

    Args:
        dictionaries: the dictionaries by the points that they write. A dictionary that writes
            `mlp_out` must read `ln2.normalized`. Any other dictionary must read the point that it
            writes.
    """
    tensors: dict[str, Tensor] = {}
    for writes, dictionary in dictionaries.items():
        weights = {
            "W_enc": dictionary.W_enc.T,
            "W_dec": dictionary.W_dec,
            "W_skip": dictionary.W_skip,
        }
        for name, weight in weights.items():
            if weight is not None:
                scale = weight.abs().amax(1, keepdim=True) / 127
                tensors[f"{writes}/{name}"] = (weight / scale).round().to(torch.int8)
                tensors[f"{writes}/{name}_scale"] = scale
        k = torch.tensor(dictionary.activation.k)
        tensors |= {
            f"{writes}/b_enc": dictionary.b_enc,
            f"{writes}/b_dec": dictionary.b_dec,
            f"{writes}/k": k,
        }
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def unpacked(tensors: Mapping[str, Shaped[Tensor, "..."]]) -> dict[str, Dictionary]:
    """Return the dictionaries in the tensors of a file; `packed` returns these tensors."""
    by_point: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        writes, _, part = name.partition("/")
        by_point.setdefault(writes, {})[part] = tensor
    dictionaries = {}
    for writes, parts in by_point.items():
        weights = {}
        for name, weight in parts.items():
            if f"{name}_scale" in parts:
                weights[name] = weight * parts[f"{name}_scale"]
        dictionaries[writes] = Dictionary(
            W_enc=weights["W_enc"].T,
            W_dec=weights["W_dec"],
            b_enc=parts["b_enc"],
            b_dec=parts["b_dec"],
            activation=TopK(int(parts["k"])),
            W_skip=weights.get("W_skip"),
            reads=writes.replace("mlp_out", "ln2.normalized"),
            writes=writes,
            config={"model_name": "pydoc-4l"},
        )
    return dictionaries
