"""Makes the fixtures of tests/models/checkpoints/test_gguf_families.py with llama.cpp's own converter.

By hand, with transformers 5.24 and the llama.cpp that is unpacked in the source distribution of llama-cpp-python 0.3.36
(`vendor/llama.cpp`): `python tests/gguf/make.py path/to/llama.cpp`. Each file is of a small random model of
`transformers`; `expected.safetensors` has, under each file's name, the logits that this model computed in float64.
The converter knows published tokenizers only, so each file gets a small vocabulary of this script's.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
VOCAB, N_CTX = 53, 64
TOKENS = torch.randint(VOCAB, (1, 19), generator=torch.Generator().manual_seed(1))

SIZES = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=28, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=6, max_position_embeddings=N_CTX, tie_word_embeddings=False)
GROUPED = SIZES | dict(num_key_value_heads=2)
RMS = GROUPED | dict(rms_norm_eps=0.03)
FREE = RMS | dict(head_dim=10)
LAYER = dict(layer_norm_eps=0.03)
PARTIAL = dict(hidden_size=32, num_attention_heads=4)
GPT = dict(vocab_size=VOCAB, n_positions=N_CTX, n_embd=20, n_layer=2, n_head=5)
GPT |= dict(layer_norm_epsilon=0.03)


def rope(kind="default", theta=500.0, **options):
    return {"rope_parameters": dict(rope_type=kind, rope_theta=theta) | options}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["rope_parameters"]["original_max_position_embeddings"] = 32
SUPER = rope("longrope", long_factor=[4.0, 5.0], short_factor=[1.0, 1.5])
SUPER["rope_parameters"] |= dict(partial_rotary_factor=0.5)
SUPER["original_max_position_embeddings"] = 16
HALF = dict(partial_rotary_factor=0.5)
MIXED = ["sliding_attention", "sliding_attention", "full_attention"]
WINDOWS = dict(num_hidden_layers=3, layer_types=MIXED, sliding_window=7)


def turned(full, sliding):
    parameters = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_parameters": {kind: rope["rope_parameters"] for kind, rope in parameters.items()}}


# Gemma 3's five layers of six, which the file does not say, at a size that lets there be so many.
GEMMA3 = FREE | dict(hidden_size=12, intermediate_size=14, num_attention_heads=3, head_dim=6)
GEMMA3 |= dict(num_key_value_heads=1, query_pre_attn_scalar=6, tie_word_embeddings=True)
GEMMA3 |= dict(num_hidden_layers=7, sliding_window=7, final_logit_softcapping=2.5)
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, logits_scaling=2.5)
WIDE = dict(intermediate_size=96)  # the converter presumes it
FALCON = dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=6)
FALCON |= dict(layer_norm_epsilon=0.03, alibi=False, max_position_embeddings=2048)
COHERE = dict(logit_scale=0.3, tie_word_embeddings=True)
CAPS = dict(attn_logit_softcapping=1.5, final_logit_softcapping=2.5)
MOE = dict(moe_intermediate_size=768, num_experts=3, num_experts_per_tok=2, hidden_size=4)
MOE |= dict(num_hidden_layers=1, norm_topk_prob=True)
LFM2 = dict(norm_eps=0.03, block_auto_adjust_ff_dim=False, conv_L_cache=3, tie_word_embeddings=True)
LFM2 |= dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
# Rows of whole blocks of 32.
BLOCKS = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4)

MODELS = {
    "llama": ("llama", FREE | rope() | dict(attention_bias=True, mlp_bias=True)),
    "llama-linear": ("llama", RMS | rope("linear", factor=4.0)),
    "llama-yarn": ("llama", FREE | YARN),
    "llama-llama3": ("llama", FREE | LLAMA3 | dict(tie_word_embeddings=True)),
    "mistral": ("mistral", FREE | rope() | dict(sliding_window=None)),
    "qwen2": ("qwen2", RMS | rope()),
    "qwen3": ("qwen3", FREE | YARN),
    "gpt2": ("gpt2", GPT),
    "starcoder": ("gpt_bigcode", GPT),
    "gptneox": ("gpt_neox", SIZES | LAYER | dict(num_attention_heads=3, rotary_pct=0.5)),
    "gemma": ("gemma", FREE | dict(tie_word_embeddings=True)),
    "gemma2": (
        "gemma2",
        FREE | CAPS | dict(tie_word_embeddings=True, query_pre_attn_scalar=10, sliding_window=7),
    ),
    "phi2": (
        "phi",
        SIZES | LAYER | rope(theta=10_000.0, **HALF) | dict(num_attention_heads=3) | WIDE,
    ),
    "phi3": ("phi3", RMS | rope() | dict(sliding_window=None)),
    "phi3-window": ("phi3", RMS | PARTIAL | rope(**HALF) | dict(sliding_window=7)),
    "phi3-q8_0": ("phi3", RMS | rope() | BLOCKS | dict(sliding_window=None)),
    "starcoder2": ("starcoder2", GROUPED | rope() | dict(norm_epsilon=0.03, sliding_window=None)),
    "stablelm": (
        "stablelm",
        GROUPED | PARTIAL | LAYER | rope(theta=10_000.0, **HALF) | dict(use_qkv_bias=True),
    ),
    "stablelm-parallel": (
        "stablelm",
        GROUPED | PARTIAL | LAYER | rope(theta=10_000.0, **HALF) | dict(use_parallel_residual=True),
    ),
    "olmo": ("olmo", GROUPED | rope()),
    "olmo2": ("olmo2", RMS | rope()),
    "olmo3": ("olmo3", RMS | WINDOWS | turned(rope(), rope())),
    "falcon": (
        "falcon",
        FALCON | dict(num_kv_heads=1, multi_query=True, new_decoder_architecture=False),
    ),
    "falcon-new": ("falcon", FALCON | dict(num_kv_heads=2, new_decoder_architecture=True)),
    "granite": (
        "granite",
        RMS | rope() | GRANITE | dict(attention_multiplier=0.6, attention_bias=True),
    ),
    "cohere": ("cohere", GROUPED | LAYER | rope() | COHERE),
    "ernie4_5": ("ernie4_5", FREE | rope() | dict(use_bias=True)),
    "exaone4": (
        "exaone4",
        RMS | rope() | dict(sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "seed_oss": ("seed_oss", FREE | rope() | dict(attention_bias=True)),
    "glm4": ("glm4", RMS | rope(**HALF) | dict(head_dim=8, attention_bias=True)),
    "gemma3-plain": ("gemma3_text", GEMMA3 | turned(rope(), rope())),
    # Not expressed by our config, and refused.
    "gemma3": (
        "gemma3_text",
        GEMMA3 | turned(rope(theta=1e6), rope(theta=1e4)) | dict(query_pre_attn_scalar=256),
    ),
    "phi3-longrope": ("phi3", RMS | PARTIAL | SUPER | dict(sliding_window=None)),
    "smollm3": ("smollm3", RMS | rope() | dict(num_hidden_layers=4)),
    "bloom": ("bloom", dict(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=6)),
    "arcee": ("arcee", RMS | rope()),
    "nemotron": ("nemotron", GROUPED | rope(**HALF) | PARTIAL | dict(norm_eps=0.03)),
    "hunyuan": ("hunyuan_v1_dense", FREE | rope()),
    "olmo-clipped": ("olmo", GROUPED | rope() | dict(clip_qkv=0.5)),
    "olmo3-yarn": ("olmo3", RMS | WINDOWS | turned(YARN, rope())),
    "exaone4-windows": ("exaone4", RMS | rope() | WINDOWS),
    # transformers presumes the size of an expert, which the file says.
    "qwen3moe": ("qwen3_moe", FREE | rope() | MOE),
    "lfm2": ("lfm2", RMS | rope() | LFM2),
    "mamba": (
        "mamba",
        dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, state_size=6, conv_kernel=3),
    ),
}

# What config.json of published models says, and the converter reads.
OLDER = {"rotary_pct": 0.5, "n_ctx": N_CTX}


def randomized(kind, options):
    """A model whose every parameter matters, and is held by half precision without rounding."""
    config = transformers.AutoConfig.for_model(kind, **options)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            parameter.copy_(parameter.half())
    return model.eval()


def quantized(model):
    """The model with each matrix as Q8_0 holds it."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    return model


