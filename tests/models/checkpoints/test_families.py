"""Configs of published models, what cannot be expressed, and the keys of each family's files."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints import from_hf, load
from models.checkpoints.huggingface import translated
from models.checkpoints.huggingface.families import FAMILIES
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase, RotaryScaling

# The content of config.json of published models.
(
    GPT2,
    TINY_STARCODER,
    TINYSTORIES_8M,
    OPT_1_3B,
    PYTHIA_70M,
    LLAMA_3_2_1B,
    MISTRAL_7B,
    QWEN_2_5,
    QWEN_3,
    OLMO_2_1B,
    GEMMA_2_2B,
    GEMMA_3_1B,
    GEMMA_3_12B,
) = json.loads(Path(__file__).with_name("published.json").read_text()).values()
RMS = dict(norm="rmsnorm", mlp="gated", positions="rotary", mlp_bias=False)
UNBIASED = RMS | dict(activation="silu", qkv_bias=False, out_bias=False)
GEMMA3 = RMS | dict(qkv_bias=False, out_bias=False, activation="gelu_tanh", norm_eps=1e-6)
GEMMA3 |= dict(norm_place="sandwich", qk_norm="head", attn_scale=1 / 16, d_head=256)
GEMMA3 |= dict(rotary_theta=1e6, window_rotary=RotaryBase(theta=1e4))
LLAMA3 = RotaryScaling(kind="llama3", factor=32.0, original_n_ctx=8192, low=1.0, high=4.0)


def sizes(vocab_size, n_ctx, n_layers, n_heads, d_model, **others):
    first = dict(vocab_size=vocab_size, n_ctx=n_ctx, n_layers=n_layers, n_heads=n_heads)
    return first | dict(d_model=d_model) | others


PUBLISHED = [
    (GPT2, sizes(50257, 1024, 12, 12, 768, dropout=0.1)),
    (TINY_STARCODER, sizes(49152, 8192, 20, 12, 768, dropout=0.1, n_kv_heads=1)),
    (
        TINYSTORIES_8M,
        sizes(50257, 2048, 8, 16, 256, window=256, window_layers=(1, 3, 5, 7))
        | dict(attn_scale=1.0, qkv_bias=False),
    ),
    (OPT_1_3B, sizes(50272, 2048, 24, 32, 2048, activation="relu")),
    (
        PYTHIA_70M,
        sizes(50304, 2048, 6, 8, 512, activation="gelu", positions="rotary")
        | dict(rotary_fraction=0.25, parallel=True, tied_unembed=False),
    ),
    (
        LLAMA_3_2_1B,
        sizes(128256, 131072, 16, 32, 2048, d_head=64, n_kv_heads=8, d_mlp=8192)
        | UNBIASED
        | dict(rotary_theta=5e5, rotary_scaling=LLAMA3),
    ),
    (
        MISTRAL_7B,
        sizes(32000, 32768, 32, 32, 4096, d_head=128, n_kv_heads=8, d_mlp=14336)
        | UNBIASED
        | dict(window=4096, tied_unembed=False),
    ),
    (
        QWEN_2_5,
        sizes(151936, 32768, 24, 14, 896, d_head=64, n_kv_heads=2, d_mlp=4864)
        | UNBIASED
        | dict(rotary_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    ),
    (
        QWEN_3,
        sizes(151936, 40960, 28, 16, 1024, d_head=128, n_kv_heads=8, d_mlp=3072)
        | UNBIASED
        | dict(rotary_theta=1e6, norm_eps=1e-6, qk_norm="head"),
    ),
    (
        OLMO_2_1B,
        sizes(100352, 4096, 16, 16, 2048, d_mlp=8192, norm_place="output", qk_norm="all")
        | UNBIASED
        | dict(rotary_theta=5e5, norm_eps=1e-6, tied_unembed=False),
    ),
    (
        GEMMA_2_2B,
        sizes(256000, 8192, 26, 8, 2304, d_head=256, n_kv_heads=4, d_mlp=9216)
        | UNBIASED
        | dict(norm_eps=1e-6, norm_place="sandwich", activation="gelu_tanh")
        | dict(embed_scale=48.0, attn_scale=1 / 16, attn_cap=50.0, logit_cap=30.0)
        | dict(window=4096, window_layers=tuple(range(0, 26, 2))),
    ),
    (
        GEMMA_3_1B,
        sizes(262144, 32768, 26, 4, 1152, n_kv_heads=1, d_mlp=6912, embed_scale=1152**0.5)
        | GEMMA3
        | dict(window=512, window_layers=tuple(set(range(26)) - {5, 11, 17, 23})),
    ),
    (
        GEMMA_3_12B,
        sizes(262208, 131072, 48, 16, 3840, n_kv_heads=8, d_mlp=15360, embed_scale=3840**0.5)
        | GEMMA3
        | dict(window=1024, window_layers=tuple(set(range(48)) - set(range(5, 48, 6))))
        | dict(rotary_scaling=RotaryScaling(kind="linear", factor=8.0)),
    ),
]


@pytest.mark.parametrize(("described", "expected"), PUBLISHED)
def test_published_configs(described, expected):
    ends = described["eos_token_id"]
    ends = tuple(ends) if isinstance(ends, list) else (ends,)
    assert config_of(described) == TransformerConfig(**expected, eos_token_ids=ends)


def config_of(described, **changes):
    return translated(described | changes, "config.json")[1]


SIZES_STATED = {"model_type", "vocab_size", "max_position_embeddings", "num_hidden_layers"}
SIZES_STATED |= {"num_attention_heads", "hidden_size", "intermediate_size"}


def test_missing_fields_have_the_defaults_of_transformers():
    transformers = pytest.importorskip("transformers")
    for family in FAMILIES:
        stated = transformers.AutoConfig.for_model(family).to_dict()
        brief = {name: stated[name] for name in SIZES_STATED & stated.keys()}
        assert translated(brief, "config.json")[1] == translated(stated, "config.json")[1]


def test_old_and_new_spellings_are_one():
    scaling = dict(LLAMA_3_2_1B["rope_scaling"])
    new = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_scaling", "rope_theta")}
    new = config_of(new, rope_parameters=dict(scaling, rope_theta=500000.0), dtype="bfloat16")
    assert new == config_of(LLAMA_3_2_1B)
    scaling["type"] = scaling.pop("rope_type")
    assert config_of(LLAMA_3_2_1B, rope_scaling=scaling) == new
    neox = {k: v for k, v in PYTHIA_70M.items() if not k.startswith("rotary")}
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
    assert config_of(neox, rope_parameters=rope) == config_of(PYTHIA_70M)


def test_rotary_scalings():
    def scaling(**stated):
        return config_of(LLAMA_3_2_1B, rope_scaling=stated).rotary_scaling

    assert scaling(type="linear", factor=4) == RotaryScaling(kind="linear", factor=4.0)
    assert scaling(rope_type="default") is None
    yarn = scaling(type="yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=16)
    assert yarn == RotaryScaling(kind="yarn", factor=4.0, original_n_ctx=4096, high=16.0)
    by_ratio = scaling(type="yarn", original_max_position_embeddings=32768)
    assert (by_ratio.factor, by_ratio.turns) == (4.0, (1.0, 32.0))
    assert scaling(type="yarn", factor=2.0, attention_factor=1.5).attention_factor == 1.5
    long = scaling(type="yarn", factor=2.718281828, mscale=2.0, mscale_all_dim=5.0)
    assert long.attention_factor == pytest.approx(1.2 / 1.5)


def test_rotary_bases_of_layers_with_windows():
    scaling = RotaryScaling(kind="linear", factor=8.0)
    new = {k: v for k, v in GEMMA_3_12B.items() if not k.startswith("rope")}
    by_kind = {
        "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    }
    assert config_of(new, rope_parameters=by_kind) == config_of(GEMMA_3_12B)
    # Without these fields, the bases are a million and ten thousand.
    assert config_of(new, rope_scaling=GEMMA_3_12B["rope_scaling"]) == config_of(GEMMA_3_12B)
    by_kind["sliding_attention"] = dict(rope_type="linear", factor=2, rope_theta=9)
    scaled = config_of(new, rope_parameters=by_kind).window_rotary
    assert scaled == RotaryBase(theta=9.0, scaling=RotaryScaling(kind="linear", factor=2.0))
    # If all layers have a window, or none has one, there is one base.
    for kind, base in (("sliding", (1e4, None)), ("full", (1e6, scaling))):
        config = config_of(GEMMA_3_12B, layer_types=[f"{kind}_attention"] * 48)
        assert (config.rotary_theta, config.rotary_scaling) == base
        assert config.window_rotary is None
    sizes = {name: OLMO_2_1B[name] for name in SIZES_STATED} | dict(num_hidden_layers=4)
    olmo = dict(sizes, model_type="olmo3", sliding_window=7)
    assert config_of(olmo).window_layers == (0, 1, 2)
    assert (config_of(olmo).rotary_theta, config_of(olmo).window_rotary) == (5e5, None)
    # The file states one base for both kinds of layers, and only one kind is scaled.
    scaled = config_of(olmo, rope_theta=9, rope_scaling=GEMMA_3_12B["rope_scaling"])
    assert (scaled.rotary_theta, scaled.rotary_scaling) == (9.0, scaling)
    assert scaled.window_rotary == RotaryBase(theta=9.0)


def test_windows():
    qwen = dict(QWEN_2_5, num_hidden_layers=5, sliding_window=7)
    upper = config_of(qwen, use_sliding_window=True, max_window_layers=3)
    assert (upper.window, upper.window_layers) == (7, (3, 4))
    assert config_of(qwen, max_window_layers=3).window == 0
    listed = ["sliding_attention"] + ["full_attention"] * 4
    listed = config_of(qwen, use_sliding_window=True, layer_types=listed)
    assert (listed.window, listed.window_layers) == (7, (0,))
    whole = config_of(qwen, use_sliding_window=True, max_window_layers=0)
    assert (whole.window, whole.window_layers) == (7, ())
    assert config_of(MISTRAL_7B, sliding_window=None).window == 0
    neo = dict(TINYSTORIES_8M, num_layers=3, attention_layers=None)
    neo = config_of(neo, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=7)
    assert (neo.window, neo.window_layers) == (7, (1, 2))
    neo = config_of(TINYSTORIES_8M, attention_types=[], attention_layers=["local"] * 8)
    assert (neo.window, neo.window_layers) == (256, ())
    gemma = config_of(GEMMA_2_2B, layer_types=["full_attention"] * 26, final_logit_softcapping=None)
    assert (gemma.window, gemma.logit_cap) == (0, 0.0)


WITHOUT_EFFECT = [
    (GPT2, dict(n_special=0, predict_special_tokens=True, output_past=True, n_ctx=3)),
    (PYTHIA_70M, dict(attention_probs_dropout_prob=0, hidden_dropout_prob=0, custom_pipelines={})),
    (LLAMA_3_2_1B, dict(is_llama_config=True, rope_interleaved=False, pretraining_tp=2)),
    (LLAMA_3_2_1B, {"transformers.js_config": {"dtype": "q4"}, "max_sequence_length": 2048}),
    (MISTRAL_7B, dict(attention_bias=False, mask_token_id=None)),
    (OLMO_2_1B, dict(clip_qkv=None)),
    (GEMMA_2_2B, dict(sliding_window_size=4096, hidden_act="gelu")),
    (GPT2, dict(spectral_gate=None, gated=False, add_cross_attention=None, resid_dropout=0.3)),
    (PYTHIA_70M, dict(hidden_dropout_prob=0.1)),
    (TINYSTORIES_8M, dict(attention_types=None, classifier_dropout=0.1, intermediate_size=1024)),
    (OPT_1_3B, dict(word_embed_proj_dim=None, layerdrop=0.1, enable_bias=True)),
    (LLAMA_3_2_1B, dict(attention_dropout=0.1, embd_pdrop=0.1, rope_interleaved=None)),
]


def test_attributes_of_some_files_that_change_nothing():
    for described, more in WITHOUT_EFFECT:
        assert config_of(described, **more) == config_of(described)


ROPE = "rope_scaling"
REFUSED = [
    (LLAMA_3_2_1B, dict(rope_interleaved=True), "rope_interleaved"),
    (GEMMA_2_2B, dict(sliding_window_size=512), "512"),
    (GPT2, dict(add_cross_attention=True), "add_cross_attention"),
    (GPT2, dict(is_encoder_decoder=True), "is_encoder_decoder"),
    (GPT2, dict(activation_function="quick_gelu"), "activation_function .*gelu_new.*'quick_gelu'"),
    (GPT2, dict(quantization_config={"bits": 4}), "quantization_config"),
    (GPT2, dict(n_embd="768"), "d_model"),
    (GPT2, dict(n_head=5), "d_model .* n_heads .5."),
    (GPT2, dict(n_embd=10**30), f"d_model .*{10**30}"),
    (GPT2, dict(eos_token_id="2"), "eos_token_ids .*'2'"),
    (
        GPT2,
        dict(spectral_gate=3, auto_map={}),
        "auto_map .*spectral_gate .3.*ignore=.'auto_map', 's",
    ),
    (TINY_STARCODER, dict(num_key_value_heads=2), "num_key_value_heads"),
    (TINY_STARCODER, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    (TINYSTORIES_8M, dict(attention_layers=["global"] * 7), "attention_layers must be 8 of"),
    (TINYSTORIES_8M, dict(attention_layers=["axial"] * 8), "attention_layers .*'axial'"),
    (TINYSTORIES_8M, dict(window_size=0), "window_size .*0"),
    (TINYSTORIES_8M, dict(num_heads=5), "d_model .* n_heads .5."),
    (TINYSTORIES_8M, dict(activation_function="tanh"), "activation_function .*'tanh'"),
    (OPT_1_3B, dict(word_embed_proj_dim=512), "word_embed_proj_dim .*hidden_size .2048.*512"),
    (OPT_1_3B, dict(enable_bias="no"), "qkv_bias"),
    (OPT_1_3B, dict(activation_function="quick_gelu"), "activation_function .*'quick_gelu'"),
    (OPT_1_3B, dict(learned_embeddings=True), "learned_embeddings"),
    (PYTHIA_70M, dict(rope_theta=500.0), "rope_theta .*500.0"),
    (LLAMA_3_2_1B, dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (LLAMA_3_2_1B, {ROPE: {"type": "dynamic", "factor": 2.0}}, "rope_type .*'dynamic'"),
    (LLAMA_3_2_1B, {ROPE: {"type": "linear"}}, "'factor'"),
    (LLAMA_3_2_1B, {ROPE: {"type": "llama3", "factor": 2.0}}, "'low_freq_factor'"),
    (LLAMA_3_2_1B, {ROPE: {"type": "linear", "factor": 2.0, "fast": 1}}, "'fast': 1"),
    (LLAMA_3_2_1B, {ROPE: {"type": "linear", "rope_type": "yarn"}}, "rope_type .*'linear'"),
    (LLAMA_3_2_1B, {ROPE: {"type": "yarn", "truncate": False}}, "truncate"),
    (LLAMA_3_2_1B, {ROPE: {"type": "yarn", "attention_factor": 0.0}}, "attention_factor"),
    (LLAMA_3_2_1B, {ROPE: {"type": "yarn", "beta_fast": "a"}}, "rotary_scaling.high"),
    (LLAMA_3_2_1B, {ROPE: dict(type="yarn", original_max_position_embeddings=0)}, "original.* 0"),
    (LLAMA_3_2_1B, dict(rope_theta=0), "rotary_theta"),
    (GEMMA_2_2B, dict(query_pre_attn_scalar=0), "zero|0"),
    (LLAMA_3_2_1B, {ROPE: {"full_attention": {}}}, "full_attention"),
    (LLAMA_3_2_1B, {ROPE: {"rope_type": "default", "factor": 2.0}}, "'factor': 2.0"),
    (LLAMA_3_2_1B, dict(original_max_position_embeddings=4096), "4096"),
    (LLAMA_3_2_1B, dict(hidden_act=["silu"]), "hidden_act"),
    (LLAMA_3_2_1B, dict(num_hidden_layers="16"), "n_layers|range"),
    (LLAMA_3_2_1B, dict(sliding_window=4096), "sliding_window .4096"),
    (MISTRAL_7B, dict(attention_bias=True), "attention_bias"),
    (MISTRAL_7B, dict(sliding_window=0), "sliding_window"),
    (OLMO_2_1B, dict(clip_qkv=8.0), "clip_qkv"),
    (QWEN_2_5, dict(use_mrope=True), "use_mrope"),
    (QWEN_2_5, dict(layer_types=["sliding_attention"] * 24), "sliding_window .*None"),
    (QWEN_2_5, dict(layer_types=["full_attention"]), "layer_types"),
    (QWEN_3, dict(layer_types=["linear_attention"] * 28), "layer_types .*'linear_attention'"),
    (GEMMA_2_2B, dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (GEMMA_3_1B, dict(attn_logit_softcapping=50.0), "attn_logit_softcapping .*None.*50.0"),
    (GEMMA_3_1B, dict(rope_parameters=dict(rope_theta=1e6)), "rope_parameters .*by full_attention"),
    (GEMMA_3_1B, {ROPE: {"rope_theta": 5.0}}, "rope_theta .*1000000.0"),
    (GEMMA_3_1B, {ROPE: {"type": "dynamic", "factor": 2.0}}, "rope_type .*'dynamic'"),
    (GEMMA_3_1B, {ROPE: {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (GEMMA_3_1B, dict(rope_local_base_freq=0), "rotary_base.theta .*0"),
    (GEMMA_3_1B, dict(sliding_window_pattern=0), "zero|0"),
    (GPT2, dict(model_type="gpt3"), "'gpt3'.* 'gpt2'"),
    (GPT2, dict(model_type=7), "model_type .*7"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("described", "changes", "message"), REFUSED)
def test_fields_that_cannot_be_expressed_are_named(described, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        translated(described | changes, "here/config.json")
    assert str(caught.value).startswith("here/config.json: ")


def test_dropout_is_the_common_one_or_none():
    assert config_of(GPT2, attn_pdrop=0.0).dropout == 0.0
    assert config_of(PYTHIA_70M, attention_dropout=0.1, hidden_dropout=0.1).dropout == 0.1
    three = dict(embed_dropout=0.2, attention_dropout=0.2, resid_dropout=0.2)
    assert config_of(TINYSTORIES_8M, **three).dropout == 0.2
    assert config_of(TINYSTORIES_8M, **three | dict(resid_dropout=0.0)).dropout == 0.0
    # Without the field, the default of `dropout` is 0.1.
    opt = {name: value for name, value in OPT_1_3B.items() if name != "dropout"}
    assert config_of(opt, attention_dropout=0.1).dropout == 0.1


def test_contexts_that_scaling_stretches():
    def n_ctx(**changes):
        return config_of(LLAMA_3_2_1B, max_position_embeddings=4096, **changes).n_ctx

    yarn = dict(type="yarn", factor=4.0, original_max_position_embeddings=4096)
    assert n_ctx(rope_scaling=yarn) == 16384
    assert n_ctx(rope_scaling=yarn | dict(original_max_position_embeddings=512)) == 4096
    # If the original context is not given, transformers takes the context of the config.
    assert n_ctx(rope_scaling=dict(type="yarn", factor=4.0)) == 16384
    linear = dict(type="linear", factor=4.0)
    assert n_ctx(rope_scaling=linear, max_sequence_length=16384) == 16384
    assert n_ctx(rope_scaling=linear, max_sequence_length=2048) == 4096
    assert n_ctx(rope_scaling=linear) == 4096
    assert n_ctx(rope_scaling=None, max_sequence_length=16384) == 4096


# Files with keys that other versions of transformers and other tools write.

SMALL = dict(n_layer=2, n_head=2, n_embd=10, n_positions=7, vocab_size=11, n_inner=13)
NEOX = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=13)
NEOX |= dict(vocab_size=11, max_position_embeddings=7, rotary_pct=0.5)
NEO = dict(num_layers=2, num_heads=2, hidden_size=8, intermediate_size=13, vocab_size=11)
NEO |= dict(max_position_embeddings=7, attention_types=[[["local", "global"], 1]], window_size=3)
OPT = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, ffn_dim=13, vocab_size=11)
OPT |= dict(max_position_embeddings=7)
LLAMA = dict(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=13)
LLAMA |= dict(vocab_size=11, max_position_embeddings=7, num_key_value_heads=2)


@pytest.fixture
def made(tmp_path):
    """A function that saves a small model of a family, and returns its directory and the model."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()

    def make(family, **changes):
        small = {"gpt2": SMALL, "gpt_bigcode": SMALL, "gpt_neox": NEOX, "gpt_neo": NEO, "opt": OPT}
        small = small.get(family, LLAMA)
        ids = dict(bos_token_id=1, eos_token_id=2)
        config = transformers.AutoConfig.for_model(family, **small | changes, **ids)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make


