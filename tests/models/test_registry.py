"""The registry and its presets: published sizes, settings of the source documents, and errors."""

import pytest
import torch
from torch import nn

from models import (
    Transformer,
    TransformerConfig,
    build,
    config_of,
    list_configs,
    register,
    registry,
)

# n_layers, n_heads, d_model
SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
PRESETS = [
    *COUNTS,
    *SIZES,
    *("d12_post_norm", "d12_post_norm_qk_norm"),
    *("tiny-lm", "transformer-learned", "transformer-sinusoidal", "transformer-rotary"),
    *(f"svd-{width}-{depth}l" for width in (64, 128, 256) for depth in (2, 4, 6)),
]


@pytest.fixture
def names():
    """Restore the registry after the test."""
    before = dict(registry._configs)
    yield
    registry._configs.clear()
    registry._configs.update(before)


def on_meta(name, **overrides):
    with torch.device("meta"):
        return build(name, **overrides)


# --- the registry


@pytest.mark.usefixtures("names")
def test_registering_makes_a_name_known():
    assert [name for name in list_configs() if name in PRESETS] == PRESETS

    @register("own")
    def own():
        return TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=6)

    assert list_configs()[-1] == "own"
    assert config_of("own") == own()
    model = build("own", d_model=8, positions="none")
    assert type(model) is Transformer
    assert model.config == own().replace(d_model=8, positions="none")
    assert (model.config.d_mlp, model.config.d_head) == (32, 4)
    assert not torch.equal(model.W_E, build("own", d_model=8).W_E)
    with pytest.warns(UserWarning, match="'own'"):
        register("own")(lambda: config_of("d24"))
    assert config_of("own") == config_of("d24")
    for wrong in (build, lambda: 7, Transformer, nn.Linear(2, 3)):
        with pytest.raises((ValueError, TypeError)):
            register("wrong")(wrong)
    assert "wrong" not in list_configs()


@pytest.mark.parametrize("get", [build, config_of])
def test_unknown_names_list_close_matches_and_overrides_are_checked(get):
    with pytest.raises(KeyError, match="'gpt2-medum'") as error:
        get("gpt2-medum")
    assert error.value.close_matches[0] == "gpt2-medium"
    with pytest.raises(KeyError, match="'layers'.*n_layers"):
        get("d12", d_head=5, n_layers=2, layers=3)
    # The close match is the field `d_head`, not the value `head` of another field.
    with pytest.raises(KeyError, match="'head_dim'.*d_head") as error:
        get("d12", head_dim=12)
    with pytest.raises(ValueError, match=r"d_model .*\(12\).* 100"):
        get("d12", d_model=100)


# --- sizes


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_published_sizes_of_gpt2(name, count):
    model = on_meta(name)
    assert model.count_parameters() == count
    model.token_embedding.weight.requires_grad_(False)
    assert model.count_parameters() == count - 50257 * model.config.d_model


def test_other_sizes_follow_from_the_documents_numbers():
    for name, (layers, heads, width) in SIZES.items():
        # The only parameters are tied embeddings and, in each block, 4 d² in attention and 8 d² in
        # the MLP.
        assert on_meta(name).count_parameters() == 50257 * width + layers * 12 * width**2
        assert (config_of(name).n_heads, config_of(name).d_head) == (heads, 64)
    # Embeddings, output map and its bias; per block two LayerNorms, 4 d², and an MLP with biases.
    block = 4 * 128 + 4 * 128**2 + 8 * 128**2 + 5 * 128
    assert on_meta("tiny-lm").count_parameters() == 96 * 128 + 4 * block + 96 * 128 + 96
    # The gains of RMSNorm: two in each block, one after the embeddings and one at the end. All maps
    # have biases.
    block = 2 * 512 + 12 * 512**2 + 4 * 512 + 5 * 512
    rest = 50257 * 512 + 6 * block + 2 * 512
    assert on_meta("transformer-sinusoidal").count_parameters() == rest
    assert on_meta("transformer-rotary").count_parameters() == rest
    assert on_meta("transformer-learned").count_parameters() == rest + 256 * 512
    for width in (64, 128, 256):
        for depth in (2, 4, 6):
            block = 4 * width + 12 * width**2 + 5 * width
            total = 500 * width + 64 * width + depth * block + 2 * width + 500 * width
            assert on_meta(f"svd-{width}-{depth}l").count_parameters() == total


# --- every preset runs, and learns with every parameter


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_and_every_parameter_has_a_gradient(name):
    heads = 1 if name.startswith("svd") else 3
    model = build(name, vocab_size=23, n_ctx=17, n_layers=2, n_heads=heads, d_model=12)
    assert model.config.d_mlp == 48
    tokens = torch.randint(23, (5, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # With zero biases, some gradients would be zero.
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    logits = model.train()(tokens)
    assert logits.shape == (5, 7, 23)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
    for where, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient.isfinite().all(), where
        # Each row of a matrix has a gradient, except the rows of unused tokens and positions.
        assert gradient.any(), where
        if "embedding" not in where and ".qkv.bias" not in where:
            assert gradient.abs().gt(0).float().mean() > 0.9, where


# --- the settings that the source documents ask for

# fmt: off
BARE = dict(qkv_bias=False, out_bias=False)
PRE = dict(norm_place="pre", norm="layernorm")
GPT2 = PRE | dict(positions="learned", activation="gelu_tanh", norm_eps=1e-5, dropout=0.1, n_ctx=1024, d_head=64)
QK_NORM = BARE | dict(positions="rotary", rotary_fraction=1.0, norm="rmsnorm", norm_learned=False, norm_eps=1e-6)
QK_NORM |= dict(mlp_bias=False, activation="gelu", dropout=0.0, tied_unembed=True, norm_place="pre", qk_norm="none")
HANDOUT = BARE | PRE | dict(positions="sinusoidal", activation="gelu", mlp_bias=True, unembed_bias=True)
HANDOUT |= dict(dropout=0.0, tied_unembed=False, final_norm=False)
COMPONENTS = dict(n_ctx=256, d_model=512, n_heads=8, n_layers=6, d_mlp=2048, dropout=0.1, dropout_place="hidden", activation="gelu")
COMPONENTS |= dict(norm="rmsnorm", norm_eps=1e-6, embed_norm=True, norm_place="pre", tied_unembed=True, init="normal")
SVD = BARE | PRE | dict(positions="learned", activation="gelu", tied_unembed=False, unembed_bias=False, n_heads=1)
DOCUMENTS = {
    **dict.fromkeys(COUNTS, GPT2),
    **dict.fromkeys(SIZES, QK_NORM),
    "d12_post_norm": QK_NORM | dict(norm_place="sandwich"),
    "d12_post_norm_qk_norm": QK_NORM | dict(norm_place="sandwich", qk_norm="head", qk_norm_learned=False),
    "tiny-lm": HANDOUT,
    **{f"transformer-{kind}": COMPONENTS | dict(positions=kind) for kind in ("learned", "sinusoidal", "rotary")},
    **{f"svd-{width}-{depth}l": SVD | dict(d_model=width, n_layers=depth, d_head=width) for width in (64, 128, 256) for depth in (2, 4, 6)},
}
# fmt: on


@pytest.mark.parametrize("name", PRESETS)
def test_presets_match_the_documents(name):
    config, expected = config_of(name), DOCUMENTS[name]
    assert {field: getattr(config, field) for field in expected} == expected
