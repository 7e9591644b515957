"""Models in GGUF, llama.cpp's file format: the architectures llama and gpt2."""

import os
from functools import partial
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from models.checkpoints.assemble import Source, assemble, concatenated
from models.checkpoints.gguf_file import GGUFFile
from models.config import RotaryScaling, TransformerConfig
from models.transformer import Transformer

ARCHITECTURES = ("llama", "gpt2")

# Our modules and the file's, where a block's q, k and v may be apart.
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

# Keys of an architecture that the model has no counterpart for: the only value it computes the same
# with, and what any other means.
_ONLY: dict[str, tuple[float, str]] = {
    "attention.causal": (True, "attention to later tokens"),
    "attention.sliding_window": (0, "a window whose layers the file does not name"),
    "expert_count": (0, "a mixture of experts"),
    "expert_used_count": (0, "a mixture of experts"),
    "pooling_type": (0, "an embedding in place of logits"),
    "rope.scaling.attn_factor": (1, "a further scale of queries and keys"),
    "rope.scaling.yarn_ext_factor": (1, "a part of YaRN's ramp"),
    "rope.scaling.yarn_log_multiplier": (0, "another length of YaRN's vectors"),
}
# How the file came about; the tensors already are as they say.
_WITHOUT_EFFECT = ("tensor_data_layout", "rope.scaling.finetuned")
# A size from here on is a damaged file's. Found early, as nothing can be built to tell more.
_TOO_LARGE = 2**24

Value = TypeVar("Value", int, float, str)


