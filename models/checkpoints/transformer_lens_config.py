"""Make a `TransformerConfig` from TransformerLens' config and the facts in a state dict."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooks.base import storage, warn
from models.checkpoints.huggingface.family import ACTIVATION_NAMES, Attributes
from models.config import SHORTFORMER, TransformerConfig
from models.files import read_object
from models.rotary_scaling import RotaryScaling

# Fields of TransformerLens' config that do not affect logits (`_BOOKKEEPING`), and fields that have
# an effect only if another field has some value (`_SUBORDINATE`).
_BOOKKEEPING = """
    model_name original_architecture from_checkpoint checkpoint_index checkpoint_label_type
    checkpoint_value tokenizer_name tokenizer_prepends_bos default_prepend_bos init_mode
    init_weights initializer_range seed device n_devices n_params dtype use_attn_result
    use_split_qkv_input use_hook_mlp_in use_attn_in use_hook_tokens ungroup_grouped_query_attention
    trust_remote_code tie_word_embeddings decoder_start_token_id
"""
_SUBORDINATE = """
    NTK_by_parts_factor NTK_by_parts_low_freq_factor NTK_by_parts_high_freq_factor
    NTK_original_ctx_len use_NTK_by_parts_rope use_local_attn window_size attn_types rotary_dim
    rotary_base rotary_adjacent_pairs attn_scale eps final_rms use_normalization_before_and_after
    experts_per_token parallel_attn_mlp relative_attention_max_distance
    relative_attention_num_buckets