# More attributes than the ones that `transformers` writes, as other files have them, and the length
# of a text.
def rope(kind="yarn", beside=None, **numbers):
    given = {"original_max_position_embeddings": beside} if beside else {}
    return given | {"rope_scaling": {"type": kind, **numbers}}


ORIGINAL = dict(factor=4.0, original_max_position_embeddings=7)
BY_LAYER = dict(scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
READ = [
    ("gpt2", BY_LAYER, 7),
    ("llama", rope("default", factor=1.0), 7),
    ("llama", rope(**ORIGINAL, finetuned=True), 28),
    ("llama", rope(**ORIGINAL, attn_factor=0.7), 28),
    ("gpt_neox", dict(rope(**ORIGINAL), rotary_pct=0.5), 28),
    ("llama", rope(beside=5, factor=4.0), 20),
    ("llama", rope(factor=3.0), 21),
    ("llama", rope("linear", beside=5, factor=3.0), 7),
    ("llama", dict(rope("linear", factor=3.0), max_sequence_length=21), 21),
]


@pytest.mark.parametrize(("family", "attributes", "length"), READ)
def test_other_attributes_are_read_as_in_transformers(made, family, attributes, length):
    directory, model = made(family)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(noise * 0.2 if parameter.ndim == 1 else noise * 0.5)
    model.save_pretrained(directory)
    path = directory / "config.json"
    described = json.loads(path.read_text()) | attributes
    # rope_scaling is the older form. Replace the newer form by it.
    if "rope_scaling" in attributes:
        described["rope_theta"] = described.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(described))
    theirs = type(model).from_pretrained(directory, attn_implementation="eager").eval()
    ours, copied = load(directory), from_hf(theirs)
    tokens = torch.randint(11, (2, length))
    assert length == ours.config.n_ctx == copied.config.n_ctx or "max_sequence_length" in attributes
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(copied(tokens), expected, atol=1e-5, rtol=1e-5)


