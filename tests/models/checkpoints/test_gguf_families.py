"""GGUF files of llama.cpp's converter (tests/gguf/make.py), compared with the original models."""

import re

import pytest
import torch
from safetensors.torch import load_file

import models
from hooks import HookedRunner
from models import RotaryBase, RotaryScaling, load
from tests.count import ROOT

gguf = pytest.importorskip("gguf", reason="reads GGUF")
from models.checkpoints.gguf_config import ARCHITECTURES, READ_BY_TRANSFORMERS  # noqa: E402 - needs gguf

HERE = ROOT / "tests" / "gguf"
# Architectures that are not supported, and the words that the error must contain.
REFUSED = {
    "arcee": ("'arcee'", "squared ReLU"),
    "bloom": ("'bloom'", "ALiBi"),
    "exaone4-windows": ("exaone4.attention.sliding_window must be 0", "got 7"),
    "hunyuan": ("'hunyuan-dense'", "norms of queries and keys after rotation"),
    "lfm2": ("'lfm2'", "convolutions"),
    "mamba": ("'mamba'", "state spaces"),
    "nemotron": ("'nemotron'", "squared ReLU"),
    "olmo-clipped": ("olmo.attention.clamp_kqv",),
    "phi3-longrope": ("rope_factors_long.weight",),
    "qwen3moe": ("'qwen3moe'", "mixture of experts"),
    "smollm3": ("'smollm3'", "layers without positions"),
}
LOADED = sorted({file.stem for file in HERE.glob("*.gguf")} - REFUSED.keys())


def expected(name):
    held = load_file(HERE / "expected.safetensors")
    return held["tokens"], held[name]


def error(path):
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        load(path)
    return str(raised.value)


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOADED)
def test_logits_match_the_model_that_the_file_came_from(name, dtype):
    tokens, logits = expected(name)
    with torch.no_grad():
        assert_near(load(HERE / f"{name}.gguf", dtype=dtype)(tokens).float(), logits)


def test_every_architecture_has_a_file():
    read = {
        gguf.GGUFReader(HERE / f"{name}.gguf").fields["general.architecture"].contents()
        for name in LOADED
    }
    assert read == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_our_config_cannot_express_are_named(name):
    message = error(HERE / f"{name}.gguf")
    assert all(part in message for part in REFUSED[name])
    assert "AutoModelForCausalLM.from_pretrained(" in message


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_the_line_in_the_error_loads_the_model(name):
    transformers = pytest.importorskip("transformers", reason="the line is for it")
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF")
    line = re.search(r"models\.attach\(.*\)\)", error(HERE / f"{name}.gguf"))[0]
    attached = eval(line, {"models": models, "transformers": transformers})
    tokens, logits = expected(name)
    with torch.no_grad():
        assert_near(attached.model(tokens, use_cache=False).logits.float(), logits)
    assert "blocks.0.resid_post" in HookedRunner(attached.model).points


def rewritten(path, name, keys=None, tensors=None):
    """Write a file again with some keys and tensors changed. None leaves a key or a tensor out."""
    source = gguf.GGUFReader(HERE / f"{name}.gguf")
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    for key, field in source.fields.items():
        if key not in keys and not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in keys.items():
        if value is not None:
            kind = gguf.GGUFValueType.get_type
            inner = kind(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key, value, kind(value), inner)
    changed = {tensor.name: tensor.data for tensor in source.tensors} | (tensors or {})
    for tensor, data in changed.items():
        if data is not None:
            writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "keys", "tensors"),
    [
        ("nemotron", {"rope.scaling.factor": 8.0}, {}),
        ("qwen3moe", {}, {"rope_freqs.weight": torch.ones(5).numpy()}),
    ],
)
def test_scaled_rotation_is_not_sent_through_the_reader_of_transformers(
    tmp_path, name, keys, tensors
):
    """The error must not suggest the GGUF reader of `transformers`, because it silently ignores the
    scaling.
    """
    message = error(rewritten(tmp_path / "it.gguf", name, keys, tensors))
    assert "gguf_file" not in message
    assert "the folder that the file was made from" in message


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("phi2", "blk.1.attn_norm.bias"),  # both sublayers read this norm
        ("stablelm", "blk.0.ffn_norm.weight"),
        ("stablelm-parallel", "blk.0.attn_norm.weight"),
        ("falcon-new", "blk.1.attn_norm_2.weight"),
        ("seed_oss", "blk.1.post_attention_norm.weight"),
        ("phi3", "blk.0.ffn_up.weight"),
        ("granite", "output_norm.weight"),
    ],
)
def test_missing_tensors_are_named(tmp_path, name, tensor):
    assert f"missing: {tensor}" in error(rewritten(tmp_path / "it.gguf", name, {}, {tensor: None}))


