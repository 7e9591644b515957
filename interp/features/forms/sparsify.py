"""Read dictionaries of the library sparsify."""

from pathlib import Path

from hooks.base import require_choice
from interp.features.activations import GroupMax, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, known_fields, require_weights, tensors_of
from interp.features.places import ours


def read(folder: Path, *, transcodes: bool | None = None) -> Dictionary:
    """Return the dictionary in `cfg.json` and `sae.safetensors`.

    Files from before February 2025 do not have the field `transcode`. Their transcoders subtract
    the bias of the decoder, as autoencoders do. Without the field, a dictionary with a skip
    connection is read as a transcoder, and any other dictionary as an autoencoder, unless
    `transcodes` is True.

    Args:
        folder: the folder with the two files.
        transcodes: whether the dictionary is a transcoder. Default: read it from the files.
    """
    config = known_fields(json_of(folder / "cfg.json"), "cfg.json of sparsify")
    weights = tensors_of(folder / "sae.safetensors")
    skip = weights.keys() & {"W_skip"}
    require_weights(
        weights, {"encoder.weight", "encoder.bias", "W_dec", "b_dec"} | skip, "cfg.json"
    )
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
