"""The families of Hugging Face checkpoints, with functions for facts that no table can express."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.assemble import concatenated, rotary_of_windows
from models.checkpoints.huggingface.family import (
    FACTS,
    FULL,
    KINDS,
    SLIDING,
    Attributes,
    Family,
    rotary_by_kind,
    rotary_fields,
)
from models.config import TransformerConfig

Fields = Mapping[str, Any]


def windows(
    attributes: Attributes,
    window: int | None,
    types: Sequence[str],
    n_layers: int,
    kinds: tuple[str, str] = KINDS,
    spelled: tuple[str, str] = ("layer_types", "sliding_window"),
) -> dict[str, Any]:
    """Return the window fields of our config.

    Args:
        attributes: the attributes of the config, which make errors.
        window: the number of positions that a query sees in layers with a window.
        types: the kind of attention in each layer.
        n_layers: the number of layers.
        kinds: the names in `types`: for attention without a window, and with a window.
        spelled: the names that the family gives to `types` and `window`, for errors.

    Raises:
        ValueError: if a kind is unknown, if the number of kinds is not the number of layers, or if
            the window is missing.
    """
    if len(types) != n_layers or any(kind not in kinds for kind in types):
        raise attributes.error(spelled[0], types, f"{n_layers} of {' and '.join(kinds)}")
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == kinds[1])
    if not sliding:
        return {}
    if window is None or window < 1:
        raise attributes.error(spelled[1], window, f"at least 1 where there is {kinds[1]}")
    return {"window": window, "window_layers": () if len(sliding) == len(types) else sliding}


def _gpt2(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the scale of dot products: 1 if the config switches the usual scale off."""
    return {"attn_scale": 0.0 if attributes.take("scale_attn_weights", True) else 1.0}


