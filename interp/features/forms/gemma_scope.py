"""Read dictionaries of Gemma Scope 1 and 2."""

import re
from pathlib import Path
from typing import Any

from interp.features.activations import JumpReLU
from interp.features.dictionary import Dictionary
from interp.features.forms.common import json_of, known_fields, require_weights, tensors_of
from interp.features.places import ours

# The end of the name of a repository, or of its folder in a cache such as
# `models--google--gemma-scope-2b-pt-res`, determines the point that the dictionaries write.
_REPOSITORY = re.compile(r"gemma-scope-\d+b-[a-z]+-(res|mlp|att|transcoders)\b")
_WRITES = {"res": "resid_post", "mlp": "mlp_out", "att": "attn.z", "transcoders": "mlp_out"}
# Folders in a repository are `embedding/width_4k/average_l0_6` or
# `layer_3/width_16k/average_l0_59`.
_PLACE = re.compile(r".*/(?:embedding/width_|layer_(\d+)(?:/|$))")

# Folders of Gemma Scope 2 are `resid_post_all/layer_9_width_16k_l0_small`.
_PLACE_2 = re.compile(r"/(resid_post|attn_out|mlp_out|transcoder)(?:_all)?/layer_(\d+)_")
# The points of Gemma 3 that the dictionaries of each folder read and write.
_NAMES_2 = {
    "resid_post": ("output", "output"),
    "attn_out": ("self_attn.o_proj.input", "self_attn.o_proj.input"),
    "mlp_out": ("post_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
    "transcoder": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
}


def read(
    folder: Path, *, scale_embeddings: bool | None = None, transcodes: bool | None = None
) -> Dictionary:
    """Return the dictionary of Gemma Scope 1 in `params.npz`.

    The kind of dictionary follows from the path, or else from the arguments. A folder such as
    `embedding/width_4k` contains dictionaries of embeddings that are scaled by √d_model. A
    repository `...-transcoders` contains transcoders that read the output of the norm before the
    MLP, before the gain; see `Dictionary.with_input_gain`.

    Args:
        folder: the folder of the file.
        scale_embeddings, transcodes: see `load_sae`.
    """
    weights = tensors_of(folder / "params.npz")
    names = {"W_enc", "W_dec", "b_enc", "b_dec", "threshold"}
    weights = {
        "W_" + name[2:] if name.startswith("w_") else name: weight
        for name, weight in weights.items()
    }
    require_weights(weights, names, "params.npz")
    kind, is_embedding, block = _facts_in_path(folder)
    if scale_embeddings is None:
        scale_embeddings = is_embedding
    if scale_embeddings is None:
        raise ValueError(
            f"the path {folder} does not contain the kind of dictionary: give scale_embeddings=, "
            "whether it reads embeddings, which are scaled by √d_model, and transcodes=, whether "
            "it is a transcoder"
        )
    if transcodes is None and (kind or scale_embeddings):
        transcodes = kind == "transcoders"
    root = weights["W_enc"].shape[0] ** 0.5 if scale_embeddings else 1.0
    writes = f"{block}{_WRITES[kind]}" if kind and block else None
    if scale_embeddings:
        writes = "embed"
    reads = f"{block}ln2.hook_normalized" if transcodes else writes
    return Dictionary(
        W_enc=weights["W_enc"] / root,
        W_dec=weights["W_dec"] * root,
        b_enc=weights["b_enc"],
        b_dec=weights["b_dec"],
        activation=JumpReLU(weights["threshold"]),
        # An autoencoder and a transcoder read different points. `splice` raises an error for this
        # name.
        reads="what load_sae(..., transcodes=) says" if transcodes is None else reads,
        writes=writes,
        transcodes=transcodes,
    )


def _facts_in_path(folder: Path) -> tuple[str | None, bool | None, str]:
    """Return the kind of repository, whether the dictionary is for embeddings, and the prefix of
    points in its block.

    The files in a cache are links to paths with fewer facts than the path of the folder, while a
    file elsewhere may be a link into a cache. Both paths are therefore searched.
    """
    kind, is_embedding, block = None, None, ""
    for path in (folder.resolve(), folder.absolute(), (folder / "params.npz").resolve().parent):
        kinds = _REPOSITORY.findall(path.as_posix())
        kind = kind or (kinds[-1] if kinds else None)
        if is_embedding is None and (place := _PLACE.match(path.as_posix())):
            is_embedding = place[1] is None
            block = f"blocks.{place[1]}." if place[1] else ""
    return kind, is_embedding, block


def _point_of_gemma_3(name: str | None) -> str | None:
    """Return our name of a place in Gemma 3."""
    if name is None:
        return None
    # In Gemma 3, the outputs of the heads enter this map unchanged.
    pattern = r"^(?:\w+\.)*layers\.(\d+)\.self_attn\.o_proj\.input$"
    return ours(re.sub(pattern, r"blocks.\1.attn.z", name))


def _config_in_path(folder: Path) -> dict[str, Any]:
    """Return the config of a dictionary of Gemma Scope 2 that follows from its path.

    Raises:
        ValueError: if the path is not a path of Gemma Scope 2's repositories.
    """
    for path in (folder.resolve(), folder.absolute(), (folder / "params.safetensors").resolve()):
        if matched := _PLACE_2.search(path.as_posix()):
            kind, layer = matched[1], matched[2]
            reads, writes = (f"model.layers.{layer}.{name}" for name in _NAMES_2[kind])
            config = {"architecture": "jump_relu", "hf_hook_point_in": reads}
            return config | ({"hf_hook_point_out": writes} if kind == "transcoder" else {})
    raise ValueError(
        f"config.json must be in {folder}, or the path must be a path of Gemma Scope 2, such as "
        "resid_post_all/layer_9_width_16k_l0_small"
    )


def read_2(folder: Path) -> Dictionary:
    """Return the dictionary of Gemma Scope 2 in `params.safetensors` and `config.json`.

    Some folders on the hub contain no config. Then the fields of the config are read from the path.
    """
    has_config = (folder / "config.json").is_file()
    config = json_of(folder / "config.json") if has_config else _config_in_path(folder)
    config = known_fields(config, "config.json of Gemma Scope 2")
    weights = tensors_of(folder / "params.safetensors")
    if config.get("architecture") != "jump_relu":
        raise ValueError(f"architecture must be 'jump_relu'; got {config.get('architecture')!r}")
    skip = weights.keys() & {"affine_skip_connection"}
    require_weights(
        weights, {"w_enc", "w_dec", "b_enc", "b_dec", "threshold"} | skip, "config.json"
    )
    if config.get("affine_connection", bool(skip)) != bool(skip):
        raise ValueError(
            f"affine_connection must be {str(bool(skip)).lower()}, because the weights have "
            f"{'an' if skip else 'no'} affine_skip_connection"
        )
    reads = _point_of_gemma_3(config.get("hf_hook_point_in"))
    writes = _point_of_gemma_3(config.get("hf_hook_point_out")) or reads
    kind = config.get("type")
    if kind not in (None, "sae", "transcoder") or (kind == "sae" and reads != writes):
        raise ValueError(
            f"type must be 'sae', of one point, or 'transcoder'; got {kind!r} from {reads} to "
            f"{writes}"
        )
    return Dictionary(
        W_enc=weights["w_enc"],
        W_dec=weights["w_dec"],
        b_enc=weights["b_enc"],
        b_dec=weights["b_dec"],
        activation=JumpReLU(weights["threshold"]),
        W_skip=weights.get("affine_skip_connection"),
        transcodes=None if kind is None else kind == "transcoder",
        reads=reads,
        writes=writes,
        config=config,
    )
