"""Transcoders of circuit-tracer, of one layer and across layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from interp.features.activations import JumpReLU
from interp.features.dictionary import CrossLayerTranscoder, Dictionary
from interp.features.forms.common import Weights, ours, require, yaml_of


def read(folder: Path) -> dict[str, Dictionary]:
    """circuit-tracer: `layer_0.safetensors` and so on, and `config.yaml` if it is there. By the points where they stand."""
    config = yaml_of(folder)
    reads, writes = (_last_part(config, end) for end in ("input", "output"))
    made = {}
    for layer in range(len([*folder.glob("layer_*.safetensors")])):
        weights = load_file(folder / f"layer_{layer}.safetensors")
        more = weights.keys() & {"W_skip", "activation_function.threshold"}
        require(weights, {"W_enc", "W_dec", "b_enc", "b_dec"} | more, f"layer_{layer}")
        threshold = weights.get("activation_function.threshold")
        place = f"blocks.{layer}.{writes or 'mlp_out'}"
        made[place] = Dictionary(
            weights["W_enc"].T, weights["W_dec"], weights["b_enc"], weights["b_dec"],
            nn.ReLU() if threshold is None else JumpReLU(threshold, relu=False),
            W_skip=weights["W_skip"].T if "W_skip" in weights else None,
            reads=reads and f"blocks.{layer}.{reads}", writes=place, config=config,
        )  # fmt: skip
    return made


def read_cross_layer(folder: Path) -> CrossLayerTranscoder:
    """circuit-tracer's cross-layer transcoders: `W_enc_0.safetensors`, `W_dec_0.safetensors` and so on."""
    config = yaml_of(folder)
    layers: list[Weights] = []
    for n in range(len([*folder.glob("W_enc_*.safetensors")])):
        tensors = {
            name: tensor
            for end in ("enc", "dec")
            for name, tensor in load_file(folder / f"W_{end}_{n}.safetensors").items()
        }
        weights = {name.removesuffix(f"_{n}"): tensor for name, tensor in tensors.items()}
        more = (layers[0] if layers else weights).keys() & {"threshold", "W_skip"}
        require(weights, {"W_enc", "W_dec", "b_enc", "b_dec"} | more, f"layer {n}")
        layers.append(weights)
    return CrossLayerTranscoder(
        [w["W_enc"].T for w in layers],
        [w["W_dec"] for w in layers],
        [w["b_enc"] for w in layers],
        torch.stack([w["b_dec"] for w in layers]),
        [JumpReLU(w["threshold"], relu=False) if "threshold" in w else nn.ReLU() for w in layers],
        W_skip=[w["W_skip"] for w in layers] if "W_skip" in layers[0] else None,
        reads=_last_part(config, "input"),
        writes=_last_part(config, "output"),
        config=config,
    )


def _last_part(config: Mapping[str, Any], end: str) -> str | None:
    """The last part of our names of the points that all layers read or write."""
    name = config.get(f"feature_{end}_hook")
    # circuit-tracer adds these to TransformerLens. A norm after the MLP would come between the second and `mlp_out`.
    alone = {"mlp.hook_in": "ln2.normalized", "mlp.hook_out": "mlp_out"}.get(name or "")
    name = alone or ours(name)
    return name and name.removeprefix("blocks.*.")
