"""Read dictionaries of Llama Scope and Llama Scope R1.

The library Language-Model-SAEs of OpenMOSS writes their formats.
"""

from collections.abc import Mapping, Set
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp.features.activations import JumpReLU
from interp.features.dictionary import Dictionary
from interp.features.forms.common import (
    Weights,
    full_precision,
    is_number,
    json_of,
    known_fields,
    require_weights,
    tensors_of,
)
from interp.features.places import ours

_RULES = {
    "act_fn": "jumprelu",
    "sae_type": "sae",
    "use_glu_encoder": False,
    "apply_decoder_bias_to_pre_encoder": False,
}
_WEIGHTS = {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}


def read(folder: Path) -> Dictionary:
    """Return the dictionary in `hyperparams.json` and `checkpoints/final.safetensors`.

    The features have the scale of the unnormalized activations. The loader of that library returns
    the features of `with_unit_decoder` instead, and the threshold in the file refers to these.
    """
    config = _config_of(folder / "hyperparams.json", {"jump_relu_threshold"})
    weights = tensors_of(folder / "checkpoints" / "final.safetensors")
    require_weights(weights, _WEIGHTS, "final.safetensors")
    norms = config.get("dataset_average_activation_norm") or {}
    factors = _factors(config, norms.get("in"), norms.get("out"))
    threshold = torch.full([len(weights["encoder.bias"])], float(config["jump_relu_threshold"]))
    return _scaled_dictionary(config, weights, *factors, threshold)


def read_r1(folder: Path) -> Dictionary:
    """Return the dictionary of Llama Scope R1 in `config.json` and `sae_weights.safetensors`.

    The second file contains the norms of activations. The thresholds were trained on features of
    normalized activations.
    """
    config = _config_of(folder / "config.json")
    weights = tensors_of(folder / "sae_weights.safetensors")
    start = "dataset_average_activation_norm."
    norms = {
        name.removeprefix(start): _number_in(name, weights.pop(name))
        for name in [*weights]
        if name.startswith(start)
    }
    require_weights(weights, _WEIGHTS | {"log_jumprelu_threshold"}, "sae_weights.safetensors")
    ends = config["hook_point_in"], config.get("hook_point_out") or config["hook_point_in"]
    s_in, s_out = _factors(config, *map(norms.get, ends))
    by_length = config.get("sparsity_include_decoder_norm", True)
    threshold = weights["log_jumprelu_threshold"].float().exp() / (s_out if by_length else s_in)
    return _scaled_dictionary(config, weights, s_in=s_in, s_out=s_out, threshold=threshold)


def _number_in(name: str, tensor: Tensor) -> float:
    """Return the number in a tensor of one element.

    Raises:
        ValueError: if the tensor has another number of elements.
    """
    if tensor.numel() != 1:
        raise ValueError(f"{name} must be one number; got {[*tensor.shape]}")
    return float(tensor)


def _config_of(path: Path, needed: Set[str] = frozenset()) -> dict[str, Any]:
    """Return the config in a file.

    Raises:
        ValueError: if a `Dictionary` cannot express the config.
    """
    config = known_fields(json_of(path), "config of Llama Scope")
    needed = needed | ({"expansion_factor"} if "d_sae" not in config else frozenset())
    if missing := sorted(({"hook_point_in", "d_model"} | needed) - config.keys()):
        raise ValueError(f"{path.name} must contain {', '.join(missing)}; it does not")
    for name, rule in _RULES.items():
        if (value := config.get(name, rule)) != rule:
            raise ValueError(f"{name} of {path.name} must be {rule!r}; got {value!r}")
    return config


def _factors(
    config: Mapping[str, Any], norm_in: float | None, norm_out: float | None
) -> tuple[float, float]:
    """Return the factors of the input and the output in training, which scaled the mean length of
    activations to √d_model.
    """
    kind = config.get("norm_activation", "dataset-wise")
    if kind == "inference":
        return 1.0, 1.0
    if kind != "dataset-wise" or not _is_positive(norm_in) or not _is_positive(norm_out):
        raise ValueError(
            "norm_activation must be 'inference', or 'dataset-wise' with "
            "dataset_average_activation_norm of the points that are read "
            f"and written; got {kind!r} with {norm_in} and {norm_out}"
        )
    root = sqrt(config["d_model"])
    assert norm_in is not None
    assert norm_out is not None
    return root / norm_in, root / norm_out


def _is_positive(norm: float | None) -> bool:
    """Return True if a norm is known and above 0."""
    return is_number(norm) and norm is not None and norm > 0


def _scaled_dictionary(
    config: Mapping[str, Any], weights: Weights, s_in: float, s_out: float, threshold: Tensor
) -> Dictionary:
    """Return the dictionary, with the factors multiplied into its weights.

    Args:
        config: the config.
        weights: the tensors of the file.
        s_in, s_out: the factors of the input and the output in training.
        threshold: the threshold of each feature. If `sparsity_include_decoder_norm` is true in the
            config, it applies to the feature times the length of its row in `W_dec`.
    """
    width = config["d_model"]
    size = [int(config.get("d_sae") or width * config["expansion_factor"]), width]
    weights = full_precision(weights)
    if (got := [*weights["encoder.weight"].shape]) != size:
        raise ValueError(f"encoder.weight must be [d_sae d_model], {size}; got {got}")
    W_dec = weights["decoder.weight"].T * (s_in / s_out)
    if config.get("sparsity_include_decoder_norm", True):
        threshold = threshold / W_dec.norm(dim=1)
    reads = ours(config["hook_point_in"])
    return Dictionary(
        W_enc=weights["encoder.weight"].T,
        W_dec=W_dec,
        b_enc=weights["encoder.bias"] / s_in,
        b_dec=weights["decoder.bias"] / s_out,
        activation=JumpReLU(threshold, relu=False),
        reads=reads,
        writes=ours(config.get("hook_point_out")) or reads,
        config={**config, "input_factor": s_in},
    )
