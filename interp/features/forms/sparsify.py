"""Read dictionaries of the library sparsify."""

from pathlib import Path

from hooks.base import require_choice
from interp.features.activations import GroupMax, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, known_fields, require, tensors_of
from interp.features.places import ours


def read(folder: Path, *, transcodes: bool | None = None) -> Dictionary:
    """Return the dictionary in `cfg.json` and `sae.safetensors`.

    Transcoders that were trained before the field `transcode` existed (February 2025) subtract the
    bias of the decoder, as autoencoders do. They are recognized by a skip connection. Without a
    skip connection, `transcodes` must be given.

    Args:
        folder: the folder of the files.
        transcodes: whether the dictionary is a transcoder, if `cfg.json` does not tell.
    """
    config = known_fields(json_of(folder / "cfg.json"), "cfg.json of sparsify")
    weights = tensors_of(folder / "sae.safetensors")
    skip = weights.keys() & {"W_skip"}
    require(weights, {"encoder.weight", "encoder.bias", "W_dec", "b_dec"} | skip, "cfg.json")
    if "k" not in config:
        raise ValueError("cfg.json of sparsify must contain k; it does not")
    kinds = {"topk": TopK, "groupmax": GroupMax}
    kind = config.get("activation", "topk")
    require_choice("activation", kind, kinds)
    if config.get("signed"):
        raise ValueError(
            "signed must be false, because negative features are unsupported; got true"
        )
    if bool(skip) != config.get("skip_connection", bool(skip)):
        raise ValueError(
            f"skip_connection must be {str(bool(skip)).lower()}, because the weights have "
            f"{'a' if skip else 'no'} W_skip"
        )
    # The name of the folder is the name of a module of transformers.
    name = folder.absolute().name
    is_transcoder = config.get("transcode", bool(skip) or bool(transcodes))
    if transcodes not in (None, is_transcoder):
        raise ValueError(
            f"transcodes must be None or {is_transcoder}, the value in cfg.json; got {transcodes}"
        )
    return Dictionary(
        W_enc=weights["encoder.weight"].T,
        W_dec=weights["W_dec"],
        b_enc=weights["encoder.bias"],
        b_dec=weights["b_dec"],
        activation=kinds[kind](config["k"]),
        W_skip=weights["W_skip"].T if skip else None,
        subtracts_b_dec=not config.get("transcode", False),
        transcodes=is_transcoder,
        reads=ours(f"{name}.input" if is_transcoder else name),
        writes=ours(name),
        config=config,
    )
