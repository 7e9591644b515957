"""Read dictionaries of the library dictionary_learning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interp.features.activations import Gated, JumpReLU, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import (
    is_number,
    json_of,
    known_fields,
    no_factor,
    pickled,
    require_weights,
    whole_of,
)
from interp.features.places import ours

# Names of tensors in that library, and our names.
_OURS = {
    "encoder.weight": "W_enc",
    "decoder.weight": "W_dec",
    "encoder.bias": "b_enc",
    "bias": "b_dec",
    "decoder_bias": "b_dec",
    "decoder.bias": "b_dec",
}
_THRESHOLD = ({"b_enc", "threshold"}, {"k", "group_sizes"})
# The required and the optional tensors of each kind of dictionary, in addition to the weights and
# `b_dec`.
_NAMES: Mapping[str, tuple[set[str], set[str]]] = {
    "AutoEncoder": ({"b_enc"}, set()),
    "AutoEncoderNew": ({"b_enc"}, set()),
    "GatedAutoEncoder": ({"r_mag", "gate_bias", "mag_bias"}, set()),
    "AutoEncoderTopK": ({"b_enc"}, {"threshold", "k"}),
    "JumpReluAutoEncoder": _THRESHOLD,
    "BatchTopKSAE": _THRESHOLD,
    "MatryoshkaBatchTopKSAE": _THRESHOLD,
}


# The kind of dictionary by the names of its tensors in the file. Dictionaries with top-k features
# of a position and of a batch have the same names, so their files need a config.
_KINDS = {
    frozenset({"encoder.weight", "encoder.bias", "decoder.weight", "bias"}): "AutoEncoder",
    frozenset({"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}): (
        "AutoEncoderNew"
    ),
    frozenset(
        {"encoder.weight", "decoder.weight", "decoder_bias", "r_mag", "gate_bias", "mag_bias"}
    ): "GatedAutoEncoder",
    frozenset({"W_enc", "b_enc", "W_dec", "b_dec", "threshold"}): "JumpReluAutoEncoder",
    frozenset(
        {"W_enc", "b_enc", "W_dec", "b_dec", "threshold", "k", "group_sizes"}
    ): "MatryoshkaBatchTopKSAE",
}
_WITH_K = {"encoder.weight", "encoder.bias", "decoder.weight", "b_dec", "k", "threshold"}


def read_without_config(path: Path, content: Mapping[str, Any]) -> Dictionary | None:
    """Return the dictionary in a file without its `config.json`; None if the file is of another
    library.

    Args:
        path: the path of the file, for the error.
        content: the content of the file.

    Raises:
        ValueError: if several kinds of dictionaries have the same tensors.
    """
    inner = content.get("ae", content)
    names = frozenset(inner) if isinstance(inner, dict) else frozenset()
    if names == _WITH_K:
        raise ValueError(
            f"config.json must be beside {path}, because AutoEncoderTopK and BatchTopKSAE have the "
            'same tensors (write {"trainer": {"dict_class": "BatchTopKSAE"}} into it)'
        )
    if names not in _KINDS:
        return None
    return _dictionary(_KINDS[names], content, trainer={}, norm_factor=None)


def read(folder: Path, *, norm_factor: float | None = None) -> Dictionary:
    """Return the dictionary in `config.json` and `ae.pt`. The training may have been interrupted.

    The scale of features is the scale in the file. The loader of dictionary_learning itself divides
    the decoder rows of an `AutoEncoder` by their lengths, and multiplies the features by these
    lengths.

    Args:
        folder: the folder of the files.
        norm_factor: see `load_sae`.
    """
    trainer = _trainer(json_of(folder / "config.json"))
    kind = trainer.get("dict_class")
    return _dictionary(kind, pickled(folder / "ae.pt"), trainer=trainer, norm_factor=norm_factor)


def _dictionary(
    kind: Any, saved: Mapping[str, Any], trainer: Mapping[str, Any], norm_factor: float | None
) -> Dictionary:
    """Return the dictionary of a kind, from the content of its file.

    Args:
        kind: the name of the class in dictionary_learning.
        saved: the content of the file.
        trainer: the settings of the training.
        norm_factor: see `load_sae`.
    """
    weights, norm_factor = _weights(saved, norm_factor)
    tensors = _renamed(weights)
    # The library scales the biases at the end of a training.
    if norm_factor is not None:
        for name in tensors.keys() & {"b_enc", "b_dec", "gate_bias", "mag_bias", "threshold"}:
            tensors[name] = tensors[name] * norm_factor
    if kind not in _NAMES:
        raise ValueError(f"dict_class must be one of {', '.join(_NAMES)}; got {kind!r}")
    needed, optional = _NAMES[kind]
    require_weights(
        tensors, {"W_enc", "W_dec", "b_dec"} | needed | (tensors.keys() & optional), kind
    )
    place = ours(trainer.get("submodule_name"))
    return Dictionary(
        W_enc=tensors["W_enc"],
        W_dec=tensors["W_dec"],
        b_enc=tensors["b_enc"] if "b_enc" in needed else torch.zeros_like(tensors["r_mag"]),
        b_dec=tensors["b_dec"],
        activation=_activation(kind, tensors, trainer),
        subtracts_b_dec=kind not in ("JumpReluAutoEncoder", "AutoEncoderNew"),
        reads=place,
        writes=place,
        config={**trainer},
    )


def _trainer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the training, which may be a part of the config or the
    whole config.
    """
    inner = config.get("trainer", config)
    kind = inner.get("dict_class") if isinstance(inner, dict) else None
    if kind in ("CrossCoder", "BatchTopKCrossCoder"):
        raise ValueError(f"load_crosscoder reads a crosscoder; got the dict_class {kind!r}")
    if "trainer" not in config:
        return known_fields(config, "trainer in config.json")
    config = known_fields(config, "config.json of dictionary_learning")
    trainer = known_fields(config["trainer"], "trainer in config.json")
    buffer = known_fields(config.get("buffer", {}), "buffer in config.json")
    if (end := buffer.get("io", "out")) != "out":
        raise ValueError(f"io must be 'out', because inputs are not supported; got {end!r}")
    return trainer


