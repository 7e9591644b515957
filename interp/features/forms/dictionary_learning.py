"""Dictionaries of dictionary_learning."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.features.activations import Gated, JumpReLU, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import (
    is_number,
    json_of,
    known_fields,
    no_factor,
    pickled,
    require,
    whole_of,
)
from interp.features.places import ours


def read(folder: Path, *, norm_factor: float | None = None) -> Dictionary:
    """dictionary_learning: `config.json` and `ae.pt`, also of an interrupted training.

    Features are those of the file. That library's own loader divides decoder rows of `AutoEncoder` by their lengths, and
    multiplies features with them.
    """
    config = json_of(folder / "config.json")
    trainer = config
    buffer: dict[str, Any] = {}
    if "trainer" in config:
        config = known_fields(config, "config.json of dictionary_learning")
        trainer = config["trainer"]
        buffer = known_fields(config.get("buffer", {}), "buffer in config.json")
    trainer = known_fields(trainer, "trainer in config.json")
    if (end := buffer.get("io", "out")) != "out":
        raise ValueError(f"io must be 'out', as values that go in have no place here; got {end!r}")
    weights = pickled(folder / "ae.pt")
    if "ae" in weights:  # {step, ae, optimizer, ..., norm_factor}
        norm_factor = weights.get("norm_factor", 1.0) if norm_factor is None else norm_factor
        weights = weights["ae"]
        if not is_number(norm_factor) or not isinstance(weights, dict):
            raise ValueError(
                "ae.pt must have a number as norm_factor, and tensors by name as ae; "
                f"got {norm_factor!r:.40} and {weights!r:.40}"
            )
    else:  # its biases are scaled already
        no_factor(norm_factor)
    if not all(isinstance(weight, torch.Tensor) for weight in weights.values()):
        others = [name for name, weight in weights.items() if not isinstance(weight, torch.Tensor)]
        raise ValueError(f"ae.pt must hold tensors by name; got something else at {others}")
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
        ks = {whole_of("k", k) for k in (tensors.get("k"), trainer.get("k")) if k is not None}
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
