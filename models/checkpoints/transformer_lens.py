"""Make a plain model from TransformerLens' classic weights (`embed.W_E`, `blocks.0.attn.W_Q`).

1. Read the facts that the state dict contains: sizes from shapes, learned norms from keys, rotary
   embeddings and windows from buffers.
2. Add the config. Without a config, some facts are unknown: this is an error, or the default of
   TransformerLens is used with a warning.
3. Translate the facts to a `TransformerConfig` (`lens_config`).
4. Assign every tensor to a parameter (`_lens_rows`), and compare the buffers with the values that
   the model computes (`_check_buffers`).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import agree, file_rounding, float32_rounding, require_kind, warn, without_gradients
from models.checkpoints.assemble import Reader, SourceTable, TensorSource, assemble, expanded
from models.checkpoints.transformer_lens_config import lens_config
from models.config import TransformerConfig
from models.positions import rotary
from models.transformer import Transformer

_BUFFER = re.compile(r"blocks\.\d+\.attn\.(mask|IGNORE|rotary_sin|rotary_cos)")


@without_gradients
def from_transformer_lens(
    state_dict: Mapping[str, Tensor] | nn.Module,
    config: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Return a plain model with the weights of a `HookedTransformer` and equal logits.

    TransformerLens may have folded the gains of norms into other weights, or centred weights. The
    model gets the weights without a change of this. If gains are folded, its config has
    `norm_learned=False`. If the unembedding is centred, a warning says so.

    In a gated MLP, TransformerLens adds `b_in` to the product of the gate and the linear map. Here
    the effect of this bias is added to `b_out` instead, so the value at `mlp.post` is smaller by
    `b_in` than in TransformerLens.

    Args:
        state_dict: a state dict with TransformerLens' classic names, or a `HookedTransformer`,
            which also contains its config and its tokenizer.
        config: TransformerLens' config, its dict, the path of its JSON, or a `TransformerConfig`. A
            dict may omit the fields that shapes and keys determine. With None, the other fields get
            the defaults of TransformerLens, and a warning lists them. If the norms have no weights,
            a config is needed, because the state dict does not show the kind of norm.
        dtype: the dtype of all parameters. Default: the dtype of the state dict.
        device: the device of the parameters. Default: the CPU.

    Returns:
        The model, in evaluation mode, with logits [batch, pos, vocab].

    Raises:
        ValueError: if the config is needed for a field (the error names it), if a field of the
            config is not supported, or if keys, shapes or buffers do not match the config.

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
    require_kind(
        "state_dict",
        state_dict,
        Mapping,
        words="a state dict or a model of TransformerLens",
        call="models.load(path) reads a file of its weights",
    )
    weights = dict(state_dict)
    if not is_transformer_lens(weights):
        raise ValueError(
            "the state dict must have TransformerLens' classic names, such as embed.W_E; got "
            f"{', '.join(list(weights)[:3]) or 'none'} (a TransformerBridge contains a model of "
            "transformers: models.from_hf(bridge.original_model))"
        )
    ours = config if isinstance(config, TransformerConfig) else lens_config(weights, config)
    table = expanded(_lens_rows(ours, weights), ours, weights)
    reader = Reader(weights.keys(), weights.__getitem__, keep=False)
    model = assemble(
        ours,
        table,
        reader=reader,
        where="the state dict",
        ignored=_BUFFER.fullmatch,
        dtype=dtype,
        device=device,
    )
    _check_buffers(model, weights)
    if _is_centred(weights):
        warn(
            "TransformerLens centred these weights: the probabilities are the original model's, "
            "logits less their mean over the vocabulary",
        )
    if tokenizer is not None:
        model.tokenizer = tokenizer
    return model


def is_transformer_lens(weights: Mapping[Any, Any]) -> bool:
    """Return whether a state dict has TransformerLens' classic names."""
    return {"embed.W_E", "unembed.W_U", "blocks.0.attn.W_Q"} <= weights.keys()


def state_dict_in(content: Any, where: str) -> tuple[dict[str, Tensor] | None, Any]:
    """Return TransformerLens' state dict in the content of a file, and its config.

    Training scripts save a state dict alone, or as an entry of a dict. The state dict is None if
    the content has none, and the config is None if it is missing.

    Args:
        content: the content of the file.
        where: the name of the file, for errors.

    Raises:
        ValueError: if the file contains several state dicts.
    """
    if not isinstance(content, Mapping):
        return None, None
    if is_transformer_lens(content):
        return dict(content), None
    state_dicts = {
        key: value
        for key, value in content.items()
        if isinstance(value, Mapping) and is_transformer_lens(value)
    }
    if len(state_dicts) > 1:
        raise ValueError(
            f"{where} must contain one state dict; got {', '.join(map(str, state_dicts))}: "
            "give one entry of torch.load(...) to models.from_transformer_lens"
        )
    config = next((content[name] for name in ("cfg", "config") if content.get(name)), None)
    for weights in state_dicts.values():
        return dict(weights), config
    return None, None


