"""Causal language models of `transformers` as tiny random ones, one line each, to be attached to."""

import inspect

import pytest
import torch

from hooks import HookedRunner

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

IS_5_24 = "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
# The argument and the output that hold keys and values.
CACHE = "cache" if IS_5_24 else "past_key_values"

BATCH, POS, LAYERS, HEADS, KV_HEADS, VOCAB = 3, 7, 2, 4, 2, 29
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=8,
    max_position_embeddings=17,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
SQUARE = dict(hidden_size=32)  # where d_head must be hidden_size / num_attention_heads
ALL_HEADS = dict(num_key_value_heads=HEADS)
WINDOWED = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"])
LINEAR = dict(
    layer_types=["full_attention", "linear_attention"],
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=6,
    linear_value_head_dim=6,
)
EXPERTS = dict(
    num_experts=5,
    num_local_experts=5,
    n_routed_experts=5,
    moe_num_experts=5,
    num_experts_per_tok=2,
    moe_topk=2,
    moe_k=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=16,
    n_shared_experts=1,
)
DENSE_FIRST = EXPERTS | dict(first_k_dense_replace=1, n_group=1, topk_group=1)
LATENT = ALL_HEADS | dict(
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=12,
    head_dim=4,
)
MAMBA = dict(
    mamba_d_state=6,
    mamba_d_conv=3,
    mamba_expand=2,
    mamba_n_heads=4,
    mamba_d_head=12,
    mamba_n_groups=1,
    mamba_d_ssm=48,
    mamba_chunk_size=4,
)
DECODER = dict(
    d_model=24,
    decoder_layers=LAYERS,
    decoder_attention_heads=HEADS,
    decoder_ffn_dim=20,
    is_decoder=True,
    is_encoder_decoder=False,
)