def load_gguf(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """The model in a GGUF file, in eval mode.

    Tensors are dequantised one at a time, so that the memory needed is about the model's own.
    The file's vocabulary is left where it is.

    Args:
        path: a file of `ARCHITECTURES` and `gguf_file.TYPES`, in one part.
        dtype: of all weights; None for float32, whatever the file's types.
        device: where the weights go; None for the CPU.

    Raises:
        ImportError: if the package gguf is not installed.
        ValueError: naming the file, if it is damaged, holds something that the model cannot
            express, or its tensors are not those of its metadata.
    """
    try:
        file = GGUFFile(path)
        config = _config(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    ignored = set()
    if config.positions == "rotary":
        ignored.add("rope_freqs.weight")  # in the config by now
    if config.tied_unembed:
        ignored.add("output.weight")  # where it is, it is the embedding again
    return assemble(
        config,
        _table(config, file.keys()),
        file,
        str(path),
        ignored=ignored.__contains__,
        dtype=dtype,
        device=device,
    )


class _Keys:
    """What a file says of its architecture; each key is to be taken once."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.prefix = f"{architecture}."
        self.left = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }

    def take(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        value = self.left.pop(key, default)
        each = set(value) if isinstance(value, tuple) else {value}  # a tuple has one for each layer
        one = each.pop() if len(each) == 1 else None
        if not isinstance(one, (int, float) if kind is float else kind):
            rule = f"needed, as one {kind.__name__} for all layers"
            raise ValueError(f"{self.prefix}{key} is {rule}, not {value!r}")
        if kind is int and isinstance(one, int) and one >= _TOO_LARGE:
            raise ValueError(f"{self.prefix}{key} is below {_TOO_LARGE}, not {one}")
        return kind(one)


def _config(file: GGUFFile) -> TransformerConfig:
    metadata = file.metadata
    if (architecture := metadata.get("general.architecture")) not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is one of {', '.join(ARCHITECTURES)}, not {architecture!r}"
        )
    for key, only in (("general.type", "model"), ("split.count", 1)):
        if metadata.get(key, only) not in (only, 0):
            raise ValueError(
                f"{key} is {only!r} for a whole model in one file, not {metadata[key]!r}"
            )
    keys = _Keys(metadata, architecture)
    for key, (value, meaning) in _ONLY.items():
        if (given := keys.left.pop(key, value)) != value:
            said = f"{keys.prefix}{key} is {value}, not {given}"
            raise ValueError(f"{said}: {meaning} cannot be expressed")
    n_heads, d_model = keys.take("attention.head_count", int), keys.take("embedding_length", int)
    n_ctx = keys.take("context_length", int)
    d_head = keys.take("attention.key_length", int, d_model // max(n_heads, 1))
    d_value = keys.take("attention.value_length", int, d_model // max(n_heads, 1))
    if d_value != d_head:
        raise ValueError(
            f"{keys.prefix}attention.value_length is key_length, {d_head}, not {d_value}"
        )
    n_layers = keys.take("block_count", int)
    held = len({key.split(".")[1] for key in file.tensors if key.startswith("blk.")})
    if n_layers != held:
        raise ValueError(f"{keys.prefix}block_count is {held}, the blocks here, not {n_layers}")
    if "token_embd.weight" not in file.tensors:
        raise ValueError("there is a tensor token_embd.weight, and the file has none")
    config = TransformerConfig(
        vocab_size=keys.take("vocab_size", int, file.tensors["token_embd.weight"].shape[0]),
        n_ctx=n_ctx,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.take("attention.head_count_kv", int, n_heads),
        d_model=d_model,
        d_head=d_head,
        d_mlp=keys.take("feed_forward_length", int),
        **(_llama(keys, file, d_head, n_ctx) if architecture == "llama" else _gpt2(keys, file)),
    )
    left = {key: value for key, value in keys.left.items() if key not in _WITHOUT_EFFECT}
    if left:
        said = ", ".join(f"{keys.prefix}{key} = {value}" for key, value in left.items())
        raise ValueError(f"keys of an architecture are known ones, as they may matter; not {said}")
    return config


def _gpt2(keys: _Keys, file: GGUFFile) -> dict[str, Any]:
    # The converter writes GPT-2's embedding a second time, as the unembedding.
    output = "output.weight"
    tied = output not in file.tensors or file.stored_alike(output, "token_embd.weight")
    return {"norm_eps": keys.take("attention.layer_norm_epsilon", float), "tied_unembed": tied}


def _llama(keys: _Keys, file: GGUFFile, d_head: int, n_ctx: int) -> dict[str, Any]:
    if (rotated := keys.take("rope.dimension_count", int, d_head)) != d_head:
        raise ValueError(f"llama.rope.dimension_count is a head's width, {d_head}, not {rotated}")
    ends = {key.split(".", 2)[-1] for key in file.tensors}
    return {
        "tied_unembed": "output.weight" not in file.tensors,
        "norm": "rmsnorm",
        "norm_eps": keys.take("attention.layer_norm_rms_epsilon", float),
        "positions": "rotary",
        "rotary_theta": keys.take("rope.freq_base", float, 10_000.0),
        "rotary_scaling": _scaling(keys, file, d_head, n_ctx),
        "mlp": "gated",
        "activation": "silu",
        "qkv_bias": not ends.isdisjoint({f"{part}.bias" for part in ("attn_qkv", *_QKV_APART)}),
        "out_bias": "attn_output.bias" in ends,
        "mlp_bias": not ends.isdisjoint({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
    }


def _scaling(keys: _Keys, file: GGUFFile, d_head: int, n_ctx: int) -> RotaryScaling | None:
    kind = keys.take("rope.scaling.type", str, "linear")  # llama.cpp's default
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"llama.rope.scaling.type is one of none, linear, yarn, not {kind!r}")
    factor = keys.take("rope.scale_linear", float, 1.0)  # the older name
    factor = keys.take("rope.scaling.factor", float, factor) or 1.0
    original = keys.take("rope.scaling.original_context_length", int, n_ctx)
    stretched = kind != "none" and factor != 1
    if "rope_freqs.weight" in file.tensors:
        divisors = file.read("rope_freqs.weight").flatten().tolist()
        if stretched or len(divisors) != d_head // 2:
            raise ValueError(
                f"rope_freqs.weight holds {d_head // 2} divisors, and takes the place of scaling by "
                f"a factor; not {len(divisors)} divisors and the factor {factor}"
            )
        return RotaryScaling(kind="factors", factors=tuple(divisors))
    if kind == "yarn":
        return RotaryScaling(
            kind="yarn",
            factor=factor,
            original_n_ctx=original,
            low=keys.take("rope.scaling.yarn_beta_slow", float, 0.0),
            high=keys.take("rope.scaling.yarn_beta_fast", float, 0.0),
            attention_factor=keys.take("rope.scaling.yarn_attn_factor", float, 0.0),
        )
    return RotaryScaling(kind="linear", factor=factor) if stretched else None


def _table(config: TransformerConfig, held: set[str]) -> dict[str, Source]:
    modules = dict(_TOP)
    for layer in range(config.n_layers):
        modules |= {f"blocks.{layer}.{ours}": f"blk.{layer}.{_BLOCK[ours]}" for ours in _BLOCK}
    table = {}
    for ours, theirs in modules.items():
        for leaf in ("weight", "bias"):
            table[f"{ours}.{leaf}"] = Source((f"{theirs}.{leaf}",))
    n_rotated = (config.n_heads + config.n_kv_heads) * config.d_head
    turned = partial(_halves_together, n_rotated, config.d_head)
    convert = turned if config.positions == "rotary" else concatenated
    for ours, source in table.items():
        if ".attn.qkv." in ours:
            apart = tuple(source.keys[0].replace("attn_qkv", part) for part in _QKV_APART)
            table[ours] = Source(source.keys if held.isdisjoint(apart) else apart, convert)
    return table


def _halves_together(n_rotated: int, d_head: int, *qkv: Tensor) -> Tensor:
    """Rows of q, k and v, where those of q's and k's heads are in the order that we rotate in.

    llama.cpp rotates neighbours, 2i with 2i + 1, and its files have q and k permuted to that end; we
    rotate i with i + d_head/2.
    """
    rows = torch.cat(qkv)
    turned = rearrange(
        rows[:n_rotated],
        "(head pair half) ... -> (head half pair) ...",
        half=2,
        pair=d_head // 2,
    )
    return torch.cat([turned, rows[n_rotated:]])
