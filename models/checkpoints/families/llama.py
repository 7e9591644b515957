"""Llama, Mistral, Qwen 2, Qwen 3, OLMo 2 and Gemma 2: RMSNorm, rotary positions, a gated MLP."""

from collections.abc import Mapping
from typing import Any

from models.checkpoints.assemble import Source
from models.checkpoints.attributes import Attributes
from models.checkpoints.families.family import ACTIVATIONS, Rows, plus_one, window_fields
from models.checkpoints.families.rope import rotary
from models.config import TransformerConfig

# What a config.json leaves out has the value that it has in transformers.
LLAMA = {
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
QWEN2 = LLAMA | {
    "vocab_size": 151_936,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
}
QWEN3 = QWEN2 | {"head_dim": 128}
OLMO2 = LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
GEMMA2 = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def llama_config(a: Attributes) -> TransformerConfig:
    """Llama's config (Touvron et al. 2023)."""
    a.idle("pretraining_tp")  # how an old transformers cut its products; the present does not
    a.only("rope_interleaved", False)
    a.idle("is_llama_config", "transformers.js_config")
    return TransformerConfig(
        **_shared(a, LLAMA),
        **_attention_bias(a),
        mlp_bias=a.take("mlp_bias", False),
        activation=a.choice("hidden_act", "silu", ACTIVATIONS),
    )


def mistral_config(a: Attributes) -> TransformerConfig:
    """Mistral's config: a window in all layers (Jiang et al. 2023)."""
    a.only("attention_bias", False)
    window, n_layers = a.take("sliding_window", 4096), a.take("num_hidden_layers", 32)
    types = ["full_attention" if window is None else "sliding_attention"] * n_layers
    return TransformerConfig(
        **_shared(a, MISTRAL),
        **_no_attention_bias(),
        **window_fields(a, window, types),
        mlp_bias=False,
        activation=a.choice("hidden_act", "silu", ACTIVATIONS),
    )


def qwen2_config(a: Attributes) -> TransformerConfig:
    """Qwen 2's config: biases of queries, keys and values alone (Yang et al. 2024)."""
    a.only("use_mrope", False)
    return TransformerConfig(
        **_shared(a, QWEN2),
        **_upper_windows(a),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        activation=a.choice("hidden_act", "silu", ACTIVATIONS),
    )


def qwen3_config(a: Attributes) -> TransformerConfig:
    """Qwen 3's config: a norm of each query and key (Yang et al. 2025)."""
    return TransformerConfig(
        **_shared(a, QWEN3),
        **_attention_bias(a),
        **_upper_windows(a),
        qk_norm="head",
        mlp_bias=False,
        activation=a.choice("hidden_act", "silu", ACTIVATIONS),
    )


def olmo2_config(a: Attributes) -> TransformerConfig:
    """OLMo 2's config: norms of what sublayers add, of all queries and of all keys (2024)."""
    a.only("clip_qkv", None)
    return TransformerConfig(
        **_shared(a, OLMO2),
        **_attention_bias(a),
        norm_place="output",
        qk_norm="all",
        mlp_bias=False,
        activation=a.choice("hidden_act", "silu", ACTIVATIONS),
    )


def gemma2_config(a: Attributes) -> TransformerConfig:
    """Gemma 2's config: norms around sublayers, caps, a window in every other layer (2024)."""
    a.only("use_bidirectional_attention", None, False)
    a.idle("hidden_act")  # transformers reads hidden_activation
    shared = _shared(a, GEMMA2)
    n_layers = shared["n_layers"]
    alternating = (["sliding_attention", "full_attention"] * n_layers)[:n_layers]
    types = a.take("layer_types", None) or alternating
    window = a.take("sliding_window", 4096)
    a.only("sliding_window_size", None, window)
    return TransformerConfig(
        **shared,
        **_attention_bias(a),
        **window_fields(a, window, types),
        norm_place="sandwich",
        embed_scale=shared["d_model"] ** 0.5,
        attn_scale=a.take("query_pre_attn_scalar", 256) ** -0.5,
        attn_cap=a.take("attn_logit_softcapping", 50.0) or 0.0,
        logit_cap=a.take("final_logit_softcapping", 30.0) or 0.0,
        mlp_bias=False,
        activation=a.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
    )


def _shared(a: Attributes, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all of these families spell alike."""
    value = {name: a.take(name, default) for name, default in defaults.items()}
    if dropout := a.take("attention_dropout", 0.0):
        raise a.error("attention_dropout", dropout, "0.0: its dropout is not of patterns alone")
    positions = rotary(a, value["max_position_embeddings"])
    if positions["rotary_fraction"] != 1:
        raise a.error("partial_rotary_factor", positions["rotary_fraction"], "1.0")
    return {
        "vocab_size": value["vocab_size"],
        "n_layers": value["num_hidden_layers"],
        "n_heads": value["num_attention_heads"],
        "d_model": value["hidden_size"],
        "n_kv_heads": value["num_key_value_heads"] or 0,
        "d_head": value["head_dim"] or 0,
        "d_mlp": value["intermediate_size"],
        "norm": "rmsnorm",
        "norm_eps": value["rms_norm_eps"],
        "mlp": "gated",
        "tied_unembed": value["tie_word_embeddings"],
        **positions,
    }


def _attention_bias(a: Attributes) -> dict[str, Any]:
    biased = a.take("attention_bias", False)
    return {"qkv_bias": biased, "out_bias": biased}


def _no_attention_bias() -> dict[str, Any]:
    return {"qkv_bias": False, "out_bias": False}


def _upper_windows(a: Attributes) -> dict[str, Any]:
    """Qwen's windows: layers from a certain one on, if they are switched on."""
    used, window = a.take("use_sliding_window", False), a.take("sliding_window", 4096)
    first, n_layers = a.take("max_window_layers", 28), a.take("num_hidden_layers", 32)
    window = window if used else None
    upper = [
        "full_attention" if window is None or layer < first else "sliding_attention"
        for layer in range(n_layers)
    ]
    return window_fields(a, window, a.take("layer_types", None) or upper)


def llama_rows(config: TransformerConfig) -> Rows:
    """Llama's keys, which are Mistral's and Qwen 2's too."""
    layer = "model.layers.N"
    return {
        "token_embedding.weight": "model.embed_tokens.weight",
        "blocks.N.ln1.weight": f"{layer}.input_layernorm.weight",
        "blocks.N.attn.qkv.*": _qkv(layer),
        "blocks.N.attn.output.*": f"{layer}.self_attn.o_proj.*",
        "blocks.N.ln2.weight": f"{layer}.post_attention_layernorm.weight",
        **_gated(layer),
        "ln_final.weight": "model.norm.weight",
        "unembedding.weight": "lm_head.weight",
    }


def qwen3_rows(config: TransformerConfig) -> Rows:
    """Qwen 3's keys."""
    return {**llama_rows(config), **_qk_norms("model.layers.N")}


def olmo2_rows(config: TransformerConfig) -> Rows:
    """OLMo 2's keys."""
    layer = "model.layers.N"
    return {
        "token_embedding.weight": "model.embed_tokens.weight",
        "blocks.N.attn.qkv.*": _qkv(layer),
        **_qk_norms(layer),
        "blocks.N.attn.output.*": f"{layer}.self_attn.o_proj.*",
        "blocks.N.ln1_post.weight": f"{layer}.post_attention_layernorm.weight",
        **_gated(layer),
        "blocks.N.ln2_post.weight": f"{layer}.post_feedforward_layernorm.weight",
        "ln_final.weight": "model.norm.weight",
        "unembedding.weight": "lm_head.weight",
    }


def gemma2_rows(config: TransformerConfig) -> Rows:
    """Gemma 2's keys; its norms store how far their gain is from one."""
    layer = "model.layers.N"

    def gain(key: str) -> Source:
        return Source((key,), plus_one)

    return {
        "token_embedding.weight": "model.embed_tokens.weight",
        "blocks.N.ln1.weight": gain(f"{layer}.input_layernorm.weight"),
        "blocks.N.attn.qkv.*": _qkv(layer),
        "blocks.N.attn.output.*": f"{layer}.self_attn.o_proj.*",
        "blocks.N.ln1_post.weight": gain(f"{layer}.post_attention_layernorm.weight"),
        "blocks.N.ln2.weight": gain(f"{layer}.pre_feedforward_layernorm.weight"),
        **_gated(layer),
        "blocks.N.ln2_post.weight": gain(f"{layer}.post_feedforward_layernorm.weight"),
        "ln_final.weight": gain("model.norm.weight"),
        "unembedding.weight": "lm_head.weight",
    }


def _qkv(layer: str) -> Source:
    return Source(tuple(f"{layer}.self_attn.{name}_proj.*" for name in "qkv"))


def _qk_norms(layer: str) -> dict[str, str]:
    return {
        f"blocks.N.attn.{name}.weight": f"{layer}.self_attn.{name}.weight"
        for name in ("q_norm", "k_norm")
    }


def _gated(layer: str) -> dict[str, str]:
    return {
        "blocks.N.mlp.gate.*": f"{layer}.mlp.gate_proj.*",
        "blocks.N.mlp.input.*": f"{layer}.mlp.up_proj.*",
        "blocks.N.mlp.output.*": f"{layer}.mlp.down_proj.*",
    }