# Overrides of SIZES by model type.
MODELS = {
    "afmoe": EXPERTS | WINDOWED | dict(num_dense_layers=1),
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": EXPERTS,
    "axk1": DENSE_FIRST | LATENT,
    "axk2": DENSE_FIRST | LATENT,
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "bart": DECODER,
    "bert": dict(is_decoder=True),
    "biogpt": {},
    "bitnet": SQUARE,
    "blenderbot": DECODER,
    "bloom": {},
    "codegen": dict(n_head=HEADS, rotary_dim=4, n_ctx=17, n_inner=20),
    "cohere": {},
    "cohere2": WINDOWED,
    "cohere2_moe": EXPERTS,
    "ctrl": dict(n_embd=24, n_head=HEADS, n_layer=LAYERS, dff=20, n_positions=17),
    "cwm": {},
    "deepseek_v2": DENSE_FIRST | LATENT,
    "deepseek_v3": DENSE_FIRST | LATENT,
    "deepseek_v32": DENSE_FIRST | LATENT,
    "diffllama": {},
    "doge": {},
    "dots1": DENSE_FIRST,
    "dots3_note_text": DENSE_FIRST | LATENT,
    "electra": dict(is_decoder=True, embedding_size=24),
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS | dict(moe_num_shared_experts=1),
    "exaone": {},
    "exaone4": WINDOWED,
    "exaone_moe": DENSE_FIRST | WINDOWED | dict(mlp_layer_types=["dense", "sparse"]),
    "falcon": dict(new_decoder_architecture=True, alibi=False, num_kv_heads=KV_HEADS),
    "falcon_h1": MAMBA
    | dict(ssm_out_multiplier=0.6, attention_out_multiplier=1.7, key_multiplier=0.8),
    "flex_olmo": EXPERTS,
    "flint": {},
    "gemma": {},
    "gemma2": WINDOWED | dict(query_pre_attn_scalar=7, attn_logit_softcapping=2.0),
    "gemma3_text": WINDOWED | dict(query_pre_attn_scalar=7),
    "gemma4_text": WINDOWED | dict(hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB),
    "glm": {},
    "glm4": {},
    "glm4_moe": DENSE_FIRST,
    "glm4_moe_lite": DENSE_FIRST | LATENT,
    "glm_moe_dsa": DENSE_FIRST | LATENT,
    "gpt2": dict(n_inner=20),
    "gpt_bigcode": dict(n_inner=20, num_key_value_heads=1),
    "gpt_neo": dict(num_layers=LAYERS, attention_types=[[["global", "local"], 1]], window_size=3),
    "gpt_neox": SQUARE | dict(rotary_pct=0.5),
    "gpt_neox_japanese": SQUARE,
    "gpt_oss": EXPERTS | WINDOWED,
    "gptj": dict(n_embd=24, rotary_dim=4, n_inner=20),
    "granite": dict(embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=2.0),
    "granite_swa": {},
    "granitemoe": SQUARE | EXPERTS | dict(residual_multiplier=0.7),
    "granitemoe_swa": EXPERTS,
    "granitemoeshared": SQUARE | EXPERTS | dict(shared_intermediate_size=16),
    "helium": SQUARE,
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS,
    "hy_v3": DENSE_FIRST,
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jamba": MAMBA
    | dict(
        mamba_dt_rank=3,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=5,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "jetmoe": dict(num_local_experts=5, kv_channels=8),
    "kolibri1": EXPERTS,
    "laguna": EXPERTS,
    "lara_mini": EXPERTS | LINEAR,
    "lfm2": dict(layer_types=["full_attention", "conv"]),
    "lfm2_moe": EXPERTS | dict(layer_types=["full_attention", "conv"], num_dense_layers=1),
    "llama": {},
    "llama4_text": EXPERTS | dict(intermediate_size_mlp=20, moe_layers=[1]),
    "marian": DECODER | dict(decoder_start_token_id=0),
    "mbart": DECODER,
    "mellum": EXPERTS,
    "mimo_v2_flash": EXPERTS,
    "minicpm3": LATENT,
    "minimax_m2": EXPERTS,
    "minimax_m3_vl_text": EXPERTS,
    "ministral": WINDOWED,
    "ministral3": {},
    "mistral": dict(sliding_window=3),
    "mixtral": EXPERTS,
    "modernbert-decoder": SQUARE,
    "mpt": dict(d_model=24, n_heads=HEADS, n_layers=LAYERS, max_seq_len=17),
    "nanochat": {},
    "nemotron": dict(head_dim=8),
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOWED,
    "olmoe": SQUARE | EXPERTS,
    "openai-gpt": {},
    "opt": dict(ffn_dim=20, word_embed_proj_dim=24),
    "persimmon": SQUARE | ALL_HEADS,
    "phi": SQUARE,
    "phi3": SQUARE,
    "phimoe": SQUARE | EXPERTS,
    "plbart": DECODER,
    "qwen2": {},
    "qwen2_moe": SQUARE | EXPERTS,
    "qwen3": {},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | EXPERTS,
    "roberta": dict(is_decoder=True),
    "sarvam_mla": DENSE_FIRST | LATENT,
    "sarvam_moe": DENSE_FIRST,
    "seed_oss": {},
    "smollm3": {},
    "solar_open": DENSE_FIRST,
    "stablelm": SQUARE,
    "starcoder2": dict(sliding_window=3),
    "vaultgemma": {},
    "xglm": dict(d_model=24, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=20),
    "youtu": LATENT,
}
MODELS = {name: sizes for name, sizes in MODELS.items() if name in transformers.CONFIG_MAPPING}


def config_of(name):
    kind = transformers.CONFIG_MAPPING[name]
    # `from_hf` refuses sizes that a config does not know.
    known = {*vars(kind()), *dir(kind), *kind.attribute_map}
    sizes = {key: size for key, size in SIZES.items() if key in known} | MODELS[name]
    if name == "falcon":
        del sizes["head_dim"]
    return kind(**sizes)


def made(name, attention=None, config=None):
    """A model with weights large enough to matter; the same ones at each call."""
    config = config_of(name) if config is None else config
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    # Older versions of the library take sdpa, without the soft cap, or for Doge without its mask.
    if getattr(config, "attn_logit_softcapping", None) or (name == "doge" and version < (5, 18)):
        attention = "eager"
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(0)
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    # Buffers that training moves; the others are frequencies, encodings and masks.
    trained = ("layer_scalar", "e_score_correction_bias")
    buffers = [value for name, value in model.named_buffers() if name.endswith(trained)]
    with torch.no_grad():
        for value in [*model.parameters(), *buffers]:
            value.copy_(value.mean() + 0.3 * torch.randn(value.shape))
    return model


def agree(ours, theirs, what="", tolerance=1e-5):
    """Equal up to a share of the largest value, which is not rounding itself."""
    assert ours.shape == theirs.shape, what
    assert theirs.abs().max() > 1e-4, what
    gap = (ours - theirs).abs().max() / theirs.abs().max()
    assert gap <= tolerance, f"{what} differs by {gap:.1g}"


# Mixtures of experts, and what raw hooks and calls of one expert at a time say of them.
N = 5
# Experts of the first two are not called with numbers and weights; those of the others are not in older versions.
OTHERWISE = ("jetmoe", "llama4_text")
OLD = () if IS_5_24 else ("aria_text", "glm_moe_dsa", "granitemoe", "granitemoeshared")
KINDS = [name for name in MODELS if "moe_topk" in MODELS[name] and name not in (*OTHERWISE, *OLD)]
NORMED = ("afmoe", "axk1", "flex_olmo", "kolibri1")  # a norm comes after
MLP = f"blocks.{LAYERS - 1}.mlp"
TOKENS = torch.randint(3, VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(4))


def logits(model):
    """Those of `TOKENS`."""
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def experts_of(model):
    """The last block's experts."""
    return [m for n, m in model.named_modules() if n.endswith(".experts")][-1]


def alone_of(experts, x):
    """What each expert gives, each by a call of its own, [row expert d_model]."""
    weight = torch.ones(len(x), 1, dtype=x.dtype)
    with torch.no_grad():
        given = [experts(x, torch.full((len(x), 1), n), weight) for n in range(N)]
    return torch.stack(given, 1)


def call_of(twin, change=None):
    """The arguments and the output of the last block's experts, the first maybe changed, and the logits."""
    seen, experts = [], experts_of(twin)
    handles = [experts.register_forward_hook(lambda module, *call: seen.append(call))]
    if change is not None:
        handles.append(experts.register_forward_pre_hook(lambda module, args: change(*args)))
    found = logits(twin)
    for handle in handles:
        handle.remove()
    return *seen[0], found


def edited(model, hooks):
    """The logits under hooks."""
    with torch.no_grad():
        return HookedRunner(model).run_with_hooks(TOKENS, hooks=hooks, use_cache=False).logits
