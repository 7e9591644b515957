"""Read crosscoders of dictionary_learning and of Gemma Scope 2.

dictionary_learning has two classes. The features of a `CrossCoder` are the positive
pre-activations. A `BatchTopKCrossCoder` keeps the top k features of a batch in the training, and
the features above a threshold afterwards. Before the comparison, a feature is multiplied by its
code norm, which is a length of its decoder rows.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.features.activations import JumpReLU
from interp.features.crosscoder import Crosscoder
from interp.features.forms.common import (
    Weights,
    full_precision,
    json_of,
    known_fields,
    pickled,
    require_weights,
    tensors_of,
)
from interp.features.places import ours

Names = Sequence[str] | None

_CODE_NORMS = ("CROSSCODER", "SAE", "MIXED", "NONE", "DECOUPLED")
"""The code norms of dictionary_learning. `code_normalization_id` in a file is 1 for the first."""

_WEIGHTS = {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}
_NORMALIZATION = {"activation_mean", "activation_std", "activation_global_scale"}
# `k` and `target_rms` only matter during the training.
_OPTIONAL = _NORMALIZATION | {"code_normalization_id", "k", "target_rms", "threshold"}


def read(folder: Path, *, names: Names = None, point: str | None = None) -> Crosscoder:
    """Return the crosscoder that a training of dictionary_learning wrote: `config.json`, and
    `ae.pt` or `model_final.pt`.

    Args:
        folder: the folder of the files.
        names, point: see `load_crosscoder`.
    """
    trainer = _trainer(json_of(folder / "config.json"))
    files = [folder / "ae.pt", folder / "model_final.pt"]
    path = next(path for path in files if path.is_file())
    return _crosscoder(pickled(path), trainer, path.name, names=names, point=point)


def read_hub(folder: Path, *, names: Names = None, point: str | None = None) -> Crosscoder:
    """Return the crosscoder in `config.json` and `model.safetensors`, with an optional
    `trainer_config.json`, as dictionary_learning publishes it on the hub.

    Args:
        folder: the folder of the files.
        names, point: see `load_crosscoder`.
    """
    # The library also writes arguments that were not given, as null.
    saved = json_of(folder / "config.json").items()
    given = {name: value for name, value in saved if value is not None}
    config = known_fields(given, "config.json of a crosscoder")
    path = folder / "trainer_config.json"
    trainer = _trainer(json_of(path)) if path.is_file() else {}
    name = "model.safetensors"
    return _crosscoder(tensors_of(folder / name), trainer | config, name, names=names, point=point)


def read_gemma_scope_2(folder: Path, *, names: Names = None) -> Crosscoder:
    """Return the weakly causal crosscoder of Gemma Scope 2 in `config.json`,
    `params_layer_0.safetensors` and so on.

    Each feature reads one layer of the model and writes to several layers. The members are the
    points of the layers.

    Args:
        folder: the folder of the files.
        names: see `load_crosscoder`.
    """
    config = known_fields(json_of(folder / "config.json"), "config.json of Gemma Scope 2")
    n_files = len([*folder.glob("params_layer_*.safetensors")])
    points = _points(config, n_files)
    layers: list[Weights] = []
    for layer in range(n_files):
        weights = tensors_of(folder / f"params_layer_{layer}.safetensors")
        expected = {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"}
        require_weights(weights, expected, f"params_layer_{layer}", across_layers=True)
        if weights["w_dec"].shape[1] != n_files:
            raise ValueError(
                f"w_dec of params_layer_{layer} must be [feature layer d_model] with {n_files} "
                f"layers; got {[*weights['w_dec'].shape]}"
            )
        layers.append(weights)
    of_layer = {}
    for name in layers[0]:
        of_layer[name] = [weights[name] for weights in layers]
    return Crosscoder(
        W_enc=torch.stack(of_layer["w_enc"]),
        W_dec=torch.cat([weight.transpose(0, 1) for weight in of_layer["w_dec"]], dim=1),
        b_enc=torch.cat(of_layer["b_enc"]),
        b_dec=torch.stack(of_layer["b_dec"]),
        activation=JumpReLU(torch.cat(of_layer["threshold"])),
        names=points if names is None else names,
        points=points,
        config=config,
    )


def _points(config: Mapping[str, Any], n_layers: int) -> list[str]:
    """Return our names of the points of a crosscoder of Gemma Scope 2.

    Raises:
        ValueError: if the config belongs to another kind of dictionary, or lists another number of
            layers.
    """
    wanted = {"architecture": "jump_relu", "type": "crosscoder", "affine_connection": False}
    for name, value in wanted.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} must be {value!r} for a crosscoder; got {config[name]!r}")
    place = str(config.get("hf_hook_point_in"))
    listed = re.fullmatch(r"(.*)\{(\d+(?:, *\d+)*)\}(.*)", place)
    if listed is None or config.get("hf_hook_point_out", place) != place:
        raise ValueError(
            "hf_hook_point_in must list layers, such as model.layers.{5,9,12,15}.output, and equal "
            f"hf_hook_point_out; got {place} and {config.get('hf_hook_point_out')}"
        )
    numbers = listed[2].replace(" ", "").split(",")
    if len(numbers) != n_layers:
        raise ValueError(
            f"each of the {len(numbers)} layers in {place} must have a file; got {n_layers} files"
        )
    return [str(ours(f"{listed[1]}{number}{listed[3]}")) for number in numbers]


def _trainer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the training, which may be a part of the config."""
    known = (
        known_fields(config, "config.json of dictionary_learning") if "trainer" in config else {}
    )
    trainer = known_fields(known.get("trainer", config), "trainer of a crosscoder")
    # The trainer writes these settings as texts.
    settings = trainer.pop("dict_class_kwargs", {})
    given = {name: value for name, value in settings.items() if value not in (None, "None")}
    known_fields(given, "dict_class_kwargs of a crosscoder")
    return trainer