def test_the_tokens_that_end_a_text(made):
    directory, model = made("llama")
    path, generation = directory / "config.json", directory / "generation_config.json"
    described = json.loads(path.read_text())

    def ends(config, *of_generation):
        path.write_text(json.dumps(described | {"eos_token_id": config}))
        generation.unlink(missing_ok=True)
        if of_generation:
            generation.write_text(json.dumps({"eos_token_id": of_generation[0]}))
        return load(directory).config.eos_token_ids

    assert ends(3) == (3,)
    assert ends(0, [2, 5, 11, -1]) == (2, 5)  # 11 and -1 are not in the vocabulary
    assert ends([4, 6], None) == (4, 6)
    assert ends(None) == ()
    assert from_hf(model).config.eos_token_ids == (2,)
    model.generation_config.eos_token_id = [7, 2]
    assert from_hf(model).config.eos_token_ids == (7, 2)


def test_keys_to_ignore(made):
    directory, model = made("llama", spectral_gate=3)
    with pytest.raises(ValueError, match=r"ignore=\['spectral_gate'\]"):
        load(directory)
    loaded = load(directory, ignore=["spectral_gate"])
    assert parameters_equal(loaded, from_hf(model, ignore=("spectral_gate",)))
    with pytest.raises(KeyError, match=r"config.json .*'spectral_gat'.*spectral_gate") as caught:
        load(directory, ignore=["spectral_gat"])
    assert caught.value.close_matches[0] == "spectral_gate"


