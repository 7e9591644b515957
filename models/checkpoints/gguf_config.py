"""Make a `TransformerConfig` from the metadata of a GGUF file, with the tables of gguf_tables.json.

The tables are:

- `keys`: the keys of fields that only some architectures have;
- `top` and `block`: the name of each of our modules in GGUF files;
- `only`: keys that our config cannot express, each with the one value that has no effect;
- `without_effect`: keys that do not change the logits;
- `beyond`: parts of other architectures that our config cannot express;
- `read_by_transformers`: architectures of `beyond` whose files transformers 5.24 reads correctly if
  rotary embeddings are not scaled, and whose models `attach` supports. transformers also reads
  Gemma 3, but assumes a scale of dot products and no cap.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hooks.base import require_choice
from models.checkpoints.assemble import end_tokens, rotary_of_windows
from models.checkpoints.gguf_file import GGUFFile
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase, RotaryScaling


@dataclass(frozen=True)
class Architecture:
    """Facts about an architecture that its files do not contain.

    Attributes:
        fields: fields of our config. If `KEYS` has a key for a field, the value here is the
            default.
        root_scale: whether embeddings are multiplied by the square root of their size, as in Gemma.
        largest: the number of layers of the largest Gemma model of this architecture. Its dot
            products are scaled by `d_model / n_heads` instead of `d_head`. 0 for other
            architectures.
        tensors: names of tensors that differ from `BLOCK_TENSORS`, by our module. A module may have
            several names, of which the first one that is in the file counts. In a model whose
            blocks are not parallel, only the first name of the list is allowed. In parallel blocks,
            attention and the MLP may read one norm, and its name is the second one.
        permuted: whether the rows of queries and keys are in llama.cpp's order for rotary
            embeddings.
        period: every `period`-th layer has no window, unless the file says which layers have
            windows; 0 if all layers have a window.
        window_theta: the rotary base in layers with a window; 0 if it equals the base of the other
            layers.
        windows_scaled: whether the scaling of rotary embeddings also applies in layers with a
            window.
        folded: keys of factors that have no field in our config. Each key has the modules whose
            weights are multiplied by a power of the factor, and the power.
        only: keys, each with the only value that our config can express.
        note: a remark for people who read the table. No code uses it.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    root_scale: bool = False
    largest: int = 0
    tensors: Mapping[str, list[str]] = field(default_factory=dict)
    permuted: bool = False
    period: int = 0
    window_theta: float = 0.0
    windows_scaled: bool = True
    folded: Mapping[str, list[Any]] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    def from_sizes(self, sizes: Mapping[str, Any]) -> dict[str, float]:
        """Return the fields of our config that this architecture computes from its sizes.

        They are the scale of embeddings and the scale of dot products.
        """
        fields = {"embed_scale": sizes["d_model"] ** 0.5} if self.root_scale else {}
        if self.largest:
            is_largest = sizes["n_layers"] == self.largest
            scaled = sizes["d_model"] // sizes["n_heads"] if is_largest else sizes["d_head"]
            fields["attn_scale"] = scaled**-0.5
        return fields


_DATA = json.loads(Path(__file__).with_name("gguf_tables.json").read_text(encoding="utf-8"))
ARCHITECTURES: Mapping[str, Architecture] = {
    name: Architecture(**facts) for name, facts in _DATA["architectures"].items()
}
KEYS: Mapping[str, str] = _DATA["keys"]
TOP_TENSORS: Mapping[str, str] = _DATA["top"]
BLOCK_TENSORS: Mapping[str, list[str]] = _DATA["block"]
QKV_APART = ("attn_q", "attn_k", "attn_v")
ONLY: Mapping[str, Any] = _DATA["only"]
WITHOUT_EFFECT = frozenset(_DATA["without_effect"])
BEYOND: Mapping[str, list[str]] = _DATA["beyond"]
READ_BY_TRANSFORMERS: Sequence[str] = _DATA["read_by_transformers"]


