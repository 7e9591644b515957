"""Dictionaries of dictionary_learning."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hooks.shared import storage
from interp.features.activations import Gated, JumpReLU, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, no_factor, require, require_known
from interp.features.forms.places import ours


def read(folder: Path, *, norm_factor: float | None = None) -> Dictionary:
    """dictionary_learning: `config.json` and `ae.pt`, also of an interrupted training.

    Features are those of the file. That library's own loader divides decoder rows of `AutoEncoder` by their lengths, and
    multiplies features with them.
    """
    config = json_of(folder / "config.json")
    trainer = config.get("trainer", config)
    if trainer is not config:
        require_known(config, "config.json of dictionary_learning")
    require_known(trainer, "trainer in config.json")
    require_known(config.get("buffer", {}), "buffer in config.json")
    if (end := config.get("buffer", {}).get("io", "out")) != "out":
        raise ValueError(f"io must be 'out', as values that go in have no place here; got {end!r}")
    weights = storage.read_saved(folder / "ae.pt")
    if "ae" in weights:  # {step, ae, optimizer, ..., norm_factor}
        norm_factor = weights.get("norm_factor", 1.0) if norm_factor is None else norm_factor
        weights = weights["ae"]
    else:  # its biases are scaled already
        no_factor(norm_factor)
    kind = trainer.get("dict_class")
    place: dict[str, Any] = {"config": trainer}
    if (name := trainer.get("submodule_name")) is not None:
        place |= {"reads": ours(name), "writes": ours(name)}
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
        require(tensors, named, kind)
        activation = Gated(tensors["gate_bias"], tensors["r_mag"], tensors["mag_bias"])
        b_enc = torch.zeros_like(tensors["r_mag"])
    elif kind == "AutoEncoderTopK":
        named |= tensors.keys() & {"threshold", "k"}
        require(tensors, named | {"b_enc"}, kind)
        ks = {int(k) for k in (tensors.get("k"), trainer.get("k")) if k is not None}
        if len(ks) != 1:
            raise ValueError(f"{kind} must have one k, in ae.pt or config.json; got {sorted(ks)}")
        activation = TopK(ks.pop())
    elif kind in ("JumpReluAutoEncoder", "BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
        named |= {"threshold"} | tensors.keys() & {"k", "group_sizes"}
        require(tensors, named | {"b_enc"}, kind)
        activation = JumpReLU(tensors["threshold"])
    else:
        raise ValueError(f"dict_class must be one that is known here; got {kind!r}")
    require(tensors, named | (set() if kind == "GatedAutoEncoder" else {"b_enc"}), str(kind))
    assert b_enc is not None
    return Dictionary(
        tensors["W_enc"], tensors["W_dec"], b_enc, tensors["b_dec"], activation,
        subtracts_b_dec=subtracts, **place,
    )  # fmt: skip