def rewritten(directory, change):
    """Change the tensors in the file of a model, and load the model."""
    path = directory / "model.safetensors"
    state = load_file(path)
    save_file({k: v.clone() for k, v in change(state).items()}, path)
    return load(directory)


def parameters_equal(one, other):
    theirs = dict(other.named_parameters())
    return all(torch.equal(value, theirs[name]) for name, value in one.named_parameters())


MASKS = ["bias", "masked_bias"]
BUFFERS = [
    ("gpt2", "transformer.h.1.attn", MASKS),
    ("gpt_neo", "transformer.h.1.attn.attention", MASKS),
    ("opt", "model.decoder", ["version"]),
    ("gpt_neox", "gpt_neox.layers.1.attention", [*MASKS, "rotary_emb.inv_freq"]),
    ("llama", "model.layers.1.self_attn", ["rotary_emb.inv_freq"]),
]


@pytest.mark.parametrize(("family", "module", "buffers"), BUFFERS)
def test_keys_of_old_versions(made, family, module, buffers):
    directory, _ = made(family)
    expected = load(directory)
    old = {f"{module}.{name}": torch.ones(3) for name in buffers}
    assert parameters_equal(rewritten(directory, lambda state: state | old), expected)
    # The first files of GPT-2 and OPT have keys without this prefix.
    prefix = FAMILIES[family].prefix
    bare = lambda state: {k.removeprefix(prefix): v for k, v in (state | old).items()}  # noqa: E731
    assert parameters_equal(rewritten(directory, bare), expected)
    other = {f"{module}.{buffers[0]}es": torch.ones(3)}
    with pytest.raises(ValueError, match=f"1 unexpected: .*{buffers[0]}es"):
        rewritten(directory, lambda state: state | other)


