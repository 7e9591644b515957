"""Readers of dictionaries in the formats of other libraries, one function each.

Each takes a folder and returns our form of what is in it. Weights keep their dtype; a field of a config that we do not know
is refused, because it may change the function.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hooks import UnknownNameError, hooks_name
from interp.features.activations import Gated, GroupMax, JumpReLU, TopK
from interp.features.dictionary import CrossLayerTranscoder, Dictionary, MatchingPursuit, Norm

Weights = dict[str, Tensor]

# Fields of cfg.json (SAELens 6) that say what the function is; all others must be among the next.
_SAE_LENS = {
    *("architecture", "d_in", "d_sae", "d_out", "apply_b_dec_to_input", "normalize_activations"),
    *(
        "reshape_activations",
        "k",
        "rescale_acts_by_decoder_norm",
        "residual_threshold",
        "max_iterations",
    ),
    *("stop_on_duplicate_support", "metadata"),
}
_WITHOUT_EFFECT = {"dtype", "device", "use_sparse_activations"}
_SPARSIFY = {
    *("activation", "expansion_factor", "normalize_decoder", "num_latents", "k", "multi_topk"),
    *("skip_connection", "transcode", "d_in"),
}
# Before version 6 one flat object held these names, and all settings of the training beside them.
_OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def sae_lens(folder: Path, norm_factor: float | None) -> Dictionary:
    """SAELens: `cfg.json` and `sae_weights.safetensors`, of version 6 or before."""
    config = _json(folder / "cfg.json")
    weights = load_file(folder / "sae_weights.safetensors")
    about = config.get("metadata")
    if about is None:
        config = {_OLD_NAMES.get(name, name): value for name, value in config.items()}
        about = config
        _translate_old(config, weights)
    else:
        training = about.get("training_architecture_details", {})
        if unknown := config.keys() - _SAE_LENS - _WITHOUT_EFFECT - training.keys():
            listed = ", ".join(sorted(unknown))
            raise ValueError(f"cfg.json has fields that are not known here: {listed}")
    kind = config.get("architecture", "standard")
    is_transcoder = "transcoder" in kind
    place: dict[str, Any] = {
        "reads": _ours(about.get("hook_name")),
        "head": about.get("hook_head_index"),
        "config": config,
        "transcodes": is_transcoder,
    }
    place["writes"] = _ours(about.get("hook_name_out")) if is_transcoder else place["reads"]
    norm, norm_factor = _sae_lens_norm(config, norm_factor)
    subtracts = bool(config.get("apply_b_dec_to_input", True)) and not is_transcoder
    b_dec = weights["b_dec"] / norm_factor
    if kind == "matching_pursuit":
        _require(weights, {"W_dec", "b_dec"} | weights.keys() & {"W_enc"}, kind)
        bias = b_dec if subtracts else torch.zeros_like(b_dec)
        return MatchingPursuit(
            weights["W_dec"], bias, config.get("residual_threshold", 1e-2), config.get("max_iterations"),
            config.get("stop_on_duplicate_support", True), norm=norm, **place,
        )  # fmt: skip
    biases = {"b_gate", "r_mag", "b_mag"} if kind == "gated" else {"b_enc"}
    extra = weights.keys() & {"threshold", "log_threshold", "topk_threshold"}
    skip = {"W_skip"} if "skip" in kind else set[str]()
    _require(weights, {"W_enc", "W_dec", "b_dec"} | biases | skip | extra, kind)
    b_enc = torch.zeros_like(weights["W_enc"][0]) if kind == "gated" else weights["b_enc"]
    W_enc, W_dec = weights["W_enc"] * norm_factor, weights["W_dec"] / norm_factor
    if config.get("rescale_acts_by_decoder_norm"):
        length = W_dec.norm(dim=1)
        W_enc, b_enc, W_dec = W_enc * length, b_enc * length, W_dec / length[:, None]
    return Dictionary(
        W_enc, W_dec, b_enc, b_dec, _sae_lens_activation(kind, config, weights),
        W_skip=weights["W_skip"].T if skip else None, subtracts_b_dec=subtracts, norm=norm, **place,
    )  # fmt: skip


def _sae_lens_norm(config: Mapping[str, Any], norm_factor: float | None) -> tuple[Norm, float]:
    """The norm, and the factor that goes into the weights."""
    name = config.get("normalize_activations") or "none"
    if name == "expected_average_only_in":
        if norm_factor is None:
            raise ValueError(
                f"normalize_activations is {name!r}, whose factor cfg.json does not have: give norm_factor="
            )
        if config.get("architecture") == "matching_pursuit":
            raise ValueError(
                "a factor cannot go into the weights of matching pursuit, which are tied"
            )
        return "none", norm_factor
    norms: dict[str, Norm] = {
        "none": "none",
        "constant_norm_rescale": "constant_norm_rescale",
        "layer_norm": "layer_norm",
    }
    if name not in norms:
        raise ValueError(f"normalize_activations must be one that is known here; got {name!r}")
    _no_factor(norm_factor)
    return norms[name], 1.0


def _translate_old(config: dict[str, Any], weights: Weights) -> None:
    """Gives a flat config the fields of version 6."""
    activation = config.get("activation_fn", "relu")
    if activation == "topk":
        config |= {"architecture": "topk", **config.get("activation_fn_kwargs", {})}
    elif activation != "relu":
        raise ValueError(f"activation_fn must be 'relu' or 'topk'; got {activation!r}")
    norm = config.get("normalize_activations")
    if isinstance(norm, bool):
        config["normalize_activations"] = "expected_average_only_in" if norm else "none"
    factor = weights.pop("scaling_factor", None)
    if factor is not None and not torch.equal(factor, torch.ones_like(factor)):
        raise ValueError("scaling_factor must be 1 everywhere: fold it into W_dec first")


def _sae_lens_activation(kind: str, config: Mapping[str, Any], weights: Weights) -> nn.Module:
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
        raise ValueError(f"cfg.json of a {kind} dictionary must say k; it does not")
    if kind in ("topk", "abstopk"):
        return (
            TopK(int(config["k"])) if kind == "topk" else TopK(int(config["k"]), "size", relu=False)
        )
    if kind == "gated":
        return Gated(weights["b_gate"], weights["r_mag"], weights["b_mag"])
    if kind in ("standard", "transcoder", "skip_transcoder"):
        return nn.ReLU()
    raise ValueError(f"architecture must be one that is known here; got {kind!r}")


def gemma_scope(folder: Path, norm_factor: float | None) -> Dictionary:
    """Gemma Scope 1: `params.npz`.

    A folder `embedding` has those that read embeddings scaled by √d_model. A repository `...-transcoders` has those that
    read what the norm before the MLP gives, before its gain; see `Dictionary.with_input_gain`.
    """
    _no_factor(norm_factor)
    with np.load(folder / "params.npz") as file:
        weights = {name: torch.from_numpy(file[name]) for name in file}
    names = {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
    weights = {"W_" + n[2:] if n.startswith("w_") else n: weight for n, weight in weights.items()}
    _require(weights, names, "params.npz")
    root = weights["W_enc"].shape[0] ** 0.5 if "embedding" in folder.parts[-3:] else 1.0
    is_transcoder = any(part.endswith("-transcoders") for part in folder.parts[-6:])
    return Dictionary(
        weights["W_enc"] / root, weights["W_dec"] * root, weights["b_enc"], weights["b_dec"], JumpReLU(weights["threshold"]),
        reads="ln2.normalized before its gain" if is_transcoder else None,
    )  # fmt: skip


def gemma_scope_2(folder: Path, norm_factor: float | None) -> Dictionary:
    """Gemma Scope 2: `params.safetensors` and `config.json`."""
    _no_factor(norm_factor)
    config, weights = _json(folder / "config.json"), load_file(folder / "params.safetensors")
    if config.get("architecture") != "jump_relu":
        raise ValueError(f"architecture must be 'jump_relu'; got {config.get('architecture')!r}")
    skip = weights.keys() & {"affine_skip_connection"}
    _require(weights, {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"} | skip, "config.json")
    # Modules of transformers: who splices a transcoder says which points of ours they are.
    reads = config.get("hf_hook_point_in")
    writes = config.get("hf_hook_point_out", reads)
    return Dictionary(
        weights["w_enc"], weights["w_dec"], weights["b_enc"], weights["b_dec"], JumpReLU(weights["threshold"]),
        W_skip=weights.get("affine_skip_connection"), reads=reads, writes=writes, config=config,
    )  # fmt: skip


def dictionary_learning(folder: Path, norm_factor: float | None) -> Dictionary:
    """dictionary_learning: `config.json` and `ae.pt`, also of an interrupted training.

    Features are those of the file. That library's own loader divides decoder rows of `AutoEncoder` by their lengths, and
    multiplies features with them.
    """
    trainer = _json(folder / "config.json")
    trainer = trainer.get("trainer", trainer)
    weights = torch.load(folder / "ae.pt", map_location="cpu", weights_only=True)
    if "ae" in weights:  # {step, ae, optimizer, ..., norm_factor}
        norm_factor = weights.get("norm_factor", 1.0) if norm_factor is None else norm_factor
        weights = weights["ae"]
    else:  # its biases are scaled already
        _no_factor(norm_factor)
    kind = trainer.get("dict_class")
    place: dict[str, Any] = {"config": trainer}
    if (name := trainer.get("submodule_name")) is not None:
        stream, _, layer = name.partition("_layer_")
        name = f"blocks.{layer}.resid_post" if stream == "resid_post" else name
        place |= {"reads": name, "writes": name}
    tensors = {
        {"encoder.weight": "W_enc", "decoder.weight": "W_dec", "encoder.bias": "b_enc"}.get(
            name, name
        ): (weight.T if name.endswith("coder.weight") else weight)
        for name, weight in weights.items()
    }
    for name in ("bias", "decoder_bias", "decoder.bias"):
        if name in tensors:
            tensors["b_dec"] = tensors.pop(name)
    if norm_factor is not None:  # they do so at the end of a training
        for name in tensors.keys() & {"b_enc", "b_dec", "gate_bias", "mag_bias", "threshold"}:
            tensors[name] = tensors[name] * norm_factor
    subtracts = kind not in ("JumpReluAutoEncoder", "AutoEncoderNew")
    named = {"W_enc", "W_dec", "b_dec"}
    b_enc = tensors.get("b_enc")
    if kind in ("AutoEncoder", "AutoEncoderNew"):
        activation: nn.Module = nn.ReLU()
    elif kind == "GatedAutoEncoder":
        named |= {"r_mag", "gate_bias", "mag_bias"}
        _require(tensors, named, kind)
        activation = Gated(tensors["gate_bias"], tensors["r_mag"], tensors["mag_bias"])
        b_enc = torch.zeros_like(tensors["r_mag"])
    elif kind == "AutoEncoderTopK":
        named |= tensors.keys() & {"threshold"} | {"k"}
        _require(tensors, named | {"b_enc"}, kind)
        activation = TopK(int(tensors["k"]))
    elif kind in ("JumpReluAutoEncoder", "BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
        named |= {"threshold"} | tensors.keys() & {"k", "group_sizes"}
        _require(tensors, named | {"b_enc"}, kind)
        activation = JumpReLU(tensors["threshold"])
    else:
        raise ValueError(f"dict_class must be one that is known here; got {kind!r}")
    _require(tensors, named | (set() if kind == "GatedAutoEncoder" else {"b_enc"}), str(kind))
    assert b_enc is not None
    return Dictionary(
        tensors["W_enc"], tensors["W_dec"], b_enc, tensors["b_dec"], activation,
        subtracts_b_dec=subtracts, **place,
    )  # fmt: skip


def sparsify(folder: Path, norm_factor: float | None) -> Dictionary:
    """sparsify: `cfg.json` and `sae.safetensors`."""
    _no_factor(norm_factor)
    config, weights = _json(folder / "cfg.json"), load_file(folder / "sae.safetensors")
    if unknown := config.keys() - _SPARSIFY:
        raise ValueError(
            f"cfg.json has fields that are not known here: {', '.join(sorted(unknown))}"
        )
    skip = weights.keys() & {"W_skip"}
    _require(weights, {"encoder.weight", "encoder.bias", "W_dec", "b_dec"} | skip, "cfg.json")
    kinds = {"topk": TopK, "groupmax": GroupMax}
    kind = config.get("activation", "topk")
    if kind not in kinds:
        raise ValueError(f"activation must be 'topk' or 'groupmax'; got {kind!r}")
    # The folder has the name of a module of transformers.
    is_transcoder = bool(config.get("transcode", False))
    reads = f"the input of {folder.name}" if is_transcoder else folder.name
    return Dictionary(
        weights["encoder.weight"].T, weights["W_dec"], weights["encoder.bias"], weights["b_dec"], kinds[kind](int(config["k"])),
        W_skip=weights["W_skip"].T if skip else None, subtracts_b_dec=not is_transcoder, transcodes=is_transcoder, reads=reads, writes=folder.name,
        config=config,
    )  # fmt: skip


def circuit_tracer(folder: Path, norm_factor: float | None) -> dict[str, Dictionary]:
    """circuit-tracer: `layer_0.safetensors` and so on, and `config.yaml` if it is there. By the points where they stand."""
    _no_factor(norm_factor)
    config = _yaml(folder)
    reads, writes = (_last_part(config, end) for end in ("input", "output"))
    made = {}
    for layer in range(len([*folder.glob("layer_*.safetensors")])):
        weights = load_file(folder / f"layer_{layer}.safetensors")
        more = weights.keys() & {"W_skip", "activation_function.threshold"}
        _require(weights, {"W_enc", "W_dec", "b_enc", "b_dec"} | more, f"layer_{layer}")
        threshold = weights.get("activation_function.threshold")
        place = f"blocks.{layer}.{writes or 'mlp_out'}"
        made[place] = Dictionary(
            weights["W_enc"].T, weights["W_dec"], weights["b_enc"], weights["b_dec"],
            nn.ReLU() if threshold is None else JumpReLU(threshold, relu=False),
            W_skip=weights["W_skip"].T if "W_skip" in weights else None,
            reads=reads and f"blocks.{layer}.{reads}", writes=place, config=config,
        )  # fmt: skip
    return made


def cross_layer(folder: Path, norm_factor: float | None) -> CrossLayerTranscoder:
    """circuit-tracer's cross-layer transcoders: `W_enc_0.safetensors`, `W_dec_0.safetensors` and so on."""
    _no_factor(norm_factor)
    config = _yaml(folder)
    layers = []
    for n in range(len([*folder.glob("W_enc_*.safetensors")])):
        tensors = {
            name: tensor
            for end in ("enc", "dec")
            for name, tensor in load_file(folder / f"W_{end}_{n}.safetensors").items()
        }
        weights = {name.removesuffix(f"_{n}"): tensor for name, tensor in tensors.items()}
        more = weights.keys() & {"threshold"}
        _require(weights, {"W_enc", "W_dec", "b_enc", "b_dec"} | more, f"layer {n}")
        layers.append(weights)
    return CrossLayerTranscoder(
        [w["W_enc"].T for w in layers],
        [w["W_dec"] for w in layers],
        [w["b_enc"] for w in layers],
        torch.stack([w["b_dec"] for w in layers]),
        [JumpReLU(w["threshold"], relu=False) if "threshold" in w else nn.ReLU() for w in layers],
        reads=_last_part(config, "input"),
        writes=_last_part(config, "output"),
        config=config,
    )


