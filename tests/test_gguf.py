"""GGUF files, written here as llama.cpp's converter writes them, against independent readers."""

import copy
import re
import struct
import sys

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="reads and writes GGUF")
transformers = pytest.importorskip("transformers", reason="the reference models")
np = pytest.importorskip("numpy", reason="gguf's arrays")

LAYERS, N_CTX, VOCAB = 3, 41, 307  # more rows of the embedding than are dequantised at a time
HEADS, KV_HEADS, D_HEAD, D_MODEL, D_MLP = 6, 2, 10, 24, 44
# Rows of whole blocks, of every type.
WIDE_LLAMA = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "intermediate_size": 768,
}
WIDE_GPT2 = {"n_embd": 256, "n_head": 8}
TOKENS = torch.randint(VOCAB, (2, 37), generator=torch.Generator().manual_seed(1))


def shaken(model):
    """The model in eval mode, with weights large enough that each matters, gains and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.eval()


def llama(**options):
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": D_MODEL,
            "intermediate_size": D_MLP,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": D_HEAD,
            "max_position_embeddings": N_CTX,
            "rms_norm_eps": 0.03,
            "rope_theta": 500.0,
        }
        | options
    )
    return shaken(transformers.LlamaForCausalLM(config))


def gpt2(**options):
    config = transformers.GPT2Config(
        **{
            "vocab_size": VOCAB,
            "n_positions": N_CTX,
            "n_embd": 28,
            "n_layer": LAYERS,
            "n_head": 7,
            "layer_norm_epsilon": 0.03,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
        | options
    )
    return shaken(transformers.GPT2LMHeadModel(config))


def metadata_of(model):
    """What llama.cpp's converter writes of a model."""
    config = model.config
    common = {"general.type": "model", "general.name": "tiny", "general.file_type": 0}
    if config.model_type == "gpt2":
        return common | {
            "general.architecture": "gpt2",
            "gpt2.block_count": config.n_layer,
            "gpt2.context_length": config.n_positions,
            "gpt2.embedding_length": config.n_embd,
            "gpt2.feed_forward_length": 4 * config.n_embd,
            "gpt2.attention.head_count": config.n_head,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
        }
    return common | {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.freq_base": 500.0,
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
    }