def _weights(
    saved: Mapping[str, Any], norm_factor: float | None
) -> tuple[Mapping[str, Tensor], float | None]:
    """Return the tensors of a file, and the factor by which the biases must be scaled, or None if
    they are already scaled.
    """
    weights = saved
    # An interrupted training wrote {step, ae, optimizer, ..., norm_factor}.
    if "ae" in saved:
        norm_factor = saved.get("norm_factor", 1.0) if norm_factor is None else norm_factor
        weights = saved["ae"]
        if not is_number(norm_factor) or not isinstance(weights, dict):
            raise ValueError(
                "norm_factor in ae.pt must be a number, and ae must contain tensors by name; "
                f"got {norm_factor!r:.40} and {weights!r:.40}"
            )
    else:
        no_factor(norm_factor)
    others = [name for name, weight in weights.items() if not isinstance(weight, Tensor)]
    if others:
        raise ValueError(f"ae.pt must contain tensors by name; got other values at {others}")
    return weights, norm_factor


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under our names, with transposed weights of linear layers."""
    tensors = {}
    for name, weight in weights.items():
        is_linear = name.endswith("coder.weight")
        tensors[_OURS.get(name, name)] = weight.T if is_linear else weight
    return tensors


def _activation(kind: str, tensors: Mapping[str, Tensor], trainer: Mapping[str, Any]) -> nn.Module:
    """Return the nonlinearity of a kind of dictionary."""
    if kind in ("AutoEncoder", "AutoEncoderNew"):
        return nn.ReLU()
    if kind == "GatedAutoEncoder":
        return Gated(tensors["gate_bias"], tensors["r_mag"], tensors["mag_bias"])
    if kind == "AutoEncoderTopK":
        ks = {
            whole_of("k", number)
            for number in (tensors.get("k"), trainer.get("k"))
            if number is not None
        }
        if len(ks) != 1:
            raise ValueError(f"{kind} must have one k, in ae.pt or config.json; got {sorted(ks)}")
        return TopK(ks.pop())
    return JumpReLU(tensors["threshold"])
