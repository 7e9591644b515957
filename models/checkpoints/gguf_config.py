"""Our config from the metadata of a GGUF file, by the tables of gguf_tables.json.

Of the file's other tables, `keys` are the keys of fields that only some architectures have, `top` and `block` the file's
names of our modules, `only` keys without a counterpart in the model, each with the one value that changes nothing,
`without_effect` keys about how a file was made, `beyond` what other architectures have and our config has not, and
`read_by_transformers` those of them whose files transformers 5.24 reads right where rotation is not scaled, and whose models
`attach` takes. It reads Gemma 3 too, but presumes its scale of dot products and no cap.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hooks.base import require_choice
from models.checkpoints.assemble import end_tokens
from models.checkpoints.gguf_file import GGUFFile
from models.config import TransformerConfig
from models.rotary_scaling import RotaryScaling

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What a file does not say about a model of its architecture.

    Attributes:
        fields: fields of our config. Where `KEYS` has a key for one, it is the default.
        root_scale: whether embeddings are multiplied with the root of their size, as Gemma's are.
        largest: of so many layers is the one model of Gemma whose dot products have a scale of another head size; 0 if
            `attn_scale` is as in other architectures.
        tensors: the tensors of modules that have others than in `BLOCK`. Of several the first that the file has; all
            but the first are for parallel blocks, where attention and the MLP may read one norm.
        permuted: whether rows of queries and keys are in llama.cpp's order for rotation.
        period: of so many layers the last has no window, if the file does not say which; 0 means that all have it.
        window_theta: the base of rotation in layers with a window; 0 means that of the others.
        windows_scaled: whether rotation is scaled there as in the others.
        folded: keys of factors without a field in our config, with the modules whose weights are multiplied by the
            factor to a power, and the power.
        only: keys with the only value that our config can express.
        note: for readers of the table.
    """

    fields: Fields = field(default_factory=dict)
    root_scale: bool = False
    largest: int = 0
    tensors: Mapping[str, list[str]] = field(default_factory=dict)
    permuted: bool = False
    period: int = 0
    window_theta: float = 0.0
    windows_scaled: bool = True
    folded: Mapping[str, list[Any]] = field(default_factory=dict)
    only: Fields = field(default_factory=dict)
    note: str = ""

    def from_sizes(self, sizes: Fields) -> dict[str, float]:
        """Fields of our config that follow from sizes."""
        fields = {"embed_scale": sizes["d_model"] ** 0.5} if self.root_scale else {}
        if self.largest:
            is_largest = sizes["n_layers"] == self.largest
            scaled = sizes["d_model"] // sizes["n_heads"] if is_largest else sizes["d_head"]
            fields["attn_scale"] = scaled**-0.5
        return fields


_DATA = json.loads(Path(__file__).with_name("gguf_tables.json").read_text(encoding="utf-8"))
ARCHITECTURES = {name: Architecture(**row) for name, row in _DATA["architectures"].items()}
KEYS: Mapping[str, str] = _DATA["keys"]
TOP: Mapping[str, str] = _DATA["top"]
BLOCK: Mapping[str, list[str]] = _DATA["block"]
QKV_APART = ("attn_q", "attn_k", "attn_v")
ONLY: Fields = _DATA["only"]
WITHOUT_EFFECT = frozenset(_DATA["without_effect"])
BEYOND: Mapping[str, list[str]] = _DATA["beyond"]
READ_BY_TRANSFORMERS: list[str] = _DATA["read_by_transformers"]


def gguf_config(file: GGUFFile, name: str) -> tuple[TransformerConfig, dict[str, float]]:
    """The config of a file, and the factors by which the weights of some modules are multiplied.

    Args:
        file: a whole model.
        name: its architecture.

    Raises:
        KeyError: if a key is missing.
        ValueError: if our config cannot express the model; the message names the key or the tensor.
    """
    require_choice("general.architecture", name, ARCHITECTURES)
    architecture = ARCHITECTURES[name]
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
    fields = {**sizes, **architecture.fields, **architecture.from_sizes(sizes)}
    fields |= {ours: keys.pop(KEYS[ours], fields[ours]) for ours in KEYS if ours in fields}
    fields |= _windows(keys, architecture, fields.get("window"), n_layers)
    if fields.get("positions") == "rotary":
        fields["rotary_theta"] = keys.pop("rope.freq_base", 10_000.0)
        fields["rotary_scaling"] = _scaling(keys, file, sizes["n_ctx"])
        if not architecture.permuted:
            fields["rotary_fraction"] = keys.pop("rope.dimension_count", d_head) / d_head
        _check_one_rotation(name, keys, fields)
    rms = "rms_" if fields.get("norm") == "rmsnorm" else ""
    fields["norm_eps"] = keys.pop(f"attention.layer_norm_{rms}epsilon")
    factors: dict[str, float] = {}
    for key, (modules, power) in architecture.folded.items():
        factor = keys.pop(key, 1.0) or 1.0  # in llama.cpp 0 is no factor
        factors |= dict.fromkeys(modules, factor**power)
    only = {"attention.value_length": d_head, "rope.dimension_count": d_head}
    only |= {"block_count": n_layers, **architecture.only}
    _refuse_left(name, keys, {**ONLY, **only})
    # The ends of a text, of a turn and of a message: a chat model may write any of them.
    ends = [file.metadata(f"tokenizer.ggml.eo{which}_token_id").get("") for which in "stm"]
    fields["eos_token_ids"] = end_tokens(ends, vocab_size)
    fields |= _from_tensors(file, fields)
    return TransformerConfig(**fields), factors