def permuted(rows, n_heads):
    """llama.cpp's convert_hf_to_gguf, LlamaModel.permute."""
    return (
        rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def tensors_of(model, encode=lambda weight: weight):
    """A model's tensors under the converter's names, matrices as `encode` makes them.

    What that writes into its argument becomes the model's weight.
    """
    config = model.config
    arch = gguf.MODEL_ARCH.GPT2 if config.model_type == "gpt2" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    written = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        held, transposed = value, name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        value = np.ascontiguousarray(held.numpy().T if transposed else held.numpy())
        if value.ndim == 2 and "wpe" not in name:
            weight, value = value, encode(value)
            held.copy_(torch.from_numpy(weight.T if transposed else weight))
        if "q_proj" in name:
            value = permuted(value, config.num_attention_heads)
        if "k_proj" in name:
            value = permuted(value, config.num_key_value_heads)
        written[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return written


def write(path, metadata, tensors, kind=None):
    """Matrices that are bytes are of the given kind already."""
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
    """A file of a model; what is None in the changes to metadata or tensors is left out."""
    kept = {**tensors_of(model), **dict(tensors)}
    kept = {name: value for name, value in kept.items() if value is not None}
    return write(path, {**metadata_of(model), **dict(metadata)}, kept)


def load(path, **options):
    from models.checkpoints.gguf import load_gguf

    return load_gguf(path, **options)


@torch.no_grad()
def assert_same(ours, reference):
    """Logits to 1e-5, of logits whose size is about 1."""
    expected = reference(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(TOKENS), expected, atol=1e-5 * expected.std().item(), rtol=1e-5)


BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama": lambda: llama(),
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama biases": lambda: llama(**BIASES),
    "llama one key head": lambda: llama(num_key_value_heads=1),
    "gpt2": lambda: gpt2(),
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
}


@pytest.fixture(params=MODELS)
def reference(request):
    return MODELS[request.param]()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_logits_are_those_of_the_model_that_was_converted(path, reference):
    model = load(written(path, reference))
    assert_same(model, reference)
    assert not model.training
    assert model.config.tied_unembed == reference.config.tie_word_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_embedding_that_is_stored_twice_is_tied(path, kind):
    """llama.cpp's converter writes GPT-2's a second time, as the unembedding."""
    model = gpt2(n_embd=32, n_head=2)
    raw = gguf.GGMLQuantizationType.Q8_0 if kind == "Q8_0" else None
    tensors = tensors_of(model) if raw is None else tensors_of(model, encoder(kind))
    tensors["output.weight"] = tensors["token_embd.weight"].copy()
    ours = load(write(path, metadata_of(model), tensors, raw))
    assert ours.config.tied_unembed
    assert ours.unembedding.weight is ours.token_embedding.weight
    assert_same(ours, model)
    tensors["output.weight"][-1, -1] += 1  # a byte, or a number
    apart = load(write(path, metadata_of(model), tensors, raw))
    assert not apart.config.tied_unembed
    assert not torch.equal(apart.unembedding.weight, apart.token_embedding.weight)


def test_llamas_two_matrices_stay_apart(path):
    model = llama(tie_word_embeddings=True)
    tensors = {"output.weight": tensors_of(model)["token_embd.weight"]}
    ours = load(written(path, model, tensors=tensors))
    assert not ours.config.tied_unembed
    assert_same(ours, model)


def test_logits_are_those_of_transformers_reading_the_file(path, reference):
    module = pytest.importorskip(
        "transformers.modeling_gguf_pytorch_utils",
        reason="needs transformers' own reader of GGUF, which this version has not",
    )
    written(path, reference)
    empty = type(reference)(reference.config)
    read = module.load_gguf_checkpoint(path, return_tensors=True, model_to_load=empty)["tensors"]
    missing = empty.load_state_dict(read, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    assert_same(load(path), empty.eval())


# The types, from their definitions in llama.cpp's ggml-common.h and ggml-quants.c, block by block.


def half(raw):
    return raw.copy().view(np.float16).astype(np.float32)


def q8_0(raw):
    return half(raw[:, :2]) * raw[:, 2:].view(np.int8)


def q4_0(raw):
    low, high = raw[:, 2:] & 15, raw[:, 2:] >> 4
    return half(raw[:, :2]) * (np.concatenate([low, high], 1).astype(np.float32) - 8)


def q4_k(raw):
    d, dmin, scales, nibbles = half(raw[:, :2]), half(raw[:, 2:4]), raw[:, 4:16], raw[:, 16:]
    parts = []
    for j in range(8):
        if j < 4:
            scale, low = scales[:, j] & 63, scales[:, j + 4] & 63
        else:
            scale = scales[:, j + 4] & 15 | scales[:, j - 4] >> 6 << 4
            low = scales[:, j + 4] >> 4 | scales[:, j] >> 6 << 4
        q = nibbles[:, 32 * (j // 2) :][:, :32] >> 4 * (j % 2) & 15
        parts.append(d * scale[:, None] * q - dmin * low[:, None])
    return np.concatenate(parts, 1)


def q6_k(raw):
    low, high, scales = raw[:, :128], raw[:, 128:192], raw[:, 192:208].view(np.int8)
    values = np.empty((len(raw), 256), np.float32)
    for i in range(256):
        side, quarter, at = i // 128, i % 128 // 32, i % 32
        nibble = low[:, 64 * side + 32 * (quarter % 2) + at] >> 4 * (quarter // 2) & 15
        q = (nibble | (high[:, 32 * side + at] >> 2 * quarter & 3) << 4).astype(np.int8) - 32
        values[:, i] = half(raw[:, 208:])[:, 0] * scales[:, i // 16] * q
    return values


def bf16(raw):
    return (raw.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# Of each type: values in a block, bytes in a block, values of blocks.
TYPES = {
    "F16": (1, 2, half),
    "BF16": (1, 2, bf16),
    "Q8_0": (32, 34, q8_0),
    "Q4_0": (32, 18, q4_0),
    "Q4_K": (256, 144, q4_k),
    "Q6_K": (256, 210, q6_k),
}


def random_blocks(kind, n_blocks):
    """Bytes of any value, but for the halves: with those, values are about 0 and below 1."""
    random = np.random.default_rng(n_blocks)
    raw = random.integers(256, size=(n_blocks, TYPES[kind][1]), dtype=np.uint8)
    for at, size in {"Q4_K": ((0, 2e-4), (2, 15e-4)), "Q6_K": ((208, 4e-5),)}[kind]:
        halves = random.uniform(size, 2 * size, (n_blocks, 1)).astype(np.float16)
        raw[:, at : at + 2] = halves.view(np.uint8)
    return raw


def encoder(kind):
    size, n_bytes, decode = TYPES[kind]

    def encode(weight):
        """Bytes; what they stand for goes into the weight itself, so into the reference model."""
        if kind in ("Q4_K", "Q6_K"):  # the package can read them, not write them
            raw = random_blocks(kind, weight.size // size)
        else:
            raw = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
        weight[:] = decode(raw.view(np.uint8).reshape(-1, n_bytes)).reshape(weight.shape)
        return raw.view(np.uint8).reshape(len(weight), -1)

    return encode


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "make", [lambda: llama(**WIDE_LLAMA), lambda: gpt2(**WIDE_GPT2)], ids=["llama", "gpt2"]
)
def test_each_type_has_the_values_of_its_definition(path, kind, make):
    model = make()
    tensors = tensors_of(model, encoder(kind))
    write(path, metadata_of(model), tensors, gguf.GGMLQuantizationType[kind])
    assert_same(load(path), model)


SCALED = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"type": "linear", "factor": 4.0},
    ),
    "linear by default": ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "finetuned": True},
    ),
    "yarn, from the whole context": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": N_CTX},
        {"type": "yarn", "factor": 4.0},
    ),
    "yarn, all options": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 200,
            "beta_fast": 2.0,
            "beta_slow": 0.25,
            "attention_factor": 1.5,
        },
        {
            "type": "yarn",
            "factor": 4.0,
            "original_context_length": 200,
            "yarn_beta_fast": 2.0,
            "yarn_beta_slow": 0.25,
            "yarn_attn_factor": 1.5,
            "yarn_ext_factor": 1.0,
        },
    ),
    "none": (None, {"type": "none", "factor": 4.0}),
    "a factor of none": (None, {"type": "linear", "factor": 0.0}),
}


