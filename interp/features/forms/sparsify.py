"""Dictionaries of sparsify."""

from pathlib import Path

from safetensors.torch import load_file

from interp.features.activations import GroupMax, TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, require

_FIELDS = {
    *("activation", "expansion_factor", "normalize_decoder", "num_latents", "k", "multi_topk"),
    *("skip_connection", "transcode", "d_in"),
}


def read(folder: Path) -> Dictionary:
    """sparsify: `cfg.json` and `sae.safetensors`."""
    config, weights = json_of(folder / "cfg.json"), load_file(folder / "sae.safetensors")
    if unknown := config.keys() - _FIELDS:
        raise ValueError(
            f"cfg.json has fields that are not known here: {', '.join(sorted(unknown))}"
        )
    skip = weights.keys() & {"W_skip"}
    require(weights, {"encoder.weight", "encoder.bias", "W_dec", "b_dec"} | skip, "cfg.json")
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