def _lens_rows(config: TransformerConfig, weights: Mapping[str, Tensor]) -> SourceTable:
    """Return TransformerLens' keys for each of our parameters."""
    attn, mlp = "blocks.N.attn", "blocks.N.mlp"
    # If several query heads share a key head, TransformerLens' names of keys and values begin with
    # an underscore.
    shared = "_" if "blocks.0.attn._W_K" in weights else ""
    weights_of_qkv = (f"{attn}.W_Q", f"{attn}.{shared}W_K", f"{attn}.{shared}W_V")
    biases_of_qkv = (f"{attn}.b_Q", f"{attn}.{shared}b_K", f"{attn}.{shared}b_V")
    rows: dict[str, str | TensorSource] = {
        "token_embedding.weight": "embed.W_E",
        "position_embedding.weight": "pos_embed.W_pos",
        f"{attn}.qkv.weight": TensorSource(weights_of_qkv, _joined_weights),
        f"{attn}.qkv.bias": TensorSource(biases_of_qkv, _joined_biases),
        f"{attn}.output.weight": TensorSource(
            (f"{attn}.W_O",),
            lambda W_O: rearrange(W_O, "head d_head d_model -> d_model (head d_head)"),
        ),
        f"{attn}.output.bias": f"{attn}.b_O",
        f"{attn}.q_norm.weight": f"{attn}.q_norm.w",
        f"{attn}.k_norm.weight": f"{attn}.k_norm.w",
        f"{mlp}.input.weight": TensorSource((f"{mlp}.W_in",), _transposed),
        f"{mlp}.input.bias": f"{mlp}.b_in",
        f"{mlp}.output.weight": TensorSource((f"{mlp}.W_out",), _transposed),
        f"{mlp}.output.bias": f"{mlp}.b_out",
        "unembedding.weight": TensorSource(("unembed.W_U",), _transposed),
        "unembedding.bias": "unembed.b_U",
    }
    if config.mlp == "gated":
        # TransformerLens adds `b_in` after the product with the gate, and our MLP before. So set
        # our bias to 0, and add the effect of `b_in` on the output to `b_out`.
        b_in = f"{mlp}.b_in"
        rows[f"{mlp}.gate.weight"] = TensorSource((f"{mlp}.W_gate",), _transposed)
        rows[f"{mlp}.input.bias"] = rows[f"{mlp}.gate.bias"] = TensorSource(
            (b_in,), torch.zeros_like
        )
        rows[f"{mlp}.output.bias"] = TensorSource(
            (f"{mlp}.b_out", b_in, f"{mlp}.W_out"), lambda b_out, b_in, W_out: b_out + b_in @ W_out
        )
    return {**rows, **_norm_rows(weights)}


def _norm_rows(weights: Mapping[str, Tensor]) -> SourceTable:
    """Return TransformerLens' keys for the gains and biases of our norms."""
    attn = "blocks.N.attn"
    mlp = "blocks.N.mlp"
    rows = dict[str, str | TensorSource]()
    norms = {"ln_embed": "embed.ln", "ln_final": "ln_final", f"{mlp}.ln": f"{mlp}.ln"}
    for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
        norms[f"blocks.N.{name}"] = f"blocks.N.{name}"
    for ours, theirs in norms.items():
        # If only some norms have weights, all other norms get the gain 1 and the bias 0. `like` is
        # a tensor with their shape.
        like = f"{mlp}.b_in" if ours == f"{mlp}.ln" else f"{attn}.b_O"
        has = f"{theirs}.w".replace(".N.", ".0.") in weights
        rows[f"{ours}.weight"] = f"{theirs}.w" if has else TensorSource((like,), torch.ones_like)
        rows[f"{ours}.bias"] = f"{theirs}.b" if has else TensorSource((like,), torch.zeros_like)
    return rows


def _joined_weights(*weights: Tensor) -> Tensor:
    """Return weights [head, d_model, d_head] as one weight of a linear map."""
    return torch.cat(
        [rearrange(weight, "head d_model d_head -> (head d_head) d_model") for weight in weights]
    )


def _joined_biases(*biases: Tensor) -> Tensor:
    """Return biases [head, d_head] as one bias of a linear map."""
    return torch.cat([rearrange(bias, "head d_head -> (head d_head)") for bias in biases])


def _transposed(weight: Tensor) -> Tensor:
    """Return a weight with its last two axes exchanged."""
    return weight.mT


def _check_buffers(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Check that the model computes the rotary embeddings and masks that the file contains.

    Raises:
        ValueError: if they differ, because then the config does not belong to the weights.
    """
    config = model.config
    for key in filter(_BUFFER.fullmatch, weights):
        layer = int(key.split(".")[1])
        kind = key.rpartition(".")[2]
        if layer >= config.n_layers or kind == "IGNORE":
            continue
        saved = weights[key]
        n_ctx = min(len(saved), config.n_ctx)
        if kind == "mask":
            columns = torch.arange(n_ctx)
            distance = columns[:, None] - columns
            window = config.windows[layer] or n_ctx
            fits = torch.equal(
                saved[:n_ctx, :n_ctx].cpu().bool(), (distance >= 0) & (distance < window)
            )
            fits |= not config.causal
        else:
            positions = torch.arange(n_ctx)[None]
            rotation = rotary(config, config.windows[layer]).rotation(positions, torch.float64)
            fits = rotation is not None and _same_rotation(
                rotation[kind == "rotary_sin"], saved[:n_ctx]
            )
        if not fits:
            field = "attn_types and window_size" if kind == "mask" else "its rotary fields"
            raise ValueError(
                f"{key} in the state dict must match {field} of the config; it differs"
            )


def _same_rotation(
    expected: Float[Tensor, "1 pos 1 d_rotary"], saved: Float[Tensor, "pos _d"]
) -> bool:
    """Return whether the sines or cosines of a file are equal to the model's, up to rounding."""
    return agree(saved.double().cpu(), expected[0, :, 0], file_rounding())


def _is_centred(weights: Mapping[str, Tensor]) -> bool:
    """Return whether the unembedding was centred over the vocabulary."""
    unembedding = weights["unembed.W_U"].double()
    rounding = float32_rounding() * unembedding.abs().max()
    return bool(unembedding.mean(1).abs().max() < rounding)
