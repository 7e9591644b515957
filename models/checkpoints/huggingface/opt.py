"""OPT: LayerNorm before or after sublayers, biases, ReLU, learned positions with an offset."""

from models.checkpoints.assemble import Source
from models.checkpoints.huggingface.family import Attributes, Rows
from models.config import TransformerConfig

# Rows of the position table before that of the first position.
OFFSET = 2


def opt_config(a: Attributes) -> TransformerConfig:
    """OPT's config (Zhang et al. 2022)."""
    d_model = a.take("hidden_size", 768)
    if (width := a.take("word_embed_proj_dim", None)) not in (None, d_model):  # OPT-350m
        raise a.error(
            "word_embed_proj_dim",
            width,
            f"hidden_size ({d_model}), as no map from narrower embeddings to the stream can be expressed",
        )
    a.idle("init_std")
    before, biased = a.take("do_layer_norm_before", True), a.take("enable_bias", True)
    removed = a.take("_remove_final_layer_norm", False)
    return TransformerConfig(
        vocab_size=a.take("vocab_size", 50272),
        n_ctx=a.take("max_position_embeddings", 2048),
        n_layers=a.take("num_hidden_layers", 12),
        n_heads=a.take("num_attention_heads", 12),
        d_model=d_model,
        d_mlp=a.take("ffn_dim", 3072),
        norm_place="pre" if before else "post",
        norm_learned=a.take("layer_norm_elementwise_affine", True),
        final_norm=before and not removed,
        activation=a.activation("activation_function", "relu"),
        qkv_bias=biased,
        out_bias=biased,
        mlp_bias=biased,
        tied_unembed=a.take("tie_word_embeddings", True),
        dropout=a.dropout({"dropout": 0.1, "attention_dropout": 0.0}),
    )


def opt_rows(config: TransformerConfig) -> Rows:
    """OPT's keys. In each block, its `final_layer_norm` is the MLP's."""
    decoder, layer = "model.decoder", "model.decoder.layers.N"
    positions = Source((f"{decoder}.embed_positions.weight",), lambda table: table[OFFSET:])
    return {
        "token_embedding.weight": f"{decoder}.embed_tokens.weight",
        "position_embedding.weight": positions,
        "blocks.N.ln1.*": f"{layer}.self_attn_layer_norm.*",
        "blocks.N.attn.qkv.*": Source(tuple(f"{layer}.self_attn.{n}_proj.*" for n in "qkv")),
        "blocks.N.attn.output.*": f"{layer}.self_attn.out_proj.*",
        "blocks.N.ln2.*": f"{layer}.final_layer_norm.*",
        "blocks.N.mlp.input.*": f"{layer}.fc1.*",
        "blocks.N.mlp.output.*": f"{layer}.fc2.*",
        "ln_final.*": f"{decoder}.final_layer_norm.*",
        "unembedding.weight": "lm_head.weight",
    }
