"""Fold norms into weights and centre weights, with a check that the probabilities do not change."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hooks.base import at_least_float32, model_gap, require_kind, without_gradients
from models.checkpoints.assemble import without_values
from models.checks import require
from models.config import TransformerConfig
from models.mode import mode
from models.transformer import Transformer
from models.verification import random_tokens


@without_gradients
def fold_norms(model: Transformer) -> Transformer:
    """Return a new model with the gains and biases of norms folded into linear maps.

    The linear maps that read a norm take in its gain and bias: `W (gain * x + bias) + b` becomes
    `(W * gain) x + (W bias + b)`. `ln1` is folded into `attn.qkv`, `ln2` into `mlp.input` and
    `mlp.gate`, and `ln_final` into the unembedding, which is then untied. The new config has
    `norm_learned=False`, and biases in maps that received the bias of a norm. Values at
    `normalized` lose gain and bias. The gains of `qk_norm` do not change. A norm of the MLP's
    hidden layer is folded into `mlp.output`. A model with `norm_learned=False` is copied.

    Args:
        model: the model, which does not change. The new model has the same dtype, device and mode,
            and memory of its own. In half precision the products are rounded.

    Returns:
        The new model. Its probabilities equal the probabilities of `model` up to rounding.

    Raises:
        ValueError: if there are no norms, if `norm_place` is not `pre`, or if a norm of the
            embeddings is learned.
        RuntimeError: if the processing changes log probabilities of random tokens by more than
            rounding: 1e-4 of the largest in float32, 1e-10 in float64, 1e-2 in float16, 1e-1 in
            bfloat16.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> folded = fold_norms(Transformer(config))
    >>> folded.config.norm_learned, folded.blocks[0].ln1.weight
    (False, None)
    """
    require_kind("model", model, Transformer, words="a Transformer")
    config = model.config
    values = _copied_parameters(model)
    require(config, "norm", config.norm != "none", rule="'layernorm' or 'rmsnorm' to be folded")
    if not config.norm_learned:
        return _proven("fold_norms", model, config=config, values=values)
    rule = "'pre', as maps must read the gain to take it in"
    require(config, "norm_place", config.norm_place == "pre", rule=rule)
    require(config, "embed_norm", not config.embed_norm, rule="False, as its gain is in the stream")
    for norm, linear in _readers(config):
        weight = values[f"{linear}.weight"]
        gain = model.get_parameter(f"{norm}.weight")
        values[f"{linear}.weight"] = weight * gain
        if (offset := getattr(model.get_submodule(norm), "bias", None)) is not None:
            bias = values.get(f"{linear}.bias", weight.new_zeros(()))
            # Do not use `@`: autocast of the caller would round it.
            moved = (at_least_float32(weight) * offset).sum(-1) + at_least_float32(bias)
            values[f"{linear}.bias"] = moved.to(weight.dtype)
        for kind in ("weight", "bias"):
            values.pop(f"{norm}.{kind}", None)
    changes = {"norm_learned": False, "tied_unembed": config.tied_unembed and not config.final_norm}
    for field, part in (
        ("qkv_bias", ".qkv"),
        ("mlp_bias", ".mlp"),
        ("unembed_bias", "unembedding"),
    ):
        changes[field] = any(part in name and name.endswith(".bias") for name in values)
    config = config.replace(**changes)
    for name, parameter in without_values(config).named_parameters():
        # `mlp_bias` switches on all biases of an MLP.
        if name.endswith(".bias"):
            values.setdefault(name, model.W_E.new_zeros(parameter.shape))
    return _proven("fold_norms", model, config=config, values=values)


@without_gradients
def center(model: Transformer) -> Transformer:
    """Return a new model with a residual stream of mean zero, and with centred logits.

    LayerNorm subtracts the mean over d_model of its input, so this mean has no effect. It is
    removed from token and learned position embeddings, and from the weights and biases of
    `attn.output` and `mlp.output`. Sinusoidal positions are not weights, and keep their mean. The
    mean over the vocabulary has no effect on the softmax. It is removed from the weights and the
    bias of the unembedding, unless the config has a `logit_cap`, which depends on the mean. A tied
    unembedding is untied.

    The result is exact, except with active dropout, which zeroes single numbers of a vector.

    Args:
        model: the model, which does not change. The new model has the same dtype, device and mode,
            and memory of its own. In half precision the differences are rounded, and means are zero
            up to rounding.

    Returns:
        The new model. Its probabilities equal the probabilities of `model` up to rounding.

    Raises:
        ValueError: unless only LayerNorms read the stream and only linear maps write to it: if
            `norm` is not `layernorm`, `norm_place` is not `pre`, `final_norm` is False, or a norm
            of the embeddings is learned.
        RuntimeError: if the processing changes log probabilities of random tokens by more than
            rounding: 1e-4 of the largest in float32, 1e-10 in float64, 1e-2 in float16, 1e-1 in
            bfloat16.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> bool(center(Transformer(config)).W_O.mean(-1).abs().max() < 1e-6)
    True
    """
    require_kind("model", model, Transformer, words="a Transformer")
    config = model.config
    values = _copied_parameters(model)
    of_norms = config.norm == "layernorm"
    written = config.embed_norm and config.norm_learned
    require(config, "norm", of_norms, rule="'layernorm', as only LayerNorm subtracts the mean")
    rule = "'pre', as else the stream's mean is read or written"
    require(config, "norm_place", config.norm_place == "pre", rule=rule)
    require(config, "final_norm", config.final_norm, rule="True, as the unembedding reads the mean")
    require(config, "embed_norm", not written, rule="False, as its gain and bias write a mean")
    axes = {"token_embedding": 1, "position_embedding": 1, "attn.output": 0, "mlp.output": 0}
    if not config.logit_cap:
        axes["unembedding"] = 0
    for name, value in values.items():
        for part, axis in axes.items():
            if name.rpartition(".")[0].endswith(part):
                precise = at_least_float32(value)
                values[name] = (precise - precise.mean(axis, keepdim=True)).to(value.dtype)
    return _proven("center", model, config=config.replace(tied_unembed=False), values=values)


def _copied_parameters(model: Transformer) -> dict[str, Tensor]:
    """Return copies of all parameters. A tied weight has one copy for each name."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.clone() for name, parameter in named}


