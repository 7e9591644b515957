"""Read cross-layer transcoders of Gemma Scope 2."""

from pathlib import Path

import torch
from torch import Tensor

from interp.features.activations import JumpReLU
from interp.features.cross_layer import CrossLayerTranscoder
from interp.features.forms.common import Weights, json_of, known_fields, require_weights, tensors_of

_READS = "pre_feedforward_layernorm"


def read(folder: Path) -> CrossLayerTranscoder:
    """Return the cross-layer transcoder in `params_layer_0.safetensors` and so on, and an optional
    `config.json`.

    It reads the output of the norm before the MLP, and writes the output of the norm after the MLP.
    Crosscoders have files with the same names and raise an error; `load_crosscoder` reads them.
    """
    path = folder / "config.json"
    config = json_of(path) if path.is_file() else {}
    config = known_fields(config, "config.json of Gemma Scope 2")
    kind = config.get("architecture", "jump_relu")
    reads = str(config.get("hf_hook_point_in") or _READS)
    if kind != "jump_relu" or _READS not in reads or "crosscoder" in folder.absolute().parts[-2:]:
        raise ValueError(
            "a cross-layer transcoder must have the architecture jump_relu and read "
            f"{_READS}.output; got {kind} at {reads} in {folder} (load_crosscoder reads a "
            "crosscoder)"
        )
    layers: list[Weights] = []
    n_layers = len([*folder.glob("params_layer_*.safetensors")])
    for layer in range(n_layers):
        weights = tensors_of(folder / f"params_layer_{layer}.safetensors")
        # All layers have the same optional tensor.
        skip = (layers[0] if layers else weights).keys() & {"affine_skip_connection"}
        names = {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"} | skip
        require_weights(weights, names, f"params_layer_{layer}", across_layers=True)
        layers.append(weights | {"w_dec": _later_layers(weights["w_dec"], layer, n_layers)})
    W_skip = None
    if "affine_skip_connection" in layers[0]:
        W_skip = [weights["affine_skip_connection"] for weights in layers]
    return CrossLayerTranscoder(
        W_enc=[weights["w_enc"] for weights in layers],
        W_dec=[weights["w_dec"] for weights in layers],
        b_enc=[weights["b_enc"] for weights in layers],
        b_dec=torch.stack([weights["b_dec"] for weights in layers]),
        activations=[JumpReLU(weights["threshold"]) for weights in layers],
        W_skip=W_skip,
        reads="ln2.normalized",
        writes="mlp_out",
        config=config,
    )


def _later_layers(w_dec: Tensor, layer: int, n_layers: int) -> Tensor:
    """Return the decoder of a layer to itself and to later layers, [feature later d_model].

    Raises:
        ValueError: if the decoder has another shape, or writes to earlier layers.
    """
    if w_dec.ndim != 3 or w_dec.shape[1] != n_layers or w_dec[:, :layer].any():
        raise ValueError(
            f"w_dec of params_layer_{layer} must be [feature layer d_model] with {n_layers} "
            f"layers, and 0 for all layers before {layer}; "
            f"got {[*w_dec.shape]}, or nonzero values before {layer}"
        )
    return w_dec[:, layer:].contiguous()
