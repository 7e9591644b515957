"""Llama, Mistral, Qwen 2, Qwen 3, OLMo 2 and Gemma 2: RMSNorm, rotary positions, a gated MLP."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from models.checkpoints.assemble import Source, concatenated
from models.checkpoints.huggingface.family import Attributes, Rows, rotary
from models.checkpoints.huggingface.windows import FULL, SLIDING, windows
from models.config import TransformerConfig


def llama_config(a: Attributes) -> TransformerConfig:
    """Llama's config (Touvron et al. 2023)."""
    a.idle("pretraining_tp")  # only old versions of transformers split products by it
    a.only("rope_interleaved", False)
    a.idle("is_llama_config", "transformers.js_config")
    fields = _shared(a) | _attention_bias(a)
    return TransformerConfig(**fields | {"mlp_bias": a.take("mlp_bias", False)})


def mistral_config(a: Attributes) -> TransformerConfig:
    """Mistral's config: a window in all layers (Jiang et al. 2023)."""
    a.only("attention_bias", False)
    window, n_layers = a.take("sliding_window", 4096), a.need("num_hidden_layers")
    types = [FULL if window is None else SLIDING] * n_layers
    return TransformerConfig(**_shared(a, n_kv_heads=8), **windows(a, window, types, n_layers))


def qwen2_config(a: Attributes) -> TransformerConfig:
    """Qwen 2's config: biases only of queries, keys and values (Yang et al. 2024)."""
    a.only("use_mrope", False)
    return TransformerConfig(**_shared(a, n_kv_heads=32) | _upper_windows(a) | {"qkv_bias": True})


def qwen3_config(a: Attributes) -> TransformerConfig:
    """Qwen 3's config: a norm of each query and key (Yang et al. 2025)."""
    fields = _shared(a, n_kv_heads=32, d_head=128) | _attention_bias(a) | _upper_windows(a)
    return TransformerConfig(**fields, qk_norm="head")


def olmo2_config(a: Attributes) -> TransformerConfig:
    """OLMo 2's config: norms of what sublayers add, and of all queries and all keys (2024)."""
    a.only("clip_qkv", None)
    fields = _shared(a, norm_eps=1e-5) | _attention_bias(a)
    return TransformerConfig(**fields, norm_place="output", qk_norm="all")


def gemma2_config(a: Attributes) -> TransformerConfig:
    """Gemma 2's config: norms around sublayers, caps, a window in every other layer (2024)."""
    a.only("use_bidirectional_attention", False)
    a.idle("hidden_act")  # transformers reads hidden_activation
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    fields = _shared(a, n_kv_heads=4, d_head=256, tied=True, activation=activation)
    alternating = ([SLIDING, FULL] * fields["n_layers"])[: fields["n_layers"]]
    window = a.take("sliding_window", 4096)
    a.only("sliding_window_size", window)
    return TransformerConfig(
        **fields | _attention_bias(a),
        **windows(a, window, a.take("layer_types", None) or alternating, fields["n_layers"]),
        norm_place="sandwich",
        embed_scale=fields["d_model"] ** 0.5,
        attn_scale=a.take("query_pre_attn_scalar", 256) ** -0.5,
        attn_cap=a.take("attn_logit_softcapping", 50.0) or 0.0,
        logit_cap=a.take("final_logit_softcapping", 30.0) or 0.0,
    )


def _shared(
    a: Attributes,
    n_kv_heads: int = 0,
    d_head: int = 0,
    norm_eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """The fields with the same names in all of these families, without biases.

    Defaults are those of transformers for what a file may leave out. A size must be in the file.
    """
    positions = rotary(a, a.need("max_position_embeddings"))
    if (fraction := positions["rotary_fraction"]) != 1:
        raise a.error("partial_rotary_factor", fraction, "1.0")
    return {
        "vocab_size": a.need("vocab_size"),
        "n_layers": a.need("num_hidden_layers"),
        "n_heads": a.need("num_attention_heads"),
        "d_model": a.need("hidden_size"),
        "n_kv_heads": a.take("num_key_value_heads", n_kv_heads) or 0,
        "d_head": a.take("head_dim", d_head) or 0,
        "d_mlp": a.need("intermediate_size"),
        "norm": "rmsnorm",
        "norm_eps": a.take("rms_norm_eps", norm_eps),
        "mlp": "gated",
        "activation": a.activation(*activation),
        "tied_unembed": a.take("tie_word_embeddings", tied),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        **positions,
    }


def _attention_bias(a: Attributes) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "out_bias"), a.take("attention_bias", False))


def _upper_windows(a: Attributes) -> dict[str, Any]:
    """Qwen's windows: in layers from `max_window_layers` on, if they are switched on."""
    used, window = a.take("use_sliding_window", False), a.take("sliding_window", 4096)
    first, n_layers = a.take("max_window_layers", 28), a.need("num_hidden_layers")
    window = window if used else None
    upper = [FULL if window is None or layer < first else SLIDING for layer in range(n_layers)]
    return windows(a, window, a.take("layer_types", None) or upper, n_layers)


def llama_rows(config: TransformerConfig) -> Rows:
    """The keys of Llama, Mistral and Qwen 2."""
    return _block_rows(_PRE)


def qwen3_rows(config: TransformerConfig) -> Rows:
    """Qwen 3's keys."""
    return _block_rows(_PRE | _QK)


def olmo2_rows(config: TransformerConfig) -> Rows:
    """OLMo 2's keys."""
    return _block_rows(_POST | _QK)


def gemma2_rows(config: TransformerConfig) -> Rows:
    """Gemma 2's keys. Its norms store the gain minus 1.

    In half precision our sum is rounded. transformers adds in float32, so it does not round.
    """
    before = {"ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm"}
    return _block_rows(before | _POST, gain=lambda stored: stored + 1)


# Norms of a layer by our names.
_PRE = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
_POST = {"ln1_post": "post_attention_layernorm", "ln2_post": "post_feedforward_layernorm"}
_QK = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}


def _block_rows(norms: Mapping[str, str], gain: Callable[..., Tensor] = concatenated) -> Rows:
    layer = "model.layers.N"
    qkv = tuple(f"{layer}.self_attn.{name}_proj.*" for name in "qkv")
    return {
        "token_embedding.weight": "model.embed_tokens.weight",
        "blocks.N.attn.qkv.*": Source(qkv),
        "blocks.N.attn.output.*": f"{layer}.self_attn.o_proj.*",
        "blocks.N.mlp.gate.*": f"{layer}.mlp.gate_proj.*",
        "blocks.N.mlp.input.*": f"{layer}.mlp.up_proj.*",
        "blocks.N.mlp.output.*": f"{layer}.mlp.down_proj.*",
        **{
            f"blocks.N.{ours}.weight": Source((f"{layer}.{theirs}.weight",), gain)
            for ours, theirs in norms.items()
        },
        "ln_final.weight": Source(("model.norm.weight",), gain),
        "unembedding.weight": "lm_head.weight",
    }