def scaled(rope):
    return llama() if rope is None else llama(rope_scaling=rope | {"rope_theta": 500.0})


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotation(path, kind):
    rope, said = SCALED[kind]
    metadata = {f"llama.rope.scaling.{key}": value for key, value in said.items()}
    reference = scaled(rope)
    ours = load(written(path, reference, metadata))
    assert_same(ours, reference)
    same = torch.allclose(ours(TOKENS), load(written(path, reference))(TOKENS), atol=1e-3)
    assert same == (rope is None)


def test_the_older_name_of_the_factor(path):
    reference = scaled({"rope_type": "linear", "factor": 4.0})
    assert_same(load(written(path, reference, {"llama.rope.scale_linear": 4.0})), reference)


def test_divisors_of_frequencies(path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    # As llama.cpp's converter computes them, LlamaModel.generate_extra_tensors.
    divisors = []
    for frequency in 1 / 500.0 ** (np.arange(0, D_HEAD, 2) / D_HEAD):
        turns = 32 * frequency / (2 * np.pi)
        smooth = (turns - 1) / 3
        kept = 1 if turns > 4 else 0 if turns < 1 else smooth
        divisors.append(1 / ((1 - kept) / 8 + kept))
    assert len(set(divisors)) > 2
    reference = scaled(rope)
    tensor = np.array(divisors, np.float32)
    assert_same(load(written(path, reference, tensors={"rope_freqs.weight": tensor})), reference)


def test_what_a_file_may_leave_out(path):
    reference = llama(head_dim=4, num_key_value_heads=HEADS, rope_theta=10_000.0)
    optional = ["vocab_size", "rope.freq_base", "rope.dimension_count", "attention.head_count_kv"]
    optional += ["attention.key_length", "attention.value_length"]
    assert_same(
        load(written(path, reference, {f"llama.{key}": None for key in optional})), reference
    )


def test_what_a_file_may_say_besides(path):
    reference = llama()
    metadata = {
        "general.alignment": 64,
        "general.description": "é" * 1000,
        "general.tags": ["a", "b"],
        "llama.attention.causal": True,
        "llama.attention.head_count_kv": [KV_HEADS] * LAYERS,  # one for each layer
        "llama.expert_count": 0,
        "llama.tensor_data_layout": "Meta AI original pth",
        "split.count": 0,
    }
    assert_same(load(written(path, reference, metadata)), reference)


@pytest.mark.parametrize("options", [{}, BIASES], ids=["weights", "and biases"])
def test_queries_keys_and_values_in_one_tensor(path, options):
    reference = llama(**options)
    tensors = tensors_of(reference)
    for layer in range(LAYERS):
        for leaf in ("weight", "bias") if options else ("weight",):
            apart = [tensors.pop(f"blk.{layer}.attn_{part}.{leaf}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{leaf}"] = np.concatenate(apart)
    assert_same(load(write(path, metadata_of(reference), tensors)), reference)


GROUPS = {  # biases that a file has together, and the names of their modules in transformers
    "qkv_bias": (("attn_q", "attn_k", "attn_v"), ("q_proj", "k_proj", "v_proj")),
    "out_bias": (("attn_output",), ("o_proj",)),
    "mlp_bias": (("ffn_gate", "ffn_up", "ffn_down"), ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("group", GROUPS)
def test_some_biases_without_others(path, group):
    reference = llama(**BIASES)
    theirs, modules = GROUPS[group]
    tensors = {
        name: value.copy()
        for name, value in tensors_of(reference).items()
        if name.endswith("weight") or name.split(".")[2] in theirs
    }
    for name, value in reference.state_dict().items():
        if name.endswith("bias") and name.split(".")[-2] not in modules:
            value.zero_()
    ours = load(write(path, metadata_of(reference), tensors))
    assert_same(ours, reference)
    assert {name for name in GROUPS if getattr(ours.config, name)} == {group}


def test_dimensions_keep_their_order_where_nothing_is_rotated(path):
    """Logits do not tell: they are the same where queries and keys are permuted alike."""
    reference = gpt2()
    attention = load(written(path, reference)).blocks[1].attn
    assert torch.equal(attention.qkv.weight, reference.transformer.h[1].attn.c_attn.weight.T)
    assert torch.equal(attention.qkv.bias, reference.transformer.h[1].attn.c_attn.bias)


def test_dtype_and_device(path):
    model = llama(**WIDE_LLAMA)
    kind = gguf.GGMLQuantizationType.BF16
    write(path, metadata_of(model), tensors_of(model, encoder("BF16")), kind)
    ours = load(path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    weight = model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(ours.blocks[1].mlp.input.weight.float(), weight)
    assert {p.device.type for p in load(path, device="meta").parameters()} == {"meta"}


def test_a_few_rows_are_dequantised_at_a_time(path, monkeypatch):
    from gguf import quants

    sizes, dequantize = [], quants.dequantize
    monkeypatch.setattr(
        quants, "dequantize", lambda raw, kind: [sizes.append(len(raw)), dequantize(raw, kind)][1]
    )
    reference = gpt2()
    assert_same(load(written(path, reference)), reference)
    assert max(sizes) < VOCAB


def test_the_weights_can_be_trained_and_the_file_deleted(path):
    model = load(written(path, llama()))
    path.unlink()
    before = copy.deepcopy(model.state_dict())
    model(TOKENS).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    unchanged = [
        name for name, value in model.state_dict().items() if torch.equal(value, before[name])
    ]
    assert not unchanged


def error(path):
    with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
        load(path)
    message = str(raised.value)
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


WRONG = {
    "general.architecture": ("general.architecture is one of llama, gpt2, not 'qwen2'", "qwen2"),
    "general.type": (
        "general.type is 'model' for a whole model in one file, not 'adapter'",
        "adapter",
    ),
    "split.count": ("split.count is 1 for a whole model in one file, not 2", 2),
    "llama.attention.causal": (
        "llama.attention.causal is True, not False: attention to later",
        False,
    ),
    "llama.attention.sliding_window": ("llama.attention.sliding_window is 0, not 16: a window", 16),
    "llama.expert_count": (
        "llama.expert_count is 0, not 8: a mixture of experts cannot be expr",
        8,
    ),
    "llama.expert_used_count": ("llama.expert_used_count is 0, not 2: a mixture of experts", 2),
    "llama.pooling_type": ("llama.pooling_type is 0, not 1: an embedding in place of logits", 1),
    "llama.rope.scaling.yarn_ext_factor": ("llama.rope.scaling.yarn_ext_factor is 1, not 0.5", 0.5),
    "llama.rope.scaling.yarn_log_multiplier": (
        "llama.rope.scaling.yarn_log_multiplier is 0, not",
        0.1,
    ),
    "llama.rope.scaling.attn_factor": (
        "llama.rope.scaling.attn_factor is 1, not 2.0: a further",
        2.0,
    ),
    "llama.logit_scale": ("may matter; not llama.logit_scale = 2.0", 2.0),
    "llama.rope.scaling.yarn_beta_fast": ("not llama.rope.scaling.yarn_beta_fast = 16.0", 16.0),
    "llama.rope.scaling.type": (
        "llama.rope.scaling.type is one of none, linear, yarn, not 'lon",
        "longrope",
    ),
    "llama.rope.scaling.factor": ("rotary_scaling.factor is at least 1, not 0.5", 0.5),
    "llama.rope.dimension_count": ("llama.rope.dimension_count is a head's width, 10, not 8", 8),
    "llama.attention.value_length": ("llama.attention.value_length is key_length, 10, not 12", 12),
    "llama.attention.head_count": ("n_heads is at least 1, not 0", 0),
    "llama.attention.head_count_kv": (
        "llama.attention.head_count_kv is needed, as one int for all layers, not (2, 2, 1)",
        [2, 2, 1],
    ),
    "llama.feed_forward_length": ("llama.feed_forward_length is needed, as one int for all", "44"),
    "llama.embedding_length": (
        "llama.embedding_length is needed, as one int for all layers, not N",
        None,
    ),
    "llama.context_length": ("llama.context_length is below 16777216, not 16777216", 2**24),
    "llama.block_count": ("llama.block_count is 3, the blocks here, not 4", 4),
    "llama.vocab_size": (
        f"token_embd.weight [{VOCAB}, {D_MODEL}] in the file, [99, {D_MODEL}]",
        99,
    ),
    "llama.attention.layer_norm_rms_epsilon": (
        "layer_norm_rms_epsilon is needed, as one float",
        None,
    ),
}


@pytest.mark.parametrize("key", WRONG)
def test_metadata_that_the_model_cannot_express(path, key):
    message, value = WRONG[key]
    assert message in error(written(path, llama(), {key: value}))


def test_metadata_of_gpt2_is_checked_too(path):
    assert "gpt2.rope.freq_base = 9.0" in error(written(path, gpt2(), {"gpt2.rope.freq_base": 9.0}))


def test_an_architecture_is_needed(path):
    written(path, llama())
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectura"))
    assert error(path) == "general.architecture is one of llama, gpt2, not None"


def test_tensors_that_are_missing_unknown_or_of_another_shape(path):
    tensors = {
        "blk.1.ffn_gate_exps.weight": np.zeros((3, 5), np.float32),
        "blk.0.attn_q.weight": None,
        "blk.2.ffn_up.weight": np.zeros((D_MODEL, D_MLP), np.float32),
        "blk.2.attn_k.weight": np.zeros((7, D_MODEL), np.float32),
    }
    message = error(written(path, llama(), tensors=tensors))
    assert "missing: blk.0.attn_q.weight" in message
    assert "blk.1.ffn_gate_exps.weight" in message
    assert f"blk.2.ffn_up.weight [{D_MODEL}, {D_MLP}] in the file" in message
    assert f"blk.2.attn_k.weight [7, {D_MODEL}]" in message
    assert "token_embd.weight" in error(written(path, llama(), tensors={"token_embd.weight": None}))
    assert "missing: blk.1.attn_qkv.bias" in error(
        written(path, gpt2(), tensors={"blk.1.attn_qkv.bias": None})
    )


def test_divisors_of_other_files(path):
    tensors = {"rope_freqs.weight": np.ones(4, np.float32)}
    assert "rope_freqs.weight holds 5 divisors" in error(written(path, llama(), tensors=tensors))
    tensors = {"rope_freqs.weight": np.ones(5, np.float32)}
    metadata = {"llama.rope.scaling.factor": 2.0}
    assert "the factor 2.0" in error(written(path, llama(), metadata, tensors))
    assert "unexpected: rope_freqs.weight" in error(written(path, gpt2(), tensors=tensors))


def test_a_type_that_cannot_be_read(path):
    model = llama(hidden_size=96, head_dim=16, intermediate_size=64)
    kind = gguf.GGMLQuantizationType.Q5_0
    quantised = gguf.quants.quantize(tensors_of(model)["blk.1.ffn_up.weight"], kind)
    tensors = tensors_of(model) | {"blk.1.ffn_up.weight": quantised}
    message = error(write(path, metadata_of(model), tensors, kind))
    names = "F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q6_K"
    assert message == f"the tensor blk.1.ffn_up.weight is of a type among {names}, not Q5_0"
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (kind,)
    struct.pack_into("<I", data, at, 12345)
    path.write_bytes(data)
    assert error(path).endswith("not 12345")
    struct.pack_into("<I", data, at, gguf.GGMLQuantizationType.Q4_K)
    path.write_bytes(data)
    assert "Q4_K, is of at least one row, each a multiple of 256 long, not of" in error(path)


def test_files_that_are_not_gguf(path):
    for content in (b"", b"GG", b"PK\x03\x04 and so on"):
        path.write_bytes(content)
        assert error(path) == f"a GGUF file starts with b'GGUF', not {content[:4]!r}"
    for version in (1, 4, 3 << 24):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        assert error(path) == f"the version is 2 or 3, in little-endian order, not {version}"
    with pytest.raises(FileNotFoundError, match="absent"):
        load(path.with_name("absent.gguf"))


def test_a_header_of_impossible_parts(path):
    def header(n_tensors, n_values, *parts):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_values) + b"".join(parts))

    name = struct.pack("<Q", 1) + b"a"
    for value in (struct.pack("<I", 13), struct.pack("<IIQ", 9, 13, 1)):
        header(0, 1, name, value)
        assert error(path) == "a value in the header is of type 0 to 12, not 13"
    for n_axes in (0, 5):
        header(1, 0, name, struct.pack("<I", n_axes), bytes(64))
        assert error(path) == f"a tensor in the header has 1 to 4 axes, not {n_axes}"
    header(1, 0, name, struct.pack("<IQQIQ", 2, 5, 0, 0, 0), bytes(64))
    assert (
        "a, F32, is of at least one row, each a multiple of 1 long, not of shape (0, 5)"
        in error(path)
    )


def test_values_of_each_type(path):
    from models.checkpoints.gguf_file import GGUFFile

    writer, values = gguf.GGUFWriter(path, "llama"), {"general.architecture": "llama"}
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_int{bits}")(
            f"i{bits}", values.setdefault(f"i{bits}", -(2 ** (bits - 1)))
        )
        getattr(writer, f"add_uint{bits}")(f"u{bits}", values.setdefault(f"u{bits}", 2**bits - 1))
    writer.add_float32("float32", values.setdefault("float32", 0.375))
    writer.add_float64("float64", values.setdefault("float64", 1 / 3))
    writer.add_bool("bool", values.setdefault("bool", True))
    writer.add_string("string", values.setdefault("string", "é"))
    writer.add_array("ints", values.setdefault("ints", (3, -5)))
    writer.add_array("strings", values.setdefault("strings", ("", "ab")))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(path).metadata == values


def header_size(path):
    return gguf.GGUFReader(path).data_offset


def test_a_file_that_is_cut_short(path):
    written(path, llama())
    whole, header = path.read_bytes(), header_size(path)
    for size in [*range(4, header - 32, 97), header, header + 1000, len(whole) - 1]:
        path.write_bytes(whole[:size])
        message = error(path)
        told = "ends within its header" if size < header else f"and the file at {size}"
        assert told in message, size


def test_a_damaged_header_is_an_error_or_makes_no_difference(path):
    """In particular it neither crashes nor runs on, as lengths of 2^63 might have it."""
    written(path, llama(vocab_size=11, num_hidden_layers=1))
    whole, header = path.read_bytes(), header_size(path)
    changeable = ("n_ctx", "norm_eps", "rotary_theta")  # no tensor shows that they are others

    def outcome():
        try:
            config = load(path).config
        except ValueError as error:
            return "refused" if str(error).startswith(str(path)) else error
        return config.replace(**{name: getattr(start, name) for name in changeable})

    start = load(path).config
    outcomes = []
    for at in range(4, header, 5):
        for byte in (0xFF, whole[at] ^ 1):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            outcomes.append(outcome())
    assert [each for each in outcomes if each not in (start, "refused")] == []
    assert outcomes.count("refused") > 200


def test_names_that_stand_twice(path):
    written(path, llama())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    assert (
        error(path) == "a name stands in the header once, not twice as 'blk.0.attn_q.weight' does"
    )
    path.write_bytes(whole.replace(b"general.name", b"general.type"))
    assert "not twice as 'general.type' does" in error(path)


def test_a_tensor_that_starts_elsewhere(path):
    written(path, llama())
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_gate.weight") + len("blk.0.ffn_gate.weight") + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", data, at)
    struct.pack_into("<Q", data, at, offset + 32)
    path.write_bytes(data)
    assert (
        error(path)
        == f"blk.0.ffn_gate.weight starts {offset} bytes into the data, not {offset + 32}"
    )


def test_the_alignment_is_a_power_of_two(path):
    written(path, llama(), {"general.alignment": 64})
    data = bytearray(path.read_bytes())
    at = data.index(b"general.alignment") + len("general.alignment") + 4
    for wrong in (0, 48):
        struct.pack_into("<I", data, at, wrong)
        path.write_bytes(data)
        assert error(path) == f"general.alignment is a power of two, not {wrong}"


def test_without_the_package_gguf(path, monkeypatch):
    written(path, llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=re.escape('needs the package gguf: pip install "hookscope[hf]"')
    ):
        load(path)
