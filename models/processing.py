"""Other weights, the same probabilities: `fold_norms` and `center`, each of which proves itself."""

from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoints.assemble import Source, assemble
from models.checks import mode
from models.config import TransformerConfig
from models.transformer import Transformer
from models.verification import deviation, random_tokens

Values = dict[str, Callable[[], Tensor]]
"""Parameters by name, each made when it is asked for: a model is never in memory three times."""


def fold_norms(model: Transformer) -> Transformer:
    """A new model whose norms only normalize: what they learned is in the maps that read them.

    `W (gain * x + bias) + b` becomes `(W * gain) x + (W bias + b)`: with `ln1` that is `attn.qkv`, with
    `ln2` `mlp.input` and `mlp.gate`, with `ln_final` the unembedding, which is then tied no more. The
    new config has `norm_learned=False`, and biases where there were norms' biases; `normalized` points
    lose gain and bias. The gains of `qk_norm` stay. A model with `norm_learned=False` is copied.

    Args:
        model: left as it is; the new one has its dtype, device and mode, and memory of its own. In
            half precision the products are rounded.

    Raises:
        ValueError: if there are no norms, if `norm_place` is not `pre`, or if a norm of the
            embeddings is learned.
        RuntimeError: if log-probabilities of random tokens differ by more than may be rounding:
            1e-4 of the largest in float32, 1e-10 in float64, 1e-2 in float16, 1e-1 in bfloat16.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> folded = fold_norms(Transformer(config))
    >>> folded.config.norm_learned, folded.blocks[0].ln1.weight
    (False, None)
    """
    config, values = model.config, _values(model)
    refuse = partial(_require, "fold_norms", config)
    refuse("norm", ("layernorm", "rmsnorm"), "there is nothing to fold")
    if not config.norm_learned:
        return _proven("fold_norms", model, config, values)
    refuse("norm_place", ("pre",), "no linear map alone reads a gain that follows a sublayer")
    refuse("embed_norm", (False,), "no linear map alone reads the stream, which has its gain")
    biased = config.norm == "layernorm" and config.norm_bias
    for norm, linear in _readers(config):
        weight = model.get_parameter(f"{linear}.weight")
        gain = model.get_parameter(f"{norm}.weight")
        values[f"{linear}.weight"] = partial(_scaled, weight, gain)
        if biased:
            shift, bias = model.get_parameter(f"{norm}.bias"), values.get(f"{linear}.bias")
            values[f"{linear}.bias"] = partial(_shifted, weight, shift, bias)
        for kind in ("weight", "bias"):
            values.pop(f"{norm}.{kind}", None)
    changes = {"norm_learned": False, "tied_unembed": config.tied_unembed and not config.final_norm}
    if biased:
        changes["qkv_bias"] = True
        changes["mlp_bias"] = config.mlp_bias or config.mlp != "none"
        changes["unembed_bias"] = config.unembed_bias or config.final_norm
        for layer in range(config.n_layers if config.mlp != "none" else 0):
            # `mlp_bias` is one switch for what goes in and what comes out.
            zeros = partial(model.W_E.new_zeros, config.d_model)
            values.setdefault(f"blocks.{layer}.mlp.output.bias", zeros)
    return _proven("fold_norms", model, config.replace(**changes), values)


