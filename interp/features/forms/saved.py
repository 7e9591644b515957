"""Dictionaries that are a single file of `torch.save`.

Readers for OpenAI, Qwen Scope, Goodfire, Kissane et al. on `z`, and dictionary_learning without its
config.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from interp.features.activations import TopK
from interp.features.dictionary import Dictionary
from interp.features.forms import dictionary_learning
from interp.features.forms.common import BY_HAND, json_of, pickled, require_weights, whole_of
from interp.features.places import ours

_STATISTICS = {"stats_last_nonzero", "latents_activation_frequency", "latents_mean_square"}
# The last two fields repeat the content of `activation_state_dict`.
_ACTIVATION = {"activation", "activation_state_dict", "activation.k", "activation.postact_fn"}
_OPENAI_PLACES = {
    "resid_post_mlp": "resid_post",
    "resid_post_attn": "resid_mid",
    "resid_delta_attn": "attn_out",
    "resid_delta_mlp": "mlp_out",
    "mlp_post_act": "mlp.post",
}


def read(path: Path, *, k: int | None = None) -> Dictionary:
    """Return the dictionary in a file. The release is recognized by the names of the tensors.

    Args:
        path: the file.
        k: the number of active features at a position, for Qwen Scope only. It is the number after
            `L0_` in the name of the repository.
    """
    content = pickled(path)
    # Other libraries use the same names of tensors, with another meaning. The name of the file is
    # the name that dictionary_learning writes.
    if path.name == "ae.pt" and k is None:
        made = dictionary_learning.read_without_config(path, content)
        if made is not None:
            return made
    if "W_enc" in content and _is_hook_z(content):
        return _hook_z(path, content, k)
    if "W_enc" in content:
        return _qwen_scope(path, content, k)
    if k is not None:
        raise ValueError(f"k must be None for {path.name}, which is not of Qwen Scope; got {k}")
    if "pre_bias" in content:
        return _openai(path, content)
    if "encoder_linear.weight" in content:
        return _goodfire(path, content)
    names = ", ".join(map(str, content))
    raise ValueError(
        f"{path} must contain the tensors of OpenAI, Qwen Scope, Goodfire or Kissane et al.; got "
        f"{names:.300}. {BY_HAND}"
    )


def _openai(path: Path, content: dict[str, Any]) -> Dictionary:
    """Return a dictionary of OpenAI: top-k after a norm (v5), or ReLU without a norm (v1, v4).

    The names of the folders contain the place, as in `resid_post_mlp_v5_32k/autoencoders/7.pt`.
    """
    kind = content.get("activation", "ReLU")
    state = content.get("activation_state_dict", {})
    if not isinstance(kind, str) or not isinstance(state, dict):
        raise ValueError(
            f"activation in {path.name} must be a text and activation_state_dict an object; "
            f"got {type(kind).__name__} and {type(state).__name__}"
        )
    weights = {
        name: weight for name, weight in content.items() if name not in _STATISTICS | _ACTIVATION
    }
    require_weights(
        weights, {"pre_bias", "latent_bias", "encoder.weight", "decoder.weight"}, path.name
    )
    activation = _activation_of_openai(kind, state, path)
    point = _point_of_openai(path)
    return Dictionary(
        W_enc=weights["encoder.weight"].T,
        W_dec=weights["decoder.weight"].T,
        b_enc=weights["latent_bias"],
        b_dec=weights["pre_bias"],
        activation=activation,
        subtracts_b_dec=True,
        norm="layer_norm" if isinstance(activation, TopK) else "none",
        reads=point,
        writes=point,
    )


def _activation_of_openai(kind: str, state: Mapping[str, Any], path: Path) -> nn.Module:
    """Return the nonlinearity of a dictionary of OpenAI.

    Args:
        kind, state: the name and the settings of the nonlinearity in the file.
        path: the file, for the error.

    Raises:
        ValueError: if the nonlinearity is unknown.
    """
    plain: dict[str, nn.Module] = {"ReLU": nn.ReLU(), "Identity": nn.Identity()}
    if kind in plain and not state:
        return plain[kind]
    is_top_k = kind == "TopK" and state.keys() == {"k", "postact_fn"}
    if not is_top_k or state["postact_fn"] not in [*plain]:
        raise ValueError(
            f"activation of {path.name} must be TopK with k and postact_fn, ReLU or Identity; got "
            f"{kind!r} with {dict(state)}"
        )
    return TopK(whole_of("k", state["k"]), relu=state["postact_fn"] == "ReLU")


def _point_of_openai(path: Path) -> str | None:
    """Return the point that the names of the folders contain; None if they contain no point."""
    folders = "/".join(path.absolute().parts[-4:])
    place = next((place for theirs, place in _OPENAI_PLACES.items() if theirs in folders), None)
    layer = re.search(r"(?<=layer_)\d+|\d+(?=\.pt$)", folders)
    return f"blocks.{layer[0]}.{place}" if layer and place else None


def _is_hook_z(content: dict[str, Any]) -> bool:
    """Return True if `W_enc` is [d_in feature], as in the files of Kissane et al.

    In Qwen Scope, it is [feature d_in].
    """
    weights = [content.get(name) for name in ("W_enc", "b_enc", "b_dec")]
    if not all(isinstance(weight, Tensor) for weight in weights):
        return False
    W_enc, b_enc, b_dec = (content[name] for name in ("W_enc", "b_enc", "b_dec"))
    return [*W_enc.shape] == [b_dec.numel(), b_enc.numel()] != [b_enc.numel(), b_dec.numel()]


def _hook_z(path: Path, content: dict[str, Any], k: int | None) -> Dictionary:
    """Return a dictionary of Kissane et al. 2024: ReLU features of `z` with concatenated heads.

    `b_dec` is subtracted from the input. The point is in the file `<name>_cfg.json` in the same
    folder, or in the name of the file, as in `gpt2-small_L5_Hcat_z_lr1.20e-03.pt`.
    """
    require_weights(content, {"W_enc", "W_dec", "b_enc", "b_dec"}, path.name)
    if k is not None:
        raise ValueError(f"k must be None for {path.name}, which has a ReLU; got {k}")
    beside = path.with_name(f"{path.stem}_cfg.json")
    config = json_of(beside) if beside.is_file() else {}
    layer = re.search(r"_L(\d+)_Hcat_z", path.name)
    name = config.get("act_name") or (f"blocks.{layer[1]}.attn.hook_z" if layer else None)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"act_name in {beside.name} must be a text; got {name!r:.60}")
    point = ours(name)
    return Dictionary(
        W_enc=content["W_enc"],
        W_dec=content["W_dec"],
        b_enc=content["b_enc"],
        b_dec=content["b_dec"],
        activation=nn.ReLU(),
        subtracts_b_dec=True,
        reads=point,
        writes=point,
        config=config,
    )


def _qwen_scope(path: Path, content: dict[str, Any], k: int | None) -> Dictionary:
    """Return a dictionary of Qwen Scope, `layer7.sae.pt`: top-k features of the stream after a
    block.
    """
    require_weights(content, {"W_enc", "W_dec", "b_enc", "b_dec"}, path.name)
    if k is None:
        raise ValueError(
            f"{path.name} does not contain the number of active features: give k=, the number "
            "after L0_ in the name of the repository"
        )
    return Dictionary(
        W_enc=content["W_enc"].T,
        W_dec=content["W_dec"].T,
        b_enc=content["b_enc"],
        b_dec=content["b_dec"],
        activation=TopK(k, relu=False),
        **_after_block(r"layer(\d+)\.sae\.pt", path),
    )


def _goodfire(path: Path, content: dict[str, Any]) -> Dictionary:
    """Return a dictionary of Goodfire, such as `Llama-3.1-8B-Instruct-SAE-l19.pth`.

    It has ReLU features of the stream after a block.
    """
    names = (
        "encoder_linear.weight",
        "decoder_linear.weight",
        "encoder_linear.bias",
        "decoder_linear.bias",
    )
    require_weights(content, {*names}, path.name)
    W_enc, W_dec, b_enc, b_dec = (content[name] for name in names)
    return Dictionary(
        W_enc=W_enc.T,
        W_dec=W_dec.T,
        b_enc=b_enc,
        b_dec=b_dec,
        activation=nn.ReLU(),
        **_after_block(r"SAE-l(\d+)\.pth?", path),
    )


def _after_block(pattern: str, path: Path) -> dict[str, Any]:
    """Return the stream after a block as the point to read and write, if the name of the file
    contains the block.
    """
    layer = re.search(pattern + "$", path.name)
    return dict.fromkeys(("reads", "writes"), f"blocks.{layer[1]}.resid_post") if layer else {}
