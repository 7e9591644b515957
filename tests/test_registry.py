"""The registry and its presets: published sizes, what the source documents ask for, errors."""

import pytest
import torch

from models import (
    LayerNorm,
    RMSNorm,
    Transformer,
    TransformerConfig,
    available,
    build,
    config_of,
    register,
    registry,
)
from models.linear import Linear

PRESETS = [
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    *("d12", "d24", "d36", "d48", "d12_post_norm", "d12_post_norm_qk_norm"),
    *("tiny-lm", "transformer-learned", "transformer-sinusoidal", "transformer-rotary"),
    *(f"svd-{width}-{depth}l" for width in (64, 128, 256) for depth in (2, 4, 6)),
]
# n_layers, n_heads, d_model
SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}


@pytest.fixture
def names():
    """Leaves the registry as it was."""
    before = dict(registry._configs)
    yield
    registry._configs.clear()
    registry._configs.update(before)


@pytest.fixture(autouse=True)
def seeded():
    """Fresh weights are the same in every run."""
    torch.manual_seed(0)


def on_meta(name, **overrides):
    with torch.device("meta"):
        return build(name, **overrides)


# --- the registry


def test_the_presets_are_registered():
    assert [name for name in available() if name in PRESETS] == PRESETS


@pytest.mark.usefixtures("names")
def test_registering_makes_a_name_known():
    @register("own")
    def own():
        return TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=2, d_model=6)

    assert available()[-1] == "own"
    assert config_of("own") == own()
    model = build("own", d_model=8, positions="none")
    assert type(model) is Transformer
    assert model.config == own().replace(d_model=8, positions="none")
    assert (model.config.d_mlp, model.config.d_head) == (32, 4)


@pytest.mark.usefixtures("names")
def test_a_name_cannot_be_taken_twice():
    expected = config_of("d12")
    with pytest.raises(ValueError, match="registered as 'd12' already"):
        register("d12")(lambda: config_of("d24"))
    assert config_of("d12") == expected


@pytest.mark.parametrize("get", [build, config_of])
def test_an_unknown_name_lists_close_matches(get):
    with pytest.raises(KeyError) as error:
        get("gpt2-medum")
    assert str(error.value) == (
        "no config of models.available() is named 'gpt2-medum'; "
        f"close matches: {', '.join(error.value.close_matches)}"
    )
    assert error.value.close_matches[0] == "gpt2-medium"
    with pytest.raises(KeyError, match=r"no config of models.available\(\) is named 'bert'"):
        get("bert")


@pytest.mark.parametrize("get", [build, config_of])
def test_overrides_are_checked(get):
    with pytest.raises(
        KeyError, match="no field of a config is named 'layers'; close matches: n_layers"
    ):
        get("d12", d_head=5, n_layers=2, layers=3)
    with pytest.raises(ValueError, match=r"d_model is a multiple of n_heads \(12\)"):
        get("d12", d_model=100)


def test_names_give_fresh_models():
    one, other = (build("tiny-lm", n_layers=1) for _ in range(2))
    assert not torch.equal(one.W_E, other.W_E)