def test_a_tied_head_may_be_in_the_file_if_it_is_the_embedding(made):
    directory, model = made("gpt2")
    head = model.lm_head.weight.detach()
    loaded = rewritten(directory, lambda state: state | {"lm_head.weight": head})
    assert loaded.unembedding.weight is loaded.token_embedding.weight
    with pytest.raises(ValueError, match=r"transformer.wte.weight and lm_head.weight"):
        rewritten(directory, lambda state: state | {"lm_head.weight": head + 1})
    rest = lambda state: {k: v for k, v in state.items() if "wte" not in k}  # noqa: E731
    only_head = rewritten(directory, lambda state: rest(state) | {"lm_head.weight": head})
    assert parameters_equal(only_head, loaded)


def test_a_tied_head_may_be_of_another_type_or_hold_no_numbers(made):
    directory, model = made("gpt2")
    head = model.lm_head.weight.detach().bfloat16()

    def tied(one, other):
        both = {"transformer.wte.weight": one, "lm_head.weight": other}
        return rewritten(directory, lambda state: state | both)

    for one, other in ((head, head.float()), (head.float(), head), (head.double(), head)):
        loaded = tied(one, other)
        assert loaded.unembedding.weight is loaded.token_embedding.weight
        assert torch.equal(loaded.unembedding.weight.double(), head.double())
    holed = head.clone()
    holed[3, 4], holed[5, 6] = torch.nan, torch.inf
    assert tied(holed, holed.float()).unembedding.weight.isnan().nonzero().tolist() == [[3, 4]]
    for wrong in (holed.float() + 1e-3, holed.nan_to_num(nan=0, posinf=torch.inf), head):
        with pytest.raises(ValueError, match="transformer.wte.weight and lm_head.weight"):
            tied(holed, wrong)


