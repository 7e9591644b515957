"""GPT-2, GPT-BigCode (StarCoder), GPT-Neo (TinyStories) and GPT-NeoX (Pythia): LayerNorm and biases."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.assemble import Source, concatenated
from models.checkpoints.huggingface.family import Attributes, Rows, rotary
from models.checkpoints.huggingface.windows import windows
from models.config import TransformerConfig


def gpt2_config(a: Attributes) -> TransformerConfig:
    """GPT-2's config (Radford et al. 2019)."""
    # The same multiplications in another order, to avoid overflow in half precision.
    a.idle("reorder_and_upcast_attn")
    # From the first release, for GPT's fine-tuning.
    a.only("n_special", 0)
    a.idle("predict_special_tokens")
    by_layer = a.take("scale_attn_by_inverse_layer_idx", False)
    return _learned_positions(a, activation="gelu_new", attn_scale_by_layer=by_layer)


def bigcode_config(a: Attributes) -> TransformerConfig:
    """GPT-BigCode's config: GPT-2's, with one key and value head (Ben Allal et al. 2023)."""
    multi_query = a.take("multi_query", True)
    n_kv_heads = 1 if multi_query else a.take("n_head", 12)
    a.only("num_key_value_heads", n_kv_heads)
    # Precision and buffers for inference.
    a.idle("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner")
    a.idle("max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache")
    a.idle("validate_runner_input")
    return _learned_positions(a, activation="gelu_pytorch_tanh", n_kv_heads=n_kv_heads)


