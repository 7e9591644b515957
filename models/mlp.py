"""The MLPs, plain and gated."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookPoint, Identity
from hooks.base import Component, require_kind
from models.checks import require
from models.config import TransformerConfig
from models.linear import Linear, dropout
from models.norm import LayerNorm
from models.weights import NamedWeights


def _solu(x: Tensor) -> Tensor:
    """Return `x * softmax(x)`, with the softmax over the last axis (Elhage et al. 2022)."""
    return x * torch.softmax(x, -1)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "solu": _solu,
}


class MLP(NamedWeights, Component):
    """`activation(x W_in + b_in) W_out + b_out`. `mlp_of` builds the class for a config.

    Args:
        config: sizes and choices.

    Raises:
        ValueError: if the config has no MLP.

    >>> sizes = dict(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> config = TransformerConfig(**sizes, mlp="gated")
    >>> type(mlp_of(config)).__name__
    'GatedMLP'
    """

    activation: Callable[[Tensor], Tensor]
    input: Linear
    output: Linear
    hidden_dropout: nn.Dropout | Identity
    output_dropout: nn.Dropout | Identity
    pre: HookPoint
    post: HookPoint

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        require_kind("config", config, TransformerConfig, words="a TransformerConfig")
        require(config, "mlp", config.mlp != "none", rule="'plain' or 'gated' for an MLP")
        self.activation = ACTIVATIONS[config.activation]
        self.input = Linear(config.d_model, config.d_mlp, config.mlp_bias)
        self.output = Linear(config.d_mlp, config.d_model, config.mlp_bias)
        self.hidden_dropout = dropout(config, config.dropout_place == "hidden")
        self.output_dropout = dropout(config, config.dropout_place == "output")
        self.pre = HookPoint("batch pos d_mlp", "before the nonlinearity")
        self.post = HookPoint("batch pos d_mlp", "after the nonlinearity")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors that the MLP adds to the residual stream."""
        hidden = self.post(self.activation(self.pre(self.input(x))))
        return self.output_dropout(self.output(self.hidden_dropout(hidden)))

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """Input weights, a view."""
        return self.input.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Output weights, a view."""
        return self.output.weight.T

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"]:
        """Input biases."""
        return self.input.offset

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output biases."""
        return self.output.offset


class NormedMLP(MLP):
    """`norm(activation(x W_in + b_in)) W_out + b_out` (Elhage et al. 2022).

    The norm is a LayerNorm of the hidden layer.

    >>> sizes = dict(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> config = TransformerConfig(**sizes, mlp_norm=True)
    >>> mlp, x = NormedMLP(config), torch.randn(1, 3, 4)
    >>> hidden = mlp.ln(mlp.activation(mlp.input(x)))
    >>> torch.allclose(mlp(x), mlp.output(hidden), atol=1e-6)
    True
    """

    mid: HookPoint
    ln: LayerNorm

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.mid = HookPoint("batch pos d_mlp", "after the nonlinearity, before the norm")
        learned, bias = config.norm_learned, config.norm_bias
        meaning = "the norm of the hidden layer, gain and bias applied"
        self.ln = LayerNorm(
            config.d_mlp, config.norm_eps, learned=learned, bias=bias, meaning=meaning, axis="d_mlp"
        )
        self.post.meaning = "what the output map reads: the normalized hidden layer"

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors that the MLP adds to the residual stream."""
        hidden = self.mid(self.activation(self.pre(self.input(x))))
        return self.output_dropout(self.output(self.hidden_dropout(self.post(self.ln(hidden)))))


class GatedMLP(MLP):
    """`(activation(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out` (Shazeer 2020).

    >>> sizes = dict(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> config = TransformerConfig(**sizes, mlp="gated")
    >>> mlp, x = GatedMLP(config), torch.randn(1, 3, 4)
    >>> hidden = mlp.activation(mlp.gate(x)) * mlp.input(x)
    >>> torch.allclose(mlp(x), mlp.output(hidden), atol=1e-6)
    True
    """

    gate: Linear
    linear: HookPoint

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.gate = Linear(config.d_model, config.d_mlp, config.mlp_bias)
        self.linear = HookPoint("batch pos d_mlp", "what the gate is multiplied with")
        self.pre.meaning = "the gate before the nonlinearity"
        self.post.meaning = "the gate after the nonlinearity, times linear"

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors that the MLP adds to the residual stream."""
        gate = self.activation(self.pre(self.gate(x)))
        hidden = self.post(gate * self.linear(self.input(x)))
        return self.output_dropout(self.output(self.hidden_dropout(hidden)))

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        """Gate weights, a view."""
        return self.gate.weight.T

    @property
    def b_gate(self) -> Float[Tensor, " d_mlp"]:
        """Gate biases."""
        return self.gate.offset


def mlp_of(config: TransformerConfig) -> MLP:
    """Return the MLP for a config."""
    if config.mlp == "gated":
        return GatedMLP(config)
    return NormedMLP(config) if config.mlp_norm else MLP(config)
