"""TransformerLens' classic weights (`embed.W_E`, `blocks.0.attn.W_Q`) as a plain model.

1. Read what the state dict itself says (`_implied`): sizes from shapes, learned norms from their keys, rotation and
   windows from its buffers.
2. Add the config. Without one, questions stay open that no key answers (`_open_questions`): an error, or TransformerLens'
   default and a warning.
3. Translate it to a `TransformerConfig` (`_config`).
4. Put every tensor in its place (`_rows`), and compare the buffers with what the model computes (`_check_buffers`).
"""

import math
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks._torch import without_gradients
from models.checkpoints.assemble import Reader, Source, assemble
from models.checkpoints.huggingface.family import ACTIVATIONS, Attributes, Family, Rows
from models.config import RotaryScaling, TransformerConfig
from models.files import one_error, read_object
from models.transformer import Transformer

# Fields of TransformerLens' config that do not affect logits, and those that do only where another says so.
_BOOKKEEPING = """
    model_name original_architecture from_checkpoint checkpoint_index checkpoint_label_type checkpoint_value
    tokenizer_name tokenizer_prepends_bos default_prepend_bos init_mode init_weights initializer_range seed device
    n_devices n_params dtype use_attn_result use_split_qkv_input use_hook_mlp_in use_attn_in use_hook_tokens
    ungroup_grouped_query_attention trust_remote_code tie_word_embeddings decoder_start_token_id
"""
_SUBORDINATE = """
    NTK_by_parts_factor NTK_by_parts_low_freq_factor NTK_by_parts_high_freq_factor NTK_original_ctx_len
    use_NTK_by_parts_rope use_local_attn window_size attn_types rotary_dim rotary_base rotary_adjacent_pairs
    attn_scale eps final_rms use_normalization_before_and_after experts_per_token parallel_attn_mlp
    relative_attention_max_distance relative_attention_num_buckets
"""
_BUFFER = re.compile(r"blocks\.\d+\.attn\.(mask|IGNORE|rotary_sin|rotary_cos)")
_NORMS: dict[Any, Any] = {
    "LN": "layernorm",
    "LNPre": "layernorm",
    "RMS": "rmsnorm",
    "RMSPre": "rmsnorm",
    None: "none",
}
_POSITIONS = {"standard": "learned", "shortformer": "shortformer", "rotary": "rotary"}

Config = TransformerConfig | Mapping[str, Any] | str | os.PathLike[str]