def _learned_positions(a: Attributes, activation: str, **others: Any) -> TransformerConfig:
    a.idle("n_ctx")  # from the first release; transformers reads n_positions
    return TransformerConfig(
        vocab_size=a.take("vocab_size", 50257),
        n_ctx=a.take("n_positions", 1024),
        n_layers=a.take("n_layer", 12),
        n_heads=a.take("n_head", 12),
        d_model=a.take("n_embd", 768),
        d_mlp=a.take("n_inner", None) or 0,
        norm_eps=a.take("layer_norm_epsilon", 1e-5),
        attn_scale=0.0 if a.take("scale_attn_weights", True) else 1.0,
        activation=a.activation("activation_function", activation),
        tied_unembed=a.take("tie_word_embeddings", True),
        dropout=a.dropout({"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}),
        **others,
    )


def neo_config(a: Attributes) -> TransformerConfig:
    """GPT-Neo's config: no scale of dot products, a window in every other layer (Black et al. 2021)."""
    n_layers, kinds = a.take("num_layers", 24), ("global", "local")
    periods = a.take("attention_types", None) or [[kinds, 12]]
    types = [kind for period, times in periods for _ in range(times) for kind in period]
    types = a.take("attention_layers", None) or types
    window, spelled = a.take("window_size", 256), ("attention_layers", "window_size")
    return TransformerConfig(
        vocab_size=a.take("vocab_size", 50257),
        n_ctx=a.take("max_position_embeddings", 2048),
        n_layers=n_layers,
        n_heads=a.take("num_heads", 16),
        d_model=a.take("hidden_size", 2048),
        d_mlp=a.take("intermediate_size", None) or 0,
        norm_eps=a.take("layer_norm_epsilon", 1e-5),
        **windows(a, window, types, n_layers, kinds, spelled),
        attn_scale=1.0,
        activation=a.activation("activation_function", "gelu_new"),
        qkv_bias=False,
        tied_unembed=a.take("tie_word_embeddings", True),
        dropout=a.dropout({"embed_dropout": 0.0, "attention_dropout": 0.0, "resid_dropout": 0.0}),
    )


def neox_config(a: Attributes) -> TransformerConfig:
    """GPT-NeoX's config (Black et al. 2022)."""
    biased = a.take("attention_bias", True)
    spelled = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return TransformerConfig(
        vocab_size=a.take("vocab_size", 50432),
        n_layers=a.take("num_hidden_layers", 44),
        n_heads=a.take("num_attention_heads", 64),
        d_model=a.take("hidden_size", 6144),
        d_mlp=a.take("intermediate_size", 24576),
        norm_eps=a.take("layer_norm_eps", 1e-5),
        **rotary(a, a.take("max_position_embeddings", 2048), spelled, fraction=0.25),
        parallel=a.take("use_parallel_residual", True),
        activation=a.activation("hidden_act", "gelu"),
        qkv_bias=biased,
        out_bias=biased,
        tied_unembed=a.take("tie_word_embeddings", False),
        dropout=a.dropout({"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    )


def gpt2_rows(config: TransformerConfig) -> Rows:
    """GPT-2's keys; its matrices are stored as [in, out]."""
    return _gpt_rows(qkv=torch.t, others=torch.t)


def bigcode_rows(config: TransformerConfig) -> Rows:
    """GPT-BigCode's keys. With one key head, the order of q, k and v is ours; otherwise it is by head."""
    multi_query = config.n_kv_heads < config.n_heads
    return _gpt_rows(qkv=concatenated if multi_query else _by_kind(config.n_heads))


def _gpt_rows(
    qkv: Callable[..., Tensor], others: Callable[..., Tensor] = concatenated
) -> dict[str, str | Source]:
    layer = "transformer.h.N"
    return {
        "token_embedding.weight": "transformer.wte.weight",
        "position_embedding.weight": "transformer.wpe.weight",
        "blocks.N.ln1.*": f"{layer}.ln_1.*",
        "blocks.N.attn.qkv.*": Source((f"{layer}.attn.c_attn.*",), qkv),
        "blocks.N.attn.output.*": Source((f"{layer}.attn.c_proj.*",), others),
        "blocks.N.ln2.*": f"{layer}.ln_2.*",
        "blocks.N.mlp.input.*": Source((f"{layer}.mlp.c_fc.*",), others),
        "blocks.N.mlp.output.*": Source((f"{layer}.mlp.c_proj.*",), others),
        "ln_final.*": "transformer.ln_f.*",
        "unembedding.weight": "lm_head.weight",
    }


def neo_rows(config: TransformerConfig) -> Rows:
    """GPT-Neo's keys: GPT-2's, but for those of attention. Its matrices are stored as [out, in]."""
    attention = "transformer.h.N.attn.attention"
    return _gpt_rows(qkv=concatenated) | {
        "blocks.N.attn.qkv.*": Source(tuple(f"{attention}.{name}_proj.*" for name in "qkv")),
        "blocks.N.attn.output.*": f"{attention}.out_proj.*",
    }


def neox_rows(config: TransformerConfig) -> Rows:
    """GPT-NeoX's keys; queries, keys and values are stored head by head."""
    layer = "gpt_neox.layers.N"
    qkv = Source((f"{layer}.attention.query_key_value.*",), _by_kind(config.n_heads))
    return {
        "token_embedding.weight": "gpt_neox.embed_in.weight",
        "blocks.N.ln1.*": f"{layer}.input_layernorm.*",
        "blocks.N.attn.qkv.*": qkv,
        "blocks.N.attn.output.*": f"{layer}.attention.dense.*",
        "blocks.N.ln2.*": f"{layer}.post_attention_layernorm.*",
        "blocks.N.mlp.input.*": f"{layer}.mlp.dense_h_to_4h.*",
        "blocks.N.mlp.output.*": f"{layer}.mlp.dense_4h_to_h.*",
        "ln_final.*": "gpt_neox.final_layer_norm.*",
        "unembedding.weight": "embed_out.weight",
    }


def _by_kind(n_heads: int) -> Callable[[Tensor], Tensor]:
    """A conversion from the order by head to all queries, then all keys, then all values."""

    def convert(fused: Tensor) -> Tensor:
        return fused.unflatten(0, (n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return convert