def _json(path: Path) -> dict[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object; got a {type(config).__name__}")
    return config


def _yaml(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ModuleNotFoundError("config.yaml needs PyYAML: pip install pyyaml") from None
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def _last_part(config: Mapping[str, Any], end: str) -> str | None:
    """The last part of our names of the points that all layers read or write."""
    name = config.get(f"feature_{end}_hook")
    # circuit-tracer adds these to TransformerLens. A norm after the MLP would come between the second and `mlp_out`.
    alone = {"mlp.hook_in": "ln2.normalized", "mlp.hook_out": "mlp_out"}.get(name or "")
    name = alone or _ours(name)
    return name and name.removeprefix("blocks.*.")


def _ours(name: str | None) -> str | None:
    """Our name of a point of TransformerLens; the name itself where we have none, which `splice` will refuse."""
    try:
        return None if name is None else hooks_name(name)
    except UnknownNameError:
        return name


def _require(weights: Mapping[str, Tensor], names: set[str], what: str) -> None:
    missing, unknown = sorted(names - weights.keys()), sorted(weights.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"the tensors of {what} must be {', '.join(sorted(names))}; got no {missing} and also {unknown}"
        )


def _no_factor(norm_factor: float | None) -> None:
    if norm_factor is not None:
        raise ValueError(
            f"norm_factor must be None here: the files say all, or were normed at run time; got {norm_factor}"
        )