def small_vocabulary(self):
    """In the place of a converter's `set_vocab`: letters, and tokens that begin, end and fill a text."""
    tokens = ["<pad>", "<s>", "</s>"] + [chr(ord("A") + place) for place in range(VOCAB - 3)]
    kinds = [3] * 3 + [1] * (VOCAB - 3)
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_types(kinds)
    self.gguf_writer.add_token_merges(["A B"])
    self.gguf_writer.add_bos_token_id(1)
    self.gguf_writer.add_eos_token_id(2)


def convert(directory, file, stored):
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    hparams = OLDER | ModelBase.load_hparams(directory, False)
    architecture = get_model_architecture(hparams, ModelType.TEXT)
    converter = get_model_class(architecture)
    # Gemma 3's looks for the size of the vocabulary here.
    vocabulary = {"model": {"vocab": dict.fromkeys(map(str, range(VOCAB)))}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    was, converter.set_vocab = converter.set_vocab, small_vocabulary
    try:
        options = dict(eager=True, model_name="tiny", hparams=hparams)
        converter(directory, gguf.LlamaFileType[stored], file, **options).write()
    finally:
        converter.set_vocab = was


def main(llama_cpp, *names):
    sys.path[:0] = [f"{llama_cpp}/gguf-py", llama_cpp]
    logits = {"tokens": TOKENS}
    for name in names or MODELS:
        kind, options = MODELS[name]
        model, stored = randomized(kind, options), "MOSTLY_F16"
        if name.endswith("q8_0"):
            model, stored = quantized(model), "MOSTLY_Q8_0"
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            model.save_pretrained(directory)
            convert(Path(directory), HERE / f"{name}.gguf", stored)
        with torch.no_grad():
            logits[name] = model.double()(TOKENS, use_cache=False).logits.float()
    if not names:
        save_file(logits, HERE / "expected.safetensors")
    return logits


if __name__ == "__main__":
    main(*sys.argv[1:])
