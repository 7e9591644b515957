"""The published form of Jacobian lenses: a file of `torch.save` with one matrix for each layer.

The package jacobian-lens of Gurnee et al. 2026 defines the form. TransformerLens (from 4.3) and
Neuronpedia use it too. A file contains

- `J`: by layer l, the matrix from the stream after block l to the stream after the last block;
- `source_layers`: the layers of `J`, in order;
- `d_model`: the size of the stream;
- `n_prompts`: the number of texts in the mean;
- `metadata`: facts about the fit, such as the name of the model. This entry may be missing.

The stream after block l enters block l + 1, so `J[l]` is the matrix of layer l + 1 here. The form
has no matrix for the stream that enters the first block.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import CacheError
from hooks.base import at_least_float32, require_integer, storage

_KEYS = ("J", "source_layers", "d_model", "n_prompts", "metadata")
# The facts of `metadata` that have one possible value here.
_FIXED = {"estimator": "jacobian_lens", "hook_convention": "blocks.{layer}.hook_out"}
# The facts that are computed from the lens when it is written.
_COMPUTED = (*_FIXED, "target_layer", "n_prompts")


class Published(NamedTuple):
    """The content of a published file.

    Attributes:
        weight: the matrix of the stream entering each block; NaN for layers without a matrix.
        n_texts: the number of texts in the mean.
        about: the other facts of `metadata`.
    """

    weight: Float[Tensor, "layer d_model d_model"]
    n_texts: int
    about: dict[str, Any]


def read_published(path: str | os.PathLike[str]) -> Published:
    """Return the content of a published file. Only plain data is read from it.

    Raises:
        FileNotFoundError: if the file does not exist.
        CacheError: if the file does not have a published form, or two of its entries contradict
            each other.
    """
    with storage.one_error(path, "be a Jacobian lens in the published form", CacheError):
        content = storage.read_saved(storage.path_of(path))
        if not isinstance(content, dict):
            raise ValueError(f"it must be a dictionary; got {type(content).__name__}")
        if "jacobian_sum" in content:
            raise ValueError("it is a checkpoint of a fit; finish the fit, and save its lens")
        if unknown := [key for key in content if key not in _KEYS]:
            raise ValueError(f"its keys must be {', '.join(_KEYS)}; got also {unknown[0]!r}")
        matrices = content["J"]
        size = content["d_model"]
        require_integer("d_model", size)
        require_integer("n_prompts", content["n_prompts"])
        _require_matrices(matrices, size)
        if sorted(matrices) != [*content["source_layers"]]:
            raise ValueError(
                f"J must have the matrices of source_layers, {content['source_layers']}; "
                f"got {sorted(matrices)}"
            )
        metadata = content.get("metadata") or {}
        _require_plain(metadata)
        for name, expected in _FIXED.items():
            if metadata.get(name, expected) != expected:
                raise ValueError(f"{name} must be {expected!r}; got {metadata[name]!r}")
        last = metadata.get("target_layer", max(matrices) + 1)
        require_integer("target_layer", last, least=max(matrices) + 1)
        dtype = at_least_float32(next(iter(matrices.values()))).dtype
        weight = torch.full((last + 1, size, size), torch.nan, dtype=dtype)
        for layer, matrix in matrices.items():
            weight[layer + 1] = matrix
    about = {name: fact for name, fact in metadata.items() if name not in _COMPUTED}
    return Published(weight, n_texts=int(content["n_prompts"]), about=about)


def write_published(
    path: str | os.PathLike[str],
    weight: Float[Tensor, "layer d_model d_model"],
    layers: list[int],
    n_texts: int,
    about: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    """Write a published file, completely or not at all.

    Args:
        path: the path of the file, with the suffix `.pt`.
        weight: the matrix of the stream entering each block.
        layers: the layers that have a matrix. Layer 0 is left out.
        n_texts: the number of texts in the mean.
        about: other facts, which are written to `metadata`.
        dtype: the dtype of the matrices.

    Raises:
        FileNotFoundError: if the directory does not exist.
        ValueError: if the path has another suffix, or no layer except layer 0 has a matrix.
    """
    storage.suffix_of(path, [".pt"])
    if not any(layers):
        raise ValueError(f"the lens must have a matrix for a layer after layer 0; got {layers}")
    # PyTorch would write the whole memory of a view, so each matrix is copied.
    matrices = {
        layer - 1: weight[layer].detach().to("cpu", dtype, copy=True) for layer in layers if layer
    }
    computed = {"target_layer": len(weight) - 1, "n_prompts": n_texts}
    content = {
        "J": matrices,
        "n_prompts": n_texts,
        "source_layers": sorted(matrices),
        "d_model": weight.shape[-1],
        "metadata": {**about, **_FIXED, **computed},
    }
    with storage.replacing(storage.path_of(path)) as partial:
        torch.save(content, partial)


def _require_matrices(matrices: Any, size: int) -> None:
    """Check that there is at least one matrix, and that all are [d_model, d_model] and finite."""
    if not isinstance(matrices, dict) or not matrices:
        raise ValueError("J must be a dictionary of at least one matrix")
    for layer, matrix in matrices.items():
        require_integer("a layer of J", layer, least=0)
        shape = [*matrix.shape] if isinstance(matrix, Tensor) else type(matrix).__name__
        if shape != [size, size] or not matrix.is_floating_point():
            raise ValueError(f"J[{layer}] must be a matrix [{size}, {size}]; got {shape}")
        if not matrix.isfinite().all():
            raise ValueError(f"J[{layer}] must be finite; got NaN or infinity")


def _require_plain(value: Any) -> None:
    """Check that a value contains only numbers, texts, lists, and dictionaries with text keys."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"metadata must have texts as keys; got {[*value]}")
        for part in value.values():
            _require_plain(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _require_plain(part)
    elif not isinstance(value, (str, bool, int, float, type(None))):
        raise ValueError(f"metadata must contain only plain values; got {type(value).__name__}")
