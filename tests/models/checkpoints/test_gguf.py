"""GGUF files in the form of llama.cpp's converter, compared with independent readers."""

import re
import struct
import sys

import pytest
import torch

from tests.gguf.shaken import shaken

gguf = pytest.importorskip("gguf", reason="reads and writes GGUF")
transformers = pytest.importorskip("transformers", reason="the reference models")
np = pytest.importorskip("numpy", reason="gguf's arrays")

LAYERS, N_CTX, VOCAB = 2, 41, 307
HEADS, KV_HEADS, D_HEAD, D_MODEL, D_MLP = 6, 2, 10, 24, 44
# With these sizes, the rows of matrices are whole blocks of every quantised type.
WIDE = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 128, "intermediate_size": 512}
TOKENS = torch.randint(VOCAB, (2, 37), generator=torch.Generator().manual_seed(1))


def made(kind, sizes, **options):
    config = transformers.AutoConfig.for_model(kind, **sizes | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return shaken(model)


def llama(kind="llama", **options):
    sizes = dict(vocab_size=VOCAB, hidden_size=D_MODEL, intermediate_size=D_MLP, head_dim=D_HEAD)
    sizes |= dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    sizes |= dict(max_position_embeddings=N_CTX, rms_norm_eps=0.03)
    return made(kind, sizes, **dict(rope_theta=500.0, tie_word_embeddings=False) | options)


def gpt2(kind="gpt2", **options):
    sizes = dict(vocab_size=VOCAB, n_positions=N_CTX, n_embd=28, n_layer=LAYERS, n_head=7)
    sizes |= dict(layer_norm_epsilon=0.03, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return made(kind, sizes, **options)


def neox(**options):
    sizes = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=D_MLP, num_hidden_layers=LAYERS
    )
    sizes |= dict(num_attention_heads=HEADS, max_position_embeddings=N_CTX, layer_norm_eps=0.03)
    return made("gpt_neox", sizes, **dict(rotary_pct=0.5) | options)


def gemma2(**options):
    """Return a Gemma 2 with the scale, the rotation and the windows that llama.cpp assumes.

    The file does not contain them. Even layers have a window.
    """
    presumed = dict(rope_theta=10_000.0, query_pre_attn_scalar=D_HEAD, sliding_window=9)
    caps = dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.5, tie_word_embeddings=True)
    return llama("gemma2", **presumed | caps | options)


ARCHITECTURES = {"gpt_bigcode": "starcoder", "gpt_neox": "gptneox", "mistral": "llama"}