def center(model: Transformer) -> Transformer:
    """A new model that writes vectors of mean zero to the residual stream, and gives such logits.

    LayerNorm subtracts the mean over d_model from all that it reads, so what adds to it is without
    effect: it is taken out of token and learned position embeddings and of the weights and biases of
    `attn.output` and `mlp.output`. Sinusoidal positions are not weights, and keep their mean. The
    softmax takes no notice of the mean over the vocabulary: it is taken out of the unembedding's
    weights and bias, but not where `logit_cap` would notice. A tied unembedding becomes one of its own.

    Exact unless dropout is at work, which zeroes single numbers of a vector.

    Args:
        model: left as it is; the new one has its dtype, device and mode, and memory of its own. In
            half precision the differences are rounded, and means are zero up to that.

    Raises:
        ValueError: if not all that reads the stream is a LayerNorm, or all that writes to it a
            linear map: `norm` is not `layernorm`, `norm_place` not `pre`, `final_norm` is False, or a
            norm of the embeddings is learned.
        RuntimeError: as for `fold_norms`.

    >>> from models import TransformerConfig
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> bool(center(Transformer(config)).W_O.mean(-1).abs().max() < 1e-6)
    True
    """
    config, values = model.config, _values(model)
    refuse = partial(_require, "center", config)
    reader = "RMSNorm" if config.norm == "rmsnorm" else "what reads the stream"
    refuse("norm", ("layernorm",), f"{reader} does not subtract the mean")
    refuse("norm_place", ("pre",), "sublayers read the stream's mean, or norms write to it")
    refuse("final_norm", (True,), "the unembedding reads the stream's mean")
    if config.norm_learned:
        refuse("embed_norm", (False,), "its gain and bias write a mean to the stream")
    axes = {"token_embedding": 1, "position_embedding": 1, "attn.output": 0, "mlp.output": 0}
    if not config.logit_cap:
        axes["unembedding"] = 0
    for name in values:
        for end, axis in axes.items():
            if name.rpartition(".")[0].endswith(end):
                values[name] = partial(_without_mean, model.get_parameter(name), axis)
    return _proven("center", model, config.replace(tied_unembed=False), values)


class _Computed:
    """A `Reader` of values; it lends, as some of them are the given model's own."""

    lends = True

    def __init__(self, values: Values) -> None:
        self.values = values

    def keys(self) -> Collection[str]:
        return self.values.keys()

    def read(self, key: str) -> Tensor:
        return self.values[key]()


def _proven(
    function: str, model: Transformer, config: TransformerConfig, values: Values
) -> Transformer:
    """The model of a config and values, once it gave some tokens the given model's probabilities."""
    table = {name: Source((name,)) for name in values}
    device = model.W_E.device
    made = assemble(config, table, _Computed(values), "the new model", device=device)
    tokens = random_tokens(model)
    exactly = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), exactly, mode(model, training=False):
        expected, found = (F.log_softmax(_wide(m(tokens)), -1) for m in (model, made))
    largest, allowed = deviation(found, expected, model.W_E.dtype)
    if not largest <= allowed:  # NaN is not
        raise RuntimeError(
            f"{function} leaves log-probabilities as they are, and here they differ by up to "
            f"{largest:.3g}, where {allowed:.3g} may be rounding in {model.W_E.dtype}: the model does "
            "not compute what its config says, or its weights leave the range of their dtype"
        )
    given = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in made.named_parameters():
        # A bias that is new is trained if its map's weight is.
        like = name if name in given else name.removesuffix("bias") + "weight"
        parameter.requires_grad_(given[like].requires_grad)
    return made.train(model.training)


def _values(model: Transformer) -> Values:
    return {name: p.detach for name, p in model.named_parameters(remove_duplicate=False)}


def _readers(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Each norm, and a linear map that reads it, by their names."""
    for layer in range(config.n_layers):
        yield f"blocks.{layer}.ln1", f"blocks.{layer}.attn.qkv"
        if config.mlp != "none":
            yield f"blocks.{layer}.ln2", f"blocks.{layer}.mlp.input"
        if config.mlp == "gated":
            yield f"blocks.{layer}.ln2", f"blocks.{layer}.mlp.gate"
    if config.final_norm:
        yield "ln_final", "unembedding"


def _scaled(weight: Tensor, gain: Tensor) -> Tensor:
    return (weight * gain).to(weight.dtype)


def _shifted(weight: Tensor, shift: Tensor, bias: Callable[[], Tensor] | None) -> Tensor:
    moved = _wide(weight) @ _wide(shift)
    return (moved if bias is None else moved + _wide(bias())).to(weight.dtype)


def _without_mean(value: Tensor, axis: int) -> Tensor:
    wide = _wide(value)
    return (wide - wide.mean(axis, keepdim=True)).to(value.dtype)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _require(
    function: str, config: TransformerConfig, field: str, allowed: tuple[object, ...], reason: str
) -> None:
    value = getattr(config, field)
    if value not in allowed:
        rule = " or ".join(repr(each) for each in allowed)
        raise ValueError(f"{function} needs {field} to be {rule}, not {value!r}: {reason}")
