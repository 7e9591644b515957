"""What llama.cpp computes for each architecture of a GGUF file, as tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What a file does not say about a model of its architecture.

    Attributes:
        fields: fields of our config. Where `KEYS` has a key for one, it is the default.
        from_sizes: makes more of them from the sizes.
        tensors: the tensors of modules that have others than in `BLOCK`. Of several the first that the file has; all
            but the first are for parallel blocks, where attention and the MLP may read one norm.
        permuted: whether rows of queries and keys are in llama.cpp's order for rotation.
        period: of so many layers the last has no window, if the file does not say which; 0 means that all have it.
        window_theta: the base of rotation in layers with a window; 0 means that of the others.
        windows_scaled: whether rotation is scaled there as in the others.
        folded: keys of factors without a field in our config, with the modules whose weights are multiplied by the
            factor to a power, and the power.
        only: keys with the only value that our config can express.
    """

    fields: Fields
    from_sizes: Callable[[Fields], Fields] = lambda sizes: {}
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    permuted: bool = False
    period: int = 0
    window_theta: float = 0.0
    windows_scaled: bool = True
    folded: Mapping[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    only: Fields = field(default_factory=dict)


def _gemma_embedding(sizes: Fields) -> Fields:
    return {"embed_scale": sizes["d_model"] ** 0.5}


def _gemma_largest(n_layers: int) -> Callable[[Fields], Fields]:
    """Gemma's scales. The largest model, alone with so many layers, has its own scale of dot products."""

    def fields(sizes: Fields) -> Fields:
        largest = sizes["n_layers"] == n_layers
        scaled = sizes["d_model"] // sizes["n_heads"] if largest else sizes["d_head"]
        return {**_gemma_embedding(sizes), "attn_scale": scaled**-0.5}

    return fields


_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "mlp": "gated", "activation": "silu"}
_GPT = {"positions": "rotary", "activation": "gelu_tanh"}
_GEMMA = _LLAMA | {"activation": "gelu_tanh"}
_ADJACENT = {"rotary_pairs": "adjacent"}
_SHARED_NORM = {"ln2": ("attn_norm",)}
_FUSED_GATE = {"mlp.gate": ("ffn_up",), "mlp.input": ("ffn_up",)}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture({}),
    "starcoder": Architecture({}),
    "starcoder2": Architecture(_GPT),
    # The file does not say the activation: this is Pythia's.
    "gptneox": Architecture(_GPT | {"activation": "gelu", "parallel": True}),
    "phi2": Architecture(_GPT | {"parallel": True}, tensors=_SHARED_NORM),
    # Where the two sublayers have norms of their own, that of the MLP has the usual name.
    "falcon": Architecture(
        _GPT | {"activation": "gelu", "parallel": True},
        tensors={"ln1": ("attn_norm_2", "attn_norm"), "ln2": ("attn_norm",)},
    ),
    "stablelm": Architecture(
        _LLAMA | {"norm": "layernorm", "parallel": True},
        tensors={"ln2": ("ffn_norm", "attn_norm")},
    ),
    "command-r": Architecture(
        _LLAMA | _ADJACENT | {"norm": "layernorm", "norm_bias": False, "parallel": True},
        tensors=_SHARED_NORM,
        folded={"logit_scale": (("ln_final",), 1)},
    ),
    "llama": Architecture(_LLAMA, permuted=True),
    "granite": Architecture(
        _LLAMA | {"embed_scale": 1.0, "attn_scale": 0.0},
        permuted=True,
        folded={
            "residual_scale": (("attn.output", "mlp.output"), 1),
            "logit_scale": (("ln_final",), -1),
        },
        only={"rope.scaling.finetuned": True},  # whether queries and keys are rotated
    ),
    "ernie4_5": Architecture(_LLAMA | _ADJACENT),
    "phi3": Architecture(_LLAMA | {"window": 0}, tensors=_FUSED_GATE),
    "glm4": Architecture(_LLAMA | _ADJACENT | {"norm_place": "sandwich"}, tensors=_FUSED_GATE),
    "qwen2": Architecture(_LLAMA),
    "seed_oss": Architecture(_LLAMA, tensors={"ln2": ("post_attention_norm",)}),
    "qwen3": Architecture(_LLAMA | {"qk_norm": "head"}),
    "exaone4": Architecture(_LLAMA | {"qk_norm": "head", "norm_place": "output"}),
    "olmo": Architecture(_LLAMA | {"norm": "layernorm", "norm_learned": False}, permuted=True),
    # OLMo 3 is OLMo 2 with windows.
    "olmo2": Architecture(
        _LLAMA | {"qk_norm": "all", "norm_place": "output", "window": 0},
        period=4,
        windows_scaled=False,
    ),
    "gemma": Architecture(_GEMMA, _gemma_embedding),
    "gemma2": Architecture(
        _GEMMA | {"norm_place": "sandwich", "window": 4096, "attn_cap": 50.0, "logit_cap": 30.0},
        _gemma_largest(46),
        period=2,
    ),
    "gemma3": Architecture(
        _GEMMA | {"norm_place": "sandwich", "qk_norm": "head", "window": 0, "logit_cap": 0.0},
        _gemma_largest(62),
        period=6,
        window_theta=10_000.0,
        windows_scaled=False,
    ),
}

# The keys in the metadata of fields that only some architectures have.
KEYS = {
    "parallel": "use_parallel_residual",
    "window": "attention.sliding_window",
    "attn_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "attn_scale": "attention.scale",
    "embed_scale": "embedding_scale",
}

# Our modules and the file's, which may have q, k and v in separate tensors.
TOP = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "ln_final": "output_norm",
    "unembedding": "output",
}
BLOCK = {
    "ln1": ("attn_norm",),
    "attn.qkv": ("attn_qkv",),
    "attn.q_norm": ("attn_q_norm",),
    "attn.k_norm": ("attn_k_norm",),
    "attn.output": ("attn_output",),
    "ln1_post": ("post_attention_norm",),
    "ln2": ("ffn_norm",),
    "mlp.gate": ("ffn_gate",),
    "mlp.input": ("ffn_up",),
    "mlp.output": ("ffn_down",),
    "ln2_post": ("post_ffw_norm",),
}
QKV_APART = ("attn_q", "attn_k", "attn_v")

# Keys without a counterpart in the model, and the only value of each that changes nothing.
ONLY = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
# Keys about how the file was made. They do not affect the model.
WITHOUT_EFFECT = {"tensor_data_layout", "rope.scaling.finetuned"}

# What other architectures have, and our config has not.
BEYOND: Mapping[str, tuple[str, ...]] = {
    "attention biased by distance (ALiBi)": ("bloom", "jais", "mpt", "refact"),
    "a squared ReLU": ("arcee", "jais2", "nemotron"),
    "an xIELU": ("apertus",),
    "layers without positions": ("cohere2", "smollm3"),
    "norms of queries and keys after rotation": ("hunyuan-dense",),
    "embeddings in each layer": ("gemma3n", "gemma4"),
    "convolutions": ("lfm2", "lfm2moe"),
    "an encoder": ("t5", "t5encoder"),
}
# Others whose files transformers 5.24 reads right where rotation is not scaled, and whose models `attach` takes. It reads
# Gemma 3 too, but presumes its scale of dot products and no cap.
READ_BY_TRANSFORMERS = ("bloom", "lfm2", "mamba", "nemotron", "qwen3moe")
