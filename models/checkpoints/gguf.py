"""Models in GGUF, the file format of llama.cpp, of the architectures in `ARCHITECTURES`."""

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from models.checkpoints.assemble import Reader, Source, assemble, concatenated, end_tokens
from models.checkpoints.gguf_file import GGUFFile
from models.checkpoints.gguf_tokenizer import read_tokenizer
from models.checks import check_choice
from models.config import RotaryScaling, TransformerConfig
from models.files import one_error
from models.text.tokenizer import Tokenizer
from models.transformer import Transformer

_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "mlp": "gated", "activation": "silu"}
# Fields of our config that all models of an architecture share. For fields in `_KEYS` these are defaults.
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "starcoder": {},
    # The file does not say the activation: this is Pythia's.
    "gptneox": {"positions": "rotary", "activation": "gelu", "parallel": True},
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"qk_norm": "head"},
    "olmo2": _LLAMA | {"qk_norm": "all", "norm_place": "output"},
    "gemma2": _LLAMA
    | {"activation": "gelu_tanh", "norm_place": "sandwich"}
    | {"window": 4096, "attn_cap": 50.0, "logit_cap": 30.0},
}
# The keys in the metadata of fields that only some architectures have.
_KEYS = {
    "parallel": "use_parallel_residual",
    "window": "attention.sliding_window",
    "attn_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
# The architectures whose files have the rows of queries and keys in llama.cpp's order for rotation.
_PERMUTED = {"llama"}


def _gemma2(sizes: Mapping[str, Any]) -> dict[str, Any]:
    d_model, n_layers = sizes["d_model"], sizes["n_layers"]
    # The file does not say the scale of dot products. The 27B model, alone with 46 layers, has its own.
    scaled = d_model // sizes["n_heads"] if n_layers == 46 else sizes["d_head"]
    windows = {"window_layers": tuple(range(0, n_layers, 2))}
    return windows | {"embed_scale": d_model**0.5, "attn_scale": scaled**-0.5}


# Fields that follow from the sizes.
_FROM_SIZES = {"gemma2": _gemma2}

# Our modules and the file's, which may have q, k and v in separate tensors.
_TOP = {
    "token_embedding": "token_embd",
    "position_embedding": "position_embd",
    "ln_final": "output_norm",
    "unembedding": "output",
}
_BLOCK = {
    "ln1": "attn_norm",
    "attn.qkv": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.output": "attn_output",
    "ln1_post": "post_attention_norm",
    "ln2": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.input": "ffn_up",
    "mlp.output": "ffn_down",
    "ln2_post": "post_ffw_norm",
}
_QKV_APART = ("attn_q", "attn_k", "attn_v")

# Keys without a counterpart in the model, and the only value of each that changes nothing.
_ONLY = {
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
_WITHOUT_EFFECT = {"tensor_data_layout", "rope.scaling.finetuned"}


def load_gguf(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
) -> Transformer:
    """Loads the model in a GGUF file, in evaluation mode.

    Tensors are dequantized one at a time, so loading needs little more memory than the model. What the
    format cannot say is as in llama.cpp: Gemma 2's scale of dot products, the base of GPT-NeoX's rotation
    (10,000) and no window for Mistral. GPT-NeoX's activation is Pythia's, the exact GELU.

    Args:
        path: a single file of one of `ARCHITECTURES`, with tensors of any type that the package gguf
            can dequantize.
        dtype: of all weights; None for float32, whatever the file's types.
        device: where the weights go; None for the CPU.
        ignore: keys of the metadata to read as if they were not there.

    Raises:
        UnknownNameError: if a key to ignore is not there.
        ValueError: if the file is damaged, describes something that the model cannot express, or its
            tensors do not match its metadata. The message names the file.
    """
    with one_error(path):
        file = GGUFFile(path, ignore)
        config = _gguf_config(file)
        permuted = file.metadata("general.")["architecture"] in _PERMUTED
    ignored = set()
    if config.positions == "rotary":
        ignored.add("rope_freqs.weight")  # in the config by now
    if config.tied_unembed:
        ignored.add("output.weight")  # where it is, it is the embedding again
    table = _gguf_table(config, file.shapes, permuted)
    reader = Reader(file.shapes.keys(), file.read, keep=True)
    return assemble(config, table, reader, str(path), ignored.__contains__, dtype, device)


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer in a GGUF file: byte-level BPE of GPT-2 or Llama 3, or SentencePiece's BPE.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged or its tokenizer is of another kind; it names the file.
    """
    with one_error(path):
        return read_tokenizer(GGUFFile(path))


def _gguf_config(file: GGUFFile) -> TransformerConfig:
    name = _architecture(file)
    # An array has one value for each layer.
    keys = {
        key: value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        for key, value in file.metadata(f"{name}.").items()
    }
    n_heads, d_model = keys.pop("attention.head_count"), keys.pop("embedding_length")
    d_head = keys.pop("attention.key_length", d_model // max(n_heads, 1))
    vocab_size = keys.pop("vocab_size", file.shapes["token_embd.weight"][0])
    n_layers = len({key.split(".")[1] for key in file.shapes if key.startswith("blk.")})
    sizes = {
        "vocab_size": vocab_size,
        "n_ctx": keys.pop("context_length"),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": keys.pop("attention.head_count_kv", n_heads),
        "d_model": d_model,
        "d_head": d_head,
        "d_mlp": keys.pop("feed_forward_length"),
    }
    more = _FROM_SIZES[name](sizes) if name in _FROM_SIZES else {}
    fields = {**sizes, **ARCHITECTURES[name], **more}
    fields |= {ours: keys.pop(_KEYS[ours], fields[ours]) for ours in _KEYS if ours in fields}
    if fields.get("positions") == "rotary":
        fields["rotary_theta"] = keys.pop("rope.freq_base", 10_000.0)
        fields["rotary_scaling"] = _gguf_scaling(keys, file, sizes["n_ctx"])
        if name not in _PERMUTED:
            fields["rotary_fraction"] = keys.pop("rope.dimension_count", d_head) / d_head
    rms = "rms_" if fields.get("norm") == "rmsnorm" else ""
    fields["norm_eps"] = keys.pop(f"attention.layer_norm_{rms}epsilon")
    only = {"attention.value_length": d_head, "rope.dimension_count": d_head}
    _refuse_left(name, keys, {**_ONLY, **only, "block_count": n_layers})
    # The ends of a text, of a turn and of a message: a chat model may write any of them.
    ends = [file.metadata(f"tokenizer.ggml.eo{which}_token_id").get("") for which in "stm"]
    fields["eos_token_ids"] = end_tokens(ends, vocab_size)
    fields |= _from_tensors(file, fields.get("positions") == "rotary")
    return TransformerConfig(**fields)


def _architecture(file: GGUFFile) -> str:
    """The architecture of a file that holds a whole model.

    Raises:
        ValueError: if it is of another architecture, or holds something else.
    """
    general = file.metadata("general.")
    name, kind = str(general.get("architecture")), general.get("type", "model")
    check_choice("general.architecture", name, ARCHITECTURES)
    n_files = file.metadata("split.").get("count", 1)
    if kind != "model" or n_files > 1:
        raise ValueError(f"the file must be a whole model; got 1 of {n_files} files of a {kind}")
    return name


def _refuse_left(name: str, keys: dict[str, Any], only: Mapping[str, Any]) -> None:
    """Refuses keys that are unknown, or have another value than the `only` one that can be expressed."""
    for key, value in only.items():
        if (stated := keys.pop(key, value)) != value:
            raise ValueError(f"{name}.{key} must be {value}; got {stated}")
    if left := sorted(f"{name}.{key}" for key in keys.keys() - _WITHOUT_EFFECT):
        got = f"{', '.join(left)}; to load the model without them: ignore={left}"
        raise ValueError(f"keys of an architecture must be known; got {got}")


def _from_tensors(file: GGUFFile, rotary: bool) -> dict[str, bool]:
    """The choices that only the tensors show: the biases, and whether the embedding is the unembedding."""
    ends = {name.split(".", 2)[-1] for name in file.shapes}
    pair = ("output.weight", "token_embd.weight")
    # Converters write GPT-2's embedding again as the unembedding.
    twice = pair[0] in file.shapes and not rotary and torch.equal(*map(file.read, pair))
    return {
        "tied_unembed": twice or pair[0] not in file.shapes,
        "qkv_bias": not ends.isdisjoint({f"{part}.bias" for part in ("attn_qkv", *_QKV_APART)}),
        "out_bias": "attn_output.bias" in ends,
        "mlp_bias": not ends.isdisjoint({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
    }


def _gguf_scaling(keys: dict[str, Any], file: GGUFFile, n_ctx: int) -> RotaryScaling | None:
    kind = keys.pop("rope.scaling.type", "linear")  # llama.cpp's default
    older = keys.pop("rope.scale_linear", 1.0)
    factor = keys.pop("rope.scaling.factor", older) or 1.0
    original = keys.pop("rope.scaling.original_context_length", n_ctx)
    stretched = kind != "none" and factor != 1
    if "rope_freqs.weight" in file.shapes:
        divisors = tuple(file.read("rope_freqs.weight").flatten().tolist())
        if stretched:
            raise ValueError(f"rope_freqs.weight must be the only scaling; got the factor {factor}")
        return RotaryScaling(kind="factors", factors=divisors)
    if kind == "yarn":
        return RotaryScaling(
            kind="yarn",
            factor=factor,
            original_n_ctx=original,
            low=keys.pop("rope.scaling.yarn_beta_slow", 0.0),
            high=keys.pop("rope.scaling.yarn_beta_fast", 0.0),
            attention_factor=keys.pop("rope.scaling.yarn_attn_factor", 0.0),
        )
    if kind not in ("none", "linear"):
        raise ValueError(f"rope.scaling.type must be none, linear or yarn; got {kind!r}")
    return RotaryScaling(kind="linear", factor=factor) if stretched else None


def _gguf_table(
    config: TransformerConfig, held: Collection[str], permuted: bool
) -> dict[str, Source]:
    modules = dict(_TOP)
    for layer in range(config.n_layers):
        modules |= {f"blocks.{layer}.{ours}": f"blk.{layer}.{_BLOCK[ours]}" for ours in _BLOCK}
    table = {
        f"{ours}.{leaf}": Source((f"{theirs}.{leaf}",))
        for ours, theirs in modules.items()
        for leaf in ("weight", "bias")
    }
    n_rotated = (config.n_heads + config.n_kv_heads) * config.d_head
    turned = partial(_halves_together, n_rotated, config.d_head)
    convert = turned if permuted else concatenated
    for ours, source in table.items():
        if ".attn.qkv." in ours:
            apart = tuple(source.keys[0].replace("attn_qkv", part) for part in _QKV_APART)
            table[ours] = Source(source.keys if set(apart).isdisjoint(held) else apart, convert)
    return table


def _halves_together(n_rotated: int, d_head: int, *qkv: Tensor) -> Tensor:
    """Joins q, k and v, and puts the rows of each head of q and k in our order for rotation.

    llama.cpp rotates neighbours, 2i with 2i + 1, and its files have q and k permuted for that. We rotate
    i with i + d_head/2.
    """
    rows = torch.cat(qkv)
    turned = rearrange(
        rows[:n_rotated],
        "(head pair half) ... -> (head half pair) ...",
        half=2,
        pair=d_head // 2,
    )
    return torch.cat([turned, rows[n_rotated:]])