def gguf_config(file: GGUFFile, name: str) -> tuple[TransformerConfig, dict[str, float]]:
    """Return the config of a file, and the factors that multiply the weights of some modules.

    Args:
        file: a file with a whole model.
        name: the architecture of the model.

    Raises:
        KeyError: if a key is missing.
        ValueError: if our config cannot express the model; the error names the key or the tensor.
    """
    require_choice("general.architecture", name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    keys = _metadata(file, name)
    sizes = _sizes(keys, file)
    fields = {**sizes, **architecture.fields, **architecture.from_sizes(sizes)}
    for ours, key in KEYS.items():
        if ours in fields:
            fields[ours] = keys.pop(key, fields[ours])
    n_layers = sizes["n_layers"]
    fields |= _windows(keys, architecture, window=fields.get("window"), n_layers=n_layers)
    if fields.get("positions") == "rotary":
        fields |= _rotary(keys, file, architecture=architecture, sizes=sizes)
        window_base = _window_base(keys, architecture, fields)
        fields |= rotary_of_windows(fields, window_base)
    rms = "rms_" if fields.get("norm") == "rmsnorm" else ""
    fields["norm_eps"] = keys.pop(f"attention.layer_norm_{rms}epsilon")
    factors = _factors(keys, architecture)
    only = {
        **ONLY,
        "attention.value_length": sizes["d_head"],
        "rope.dimension_count": sizes["d_head"],
        "block_count": n_layers,
        **architecture.only,
    }
    _refuse_unknown(name, keys, only)
    # A chat model may end its answer with the token for the end of a text, of a turn or of a
    # message.
    ends = [file.metadata(f"tokenizer.ggml.eo{letter}_token_id").get("") for letter in "stm"]
    fields["eos_token_ids"] = end_tokens(ends, sizes["vocab_size"])
    fields |= _from_tensors(file, fields)
    return TransformerConfig(**fields), factors


def _metadata(file: GGUFFile, name: str) -> dict[str, Any]:
    """Return the values of an architecture in a file, by key.

    An array has one value for each layer. If all its values are equal, this value is returned.
    """
    return {
        key: value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        for key, value in file.metadata(f"{name}.").items()
    }


def _sizes(keys: dict[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Return the sizes of a model by the fields of our config, and remove their keys."""
    n_heads = keys.pop("attention.head_count")
    d_model = keys.pop("embedding_length")
    d_head = keys.pop("attention.key_length", d_model // max(n_heads, 1))
    return {
        "vocab_size": keys.pop("vocab_size", file.shapes["token_embd.weight"][0]),
        "n_ctx": keys.pop("context_length"),
        "n_layers": len({key.split(".")[1] for key in file.shapes if key.startswith("blk.")}),
        "n_heads": n_heads,
        "n_kv_heads": keys.pop("attention.head_count_kv", n_heads),
        "d_model": d_model,
        "d_head": d_head,
        "d_mlp": keys.pop("feed_forward_length"),
    }


def _rotary(
    keys: dict[str, Any], file: GGUFFile, architecture: Architecture, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the rotary fields of our config, and remove their keys."""
    fields = {
        "rotary_theta": keys.pop("rope.freq_base", 10_000.0),
        "rotary_scaling": _scaling(keys, file, sizes["n_ctx"]),
    }
    if not architecture.permuted:
        d_head = sizes["d_head"]
        fields["rotary_fraction"] = keys.pop("rope.dimension_count", d_head) / d_head
    return fields


def _factors(keys: dict[str, Any], architecture: Architecture) -> dict[str, float]:
    """Return the factors that multiply the weights of modules, and remove their keys."""
    factors: dict[str, float] = {}
    for key, (modules, power) in architecture.folded.items():
        # llama.cpp ignores a factor of 0.
        factor = keys.pop(key, 1.0) or 1.0
        factors |= dict.fromkeys(modules, factor**power)
    return factors


def _windows(
    keys: dict[str, Any], architecture: Architecture, window: int | None, n_layers: int
) -> dict[str, Any]:
    """Return the window fields of our config, which say which layers have a window.

    The result is empty for an architecture without windows.

    Args:
        keys: the keys of the file. The key of the pattern is removed.
        architecture: the architecture.
        window: the size of windows; None for an architecture without windows.
        n_layers: the number of layers.
    """
    if window is None:
        return {}
    pattern = keys.pop("attention.sliding_window_pattern", architecture.period)
    # A single boolean holds for all layers.
    if isinstance(pattern, bool):
        pattern = [pattern] * n_layers
    elif isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layers)]
    if len(pattern) != n_layers:
        rule = f"one value or {n_layers}, one for each layer; got {len(pattern)}"
        raise ValueError(f"attention.sliding_window_pattern must be {rule}")
    layers = tuple(layer for layer, has_window in enumerate(pattern) if has_window)
    if not window or not layers:
        return {"window": 0}
    return {"window_layers": () if all(pattern) else layers}


def _window_base(
    keys: dict[str, Any], architecture: Architecture, fields: Mapping[str, Any]
) -> RotaryBase:
    """Return the rotary base and scaling of layers with a window, and remove the key of the base.

    Args:
        keys: the keys of the file.
        architecture: the architecture.
        fields: the fields of our config for layers without a window.
    """
    theta = fields["rotary_theta"]
    return RotaryBase(
        theta=keys.pop("rope.freq_base_swa", architecture.window_theta or theta),
        scaling=fields["rotary_scaling"] if architecture.windows_scaled else None,
    )


def _refuse_unknown(name: str, keys: dict[str, Any], only: Mapping[str, Any]) -> None:
    """Check the keys that no field was read from.

    Args:
        name: the architecture.
        keys: the remaining keys. The keys of `only` are removed.
        only: keys, each with the only value that our config can express.

    Raises:
        ValueError: naming the keys.
    """
    for key, value in only.items():
        if (stated := keys.pop(key, value)) != value:
            raise ValueError(f"{name}.{key} must be {value}; got {stated}")
    if unknown := sorted(f"{name}.{key}" for key in keys.keys() - WITHOUT_EFFECT):
        got = f"{', '.join(unknown)}; to load the model without them: ignore={unknown}"
        raise ValueError(f"every key of the architecture must be known; got {got}")


def _from_tensors(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fields that only the tensors show: biases, and whether the embeddings are tied.

    Raises:
        ValueError: if the file contains norms of queries, and the table of this architecture does
            not say how the model computes them.
    """
    ends = {name.split(".", 2)[-1] for name in file.shapes}
    if "attn_q_norm.weight" in ends and "qk_norm" not in fields:
        raise ValueError("queries of this architecture must have no norms; got attn_q_norm.weight")
    has_unembedding = "output.weight" in file.shapes
    # Converters write the embedding of GPT-2 a second time, as the unembedding. If the two copies
    # were quantized to different values, they are different weights, and each is used as it is.
    is_copy = (
        has_unembedding
        and fields.get("positions") != "rotary"
        and torch.equal(file.read("output.weight"), file.read("token_embd.weight"))
    )
    return {
        "tied_unembed": is_copy or not has_unembedding,
        "qkv_bias": not ends.isdisjoint({f"{part}.bias" for part in ("attn_qkv", *QKV_APART)}),
        "out_bias": "attn_output.bias" in ends,
        "unembed_bias": "output.bias" in file.shapes,
        "mlp_bias": not ends.isdisjoint({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
    }


def _scaling(keys: dict[str, Any], file: GGUFFile, n_ctx: int) -> RotaryScaling | None:
    """Return the scaling of rotary embeddings, and remove its keys; None without scaling.

    Raises:
        ValueError: if our config cannot express the scaling.
    """
    # "linear" is the default of llama.cpp.
    kind = keys.pop("rope.scaling.type", "linear")
    older = keys.pop("rope.scale_linear", 1.0)
    factor = keys.pop("rope.scaling.factor", older) or 1.0
    original = keys.pop("rope.scaling.original_context_length", n_ctx)
    has_factor = kind != "none" and factor != 1
    if "rope_factors_long.weight" in file.shapes:
        rule = "rope_factors_long.weight must not be there: frequencies that change with the length"
        raise ValueError(f"{rule} (LongRoPE) are not supported; got {original} and longer")
    if "rope_freqs.weight" in file.shapes:
        divisors = tuple(file.read("rope_freqs.weight").flatten().tolist())
        if has_factor:
            raise ValueError(
                f"rope_freqs.weight must be the only scaling; got also the factor {factor}"
            )
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
    return RotaryScaling(kind="linear", factor=factor) if has_factor else None