def _proven(
    function: str, model: Transformer, config: TransformerConfig, values: dict[str, Tensor]
) -> Transformer:
    """Return the model of `config` and `values`, after a check of its probabilities.

    Args:
        function: the name of the function that processed the model, for the error.
        model: the original model.
        config: the config of the new model.
        values: the parameters of the new model by name.

    Raises:
        RuntimeError: if the log probabilities of random tokens change by more than rounding.
    """
    processed = without_values(config)
    processed._tokenizer = model._tokenizer
    processed.load_state_dict(values, assign=True)
    tokens = random_tokens(model)
    exactly = torch.autocast(model.W_E.device.type, enabled=False)
    with exactly, mode(model, training=False):
        expected = F.log_softmax(at_least_float32(model(tokens)), -1)
        actual = F.log_softmax(at_least_float32(processed.eval()(tokens)), -1)
    largest, allowed = model_gap(actual, expected, model.W_E.dtype)
    # The comparison is false for NaN.
    if not largest <= allowed:
        raise RuntimeError(
            f"{function} must keep log probabilities within {allowed:.3g}, the rounding of "
            f"{model.W_E.dtype}; got a difference of {largest:.3g}: the model does not compute "
            "what its config says, or its weights overflow their dtype"
        )
    originals = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in processed.named_parameters():
        # A new bias is trainable if the weight of its map is trainable.
        like = name if name in originals else name.removesuffix("bias") + "weight"
        parameter.requires_grad_(originals[like].requires_grad)
    return processed.train(model.training)


def _readers(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield pairs of names: a norm, and a linear map that reads its output."""
    for layer in range(config.n_layers):
        yield f"blocks.{layer}.ln1", f"blocks.{layer}.attn.qkv"
        if config.mlp != "none":
            yield f"blocks.{layer}.ln2", f"blocks.{layer}.mlp.input"
        if config.mlp_norm:
            yield f"blocks.{layer}.mlp.ln", f"blocks.{layer}.mlp.output"
        if config.mlp == "gated":
            yield f"blocks.{layer}.ln2", f"blocks.{layer}.mlp.gate"
    if config.final_norm:
        yield "ln_final", "unembedding"