def _crosscoder(
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    file: str,
    names: Names,
    point: str | None,
) -> Crosscoder:
    """Return a crosscoder of dictionary_learning.

    Args:
        saved: the tensors of the file, by name.
        config: the settings of the crosscoder and of its training.
        file: the name of the file, for errors.
        names, point: see `load_crosscoder`.
    """
    # A module that was compiled when it was saved has this prefix.
    tensors = {name.removeprefix("_orig_mod."): tensor for name, tensor in saved.items()}
    _require(tensors, file)
    is_batch_top_k = "threshold" in tensors
    kind = "BatchTopKCrossCoder" if is_batch_top_k else "CrossCoder"
    if config.get("dict_class", kind) != kind:
        raise ValueError(
            f"dict_class must be {kind!r} for the tensors of {file}; got {config['dict_class']!r}"
        )
    code_norm = _code_norm(tensors.pop("code_normalization_id", None), config)
    weights = full_precision({name: tensors[name] for name in tensors.keys() - {"k"}})
    W_dec = weights["decoder.weight"]
    for name in ("num_layers", "num_decoder_layers"):
        if config.get(name, len(W_dec)) != len(W_dec):
            raise ValueError(f"{name} must be {len(W_dec)}, as in {file}; got {config[name]}")
    activation: nn.Module = nn.ReLU()
    if is_batch_top_k:
        # A feature times its norm is compared with the threshold, so compare the feature with
        # the quotient. A feature without decoder rows is never above a positive threshold.
        norms = _norms(W_dec, code_norm, config)
        activation = JumpReLU(weights["threshold"] / norms)
    center, scale = _normalization(weights, len(W_dec))
    place = point or ours(config.get("submodule_name"))
    return Crosscoder(
        W_enc=weights["encoder.weight"],
        W_dec=W_dec,
        b_enc=weights["encoder.bias"],
        b_dec=weights["decoder.bias"],
        activation=activation,
        names=names,
        points=[place] * len(W_dec),
        center=center,
        scale=scale,
        config=config,
    )


def _require(tensors: Mapping[str, Any], file: str) -> None:
    """Check the names and the sizes of the tensors of a file.

    Raises:
        ValueError: if a tensor is missing or unknown, or does not have an axis of members.
    """
    optional = tensors.keys() & _OPTIONAL
    if optional & _NORMALIZATION:
        optional |= _NORMALIZATION
    whole = {"code_normalization_id", "k", "target_rms"} & optional
    others = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if others:
        raise ValueError(f"{file} must contain tensors by name; got other values at {others}")
    floats = {name: tensor for name, tensor in tensors.items() if name not in whole}
    axes = {"encoder.weight": 3, "encoder.bias": 1, "decoder.weight": 3, "decoder.bias": 2}
    require_weights(floats, _WEIGHTS | (optional - whole), file, axes_of=axes)


def _code_norm(saved: Tensor | None, config: Mapping[str, Any]) -> str:
    """Return the name of the code norm of a crosscoder.

    Files of older versions do not contain it. The library then assumes `CROSSCODER`.

    Args:
        saved: the number of the code norm in the file, if any.
        config: the settings of the crosscoder.

    Raises:
        ValueError: if the code norm is unknown, or the file and the config have different ones.
    """
    listed = set()
    if saved is not None:
        number = int(saved)
        listed.add(_CODE_NORMS[number - 1] if 0 < number <= len(_CODE_NORMS) else str(number))
    if "code_normalization" in config:
        listed.add(str(config["code_normalization"]).upper())
    if len(listed) > 1 or not listed <= {*_CODE_NORMS}:
        raise ValueError(
            f"code_normalization must be one of {', '.join(_CODE_NORMS)}; got "
            f"{' and '.join(sorted(listed))}"
        )
    return listed.pop() if listed else "CROSSCODER"


def _norms(
    W_dec: Float[Tensor, "member feature d_model"], code_norm: str, config: Mapping[str, Any]
) -> Float[Tensor, " feature"]:
    """Return the norm of each feature that is multiplied with the feature before a comparison.

    Args:
        W_dec: the decoders.
        code_norm: the name of the norm.
        config: the settings, which contain the two factors of `MIXED`.

    Raises:
        ValueError: if each member has its own norm and therefore its own features.
    """
    concatenated = W_dec.norm(dim=(0, 2))
    summed = W_dec.norm(dim=2).sum(dim=0)
    if code_norm == "DECOUPLED":
        raise ValueError(
            "code_normalization must be CROSSCODER, SAE, MIXED or NONE, because features that "
            "differ between members are not supported; got DECOUPLED"
        )
    if code_norm == "MIXED":
        factor = config.get("code_normalization_alpha_sae", 1.0)
        other_factor = config.get("code_normalization_alpha_cc", 0.1)
        return concatenated * factor + summed * other_factor
    if code_norm == "NONE":
        return torch.ones_like(summed)
    return concatenated if code_norm == "SAE" else summed


def _normalization(weights: Weights, n_members: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the center and the scale of the values, or None if they are not normalized.

    The library stores NaN for values that are not normalized. Older versions have one scale for all
    members.
    """
    if not weights.keys() >= _NORMALIZATION:
        return None, None
    center, deviation = weights["activation_mean"], weights["activation_std"]
    if center.isnan().any() or deviation.isnan().any():
        return None, None
    return center, weights["activation_global_scale"].expand(n_members).clone()