@without_gradients
def from_transformer_lens(
    state_dict: Mapping[str, Tensor] | nn.Module,
    config: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Return a plain model with the weights of a `HookedTransformer` and equal logits.

    Weights that were folded or centred stay so: folded norms show as `norm_learned=False`, and a warning says that
    weights are centred. TransformerLens adds the `b_in` of a gated MLP after the product, so here it is part of
    `b_out`, and `mlp.post` is less by it.

    Args:
        state_dict: a state dict with TransformerLens' classic names, or the `HookedTransformer`, which has its config
            and its tokenizer with it.
        config: TransformerLens' config, its dict, the path of its JSON, or a `TransformerConfig`. A dict need not have
            what shapes and keys say. None only if norms have weights; TransformerLens' defaults are then
            taken for what no key says, with a warning that lists them.
        dtype, device: as for `load`.

    Raises:
        ValueError: if no key says what the config must (it asks that question); if a field of the config cannot be
            expressed; or if keys, shapes or buffers do not fit the config.

    >>> weights = {"embed.W_E": torch.randn(7, 6), "pos_embed.W_pos": torch.randn(5, 6),
    ...     "unembed.W_U": torch.randn(6, 7), "unembed.b_U": torch.zeros(7)}
    >>> weights |= {f"blocks.0.attn.W_{part}": torch.randn(2, 6, 3) for part in "QKV"}
    >>> weights |= {f"blocks.0.attn.b_{part}": torch.zeros(2, 3) for part in "QKV"}
    >>> weights |= {"blocks.0.attn.W_O": torch.randn(2, 3, 6), "blocks.0.attn.b_O": torch.zeros(6)}
    >>> model = from_transformer_lens(weights, {"normalization_type": None})
    >>> model.config.mlp, model.config.norm, model.config.n_heads
    ('none', 'none', 2)
    """
    tokenizer = None
    if isinstance(state_dict, nn.Module):
        config = getattr(state_dict, "cfg", None) if config is None else config
        tokenizer = getattr(state_dict, "tokenizer", None)
        state_dict = state_dict.state_dict()
    weights = dict(state_dict)
    if not is_transformer_lens(weights):
        raise ValueError(
            "the state dict must have TransformerLens' classic names, such as embed.W_E; got "
            f"{', '.join(list(weights)[:3]) or 'none'} (a TransformerBridge holds a model of transformers: "
            "models.from_hf(bridge.original_model))"
        )
    ours = config if isinstance(config, TransformerConfig) else _config(weights, config)
    table = Family(lambda a: ours, lambda c: _rows(c, weights), "").table(ours, weights)
    reader = Reader(weights.keys(), weights.__getitem__, keep=False)
    model = assemble(ours, table, reader, "the state dict", _is_buffer, dtype, device)
    _check_buffers(model, weights)
    if _is_centred(weights):
        warnings.warn(
            "these weights are centred, as TransformerLens processes them: probabilities are the original model's, "
            "logits less their mean over the vocabulary",
            stacklevel=3,
        )
    if tokenizer is not None:
        model.tokenizer = tokenizer
    return model


def is_transformer_lens(weights: Mapping[Any, Any]) -> bool:
    """Whether a state dict has TransformerLens' classic names."""
    return {"embed.W_E", "unembed.W_U", "blocks.0.attn.W_Q"} <= weights.keys()


def weights_in(held: Any, where: str) -> tuple[dict[str, Tensor] | None, Any]:
    """Return the state dict of TransformerLens in what a file holds, and the config beside it; None where there is none.

    Training scripts save a state dict alone, or as an entry of a dict.

    Raises:
        ValueError: if there are several.
    """
    if not isinstance(held, Mapping):
        return None, None
    if is_transformer_lens(held):
        return dict(held), None
    inner = {k: v for k, v in held.items() if isinstance(v, Mapping) and is_transformer_lens(v)}
    if len(inner) > 1:
        raise ValueError(
            f"{where} must hold one state dict; got {', '.join(map(str, inner))}: give one of torch.load(...) to "
            "models.from_transformer_lens"
        )
    config = next((held[name] for name in ("cfg", "config") if held.get(name)), None)
    return next(((dict(weights), config) for weights in inner.values()), (None, None))


def _is_buffer(key: str) -> bool:
    return _BUFFER.fullmatch(key) is not None


def _config(weights: Mapping[str, Tensor], config: Any) -> TransformerConfig:
    implied = _implied(weights)
    stated: Mapping[str, Any]
    if config is None:
        stated = _defaults(implied)
    elif isinstance(config, str | os.PathLike):
        stated = read_object(Path(config))
    else:
        stated = config if isinstance(config, Mapping) else config.to_dict()
    with one_error("TransformerLens' config"):
        return _translated(Attributes({**implied, **stated}))


def _implied(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of TransformerLens' config that shapes, keys and buffers say."""
    first = "blocks.0"
    layers = {int(key.split(".")[1]) for key in weights if re.match(r"blocks\.\d+\.", key)}
    n_heads, d_model, d_head = weights[f"{first}.attn.W_Q"].shape
    vocab, hidden = weights["embed.W_E"].shape[0], weights.get(f"{first}.mlp.W_in")
    mask, sines = (weights.get(f"{first}.attn.{name}") for name in ("mask", "rotary_sin"))
    fields: dict[str, Any] = {
        "n_layers": max(layers) + 1,
        "d_model": d_model,
        "n_heads": n_heads,
        "d_head": d_head,
        "d_vocab": vocab,
        "d_vocab_out": weights["unembed.W_U"].shape[1],
        "attn_only": hidden is None,
        "gated_mlp": f"{first}.mlp.W_gate" in weights,
        "use_qk_norm": f"{first}.attn.q_norm.w" in weights,
        "use_normalization_before_and_after": f"{first}.ln1_post.w" in weights,
        "post_embedding_ln": "embed.ln.w" in weights,
    }
    if hidden is not None:
        fields["d_mlp"] = hidden.shape[1]
    if f"{first}.ln1.w" in weights:
        fields["normalization_type"] = "LN" if f"{first}.ln1.b" in weights else "RMS"
    if f"{first}.mlp.ln.w" in weights:
        fields["act_fn"] = "solu_ln"
    if f"{first}.attn._W_K" in weights:
        fields["n_key_value_heads"] = len(weights[f"{first}.attn._W_K"])
    if "pos_embed.W_pos" in weights:
        fields["n_ctx"] = len(weights["pos_embed.W_pos"])
    elif mask is not None:
        fields["n_ctx"] = len(mask)
    if sines is not None:
        halves = sines[:, : sines.shape[1] // 2]
        adjacent = not torch.equal(halves, sines[:, sines.shape[1] // 2 :])
        fields |= {"positional_embedding_type": "rotary", "rotary_dim": sines.shape[1]}
        fields["rotary_adjacent_pairs"] = adjacent
    return fields


def _defaults(implied: Mapping[str, Any]) -> dict[str, Any]:
    """TransformerLens' defaults for what nothing says, with a warning.

    Raises:
        ValueError: if there is a question whose answers are equally likely.
    """
    if "normalization_type" not in implied:
        raise ValueError(
            "config must say the normalization_type, as no norm here has weights: 'LNPre', 'RMSPre' or None; got "
            "no config (cfg.to_dict() of the HookedTransformer is best)"
        )
    if "positional_embedding_type" not in implied and "n_ctx" not in implied:
        raise ValueError("config must say the positional_embedding_type and n_ctx; got no config")
    assumed: dict[str, Any] = {"attention_dir": "causal", "eps": 1e-5, "use_attn_scale": True}
    if "positional_embedding_type" not in implied:
        assumed["positional_embedding_type"] = "standard"
    if not implied["attn_only"] and "act_fn" not in implied:
        assumed["act_fn"] = "silu" if implied["gated_mlp"] else "gelu_new"
    said = ", ".join(f"{name}={value!r}" for name, value in assumed.items())
    warnings.warn(
        f"no config: {said} are taken, which the weights do not say; if they are not so, logits are wrong "
        "(config=cfg.to_dict() of the HookedTransformer)",
        stacklevel=5,
    )
    return assumed


def _translated(a: Attributes) -> TransformerConfig:
    """Our config from TransformerLens' fields. Each is known, or refused."""
    norm, d_head = a.need("normalization_type"), a.need("d_head")
    if norm not in _NORMS:
        raise a.error("normalization_type", norm, "LN, LNPre, RMS, RMSPre or None")
    if norm in ("LN", "LNPre"):  # TransformerLens asks for it beside these only
        a.only("final_rms", False)
    a.only("num_experts", None)
    a.only("load_in_4bit", False)
    is_sandwich = norm is not None and a.take("use_normalization_before_and_after", False)
    is_causal = a.take("attention_dir", "causal") == "causal"
    has_qk_norm, mlp, positions = a.take("use_qk_norm", False), _mlp(a), _positions(a)
    embed_norm = a.take("post_embedding_ln", False)
    if embed_norm and (norm != "LN" or positions["positions"] == "learned"):
        rule = "False, but for LN and positions that are not added to the embeddings"
        raise a.error("post_embedding_ln", True, rule)
    divisor = a.take("attn_scale", -1.0) if a.take("use_attn_scale", True) else 1.0
    config = TransformerConfig(
        vocab_size=a.need("d_vocab"),
        vocab_size_out=max(a.take("d_vocab_out", 0), 0),
        n_ctx=a.need("n_ctx"),
        n_layers=a.need("n_layers"),
        n_heads=a.need("n_heads"),
        d_model=a.need("d_model"),
        d_head=d_head,
        n_kv_heads=a.take("n_key_value_heads", None) or 0,
        norm=_NORMS[norm],
        norm_place="sandwich" if is_sandwich else "pre",
        # The norms of what sublayers add have weights always. Beside them those of RMSPre are 1.
        norm_learned=norm in ("LN", "RMS") or (norm == "RMSPre" and is_sandwich),
        norm_eps=a.take("eps", 1e-5) if norm or has_qk_norm or mlp.get("mlp_norm") else 1e-5,
        embed_norm=embed_norm,
        qk_norm="head" if has_qk_norm else "none",
        causal=is_causal,
        attn_scale=1 / divisor if divisor > 0 else 0.0,
        attn_scale_by_layer=a.take("scale_attn_by_inverse_layer_idx", False),
        attn_cap=max(a.take("attn_scores_soft_cap", 0.0), 0.0),
        logit_cap=max(a.take("output_logits_soft_cap", 0.0), 0.0),
        unembed_bias=True,
        tied_unembed=False,
        **mlp,
        **positions,
        **(
            _windows(a) if is_causal else {}
        ),  # TransformerLens masks nothing in the other direction
    )
    a.idle(*f"{_BOOKKEEPING} {_SUBORDINATE}".split())
    a.finish("leave them out of the config if they do not: ")
    return config


def _mlp(a: Attributes) -> dict[str, Any]:
    if a.take("attn_only", False):
        a.idle("d_mlp", "act_fn", "gated_mlp")
        return {"mlp": "none"}
    name, is_gated = a.need("act_fn"), a.take("gated_mlp", False)
    if name == "solu_ln" and is_gated:
        raise a.error(
            "act_fn", name, "another one in a gated MLP, where TransformerLens skips the product"
        )
    activation = "solu" if name in ("solu", "solu_ln") else ACTIVATIONS.get(name)
    if activation is None:
        raise a.error("act_fn", name, f"one of solu, solu_ln, {', '.join(ACTIVATIONS)}")
    return {
        "mlp": "gated" if is_gated else "plain",
        "d_mlp": a.take("d_mlp", None) or 0,
        "activation": activation,
        "mlp_norm": name == "solu_ln",
        "parallel": a.take("parallel_attn_mlp", False),
    }


def _positions(a: Attributes) -> dict[str, Any]:
    kind = a.take("positional_embedding_type", "standard")
    if kind not in _POSITIONS:
        raise a.error("positional_embedding_type", kind, f"one of {', '.join(_POSITIONS)}")
    if kind != "rotary":
        return {"positions": _POSITIONS[kind]}
    d_head, scaling = a.need("d_head"), None
    d_rotary = a.take("rotary_dim", None) or d_head
    fraction = d_rotary / d_head
    if int(d_head * fraction) < d_rotary:  # rounded down, as 30 / 44 of 44
        fraction = math.nextafter(fraction, 1)
    if a.take("use_NTK_by_parts_rope", False):
        scaling = RotaryScaling(
            kind="llama3",
            factor=a.take("NTK_by_parts_factor", 8.0),
            original_n_ctx=a.take("NTK_original_ctx_len", 8192),
            low=a.take("NTK_by_parts_low_freq_factor", 1.0),
            high=a.take("NTK_by_parts_high_freq_factor", 4.0),
        )
    return {
        "positions": "rotary",
        "rotary_theta": a.take("rotary_base", 10_000.0),
        "rotary_fraction": fraction,
        "rotary_pairs": "adjacent" if a.take("rotary_adjacent_pairs", False) else "halves",
        "rotary_scaling": scaling,
    }


def _windows(a: Attributes) -> dict[str, Any]:
    types = a.take("attn_types", None) if a.take("use_local_attn", False) else ()
    layers = tuple(layer for layer, kind in enumerate(types or ()) if kind == "local")
    return {"window": a.need("window_size"), "window_layers": layers} if layers else {}


def _rows(config: TransformerConfig, weights: Mapping[str, Tensor]) -> Rows:
    """TransformerLens' keys by our parameters."""
    attn, mlp = "blocks.N.attn", "blocks.N.mlp"
    shared = "_" if "blocks.0.attn._W_K" in weights else ""  # of key heads that queries share
    weight, bias = (
        tuple(f"{attn}.{name}" for name in (f"{kind}_Q", f"{shared}{kind}_K", f"{shared}{kind}_V"))
        for kind in "Wb"
    )
    rows: dict[str, str | Source] = {
        "token_embedding.weight": "embed.W_E",
        "position_embedding.weight": "pos_embed.W_pos",
        f"{attn}.qkv.weight": Source(weight, _joined_weights),
        f"{attn}.qkv.bias": Source(bias, _joined_biases),
        f"{attn}.output.weight": Source(
            (f"{attn}.W_O",), lambda w: rearrange(w, "head d_head d_model -> d_model (head d_head)")
        ),
        f"{attn}.output.bias": f"{attn}.b_O",
        f"{attn}.q_norm.weight": f"{attn}.q_norm.w",
        f"{attn}.k_norm.weight": f"{attn}.k_norm.w",
        f"{mlp}.input.weight": Source((f"{mlp}.W_in",), _transposed),
        f"{mlp}.input.bias": f"{mlp}.b_in",
        f"{mlp}.output.weight": Source((f"{mlp}.W_out",), _transposed),
        f"{mlp}.output.bias": f"{mlp}.b_out",
        "unembedding.weight": Source(("unembed.W_U",), _transposed),
        "unembedding.bias": "unembed.b_U",
    }
    if config.mlp == "gated":
        b_in = f"{mlp}.b_in"  # added after the product
        rows[f"{mlp}.gate.weight"] = Source((f"{mlp}.W_gate",), _transposed)
        rows[f"{mlp}.input.bias"] = rows[f"{mlp}.gate.bias"] = Source((b_in,), torch.zeros_like)
        rows[f"{mlp}.output.bias"] = Source(
            (f"{mlp}.b_out", b_in, f"{mlp}.W_out"), lambda b_out, b_in, w: b_out + b_in @ w
        )
    places = {"ln_embed": "embed.ln", "ln_final": "ln_final", f"{mlp}.ln": f"{mlp}.ln"}
    places |= {
        f"blocks.N.{name}": f"blocks.N.{name}" for name in ("ln1", "ln1_post", "ln2", "ln2_post")
    }
    for ours, theirs in places.items():
        # A norm without weights beside one with weights has gains of 1.
        like = f"{mlp}.b_in" if ours == f"{mlp}.ln" else f"{attn}.b_O"
        has = f"{theirs}.w".replace(".N.", ".0.") in weights
        rows[f"{ours}.weight"] = f"{theirs}.w" if has else Source((like,), torch.ones_like)
        rows[f"{ours}.bias"] = f"{theirs}.b" if has else Source((like,), torch.zeros_like)
    return rows


def _joined_weights(*weights: Tensor) -> Tensor:
    return torch.cat(
        [rearrange(w, "head d_model d_head -> (head d_head) d_model") for w in weights]
    )


def _joined_biases(*biases: Tensor) -> Tensor:
    return torch.cat([rearrange(bias, "head d_head -> (head d_head)") for bias in biases])


def _transposed(weight: Tensor) -> Tensor:
    return weight.mT


def _check_buffers(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Compare the rotation and the masks in the file with those that the model computes.

    Raises:
        ValueError: if they differ: then the config is not that of the weights.
    """
    config = model.config
    for key in filter(_BUFFER.fullmatch, weights):
        layer, kind = int(key.split(".")[1]), key.rpartition(".")[2]
        if layer >= config.n_layers or kind == "IGNORE":
            continue
        saved = weights[key]
        n_ctx = min(len(saved), config.n_ctx)
        if kind == "mask":
            columns = torch.arange(n_ctx)
            distance = columns[:, None] - columns
            window = config.windows[layer] or n_ctx
            fits = torch.equal(saved[:n_ctx, :n_ctx].cpu(), (distance >= 0) & (distance < window))
            fits |= not config.causal
        else:
            rotation = model.rotary.rotation(torch.arange(n_ctx)[None], torch.float64)
            fits = rotation is not None and _agree(rotation[kind == "rotary_sin"], saved[:n_ctx])
        if not fits:
            field = "attn_types and window_size" if kind == "mask" else "its rotary fields"
            raise ValueError(
                f"{key} in the state dict must be as the config says by {field}; it differs"
            )


def _agree(expected: Float[Tensor, "1 pos 1 d_rotary"], saved: Float[Tensor, "pos _d"]) -> bool:
    expected = expected[0, :, 0]
    # TransformerLens' may have the rounding of half precision.
    return expected.shape == saved.shape and torch.allclose(
        expected, saved.double().cpu(), atol=1e-2
    )


def _is_centred(weights: Mapping[str, Tensor]) -> bool:
    """Whether the unembedding has been centred over the vocabulary."""
    unembedding = weights["unembed.W_U"].double()
    return bool(unembedding.mean(1).abs().max() < 1e-6 * unembedding.abs().max())