def _bigcode(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the number of key heads, and the scale of dot products as in GPT-2.

    The number of key heads is 1 (multi-query attention), or the number of heads.
    """
    n_kv_heads = 1 if attributes.take("multi_query", True) else fields["n_heads"]
    attributes.only("num_key_value_heads", n_kv_heads)
    return {"n_kv_heads": n_kv_heads, **_gpt2(attributes, fields)}


def _neo(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the windows of GPT-Neo, from the kind of each layer or from periods of kinds."""
    kinds = ("global", "local")
    types = list[str]()
    for period, times in attributes.take("attention_types", None) or [[kinds, 12]]:
        types += [*period] * times
    types = attributes.take("attention_layers", None) or types
    return windows(
        attributes,
        attributes.take("window_size", 256),
        types=types,
        n_layers=fields["n_layers"],
        kinds=kinds,
        spelled=("attention_layers", "window_size"),
    )


def _neox(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the rotary fields of GPT-NeoX, which has other names for two attributes."""
    spelled = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    return rotary_fields(
        attributes, attributes.take("max_position_embeddings", 2048), spelled, fraction=0.25
    )


def _opt(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the place of OPT's norms.

    Raises:
        ValueError: if the embeddings are narrower than the stream.
    """
    d_model = fields["d_model"]
    width = attributes.take("word_embed_proj_dim", None)
    # The embeddings of OPT-350m are narrower than its stream, and a map joins them.
    if width not in (None, d_model):
        raise attributes.error(
            "word_embed_proj_dim",
            width,
            f"hidden_size ({d_model}), because a map from narrower embeddings to the stream is "
            "not supported",
        )
    before = attributes.take("do_layer_norm_before", True)
    removed = attributes.take("_remove_final_layer_norm", False)
    return {"norm_place": "pre" if before else "post", "final_norm": before and not removed}


def _llama(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the rotary fields of a family that rotates whole heads."""
    positions = rotary_fields(attributes, attributes.need("max_position_embeddings"))
    attributes.require_all_rotated(positions["rotary_fraction"])
    return positions


def _two_bases(
    attributes: Attributes,
    fields: Fields,
    period: int,
    thetas: tuple[float, float],
    spelled: tuple[str, str],
) -> dict[str, Any]:
    """Return windows, and the rotary fields of layers without and with a window.

    Args:
        attributes: the attributes of the config.
        fields: the fields of our config so far.
        period: if the config does not list the types of layers, every `period`-th layer has no
            window.
        thetas, spelled: see `rotary_by_kind`.
    """
    n_layers = fields["n_layers"]
    usual = [SLIDING if (layer + 1) % period else FULL for layer in range(n_layers)]
    made = windows(
        attributes,
        attributes.take("sliding_window", 4096),
        types=attributes.take("layer_types", None) or usual,
        n_layers=n_layers,
    )
    n_ctx = attributes.need("max_position_embeddings")
    positions, of_windows = rotary_by_kind(attributes, n_ctx, thetas=thetas, spelled=spelled)
    made |= positions
    return made | rotary_of_windows(made, of_windows)


def _olmo3(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the windows and the rotary fields of OLMo 3: layers with a window are not scaled."""
    spelled = ("rope_theta", "rope_theta")
    return _two_bases(attributes, fields, period=4, thetas=(5e5, 5e5), spelled=spelled)


def _gemma3(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the windows, the rotary fields and the scales of Gemma 3.

    Layers with a window have their own rotary base, and only the other layers are scaled.
    """
    # transformers writes the second name, but reads only the first.
    period = attributes.take("sliding_window_pattern", 6)
    attributes.idle("_sliding_window_pattern")
    spelled = ("rope_theta", "rope_local_base_freq")
    return _scales(attributes, fields) | _two_bases(
        attributes, fields, period=period, thetas=(1e6, 1e4), spelled=spelled
    )


def _scales(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the scales of embeddings and attention scores of Gemma."""
    return {
        "embed_scale": fields["d_model"] ** 0.5,
        "attn_scale": attributes.take("query_pre_attn_scalar", 256) ** -0.5,
    }


def _mistral(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return rotary fields, and a window in all layers unless the config switches it off."""
    window = attributes.take("sliding_window", 4096)
    n_layers = fields["n_layers"]
    types = [FULL if window is None else SLIDING] * n_layers
    return _llama(attributes, fields) | windows(attributes, window, types=types, n_layers=n_layers)


def _qwen(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return windows in layers from `max_window_layers` on, if the config switches them on."""
    has_windows = attributes.take("use_sliding_window", False)
    size = attributes.take("sliding_window", 4096)
    window = size if has_windows else None
    first = attributes.take("max_window_layers", 28)
    n_layers = fields["n_layers"]
    upper = [FULL if window is None or layer < first else SLIDING for layer in range(n_layers)]
    types = attributes.take("layer_types", None) or upper
    return _llama(attributes, fields) | windows(attributes, window, types=types, n_layers=n_layers)


def _gemma2(attributes: Attributes, fields: Fields) -> dict[str, Any]:
    """Return the rotary fields, the windows, and the scales of embeddings and attention scores.

    If the config does not list the types of layers, every second layer has a window, from layer 0
    on.
    """
    n_layers = fields["n_layers"]
    window = attributes.take("sliding_window", 4096)
    attributes.only("sliding_window_size", window)
    types = attributes.take("layer_types", None) or ([SLIDING, FULL] * n_layers)[:n_layers]
    return (
        _llama(attributes, fields)
        | windows(attributes, window, types=types, n_layers=n_layers)
        | _scales(attributes, fields)
    )


def _by_kind(config: TransformerConfig) -> Callable[[Tensor], Tensor]:
    """Return a function that reorders the rows of a joined weight of queries, keys and values.

    In the file, the rows of a head are together: its q, its k, its v. The result has the rows of
    all q, then of all k, then of all v.
    """

    def convert(fused: Tensor) -> Tensor:
        return fused.unflatten(0, (config.n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    return convert


def _by_kind_unless_shared(config: TransformerConfig) -> Callable[..., Tensor]:
    """Return the result of `_by_kind`, or `concatenated` for a model whose query heads share keys.

    Files of such models already have our order: all q, all k, all v.
    """
    return concatenated if config.n_kv_heads < config.n_heads else _by_kind(config)


_CONVERTERS: Mapping[str, Callable[[TransformerConfig], Callable[..., Tensor]]] = {
    "transposed": lambda config: torch.t,
    "by_kind": _by_kind,
    "by_kind_unless_shared": _by_kind_unless_shared,
    "without_two": lambda config: lambda table: table[2:],
    "plus_one": lambda config: lambda stored: stored + 1,
}
_MORE = {
    "gpt2": _gpt2,
    "gpt_bigcode": _bigcode,
    "gpt_neo": _neo,
    "gpt_neox": _neox,
    "opt": _opt,
    "mistral": _mistral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo3": _olmo3,
}
FAMILIES: Mapping[str, Family] = {
    name: Family(facts, _MORE.get(name, _llama), _CONVERTERS) for name, facts in FACTS.items()
}