"""
_NORMS: Mapping[Any, Any] = {
    "LN": "layernorm",
    "LNPre": "layernorm",
    "RMS": "rmsnorm",
    "RMSPre": "rmsnorm",
    None: "none",
}
_POSITIONS = {"standard": "learned", "rotary": "rotary"}


def lens_config(weights: Mapping[str, Tensor], config: Any) -> TransformerConfig:
    """Return our config for a state dict of TransformerLens.

    Args:
        weights: the state dict.
        config: TransformerLens' config, its dict, the path of its JSON, or None.

    Raises:
        ValueError: if a field is missing, or if a field is not supported.
    """
    implied = _implied(weights)
    stated: Mapping[str, Any]
    if config is None:
        stated = _defaults(implied)
    elif isinstance(config, str | os.PathLike):
        stated = read_object(Path(config))
    else:
        stated = config if isinstance(config, Mapping) else config.to_dict()
    with storage.one_error("TransformerLens' config"):
        return _translated(Attributes({**implied, **stated}))


def _implied(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the fields of TransformerLens' config that shapes, keys and buffers determine."""
    first = "blocks.0"
    layers = {int(key.split(".")[1]) for key in weights if re.match(r"blocks\.\d+\.", key)}
    n_heads, d_model, d_head = weights[f"{first}.attn.W_Q"].shape
    vocab = weights["embed.W_E"].shape[0]
    hidden = weights.get(f"{first}.mlp.W_in")
    mask, sines = (weights.get(f"{first}.attn.{name}") for name in ("mask", "rotary_sin"))
    fields: dict[str, Any] = {
        "n_layers": max(layers) + 1,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_vocab": vocab,
        "d_vocab_out": weights["unembed.W_U"].shape[1],
        "attn_only": hidden is None,
        "gated_mlp": f"{first}.mlp.W_gate" in weights,
        "use_qk_norm": f"{first}.attn.q_norm.w" in weights,
        "use_normalization_before_and_after": f"{first}.ln1_post.w" in weights,
        "post_embedding_ln": "embed.ln.w" in weights,
    }
    if hidden is not None:
        fields["d_mlp"] = hidden.shape[1]
    if f"{first}.ln1.w" in weights:
        fields["normalization_type"] = "LN" if f"{first}.ln1.b" in weights else "RMS"
    if f"{first}.mlp.ln.w" in weights:
        fields["act_fn"] = "solu_ln"
    if f"{first}.attn._W_K" in weights:
        fields["n_key_value_heads"] = len(weights[f"{first}.attn._W_K"])
    if "pos_embed.W_pos" in weights:
        fields["n_ctx"] = len(weights["pos_embed.W_pos"])
    elif mask is not None:
        fields["n_ctx"] = len(mask)
    if sines is not None:
        # Every sine occurs twice in the buffer: in both halves, or in two adjacent columns.
        halves = sines[:, : sines.shape[1] // 2]
        adjacent = not torch.equal(halves, sines[:, sines.shape[1] // 2 :])
        fields |= {"positional_embedding_type": "rotary", "rotary_dim": sines.shape[1]}
        fields["rotary_adjacent_pairs"] = adjacent
    return fields


def _defaults(implied: Mapping[str, Any]) -> dict[str, Any]:
    """Return TransformerLens' defaults for the fields that are still unknown, with a warning.

    Raises:
        ValueError: if a field is unknown and has no usual value: the kind of norms or positions, or
            the longest text.
    """
    if "normalization_type" not in implied:
        raise ValueError(
            "config must contain normalization_type ('LNPre', 'RMSPre' or None), because no norm "
            "has weights; got no config (cfg.to_dict() of the HookedTransformer is best)"
        )
    if "positional_embedding_type" not in implied and "n_ctx" not in implied:
        raise ValueError("config must contain positional_embedding_type and n_ctx; got no config")
    assumed: dict[str, Any] = {"attention_dir": "causal", "eps": 1e-5, "use_attn_scale": True}
    if "positional_embedding_type" not in implied:
        assumed["positional_embedding_type"] = "standard"
    if not implied["attn_only"] and "act_fn" not in implied:
        assumed["act_fn"] = "silu" if implied["gated_mlp"] else "gelu_new"
    said = ", ".join(f"{name}={value!r}" for name, value in assumed.items())
    warn(
        f"no config was given, so these defaults are used: {said}; if one is wrong, the logits are "
        "wrong (config=cfg.to_dict() of the HookedTransformer)",
    )
    return assumed


def _translated(attributes: Attributes) -> TransformerConfig:
    """Return our config from TransformerLens' fields. An unknown field is an error."""
    attributes.only("num_experts", None)
    attributes.only("load_in_4bit", False)
    is_causal = attributes.take("attention_dir", "causal") == "causal"
    mlp = _mlp(attributes)
    positions = _positions(attributes)
    norms = _norms(attributes, positions["positions"])
    has_norm = norms["norm"] != "none" or norms["qk_norm"] != "none" or mlp.get("mlp_norm")
    divisor = (
        attributes.take("attn_scale", -1.0) if attributes.take("use_attn_scale", True) else 1.0
    )
    config = TransformerConfig(
        vocab_size=attributes.need("d_vocab"),
        vocab_size_out=max(attributes.take("d_vocab_out", 0), 0),
        n_ctx=attributes.need("n_ctx"),
        n_layers=attributes.need("n_layers"),
        n_heads=attributes.need("n_heads"),
        d_model=attributes.need("d_model"),
        d_head=attributes.need("d_head"),
        n_kv_heads=attributes.take("n_key_value_heads", None) or 0,
        norm_eps=attributes.take("eps", 1e-5) if has_norm else 1e-5,
        causal=is_causal,
        attn_scale=1 / divisor if divisor > 0 else 0.0,
        attn_scale_by_layer=attributes.take("scale_attn_by_inverse_layer_idx", False),
        attn_cap=max(attributes.take("attn_scores_soft_cap", 0.0), 0.0),
        logit_cap=max(attributes.take("output_logits_soft_cap", 0.0), 0.0),
        unembed_bias=True,
        tied_unembed=False,
        **norms,
        **mlp,
        **positions,
        # TransformerLens applies no mask, and no window either, to attention in both directions.
        **(_windows(attributes) if is_causal else {}),
    )
    attributes.idle(*f"{_BOOKKEEPING} {_SUBORDINATE}".split())
    attributes.finish("leave them out of the config if they do not: ")
    return config


def _norms(attributes: Attributes, positions: str) -> dict[str, Any]:
    """Return our fields of norms.

    Raises:
        ValueError: if the norm is unknown, or our config cannot express its place.
    """
    norm = attributes.need("normalization_type")
    if norm not in _NORMS:
        raise attributes.error("normalization_type", norm, "LN, LNPre, RMS, RMSPre or None")
    # TransformerLens reads this field only for these two norms.
    if norm in ("LN", "LNPre"):
        attributes.only("final_rms", False)
    is_sandwich = norm is not None and attributes.take("use_normalization_before_and_after", False)
    embed_norm = attributes.take("post_embedding_ln", False)
    if embed_norm and (norm != "LN" or positions == "learned"):
        rule = "False, but for LN and positions that are not added to the embeddings"
        raise attributes.error("post_embedding_ln", True, rule)
    return {
        "norm": _NORMS[norm],
        "norm_place": "sandwich" if is_sandwich else "pre",
        # The norms after a sublayer (sandwich) always have weights. With RMSPre, the norms before a
        # sublayer have none, so `_norm_rows` sets their gains to 1.
        "norm_learned": norm in ("LN", "RMS") or (norm == "RMSPre" and is_sandwich),
        "embed_norm": embed_norm,
        "qk_norm": "head" if attributes.take("use_qk_norm", False) else "none",
    }


def _mlp(attributes: Attributes) -> dict[str, Any]:
    """Return our fields of the MLP.

    Raises:
        ValueError: if the activation is not supported.
    """
    if attributes.take("attn_only", False):
        attributes.idle("d_mlp", "act_fn", "gated_mlp")
        return {"mlp": "none"}
    name = attributes.need("act_fn")
    is_gated = attributes.take("gated_mlp", False)
    if name == "solu_ln" and is_gated:
        raise attributes.error(
            "act_fn",
            name,
            "another activation in a gated MLP, because TransformerLens skips the product",
        )
    activation = "solu" if name in ("solu", "solu_ln") else ACTIVATION_NAMES.get(name)
    if activation is None:
        raise attributes.error(
            "act_fn", name, f"one of solu, solu_ln, {', '.join(ACTIVATION_NAMES)}"
        )
    return {
        "mlp": "gated" if is_gated else "plain",
        "d_mlp": attributes.take("d_mlp", None) or 0,
        "activation": activation,
        "mlp_norm": name == "solu_ln",
        "parallel": attributes.take("parallel_attn_mlp", False),
    }


def _positions(attributes: Attributes) -> dict[str, Any]:
    """Return our fields of positions.

    Raises:
        ValueError: if the kind of positions is not supported.
    """
    kind = attributes.take("positional_embedding_type", "standard")
    if kind not in _POSITIONS:
        hint = f" ({SHORTFORMER})" if kind == "shortformer" else ""
        raise attributes.error(
            "positional_embedding_type", kind, f"one of {', '.join(_POSITIONS)}{hint}"
        )
    if kind != "rotary":
        return {"positions": _POSITIONS[kind]}
    d_head = attributes.need("d_head")
    scaling = None
    d_rotary = attributes.take("rotary_dim", None) or d_head
    fraction = d_rotary / d_head
    # Our config computes the number of rotated dimensions as int(d_head * fraction). Because of
    # rounding, the number may be too small: int(44 * (30 / 44)) is 29 and not 30. Then use the next
    # larger fraction.
    if int(d_head * fraction) < d_rotary:
        fraction = math.nextafter(fraction, 1)
    if attributes.take("use_NTK_by_parts_rope", False):
        scaling = RotaryScaling(
            kind="llama3",
            factor=attributes.take("NTK_by_parts_factor", 8.0),
            original_n_ctx=attributes.take("NTK_original_ctx_len", 8192),
            low=attributes.take("NTK_by_parts_low_freq_factor", 1.0),
            high=attributes.take("NTK_by_parts_high_freq_factor", 4.0),
        )
    return {
        "positions": "rotary",
        "rotary_theta": attributes.take("rotary_base", 10_000.0),
        "rotary_fraction": fraction,
        "rotary_pairs": "adjacent" if attributes.take("rotary_adjacent_pairs", False) else "halves",
        "rotary_scaling": scaling,
    }


def _windows(attributes: Attributes) -> dict[str, Any]:
    """Return our fields of windows; empty if no layer has a window."""
    types = attributes.take("attn_types", None) if attributes.take("use_local_attn", False) else ()
    layers = tuple(layer for layer, kind in enumerate(types or ()) if kind == "local")
    return {"window": attributes.need("window_size"), "window_layers": layers} if layers else {}
