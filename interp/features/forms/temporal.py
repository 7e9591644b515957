"""Read temporal dictionaries of canrager/temporalSAEs, and build them for the reader of SAELens."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from interp.features.activations import TopK
from interp.features.dictionary import NormKind
from interp.features.forms.common import (
    Weights,
    is_number,
    pickled,
    require_weights,
    tensors_of,
    whole_of,
    yaml_of,
)
from interp.features.temporal import AffineMap, ContextAttention, TemporalDictionary

_MAPS = {"q_target": "queries", "k_ctx": "keys", "v_ctx": "values", "c_proj": "output"}
"""The maps of `ContextAttention` by the names of the file."""


def read(folder: Path) -> TemporalDictionary:
    """Return the dictionary in `conf.yaml` and `latest_ckpt.safetensors` or `latest_ckpt.pt`.

    Their class reads the same fields of `conf.yaml`. The layer is in the name of a folder, as in
    `gemma-2-2B/layer_12/temporal`.
    """
    fields = yaml_of(folder, "conf.yaml")
    sae = fields.get("sae")
    if not isinstance(sae, dict):
        raise ValueError("conf.yaml must have the section sae")
    names = ("n_heads", "n_attn_layers", "sae_diff_type", "tied_weights", "scaling_factor")
    if missing := [name for name in names if name not in sae]:
        raise ValueError(f"sae in conf.yaml must have {', '.join(names)}; missing: {missing}")
    safe = folder / "latest_ckpt.safetensors"
    content = tensors_of(safe) if safe.is_file() else pickled(folder / "latest_ckpt.pt")
    weights = dict(content.get("sae", content))
    ours = {"D": "W_dec", "b": "b_dec", "E": "W_enc"}
    weights = {ours.get(name, name): weight for name, weight in weights.items()}
    if "b_dec" in weights:
        weights["b_dec"] = weights["b_dec"].flatten()
    layer = re.search(r"layer_(\d+)", "/".join(folder.absolute().parts[-3:]))
    point = f"blocks.{layer[1]}.resid_post" if layer else None
    place = {"reads": point, "writes": point, "config": sae}
    factor = sae["scaling_factor"]
    if not is_number(factor) or factor <= 0:
        raise ValueError(f"scaling_factor in conf.yaml must be above 0; got {factor!r}")
    return built(sae, weights, norm="none", factor=factor, place=place)


def built(
    config: Mapping[str, Any],
    weights: Weights,
    norm: NormKind,
    factor: float,
    place: Mapping[str, Any],
) -> TemporalDictionary:
    """Return a temporal dictionary from its tensors, with the names of SAELens.

    Args:
        config: the fields of the config.
        weights: the tensors.
        norm: the norm of the input.
        factor: the factor by which the input is multiplied. It becomes a part of the weights.
        place: the keywords of `DictionaryOrigin`.

    Raises:
        ValueError: if a tensor or a number is missing or wrong.
    """
    n_layers = whole_of("n_attn_layers", config.get("n_attn_layers", 1))
    is_tied = config.get("tied_weights", True)
    applies_b_dec = config.get("apply_b_dec_to_input", True)
    names = {"W_dec", "b_dec"} if is_tied else {"W_dec", "b_dec", "W_enc"}
    for layer in range(n_layers):
        for name in _MAPS:
            prefix = f"attn_layers.{layer}.{name}"
            names |= {f"{prefix}.weight", f"{prefix}.bias"}
    require_weights(weights, names, "a temporal dictionary")
    W_dec, b_dec = weights["W_dec"], weights["b_dec"]
    n_heads = whole_of("n_heads", config.get("n_heads", 8))
    layers: list[ContextAttention] = []
    for layer in range(n_layers):
        maps: dict[str, AffineMap] = {}
        for name, ours in _MAPS.items():
            prefix = f"attn_layers.{layer}.{name}"
            maps[ours] = AffineMap(weights[f"{prefix}.weight"].T, weights[f"{prefix}.bias"])
        layers.append(ContextAttention(**maps, n_heads=n_heads))
    W_enc = W_dec.T if is_tied else weights["W_enc"]
    # With tied weights, SAELens adds the bias only if it also subtracts the bias.
    uses_b_dec = applies_b_dec or not is_tied
    return TemporalDictionary(
        # Codes are a quarter of the mean product of the input and a feature.
        W_enc=W_enc * (factor / (4 * W_dec.shape[1])),
        W_dec=W_dec / factor,
        b_dec=b_dec / factor if uses_b_dec else b_dec * 0,
        activation=_activation(config),
        attention=layers,
        eps=1e-6 / factor,
        subtracts_b_dec=bool(applies_b_dec),
        norm=norm,
        **place,
    )


def _activation(config: Mapping[str, Any]) -> nn.Module:
    """Return the nonlinearity of the features.

    Raises:
        ValueError: if the config names another nonlinearity than ReLU and top-k.
    """
    kind = config.get("sae_diff_type", "topk")
    k = config.get("kval_topk")
    if kind not in ("relu", "topk"):
        raise ValueError(f"sae_diff_type must be 'relu' or 'topk'; got {kind!r}")
    return TopK(whole_of("kval_topk", k)) if kind == "topk" and k is not None else nn.ReLU()
