"""Models in GGUF, the file format of llama.cpp, with the architectures llama and gpt2."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from models.checkpoints.assemble import Source, assemble, concatenated
from models.checkpoints.gguf_file import GGUFFile, read_tokenizer
from models.config import RotaryScaling, TransformerConfig
from models.tokenizer import Tokenizer
from models.transformer import Transformer

ARCHITECTURES = ("llama", "gpt2")

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
    "attn.output": "attn_output",
    "ln2": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.input": "ffn_up",
    "mlp.output": "ffn_down",
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
) -> Transformer:
    """Loads the model in a GGUF file, in evaluation mode.

    Tensors are dequantized one at a time, so loading needs little more memory than the model.

    Args:
        path: a single file of one of `ARCHITECTURES`, with tensors of any type that the package gguf
            can dequantize.
        dtype: of all weights; None for float32, whatever the file's types.
        device: where the weights go; None for the CPU.

    Raises:
        ValueError: if the file is damaged, describes something that the model cannot express, or its
            tensors do not match its metadata. The message names the file.
    """
    with _naming(path):
        file = GGUFFile(path)
        config = _config(file)
    ignored = set()
    if config.positions == "rotary":
        ignored.add("rope_freqs.weight")  # in the config by now
    if config.tied_unembed:
        ignored.add("output.weight")  # where it is, it is the embedding again
    table = _table(config, file.keys())
    return assemble(config, table, file, str(path), ignored.__contains__, dtype, device)


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer in a GGUF file: byte-level BPE of GPT-2 or Llama 3, or SentencePiece's BPE.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged or its tokenizer is of another kind; it names the file.
    """
    with _naming(path):
        return read_tokenizer(GGUFFile(path))


@contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes errors name the file, and turns missing keys and wrong types into a ValueError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} must have {error}; got a file without it") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _config(file: GGUFFile) -> TransformerConfig:
    general = file.metadata("general.")
    architecture, kind = general.get("architecture"), general.get("type", "model")
    if architecture not in ARCHITECTURES:
        rule = f"general.architecture must be one of {', '.join(ARCHITECTURES)}"
        raise ValueError(f"{rule}; got {architecture!r}")
    n_files = file.metadata("split.").get("count", 1)
    if kind != "model" or n_files > 1:
        raise ValueError(f"the file must be a whole model; got 1 of {n_files} files of a {kind}")
    # An array has one value for each layer.
    keys = {
        key: value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        for key, value in file.metadata(f"{architecture}.").items()
    }
    n_heads, d_model = keys.pop("attention.head_count"), keys.pop("embedding_length")
    d_head = keys.pop("attention.key_length", d_model // max(n_heads, 1))
    n_layers = len({name.split(".")[1] for name in file.shapes if name.startswith("blk.")})
    only = {"attention.value_length": d_head, "rope.dimension_count": d_head}
    for key, value in {**_ONLY, **only, "block_count": n_layers}.items():
        if (given := keys.pop(key, value)) != value:
            raise ValueError(f"{architecture}.{key} must be {value}; got {given}")
    common = {
        "vocab_size": keys.pop("vocab_size", file.shapes["token_embd.weight"][0]),
        "n_ctx": keys.pop("context_length"),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": keys.pop("attention.head_count_kv", n_heads),
        "d_model": d_model,
        "d_head": d_head,
        "d_mlp": keys.pop("feed_forward_length"),
    }
    family = _llama if architecture == "llama" else _gpt2
    config = TransformerConfig(**common, **family(keys, file, d_head, common["n_ctx"]))
    if left := [f"{architecture}.{key}" for key in keys.keys() - _WITHOUT_EFFECT]:
        raise ValueError(f"keys of an architecture must be known; got {', '.join(sorted(left))}")
    return config


def _gpt2(keys: dict[str, Any], file: GGUFFile, d_head: int, n_ctx: int) -> dict[str, Any]:
    # The converter writes GPT-2's embedding again as the unembedding.
    pair = ("output.weight", "token_embd.weight")
    tied = pair[0] not in file.shapes or torch.equal(*map(file.read, pair))
    return {"norm_eps": keys.pop("attention.layer_norm_epsilon"), "tied_unembed": tied}


def _llama(keys: dict[str, Any], file: GGUFFile, d_head: int, n_ctx: int) -> dict[str, Any]:
    ends = {name.split(".", 2)[-1] for name in file.shapes}
    return {
        "tied_unembed": "output.weight" not in file.shapes,
        "norm": "rmsnorm",
        "norm_eps": keys.pop("attention.layer_norm_rms_epsilon"),
        "positions": "rotary",
        "rotary_theta": keys.pop("rope.freq_base", 10_000.0),
        "rotary_scaling": _scaling(keys, file, d_head, n_ctx),
        "mlp": "gated",
        "activation": "silu",
        "qkv_bias": not ends.isdisjoint({f"{part}.bias" for part in ("attn_qkv", *_QKV_APART)}),
        "out_bias": "attn_output.bias" in ends,
        "mlp_bias": not ends.isdisjoint({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
    }


def _scaling(keys: dict[str, Any], file: GGUFFile, d_head: int, n_ctx: int) -> RotaryScaling | None:
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
        raise ValueError(f"llama.rope.scaling.type must be none, linear or yarn; got {kind!r}")
    return RotaryScaling(kind="linear", factor=factor) if stretched else None


def _table(config: TransformerConfig, held: Collection[str]) -> dict[str, Source]:
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
    convert = turned if config.positions == "rotary" else concatenated
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
