"""How weights start."""

import math

import torch
from torch import Tensor, nn

from models.attention import Attention
from models.config import TransformerConfig
from models.linear import Linear
from models.mlp import MLP
from models.norm import LayerNorm, QKNorm, RMSNorm


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Draws all weights of a `Transformer` anew, as `config.init` says; biases become 0, gains 1."""
    config: TransformerConfig = model.config  # type: ignore[assignment]  # modules hold anything
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Attention):
            for part in module.qkv.weight.split([heads * module.d_head for heads in module.heads]):
                _draw(part, config)
            _draw(module.output.weight, config, writes=True)
        elif isinstance(module, MLP):
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    _draw(child.weight, config, writes=name == "output")
        elif isinstance(module, LayerNorm | RMSNorm | QKNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        if isinstance(module, Linear | LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if not config.tied_unembed:
        _draw(model.unembedding.weight, config)  # type: ignore[arg-type, union-attr]  # it has one


def _draw(weight: Tensor, config: TransformerConfig, writes: bool = False) -> None:
    """Args: `writes`: whether the map's output is added to the residual stream."""
    if config.init == "xavier":
        nn.init.xavier_uniform_(weight)
    elif config.init == "kaiming":
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")
    else:
        nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * config.n_layers) if writes else 1))