def test_a_norm_is_shared_in_parallel_blocks_only(tmp_path):
    norms = {
        f"blk.{layer}.ffn_norm.{leaf}": None for layer in (0, 1) for leaf in ("weight", "bias")
    }
    message = error(rewritten(tmp_path / "it.gguf", "stablelm", {}, norms))
    assert all(norm in message for norm in norms)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("cohere", "residual_scale", 2.0),
        ("llama", "logit_scale", 2.0),
        ("qwen2", "attention.sliding_window", 7),
        ("granite", "rope.scaling.finetuned", False),  # in llama.cpp, it switches rotation off
        ("llama", "expert_count", 8),
        ("glm4", "nextn_predict_layers", 1),
        ("olmo3", "attention.sliding_window_pattern", [True, False]),
    ],
)
def test_keys_that_would_change_the_logits_are_named(tmp_path, name, key, value):
    path = rewritten(tmp_path / "it.gguf", name, {key: value})
    assert key.removesuffix(".factor") in error(path)


def test_norms_of_queries_in_other_forms_are_named(tmp_path):
    """In Command R+, the queries of each head have a LayerNorm with gains of their own."""
    norms = {f"blk.{layer}.attn_q_norm.weight": torch.ones(6, 4).numpy() for layer in (0, 1)}
    message = error(rewritten(tmp_path / "it.gguf", "cohere", {}, norms))
    assert "attn_q_norm" in message
    assert "attach" in message


def test_values_that_llama_cpp_assumes_without_a_key(tmp_path):
    path = tmp_path / "it.gguf"
    keys = dict.fromkeys(["residual_scale", "logit_scale", "embedding_scale", "attention.scale"])
    config = load(rewritten(path, "granite", keys)).config
    assert (config.embed_scale, config.attn_scale) == (1, 4**-0.5)
    zeros = load(rewritten(path, "granite", {**keys, "residual_scale": 0.0, "logit_scale": 0.0}))
    original = load(rewritten(path, "granite", keys))
    tokens = torch.arange(7)[None]
    assert torch.equal(zeros(tokens), original(tokens))
    uncapped = rewritten(path, "gemma3-plain", {"final_logit_softcapping": None})
    assert load(uncapped).config.logit_cap == 0
    # Only the largest Gemma 3 (62 layers) scales scores by d_model / n_heads instead of d_head.
    sizes = {"n_layers": 62, "d_model": 24, "n_heads": 6, "d_head": 10}
    assert ARCHITECTURES["gemma3"].from_sizes(sizes)["attn_scale"] == 4**-0.5


PATTERN = "attention.sliding_window_pattern"


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({PATTERN: None}, (7, 7, 7)),  # the default: every fourth layer has no window
        ({PATTERN: 2}, (7, 0, 7)),
        ({PATTERN: [True] * 3}, (7, 7, 7)),
        ({PATTERN: [False] * 3}, (0, 0, 0)),
        ({"attention.sliding_window": 0, "rope.freq_base_swa": 9000.0}, (0, 0, 0)),
    ],
)
def test_the_layers_with_windows(tmp_path, keys, windows):
    config = load(rewritten(tmp_path / "it.gguf", "olmo3", keys)).config
    assert config.windows == windows
    assert config.window_layers == ((0, 2) if windows == (7, 0, 7) else ())


def test_five_layers_of_six_have_windows_in_gemma_3():
    assert load(HERE / "gemma3-plain.gguf").config.windows == (7, 7, 7, 7, 7, 0, 7)


LINEAR = RotaryScaling(kind="linear", factor=8.0)


@pytest.mark.parametrize(
    ("name", "keys", "others", "windows"),
    [
        ("gemma3-plain", {}, (500.0, None), None),
        # Without the key, llama.cpp assumes the base 10,000 in layers with a window.
        ("gemma3-plain", {"rope.freq_base_swa": None}, (500.0, None), (1e4, None)),
        # The models with 4 billion parameters and more scale only layers without a window.
        ("gemma3-linear", {}, (1e6, LINEAR), (1e4, None)),
        ("gemma3", {"rope.freq_base": 1e4}, (1e4, None), None),
        ("gemma3", {PATTERN: [True] * 7}, (1e4, None), None),
        ("gemma3", {PATTERN: [False] * 7}, (1e6, None), None),
        ("olmo3", {"rope.freq_base_swa": 9e3}, (500.0, None), (9e3, None)),
        ("gemma2", {"rope.scaling.factor": 8.0}, (1e4, LINEAR), None),
    ],
)
def test_layers_with_windows_have_a_rotary_base(tmp_path, name, keys, others, windows):
    config = load(rewritten(tmp_path / "it.gguf", name, keys)).config
    assert (config.rotary_theta, config.rotary_scaling) == others
    base = windows and RotaryBase(theta=windows[0], scaling=windows[1])
    assert config.window_rotary == base