# --- sizes


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_published_sizes_of_gpt2(name, count):
    model = on_meta(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.count_parameters() == count


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_the_rotary_family(name):
    layers, heads, width = SIZES[name]
    # Tied embeddings, and 4 d² of attention and 8 d² of the MLP in each block; nothing else learns.
    assert on_meta(name).count_parameters() == 50257 * width + layers * 12 * width**2
    assert config_of(name).n_heads == heads
    assert config_of(name).d_head == 64


def test_frozen_weights_are_not_counted_as_trained():
    model = on_meta("gpt2")
    model.token_embedding.weight.requires_grad_(False)
    assert model.count_parameters() == 124_439_808 - 50257 * 768


def test_other_sizes_follow_from_the_documents_numbers():
    # Embeddings, output map and its bias; per block two LayerNorms, 4 d², and an MLP with biases.
    block = 4 * 128 + 4 * 128**2 + 8 * 128**2 + 5 * 128
    assert on_meta("tiny-lm").count_parameters() == 96 * 128 + 4 * block + 96 * 128 + 96
    # RMSNorm gains: two a block, of the embeddings, and the final one; biases everywhere else.
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
        for parameter in model.parameters():  # from zero biases, some gradients would vanish
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    logits = model.train()(tokens)
    assert logits.shape == (5, 7, 23)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
    for where, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient.isfinite().all(), where
        # Unused tokens and positions aside, each row of a matrix learns.
        assert gradient.any(), where
        if "embedding" not in where and ".qkv.bias" not in where:
            assert gradient.abs().gt(0).float().mean() > 0.9, where


# --- what the documents ask for


@pytest.mark.parametrize("name", PRESETS[:4])
def test_gpt2_is_gpt2(name):
    config = config_of(name)
    assert (config.vocab_size, config.n_ctx, config.d_head) == (50257, 1024, 64)
    assert (config.norm, config.norm_place, config.norm_eps) == ("layernorm", "pre", 1e-5)
    assert (config.positions, config.activation, config.mlp) == ("learned", "gelu_tanh", "plain")
    assert (config.tied_unembed, config.unembed_bias, config.init) == (True, False, "gpt2")
    assert config.qkv_bias
    assert config.out_bias
    assert config.mlp_bias
    assert config.dropout == 0.1  # resid_pdrop, embd_pdrop and attn_pdrop of the published config


@pytest.mark.parametrize("name", PRESETS[4:10])
def test_qk_norm_document(name):
    """Rotary positions, RMSNorm without gain and 1e-6, no biases, tied."""
    model = on_meta(name)
    config = model.config
    assert config.d_rotary == config.d_head
    assert (config.activation, config.dropout, config.mlp) == ("gelu", 0.0, "plain")
    assert not [n for n, _ in model.named_parameters() if "bias" in n or "ln" in n or "norm" in n]
    block = model.blocks[0]
    assert isinstance(block.ln1, RMSNorm)
    assert isinstance(model.ln_final, RMSNorm)
    assert (block.ln1.eps, model.ln_final.eps) == (1e-6, 1e-6)
    assert model.unembedding.weight is model.token_embedding.weight
    # Hybrid norms are before and after each sublayer.
    hybrid = isinstance(block.ln1_post, RMSNorm) and isinstance(block.ln2_post, RMSNorm)
    assert hybrid == ("post_norm" in name)
    assert isinstance(block.ln2, RMSNorm)


def test_queries_and_keys_are_normalized_before_rotation_in_one_preset():
    from hooks import HookedRunner

    tokens = torch.randint(23, (3, 7), generator=torch.Generator().manual_seed(0))
    sizes = dict(vocab_size=23, n_ctx=17, n_layers=2, n_heads=3, d_model=12)
    for name in PRESETS[4:10]:
        _, cache = HookedRunner(build(name, **sizes).eval()).run_with_cache(tokens)
        for point in ("q", "k"):
            # A rotation leaves the mean square of each head's vector, which the norm made one.
            size = cache[point, 1].square().mean(-1)
            even = torch.allclose(size, torch.ones_like(size), atol=1e-2)
            assert even == (name == "d12_post_norm_qk_norm")


def test_handout_document():
    model = build("tiny-lm", vocab_size=23)
    config, block = model.config, model.blocks[0]
    assert isinstance(block.ln1, LayerNorm)
    assert isinstance(block.ln2, LayerNorm)
    assert config.norm_place == "pre"
    assert block.attn.qkv.bias is None
    assert block.attn.output.bias is None
    assert block.mlp.input.bias is not None
    assert (config.positions, config.activation, config.dropout) == ("sinusoidal", "gelu", 0.0)
    assert model.unembedding.bias is not None
    assert model.unembedding.weight is not model.token_embedding.weight
    assert not list(model.ln_final.parameters())


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_components_document(positions):
    model = on_meta(f"transformer-{positions}")
    config = model.config
    assert config.positions == positions
    assert (config.n_ctx, config.d_model, config.n_heads, config.n_layers) == (256, 512, 8, 6)
    assert (config.d_mlp, config.dropout, config.activation) == (2048, 0.1, "gelu")
    norms = (model.ln_embed, model.blocks[0].ln1, model.blocks[5].ln2, model.ln_final)
    assert all(isinstance(norm, RMSNorm) and norm.eps == 1e-6 for norm in norms)
    assert config.norm_place == "pre"
    assert model.unembedding.weight is model.token_embedding.weight
    assert model.unembedding.bias is None
    assert model.blocks[0].attn.output.bias is not None


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("depth", [2, 4, 6])
def test_svd_document(width, depth):
    model = build(f"svd-{width}-{depth}l", vocab_size=31, n_ctx=9)
    config = model.config
    assert (config.d_model, config.n_layers, config.n_heads, config.d_head) == (width, depth, 1, width)  # fmt: skip
    assert (config.positions, config.norm_place, config.activation) == ("learned", "pre", "gelu")
    assert model.position_embedding.weight.shape == (9, width)
    assert model.unembedding.weight is not model.token_embedding.weight
    assert model.unembedding.weight.shape == (31, width)
    attn = model.blocks[0].attn
    assert attn.qkv.bias is attn.output.bias is model.unembedding.bias is None
    assert attn.scale == pytest.approx(width**-0.5)
    maps = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(maps) == 4 * depth + 1
    scaled = 0.02 / (2 * depth) ** 0.5
    assert attn.output.weight.std().item() == pytest.approx(scaled, rel=0.1)
    assert model.blocks[-1].mlp.output.weight.std().item() == pytest.approx(scaled, rel=0.1)


def test_qk_norm_takes_no_significant_memory():
    """qk-norm.md, task 7: what a forward pass keeps for the backward one, weights left out."""
    tokens = torch.randint(50, (3, 64))

    def kept(name):
        model = build(name, n_layers=2, d_model=96, vocab_size=50, n_ctx=64)
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(tokens)
        assert logits.requires_grad
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        return sum(size for place, size in storages.items() if place not in weights)

    plain, normed = (kept(f"d12_post_norm{more}") for more in ("", "_qk_norm"))
    assert plain > 2**20
    assert normed < 1.05 * plain