def test_models_without_values(made):
    _, model = made("gpt2")
    copied = from_hf(model.to("meta"))
    assert {parameter.device.type for parameter in copied.parameters()} == {"meta"}
    assert copied.unembedding.weight is copied.token_embedding.weight


def test_the_number_of_layers_must_match_the_weights(made):
    directory, _ = made("llama")
    path = directory / "config.json"
    described = json.loads(path.read_text())
    for n_layers, wrong in ((1, "9 unexpected: "), (3, "9 missing: ")):
        path.write_text(json.dumps(described | {"num_hidden_layers": n_layers}))
        with pytest.raises(ValueError, match=wrong) as caught:
            load(directory)
        assert str(caught.value).count(f"model.layers.{min(n_layers, 2)}.") == 9


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_may_be_wrong_about_ignored_tensors(made, suffix):
    directory, _ = made("llama")
    expected, state = load(directory), load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    write = save_file if suffix == "safetensors" else torch.save
    buffers = [f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in (0, 1)]
    places = {key: f"{stem}-{n % 2}.{suffix}" for n, key in enumerate(sorted(state))}
    # One buffer is in a file that the index does not name for it, and one is not in the index.
    for name in set(places.values()):
        part = {key: state[key] for key in state if places[key] == name}
        write(part | {buffers[0]: torch.ones(2)}, directory / name)
    index = directory / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": places | {buffers[1]: f"{stem}-0.{suffix}"}}))
    assert parameters_equal(load(directory), expected)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_is_needed(made, family):
    """If a tensor of the model is left out, the error names it."""
    model = made(family)[1]
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for key in state:
        model.state_dict = lambda left_out=key: {k: v for k, v in state.items() if k != left_out}
        filed = key.replace("lm_head", "embed_out") if family == "gpt_neox" else key
        with pytest.raises(ValueError, match=f"1 missing: {re.escape(filed)}; 0"):
            from_hf(model)


def test_only_models_of_transformers_are_taken():
    with pytest.raises(TypeError, match="Linear"):
        from_hf(torch.nn.Linear(2, 3))


def test_the_type_of_a_model_in_memory_is_kept(made):
    _, model = made("llama")
    for dtype, wanted in ((torch.bfloat16, None), (torch.float64, torch.float32)):
        copied = from_hf(model.to(dtype), dtype=wanted)
        assert {parameter.dtype for parameter in copied.parameters()} == {wanted or dtype}
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_model_without_its_head(made):
    transformers = pytest.importorskip("transformers")
    _, model = made("gpt2")
    assert parameters_equal(from_hf(model.transformer), from_hf(model))
    neox = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model("gpt_neox", **NEOX, bos_token_id=1)
    )
    with pytest.raises(ValueError, match="GPTNeoXModel .*1 missing: embed_out"):
        from_hf(neox)
