"""Named configs of GPT-2 and of the source documents: `build("gpt2")`, `register("name")`."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from hooks.shared import unknown_name
from models.config import TransformerConfig
from models.transformer import Transformer

Describe = Callable[[], TransformerConfig]

_configs: dict[str, TransformerConfig] = {}


def register(name: str) -> Callable[[Describe], Describe]:
    """A decorator that registers the config that a function returns, for `build` and `config_of`.

    Registering a name again replaces its config, with a warning.

    Raises:
        ValueError: if it decorates anything but a function that returns a `TransformerConfig`.

    >>> @register("two-layers")
    ... def two_layers() -> TransformerConfig:
    ...     return TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> build("two-layers", n_layers=3).config.n_layers
    3
    """

    def add(describe: Describe) -> Describe:
        config = describe() if callable(describe) else describe
        if not isinstance(config, TransformerConfig):
            raise ValueError(
                f"{name!r} must be a function that returns a TransformerConfig; got {describe!r}"
            )
        if name in _configs:
            warnings.warn(f"{name!r} was registered already and is replaced", stacklevel=2)
        _configs[name] = config
        return describe

    return add


def available() -> list[str]:
    """The registered names, in order of registration.

    >>> available()[:2]
    ['gpt2', 'gpt2-medium']
    """
    return list(_configs)


def config_of(name: str, **overrides: Any) -> TransformerConfig:
    """The config registered under a name, with some fields changed.

    Derived sizes, such as `d_mlp` from `d_model`, are derived again.

    Raises:
        UnknownNameError: if there is no such name (see `available`) or field. It is a KeyError with
            close matches.
        ValueError: if an override is not allowed.

    >>> config_of("gpt2", n_heads=6).d_head
    128
    """
    if name not in _configs:
        raise unknown_name(name, _configs, "config of models.available()")
    config = _configs[name]
    for field in overrides.keys() - config.__dataclass_fields__.keys():
        raise unknown_name(field, config.__dataclass_fields__, "field of a config")
    return config.replace(**overrides)


def build(name: str, **overrides: Any) -> Transformer:
    """A model with fresh weights from a registered config. For arguments and errors see `config_of`.

    >>> build("gpt2", vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4).count_parameters()
    544
    """
    return Transformer(config_of(name, **overrides))


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
    return _gpt2(n_layers, n_heads, d_model).replace(
        positions="rotary",
        norm="rmsnorm",
        norm_eps=1e-6,
        norm_learned=False,
        activation="gelu",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        dropout=0.0,
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
    """qk-norm.md: likewise, with each head's queries and keys normalized before rotation."""
    return d12_post_norm().replace(qk_norm="head", qk_norm_learned=False)


@register("tiny-lm")
def tiny_lm() -> TransformerConfig:
    """tiny-transformer-handout.md: sinusoids, attention without biases, an untied unembedding.

    The vocabulary is printable text; for other texts give `vocab_size`.
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
    """model-architecture.md: RMSNorm, also of the embeddings, a tied unembedding, dropout inside."""
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
        dropout_place="hidden",
        init="normal",
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
