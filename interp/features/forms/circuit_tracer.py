"""Read transcoders and cross-layer transcoders of circuit-tracer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interp.features.activations import JumpReLU, TopK
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.dictionary import Dictionary
from interp.features.forms.common import (
    Weights,
    known_fields,
    require_weights,
    tensors_of,
    whole_of,
    yaml_of,
)
from interp.features.places import ours
from interp.features.transcoders import TranscoderSet


def read(folder: Path, *, k: int | None = None) -> TranscoderSet:
    """Return the transcoders in `layer_0.safetensors` and so on.

    Args:
        folder: the folder of the files, which may contain a `config.yaml`.
        k: the number of active features, if the files do not contain it.
    """
    config = _config_of(folder, "transcoder_set")
    n_files = len([*folder.glob("layer_*.safetensors")])
    listed = _listed(config)
    if listed and listed != [f"layer_{layer}.safetensors" for layer in range(n_files)]:
        raise ValueError(
            f"transcoders in config.yaml must list layer_0.safetensors and so on; got {listed}"
        )
    dictionaries = [
        _of_layer(folder / f"layer_{layer}.safetensors", layer, config=config, k=k)
        for layer in range(n_files)
    ]
    by_point = {dictionary.writes: dictionary for dictionary in dictionaries if dictionary.writes}
    return TranscoderSet(by_point, config=config)


def read_layer(path: Path, *, k: int | None = None) -> Dictionary:
    """Return the transcoder of one layer.

    Args:
        path: a file such as `layer_3.safetensors`. Its folder may contain a `config.yaml`.
        k: the number of active features, if the files do not contain it.
    """
    number = path.stem.removeprefix("layer_")
    if not number.isdecimal():
        raise ValueError(
            f"path must end in the number of a layer, such as layer_3.safetensors; got {path}"
        )
    layer = int(number)
    config = _config_of(path.parent, "transcoder_set")
    listed = _listed(config)
    if listed and listed[layer : layer + 1] != [path.name]:
        raise ValueError(
            f"transcoders in config.yaml must list {path.name} at index {layer}; got {listed}"
        )
    return _of_layer(path, layer, config=config, k=k)


def _of_layer(path: Path, layer: int, config: Mapping[str, Any], k: int | None) -> Dictionary:
    """Return the transcoder of one layer from its file."""
    weights = tensors_of(path)
    saved_k = weights.pop("k", None)
    more = weights.keys() & {"W_skip", "activation_function.threshold"}
    require_weights(weights, {"W_enc", "W_dec", "b_enc", "b_dec"} | more, path.stem)
    reads, writes = (_last_part(config, end) for end in ("input", "output"))
    return Dictionary(
        W_enc=weights["W_enc"].T,
        W_dec=weights["W_dec"],
        b_enc=weights["b_enc"],
        b_dec=weights["b_dec"],
        activation=_activation(
            config, weights.get("activation_function.threshold"), k=k, saved_k=saved_k
        ),
        W_skip=weights["W_skip"].T if "W_skip" in weights else None,
        reads=reads and f"blocks.{layer}.{reads}",
        writes=f"blocks.{layer}.{writes or 'mlp_out'}",
        config=config,
    )


def read_cross_layer(folder: Path) -> CrossLayerTranscoder:
    """Return the cross-layer transcoder in `W_enc_0.safetensors`, `W_dec_0.safetensors`
    and so on.
    """
    config = _config_of(folder, "cross_layer_transcoder")
    layers: list[Weights] = []
    for layer in range(len([*folder.glob("W_enc_*.safetensors")])):
        encoder = tensors_of(folder / f"W_enc_{layer}.safetensors")
        decoder = tensors_of(folder / f"W_dec_{layer}.safetensors")
        tensors = {**encoder, **decoder}
        weights = {name.removesuffix(f"_{layer}"): tensor for name, tensor in tensors.items()}
        # All layers have the same optional tensors.
        more = (layers[0] if layers else weights).keys() & {"threshold", "W_skip"}
        names = {"W_enc", "W_dec", "b_enc", "b_dec"} | more
        require_weights(weights, names, f"layer {layer}", across_layers=True)
        layers.append(weights)
    return CrossLayerTranscoder(
        W_enc=[weights["W_enc"].T for weights in layers],
        W_dec=[weights["W_dec"] for weights in layers],
        b_enc=[weights["b_enc"] for weights in layers],
        b_dec=torch.stack([weights["b_dec"] for weights in layers]),
        activations=[_activation(config, weights.get("threshold")) for weights in layers],
        W_skip=[weights["W_skip"] for weights in layers] if "W_skip" in layers[0] else None,
        reads=_last_part(config, "input"),
        writes=_last_part(config, "output"),
        config=config,
    )


def _config_of(folder: Path, kind: str) -> dict[str, Any]:
    """Return the fields of `config.yaml`, whose transcoders must be of one kind."""
    config = {"model_kind": kind} | known_fields(yaml_of(folder), "config.yaml of circuit-tracer")
    if config["model_kind"] != kind:
        raise ValueError(
            f"model_kind must be {kind!r} for these files; got {config['model_kind']!r}"
        )
    return config


def _listed(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the files that the config lists, or an empty list."""
    paths = config.get("transcoders") or ()
    return [path.partition("?")[0].rpartition("/")[2] for path in paths]


def _activation(
    config: Mapping[str, Any],
    threshold: Tensor | None,
    k: int | None = None,
    saved_k: Tensor | None = None,
) -> nn.Module:
    """Return the nonlinearity from the config or, if the config does not name one, from the tensors
    in the file.

    Args:
        config: the fields of `config.yaml`.
        threshold, saved_k: the tensors of the file, or None if they are missing.
        k: the number of active features from the caller, if any.
    """
    fields = ("activation", "activation_function")
    named = {str(config[name]).lower().replace("_", "") for name in fields if config.get(name)}
    saved = "relu" if saved_k is None else "topk"
    kinds = named or {saved if threshold is None else "jumprelu"}
    ks = {whole_of("k", number) for number in (k, config.get("k"), saved_k) if number is not None}
    if kinds == {"relu"} and threshold is None and not ks:
        return nn.ReLU()
    if kinds == {"jumprelu"} and threshold is not None and not ks:
        return JumpReLU(threshold, relu=False)
    is_of_one_layer = config["model_kind"] == "transcoder_set"
    if kinds == {"topk"} and threshold is None and len(ks) == 1 and is_of_one_layer:
        return TopK(ks.pop(), relu=False)
    raise ValueError(
        "activation must be 'relu', 'jump_relu' with thresholds or, in one layer, 'topk' with one "
        f"k in config.yaml or k=; got {' and '.join(sorted(kinds))} with "
        f"{'no' if threshold is None else 'a'} threshold and k {sorted(ks)}"
    )


def _last_part(config: Mapping[str, Any], end: str) -> str | None:
    """Return our name of the point that transcoders read or write, such as `ln2.normalized`.

    The name has no layer, because the transcoder of each layer uses the same point of its block. It
    is None if the config does not contain the point.

    Args:
        config: the config of the transcoders.
        end: `input` for the point that is read, `output` for the point that is written.
    """
    name = config.get(f"feature_{end}_hook")
    # circuit-tracer adds these two names to TransformerLens. If a norm follows the MLP, it lies
    # between the second point and `mlp_out`.
    alone = {"mlp.hook_in": "ln2.normalized", "mlp.hook_out": "mlp_out"}.get(name or "")
    name = alone or ours(name)
    return name and name.removeprefix("blocks.*.")
