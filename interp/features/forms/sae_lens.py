"""Read dictionaries of SAELens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.features.activations import Gated, JumpReLU, TopK
from interp.features.dictionary import Dictionary, NormKind
from interp.features.forms import temporal
from interp.features.forms.common import (
    Weights,
    json_of,
    known_fields,
    no_factor,
    require_types,
    require_weights,
    tensors_of,
    whole_of,
)
from interp.features.matching_pursuit import MatchingPursuit
from interp.features.places import ours

_CONFIG = "cfg.json of SAELens"
# Before version 6, the fields of `metadata` were in the config itself. The names on the left are
# older names.
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def read(folder: Path, *, norm_factor: float | None = None) -> Dictionary:
    """Return the dictionary in `cfg.json` and `sae_weights.safetensors`, of SAELens 6 or before.

    Args:
        folder: the folder of the files.
        norm_factor: see `load_sae`.
    """
    weights = tensors_of(folder / "sae_weights.safetensors")
    config, about = _config(json_of(folder / "cfg.json"))
    _translate(config, weights)
    kind = config.get("architecture", "standard")
    is_transcoder = "transcoder" in kind
    place: dict[str, Any] = {
        "reads": ours(about.get("hook_name")),
        "head": about.get("hook_head_index"),
        "config": config,
        "transcodes": is_transcoder,
    }
    place["writes"] = ours(about.get("hook_name_out")) if is_transcoder else place["reads"]
    if kind == "matching_pursuit":
        return _matching_pursuit(config, weights, norm_factor=norm_factor, place=place)
    if kind == "temporal":
        norm, factor = _norm(config, norm_factor)
        return temporal.built(config, weights, norm=norm, factor=factor, place=place)
    return _encoder_and_decoder(config, weights, norm_factor=norm_factor, place=place)


def _encoder_and_decoder(
    config: Mapping[str, Any],
    weights: Weights,
    norm_factor: float | None,
    place: Mapping[str, Any],
) -> Dictionary:
    """Return a dictionary of the other architectures: an encoder, a nonlinearity and a decoder.

    Args:
        config: the config.
        weights: the tensors of the file.
        norm_factor: see `load_sae`.
        place: the points that the dictionary reads and writes, and its origin.
    """
    kind = config.get("architecture", "standard")
    skip = {"W_skip"} if "skip" in kind else set[str]()
    biases = {"b_gate", "r_mag", "b_mag"} if kind == "gated" else {"b_enc"}
    thresholds = weights.keys() & {"threshold", "log_threshold", "topk_threshold"}
    norm, norm_factor = _norm(config, norm_factor)
    require_weights(weights, {"W_enc", "W_dec", "b_dec"} | biases | skip | thresholds, kind)
    b_enc = torch.zeros_like(weights["W_enc"][0]) if kind == "gated" else weights["b_enc"]
    W_enc = weights["W_enc"] * norm_factor
    W_dec = weights["W_dec"] / norm_factor
    if config.get("rescale_acts_by_decoder_norm"):
        length = W_dec.norm(dim=1)
        W_enc = W_enc * length
        b_enc = b_enc * length
        W_dec = W_dec / length[:, None]
    return Dictionary(
        W_enc=W_enc,
        W_dec=W_dec,
        b_enc=b_enc,
        b_dec=weights["b_dec"] / norm_factor,
        activation=_activation(kind, config, weights),
        W_skip=weights["W_skip"].T if skip else None,
        subtracts_b_dec=_subtracts(config) and not place["transcodes"],
        norm=norm,
        **place,
    )


def _config(saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a config with the field names of version 6, and the same config merged with its
    metadata.
    """
    require_types(saved, _CONFIG)
    metadata = saved.get("metadata") or {}
    require_types(metadata, _CONFIG)
    training = metadata.get("training_architecture_details") or {}
    if not isinstance(training, dict):
        raise ValueError(f"training_architecture_details must be an object; got {training!r:.60}")
    known_fields({name: value for name, value in saved.items() if name not in training}, _CONFIG)
    config = {
        _OLD_NAMES.get(name, name): value for name, value in saved.items() if value is not None
    }
    return config, config | metadata


