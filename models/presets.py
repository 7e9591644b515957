"""The configs of the source documents and of GPT-2."""

from functools import partial
from typing import Literal

from models.config import TransformerConfig
from models.registry import register


def _gpt2(n_layers: int, n_heads: int, d_model: int) -> TransformerConfig:
    """Radford et al. 2019, the four published sizes."""
    return TransformerConfig(
        vocab_size=50257,
        n_ctx=1024,
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=d_model,
        dropout=0.1,
    )


def _rotary(n_layers: int, n_heads: int, d_model: int) -> TransformerConfig:
    """qk-norm.md: GPT-2's sizes with rotary positions, RMSNorm without gain, and no biases."""
    return TransformerConfig(
        vocab_size=50257,
        n_ctx=1024,
        n_layers=n_layers,
        n_heads=n_heads,
        d_model=d_model,
        positions="rotary",
        norm="rmsnorm",
        norm_eps=1e-6,
        norm_learned=False,
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
    )


# n_layers, n_heads, d_model
SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
DEPTHS = {"d12": "gpt2", "d24": "gpt2-medium", "d36": "gpt2-large", "d48": "gpt2-xl"}

for _name, _sizes in SIZES.items():
    register(_name)(partial(_gpt2, *_sizes))

for _name, _sized in DEPTHS.items():
    register(_name)(partial(_rotary, *SIZES[_sized]))


@register("d12_post_norm")
def d12_post_norm() -> TransformerConfig:
    """qk-norm.md: norms before and after each sublayer."""
    return _rotary(*SIZES["gpt2"]).replace(norm_place="sandwich")


@register("d12_post_norm_qk_norm")
def d12_post_norm_qk_norm() -> TransformerConfig:
    """qk-norm.md: likewise, and queries and keys normalized head by head before rotation."""
    return d12_post_norm().replace(qk_norm="head", qk_norm_learned=False)


@register("tiny-lm")
def tiny_lm() -> TransformerConfig:
    """tiny-transformer-handout.md: sinusoids, attention without biases, an output map of its own.

    The vocabulary is that of printable text; give `vocab_size` of your own.
    """
    return TransformerConfig(
        vocab_size=96,
        n_ctx=64,
        n_layers=4,
        n_heads=4,
        d_model=128,
        positions="sinusoidal",
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        unembed_bias=True,
        tied_unembed=False,
        final_norm=False,
    )


def _components(positions: Literal["learned", "sinusoidal", "rotary"]) -> TransformerConfig:
    """model-architecture.md: RMSNorm, also of the embeddings, and a tied unembedding."""
    return TransformerConfig(
        vocab_size=50257,
        n_ctx=256,
        n_layers=6,
        n_heads=8,
        d_model=512,
        positions=positions,
        norm="rmsnorm",
        norm_eps=1e-6,
        embed_norm=True,
        activation="gelu",
        dropout=0.1,
    )


register("transformer-learned")(partial(_components, "learned"))
register("transformer-sinusoidal")(partial(_components, "sinusoidal"))
register("transformer-rotary")(partial(_components, "rotary"))


def _instrument(n_layers: int, d_model: int) -> TransformerConfig:
    """svd-transformer.md: one head, no biases in attention, tokens are vertices of a graph.

    Give `vocab_size`, the number of vertices, and `n_ctx`, the window of the walks.
    """
    return TransformerConfig(
        vocab_size=500,
        n_ctx=64,
        n_layers=n_layers,
        n_heads=1,
        d_model=d_model,
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        tied_unembed=False,
    )


for _width in (64, 128, 256):
    for _depth in (2, 4, 6):
        register(f"svd-{_width}-{_depth}l")(partial(_instrument, _depth, _width))
