"""Dictionaries that are one file of `torch.save`: those of OpenAI, Qwen Scope and Goodfire."""

import re
from pathlib import Path
from typing import Any

from torch import nn

from hooks.shared import storage
from interp.features.activations import TopK
from interp.features.dictionary import Dictionary
from interp.features.forms.common import BY_HAND, require

_STATISTICS = {"stats_last_nonzero", "latents_activation_frequency", "latents_mean_square"}
# The last two say once more what the second says.
_ACTIVATION = {"activation", "activation_state_dict", "activation.k", "activation.postact_fn"}
_OPENAI_PLACES = {
    "resid_post_mlp": "resid_post",
    "resid_post_attn": "resid_mid",
    "resid_delta_attn": "attn_out",
    "resid_delta_mlp": "mlp_out",
    "mlp_post_act": "mlp.post",
}


def read(path: Path, *, k: int | None = None) -> Dictionary:
    """One file, whose form its tensors say.

    Args:
        path: the file.
        k: how many features are kept, for Qwen Scope: it is in the name of the repository only, after `L0_`.
    """
    held = _held(path)
    if "W_enc" in held:
        return _qwen_scope(path, held, k)
    if k is not None:
        raise ValueError(f"k must be None for {path.name}, which is not of Qwen Scope; got {k}")
    if "pre_bias" in held:
        return _openai(path, held)
    if "encoder_linear.weight" in held:
        return _goodfire(path, held)
    names = ", ".join(map(str, held))
    raise ValueError(
        f"{path} must have the tensors of OpenAI, Qwen Scope or Goodfire; got {names}. {BY_HAND}"
    )


def _held(path: Path) -> dict[str, Any]:
    """What is in a file, which may be tensors and plain values only."""
    held = storage.read_saved(path)
    if not isinstance(held, dict):
        raise ValueError(f"{path} must hold tensors by name; got a {type(held).__name__}")
    return held


def _openai(path: Path, held: dict[str, Any]) -> Dictionary:
    """OpenAI: top-k behind a norm (v5), or ReLU without one (v1, v4).

    The folders say the place: `resid_post_mlp_v5_32k/autoencoders/7.pt`.
    """
    kind, state = held.get("activation", "ReLU"), held.get("activation_state_dict", {})
    weights = {n: w for n, w in held.items() if n not in _STATISTICS | _ACTIVATION}
    require(weights, {"pre_bias", "latent_bias", "encoder.weight", "decoder.weight"}, path.name)
    plain: dict[str, nn.Module] = {"ReLU": nn.ReLU(), "Identity": nn.Identity()}
    is_top_k = (
        kind == "TopK" and state.keys() == {"k", "postact_fn"} and state["postact_fn"] in plain
    )
    if not is_top_k and (kind not in plain or state):
        raise ValueError(
            f"activation of {path.name} must be TopK with k and postact_fn, ReLU or Identity; got {kind!r} with {dict(state)}"
        )
    activation = (
        TopK(int(state["k"]), relu=state["postact_fn"] == "ReLU") if is_top_k else plain[kind]
    )
    folders = "/".join(path.absolute().parts[-4:])
    place = next((place for theirs, place in _OPENAI_PLACES.items() if theirs in folders), None)
    layer = re.search(r"(?<=layer_)\d+|\d+(?=\.pt$)", folders)
    point = f"blocks.{layer[0]}.{place}" if layer and place else None
    return Dictionary(
        weights["encoder.weight"].T, weights["decoder.weight"].T, weights["latent_bias"], weights["pre_bias"], activation,
        subtracts_b_dec=True, norm="layer_norm" if is_top_k else "none", reads=point, writes=point,
    )  # fmt: skip


def _qwen_scope(path: Path, held: dict[str, Any], k: int | None) -> Dictionary:
    """Qwen Scope: `layer7.sae.pt`, top-k of the stream after a block."""
    require(held, {"W_enc", "W_dec", "b_enc", "b_dec"}, path.name)
    if k is None:
        raise ValueError(
            f"k= must say how many features {path.name} keeps: only the name of its repository does, after L0_"
        )
    return Dictionary(
        held["W_enc"].T, held["W_dec"].T, held["b_enc"], held["b_dec"], TopK(k, relu=False),
        **_after_block(r"layer(\d+)\.sae\.pt", path),
    )  # fmt: skip


def _goodfire(path: Path, held: dict[str, Any]) -> Dictionary:
    """Goodfire: `Llama-3.1-8B-Instruct-SAE-l19.pth`, ReLU of the stream after a block."""
    names = ("encoder_linear.weight", "decoder_linear.weight", "encoder_linear.bias", "decoder_linear.bias")  # fmt: skip
    require(held, {*names}, path.name)
    W_enc, W_dec, b_enc, b_dec = (held[name] for name in names)
    return Dictionary(
        W_enc.T, W_dec.T, b_enc, b_dec, nn.ReLU(), **_after_block(r"SAE-l(\d+)\.pth?", path)
    )


def _after_block(pattern: str, path: Path) -> dict[str, Any]:
    """The point after the block whose number is in the name of a file."""
    layer = re.search(pattern + "$", path.name)
    return dict.fromkeys(("reads", "writes"), f"blocks.{layer[1]}.resid_post") if layer else {}
