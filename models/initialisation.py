"""Initial weights of a transformer."""

import math

from torch import Tensor, nn

from hooks.base import without_gradients
from models.config import TransformerConfig


@without_gradients
def initialise(model: nn.Module, config: TransformerConfig) -> None:
    """Initialise all weights by `config.init`. Biases become 0 and gains 1."""
    for name, parameter in model.named_parameters():
        part = name.removesuffix(".weight")
        if parameter.ndim == 1:
            parameter.fill_(float(name.endswith("weight")))
        # Queries, keys and values are three matrices, each with its own size.
        elif part.endswith("qkv"):
            n_heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
            for matrix in parameter.split([count * config.d_head for count in n_heads]):
                _draw(matrix, config)
        else:
            # Maps that write to the stream start smaller, because many of them add up (Radford et
            # al. 2019).
            _draw(parameter, config, math.sqrt(2 * config.n_layers) if "output" in part else 1.0)


def _draw(weight: Tensor, config: TransformerConfig, divisor: float = 1.0) -> None:
    """Draw the numbers of one matrix by `config.init`.

    Args:
        weight: the matrix.
        config: the config.
        divisor: the divisor of the standard deviation in GPT-2's initialisation.
    """
    if config.init == "xavier":
        nn.init.xavier_uniform_(weight)
    elif config.init == "kaiming":
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")
    else:
        nn.init.normal_(weight, std=0.02 / (divisor if config.init == "gpt2" else 1.0))