def _windows(
    keys: dict[str, Any], architecture: Architecture, window: int | None, n_layers: int
) -> dict[str, Any]:
    """The window fields of an architecture whose models may have windows."""
    if window is None:
        return {}
    pattern = keys.pop("attention.sliding_window_pattern", architecture.period)
    if isinstance(pattern, bool):  # the same in all layers
        pattern = [pattern] * n_layers
    elif isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layers)]
    if len(pattern) != n_layers:
        rule = f"one value or {n_layers}, one for each layer; got {len(pattern)}"
        raise ValueError(f"attention.sliding_window_pattern must be {rule}")
    layers = tuple(layer for layer, windowed in enumerate(pattern) if windowed)
    if not window or not layers:
        return {"window": 0}
    return {"window_layers": () if all(pattern) else layers}


def _check_one_rotation(name: str, keys: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Refuses layers with a window that rotate otherwise than the others: our config has one rotation."""
    architecture, theta = ARCHITECTURES[name], fields["rotary_theta"]
    stated = keys.pop("rope.freq_base_swa", architecture.window_theta or theta)
    if not fields.get("window"):
        return
    if stated != theta:
        raise ValueError(
            f"{name}.rope.freq_base_swa must be {theta}, as of all layers; got {stated}"
        )
    if fields["rotary_scaling"] and not architecture.windows_scaled:
        got = f"{fields['rotary_scaling'].kind}, and layers with a window, which are not scaled"
        raise ValueError(f"{name}.rope.scaling.type must be 'none' with windows; got {got}")


def _refuse_left(name: str, keys: dict[str, Any], only: Mapping[str, Any]) -> None:
    """Refuses keys that are unknown, or have another value than the `only` one that can be expressed."""
    for key, value in only.items():
        if (stated := keys.pop(key, value)) != value:
            raise ValueError(f"{name}.{key} must be {value}; got {stated}")
    if left := sorted(f"{name}.{key}" for key in keys.keys() - WITHOUT_EFFECT):
        got = f"{', '.join(left)}; to load the model without them: ignore={left}"
        raise ValueError(f"keys of an architecture must be known; got {got}")


def _from_tensors(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, bool]:
    """The choices that only the tensors show: the biases, and whether the embedding is the unembedding.

    Raises:
        ValueError: if there are norms that models of the architecture have in another form than ours.
    """
    ends = {name.split(".", 2)[-1] for name in file.shapes}
    if "attn_q_norm.weight" in ends and "qk_norm" not in fields:
        raise ValueError("queries must have no norms in this architecture; got attn_q_norm.weight")
    pair, rotary = ("output.weight", "token_embd.weight"), fields.get("positions") == "rotary"
    # Converters write GPT-2's embedding again as the unembedding. Two that are rounded apart are two: each is used as it is.
    twice = pair[0] in file.shapes and not rotary and torch.equal(*map(file.read, pair))
    return {
        "tied_unembed": twice or pair[0] not in file.shapes,
        "qkv_bias": not ends.isdisjoint({f"{part}.bias" for part in ("attn_qkv", *QKV_APART)}),
        "out_bias": "attn_output.bias" in ends,
        "unembed_bias": "output.bias" in file.shapes,
        "mlp_bias": not ends.isdisjoint({"ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}),
    }


def _scaling(keys: dict[str, Any], file: GGUFFile, n_ctx: int) -> RotaryScaling | None:
    kind = keys.pop("rope.scaling.type", "linear")  # llama.cpp's default
    older = keys.pop("rope.scale_linear", 1.0)
    factor = keys.pop("rope.scaling.factor", older) or 1.0
    original = keys.pop("rope.scaling.original_context_length", n_ctx)
    stretched = kind != "none" and factor != 1
    if "rope_factors_long.weight" in file.shapes:
        rule = "rope_factors_long.weight must not be there: frequencies that change with the length"
        raise ValueError(f"{rule} (LongRoPE) cannot be expressed; got {original} and longer")
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