def _matching_pursuit(
    config: Mapping[str, Any],
    weights: Weights,
    norm_factor: float | None,
    place: Mapping[str, Any],
) -> MatchingPursuit:
    """Return a dictionary of the architecture `matching_pursuit`, whose encoder is the transpose of
    its decoder.
    """
    norm, _ = _norm(config, norm_factor)
    require_weights(weights, {"W_dec", "b_dec"} | weights.keys() & {"W_enc"}, "matching_pursuit")
    b_dec = weights["b_dec"]
    return MatchingPursuit(
        W_dec=weights["W_dec"],
        b_dec=b_dec if _subtracts(config) else torch.zeros_like(b_dec),
        threshold=config.get("residual_threshold", 1e-2),
        most=config.get("max_iterations"),
        stops_when_same=config.get("stop_on_duplicate_support", True),
        norm=norm,
        **place,
    )


def _subtracts(config: Mapping[str, Any]) -> bool:
    """Return True if `b_dec` is subtracted from the input, according to the config."""
    return bool(config.get("apply_b_dec_to_input", True))


def _norm(config: Mapping[str, Any], norm_factor: float | None) -> tuple[NormKind, float]:
    """Return how the dictionary normalizes its input, and the factor for its weights."""
    name = config.get("normalize_activations") or "none"
    if name == "expected_average_only_in":
        if norm_factor is None:
            raise ValueError(
                f"normalize_activations is {name!r}, and cfg.json does not contain the factor: "
                "give norm_factor="
            )
        if config.get("architecture") == "matching_pursuit":
            raise ValueError(
                "norm_factor cannot be multiplied into the weights of matching pursuit, because "
                "they are tied"
            )
        return "none", norm_factor
    if name == "constant_scalar_rescale" and config.get("architecture") == "temporal":
        no_factor(norm_factor)
        return "none", config.get("activation_normalization_factor", 1.0)
    norms: dict[str, NormKind] = {
        "none": "none",
        "constant_norm_rescale": "constant_norm_rescale",
        "layer_norm": "layer_norm",
    }
    if name not in norms:
        raise ValueError(
            "normalize_activations must be one of expected_average_only_in, "
            f"{', '.join(norms)}; got {name!r}"
        )
    no_factor(norm_factor)
    return norms[name], 1.0


def _translate(config: dict[str, Any], weights: Weights) -> None:
    """Convert a config of any version to the fields of version 6, in place."""
    activation = config.get("activation_fn", "relu")
    if activation == "topk" and "metadata" in config and config.get("architecture") != "topk":
        raise ValueError(
            "architecture must be 'topk', because activation_fn is 'topk'; got "
            f"{config.get('architecture')!r}"
        )
    if activation == "topk":
        config |= {"architecture": "topk", **config.get("activation_fn_kwargs", {})}
        require_types(config, _CONFIG)
    elif activation != "relu":
        raise ValueError(f"activation_fn must be 'relu' or 'topk'; got {activation!r}")
    if config.get("reshape_activations") not in (None, "none", "hook_z"):
        raise ValueError(
            f"reshape_activations must be 'none' or 'hook_z'; got {config['reshape_activations']!r}"
        )
    norm = config.get("normalize_activations")
    if isinstance(norm, bool):
        config["normalize_activations"] = "expected_average_only_in" if norm else "none"
    factor = weights.pop("scaling_factor", None)
    # A factor of 1 is set and not computed, so the comparison can be exact.
    if factor is not None and not torch.equal(factor, torch.ones_like(factor)):
        raise ValueError("scaling_factor must be 1 everywhere: fold it into W_dec first")


def _activation(kind: str, config: Mapping[str, Any], weights: Weights) -> nn.Module:
    """Return the nonlinearity of an architecture.

    Raises:
        ValueError: if the architecture is not supported, or a number is missing.
    """
    if "jumprelu" in kind or kind in ("batchtopk", "matryoshka_batchtopk"):
        if "log_threshold" in weights:
            return JumpReLU(weights["log_threshold"].exp())
        names = weights.keys() & {"threshold", "topk_threshold"}
        if len(names) != 1:
            raise ValueError(
                f"a dictionary of the architecture {kind!r} needs one threshold; got {len(names)}"
            )
        return JumpReLU(weights[names.pop()].to(weights["W_enc"].dtype))
    if kind in ("topk", "abstopk") and "k" not in config:
        raise ValueError(f"cfg.json of a {kind} dictionary must contain k; it does not")
    if kind == "topk":
        return TopK(whole_of("k", config["k"]))
    if kind == "abstopk":
        return TopK(whole_of("k", config["k"]), "size", relu=False)
    if kind == "gated":
        return Gated(weights["b_gate"], weights["r_mag"], weights["b_mag"])
    if kind in ("standard", "transcoder", "skip_transcoder"):
        return nn.ReLU()
    raise ValueError(f"the architecture {kind!r} is not supported")