def metadata_of(model):
    """Return the metadata that llama.cpp's converter writes for a model."""
    config = model.config
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
    }
    if kind in ("gpt2", "starcoder"):
        sizes["feed_forward_length"] = 4 * config.n_embd
        sizes["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
        sizes |= {"attention.head_count_kv": 1} if kind == "starcoder" else {}
    elif kind == "gptneox":
        sizes["feed_forward_length"] = config.intermediate_size
        sizes["attention.layer_norm_epsilon"] = config.layer_norm_eps
        sizes["use_parallel_residual"] = config.use_parallel_residual
        sizes["rope.dimension_count"] = 4  # half of 48 / 6
    else:
        d_head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        sizes["feed_forward_length"] = config.intermediate_size
        sizes["attention.head_count_kv"] = config.num_key_value_heads
        sizes["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        sizes["attention.key_length"] = sizes["attention.value_length"] = d_head
    if kind == "gemma2":
        sizes["attention.sliding_window"] = config.sliding_window
        sizes["attn_logit_softcapping"] = config.attn_logit_softcapping
        sizes["final_logit_softcapping"] = config.final_logit_softcapping
    elif "attention.key_length" in sizes:
        sizes["rope.dimension_count"] = d_head
        sizes["rope.freq_base"] = 500.0
        sizes["vocab_size"] = config.vocab_size
    common = {"general.architecture": kind, "general.type": "model", "general.name": "tiny"}
    common["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(config.vocab_size)]
    return common | {f"{kind}.{key}": value for key, value in sizes.items()}


def permuted(rows, n_heads):
    """Return rows in the order of llama.cpp, as LlamaModel.permute in convert_hf_to_gguf does."""
    return (
        rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def tensors_of(model, encode=lambda weight: weight):
    """Return the tensors of a model by the names of the converter, with matrices encoded by
    `encode`.

    If `encode` writes into its argument, the weight of the model changes too.
    """
    config = model.config
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    [arch] = [arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    written = {}
    for name, value in model.state_dict().items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight") if kind == "gpt2" else ()
        held, transposed = value, name.endswith(matrices)
        value = np.ascontiguousarray(held.numpy().T if transposed else held.numpy())
        if value.ndim == 2 and "wpe" not in name:
            weight, value = value, encode(value)
            held.copy_(torch.from_numpy(weight.T if transposed else weight))
        if "q_proj" in name and kind == "llama":
            value = permuted(value, config.num_attention_heads)
        if "k_proj" in name and kind == "llama":
            value = permuted(value, config.num_key_value_heads)
        # In GPT-NeoX, queries, keys and values of one head are next to each other.
        if "query_key_value" in name:
            by_head = value.reshape(config.num_attention_heads, 3, -1, *value.shape[1:])
            value = by_head.swapaxes(0, 1).reshape(value.shape)
        if kind == "gemma2" and name.endswith("norm.weight"):
            value = value + 1
        written[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return written


def write(path, metadata, tensors, kind=None):
    """Write a GGUF file. Matrices of bytes are already encoded in the quantised type `kind`."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    adders = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key != "general.architecture" and value is not None:
            adders.get(type(value), writer.add_uint32 if type(value) is int else writer.add_array)(
                key, value
            )
    for name, value in tensors.items():
        raw = kind if value.dtype == np.uint8 else None
        writer.add_tensor(name, np.ascontiguousarray(value), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(path, model, metadata=(), tensors=()):
    """Write the file of a model, with changes to its metadata and tensors. None leaves one out."""
    kept = {**tensors_of(model), **dict(tensors)}
    kept = {name: value for name, value in kept.items() if value is not None}
    return write(path, {**metadata_of(model), **dict(metadata)}, kept)


def load(path, **options):
    from models.checkpoints.gguf import load_gguf

    return load_gguf(path, **options)


@torch.no_grad()
def assert_same(ours, reference):
    """Check that logits agree to 1e-5 of their standard deviation, which is about 1."""
    expected = reference(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5 * expected.std().item(), rtol=1e-5)


MODELS = {
    "llama": lambda: llama(),
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "gpt2": lambda: gpt2(),
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "starcoder": lambda: gpt2("gpt_bigcode"),
    "gptneox": lambda: neox(),
    "gptneox sequential": lambda: neox(use_parallel_residual=False, tie_word_embeddings=True),
    "mistral": lambda: llama("mistral", sliding_window=None),
    "qwen2": lambda: llama("qwen2"),
    "qwen3": lambda: llama("qwen3"),
    "olmo2": lambda: llama("olmo2", head_dim=D_MODEL // HEADS),
    "gemma2": lambda: gemma2(),
    "gemma2 27B": lambda: gemma2(num_hidden_layers=46, query_pre_attn_scalar=D_MODEL // HEADS),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_logits_match_the_model_that_was_converted(path, name):
    reference = MODELS[name]()
    model = load(written(path, reference))
    assert_same(model, reference)
    assert not model.training
    assert model.config.tied_unembed == reference.config.tie_word_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # The weights do not depend on the file: it can be deleted, and the weights can be trained.
    path.unlink()
    before = [parameter.clone() for parameter in model.parameters()]
    model(TOKENS).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not any(map(torch.equal, before, model.parameters()))


# The places of the float16 numbers that scale a block. These are the types that the library `gguf`
# can read, but not write, so the tests make random blocks.
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES |= {"IQ2_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
WRITTEN = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def encoder(name):
    kind = gguf.GGMLQuantizationType[name]
    size, n_bytes = gguf.GGML_QUANT_SIZES[kind]

    def random_blocks(shape, scale):
        random = np.random.default_rng(0)
        raw = random.integers(256, size=(*shape[:-1], shape[-1] // size, n_bytes), dtype=np.uint8)
        for at in SCALES[name]:
            raw[..., at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        return raw.reshape(len(raw), -1)

    def encode(weight):
        """Return the encoded bytes, and write the decoded values into the weight of the reference
        model.
        """
        if name in WRITTEN:
            raw = gguf.quants.quantize(weight, kind).view(np.uint8)
        else:
            spread = gguf.quants.dequantize(random_blocks(weight.shape, 1), kind).std()
            raw = random_blocks(weight.shape, weight.std() / spread)
        weight[:] = gguf.quants.dequantize(raw, kind)
        return raw

    return encode


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*WRITTEN, *SCALES])
def test_every_type_that_the_package_dequantizes(path, name):
    model = llama(**WIDE, num_hidden_layers=1)
    kind, tensors = gguf.GGMLQuantizationType[name], tensors_of(model, encoder(name))
    assert tensors["blk.0.attn_q.weight"].dtype == np.uint8
    assert_same(load(write(path, metadata_of(model), tensors, kind)), model)


def test_a_type_that_cannot_be_read(path):
    model = llama()
    name = "blk.1.ffn_up.weight"
    tensors = tensors_of(model) | {name: np.zeros((D_MLP, D_MODEL), np.int16)}
    message = error(write(path, metadata_of(model), tensors))
    assert name in message
    assert "I16" in message
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name) + 4 + 2 * 8
    struct.pack_into("<I", data, at, 12345)
    path.write_bytes(data)
    assert "12345" in error(path)


@pytest.mark.parametrize("name", ["F32", "Q8_0"])
def test_an_embedding_that_is_stored_twice_is_tied(path, name):
    """llama.cpp's converter writes the embedding of GPT-2 twice, also as the unembedding."""
    model, kind = gpt2(n_embd=32, n_head=2), gguf.GGMLQuantizationType.Q8_0
    tensors = tensors_of(model) if name == "F32" else tensors_of(model, encoder(name))
    tensors["output.weight"] = tensors["token_embd.weight"].copy()
    ours = load(write(path, metadata_of(model), tensors, kind))
    assert ours.unembedding.weight is ours.token_embedding.weight
    assert_same(ours, model)
    tensors["output.weight"][-1, -1] += 1  # changes a byte of a block, or a number in float32
    apart = load(write(path, metadata_of(model), tensors, kind))
    assert not torch.equal(apart.unembedding.weight, apart.token_embedding.weight)


def test_llamas_two_matrices_stay_separate(path):
    model = llama(tie_word_embeddings=True)
    tensors = {"output.weight": tensors_of(model)["token_embd.weight"]}
    ours = load(written(path, model, tensors=tensors))
    assert not ours.config.tied_unembed
    assert_same(ours, model)


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN |= {"beta_fast": 2.0, "beta_slow": 0.25, "attention_factor": 1.5}
SAID = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 2.0}
SAID |= {"yarn_beta_slow": 0.25, "yarn_attn_factor": 1.5, "yarn_ext_factor": 1.0}
SCALED = {
    "linear by default": (LINEAR, {"scaling.factor": 4.0}),
    "an older name": (LINEAR, {"scale_linear": 4.0}),
    "yarn, all options": (YARN, {f"scaling.{key}": value for key, value in SAID.items()}),
    "none": (None, {"scaling.type": "none", "scaling.factor": 4.0}),
    "a factor of none": (None, {"scaling.type": "linear", "scaling.factor": 0.0}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotation(path, kind):
    """Older files describe the scaling of rotary positions in other ways."""
    rope, said = SCALED[kind]
    reference = llama(**{"rope_scaling": rope | {"rope_theta": 500.0}} if rope else {})
    metadata = {f"llama.rope.{key}": value for key, value in said.items()}
    assert_same(load(written(path, reference, metadata)), reference)


def test_the_tokens_that_end_a_text(path):
    ends = {"eos": 5, "eot": 7, "eom": VOCAB}  # the last is not in the vocabulary
    metadata = {f"tokenizer.ggml.{name}_token_id": token for name, token in ends.items()}
    assert load(written(path, llama(), metadata)).config.eos_token_ids == (5, 7)
    assert load(written(path, llama())).config.eos_token_ids == ()


def test_keys_to_ignore(path):
    written(path, llama(), {"llama.logit_scale": 2.0})
    assert "ignore=['llama.logit_scale']" in error(path)
    assert_same(load(path, ignore=["llama.logit_scale"]), llama())
    with pytest.raises(KeyError, match=r"logit_scal'.*llama\.logit_scale"):
        load(path, ignore=["llama.logit_scal"])


def test_keys_that_a_file_may_lack_or_have_in_addition(path):
    reference = llama(head_dim=4, num_key_value_heads=HEADS, rope_theta=10_000.0)
    optional = ["vocab_size", "rope.freq_base", "rope.dimension_count", "attention.head_count_kv"]
    optional += ["attention.key_length", "attention.value_length", "block_count"]
    absent = {f"llama.{key}": None for key in optional}
    assert_same(load(written(path, reference, absent)), reference)
    reference = llama()
    metadata = {
        "general.alignment": 64,
        "general.tags": ["a", "b"],
        "llama.attention.causal": True,
        "llama.attention.head_count_kv": [KV_HEADS] * LAYERS,  # one for each layer
        "llama.expert_count": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "split.count": 0,
    }
    assert_same(load(written(path, reference, metadata)), reference)


def test_queries_keys_and_values_in_one_tensor(path):
    reference = llama(attention_bias=True)
    tensors = tensors_of(reference)
    for layer in range(LAYERS):
        for leaf in ("weight", "bias"):
            apart = [tensors.pop(f"blk.{layer}.attn_{part}.{leaf}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{leaf}"] = np.concatenate(apart)
    assert_same(load(write(path, metadata_of(reference), tensors)), reference)


BIASES = {"qkv_bias": "[qkv]", "out_bias": "o", "mlp_bias": "gate|up|down"}


@pytest.mark.parametrize("group", BIASES)
def test_some_biases_without_others(path, group):
    reference = llama(attention_bias=True, mlp_bias=True)
    for name, value in reference.state_dict().items():
        if name.endswith("bias") and not re.search(f"({BIASES[group]})_proj", name):
            value.zero_()
    tensors = {name: None for name, value in tensors_of(reference).items() if not value.any()}
    ours = load(written(path, reference, tensors=tensors))
    assert_same(ours, reference)
    assert {name for name in BIASES if getattr(ours.config, name)} == {group}


def test_dimensions_keep_their_order_without_rotary_positions(path):
    """Compare the weights, because logits do not show the order of dimensions: they are the same if
    queries and keys are permuted in the same way.
    """
    reference = gpt2()
    attention = load(written(path, reference)).blocks[1].attn
    assert torch.equal(attention.qkv.weight, reference.transformer.h[1].attn.c_attn.weight.T)
    assert torch.equal(attention.qkv.bias, reference.transformer.h[1].attn.c_attn.bias)


def test_dtype_and_device(path):
    model = llama(**WIDE)
    kind = gguf.GGMLQuantizationType.BF16
    write(path, metadata_of(model), tensors_of(model, encoder("BF16")), kind)
    ours = load(path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    weight = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(ours.blocks[1].mlp.input.weight.float(), weight)
    assert {p.device.type for p in load(path, device="meta").parameters()} == {"meta"}


def error(path):
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        load(path)
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "bloom"),
        ("general.type", "adapter"),
        ("split.count", 2),
        ("llama.attention.causal", False),
        ("llama.attention.sliding_window", 16),
        ("llama.expert_count", 8),
        ("llama.pooling_type", 1),
        ("llama.rope.scaling.yarn_ext_factor", 0.5),
        ("llama.rope.scaling.yarn_log_multiplier", 0.5),
        ("llama.rope.scaling.attn_factor", 2.0),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 12),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.block_count", 4),
        ("llama.vocab_size", 99),
        ("llama.embedding_length", None),
        ("llama.attention.layer_norm_rms_epsilon", None),
        ("llama.rope.scaling.yarn_beta_fast", 16.0),  # a key of YaRN, but the file has no YaRN
        ("llama.logit_scale", 2.0),  # a key that this architecture does not have
        ("llama.rope.freq_base", -0.5),
    ],
)
def test_metadata_that_the_model_cannot_express(path, key, value):
    message = error(written(path, llama(), {key: value}))
    if value in (None, 16.0) or "logit" in key:
        assert key.removeprefix("llama.") in message
    else:
        assert str(value) in message.removeprefix(str(path))


def test_tensors_that_are_missing_unknown_or_of_another_shape(path):
    tensors = {
        "blk.0.ffn_gate_exps.weight": np.zeros((3, 5), np.float32),
        "blk.0.attn_q.weight": None,
    }
    message = error(written(path, llama(), tensors=tensors))
    assert all(name in message for name in tensors)
    for name, shape in (("blk.1.ffn_up", (D_MODEL, D_MLP)), ("blk.1.attn_k", (7, D_MODEL))):
        tensors = {f"{name}.weight": np.zeros(shape, np.float32)}
        assert f"{name}.weight" in error(written(path, llama(), tensors=tensors))
    for name in ("token_embd.weight", "blk.1.attn_qkv.bias"):
        assert name in error(written(path, gpt2(), tensors={name: None}))
    ones = {"rope_freqs.weight": np.ones(4, np.float32)}
    assert "rope_freqs.weight" in error(written(path, gpt2(), tensors=ones))
    assert "factors" in error(written(path, llama(), tensors=ones))
    ones = {"rope_freqs.weight": np.ones(D_HEAD // 2, np.float32)}
    assert "7.5" in error(written(path, llama(), {"llama.rope.scaling.factor": 7.5}, ones))


def test_damaged_files_are_named(path):
    for content in (b"", b"GG", b"PK\x03\x04 and so on", b"GGUF" + struct.pack("<IQQ", 9, 0, 0)):
        path.write_bytes(content)
        error(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        load(path.with_name("absent.gguf"))
    written(path, llama(vocab_size=11, num_hidden_layers=1))
    whole, header = path.read_bytes(), gguf.GGUFReader(path).data_offset
    for size in (*range(4, header, 97), header, header + 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        error(path)
    path.write_bytes(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    assert "blk.0.attn_k.weight" in error(path)
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "byte order" in error(path)


# The kinds are numbers, texts and arrays; kind 13 does not exist.
@pytest.mark.parametrize("kind", [4, 8, 9, 13])
def test_a_huge_length_of_an_array_ends_at_once(path, kind):
    array = struct.pack("<IIQ", 9, kind, 2**62)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + array + bytes(1000))
    error(path)


def test_a_damaged_header_is_an_error_or_has_no_effect(path):
    written(path, llama(vocab_size=11, num_hidden_layers=1))
    whole, header = path.read_bytes(), gguf.GGUFReader(path).data_offset
    messages = []
    for at in range(4, header, 17):
        for byte in (0xFF, whole[at] ^ 1):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                load(path)(torch.zeros(1, 3, dtype=torch.int64))
            except ValueError as error:
                messages.append(str(error))
    assert len(messages) > 50
    assert all(str(path) in message for message in messages)


def test_without_the_package_gguf(path, monkeypatch):
    written(path, llama())
    for name in ("models.checkpoints.gguf", "models.checkpoints.gguf_file"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r'pip install (-e )?".*\[hf\]'):
        load(path)
