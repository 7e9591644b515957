"""Linear maps that always have a readable bias, and dropout."""

from jaxtyping import Float
from torch import Tensor, nn

from hooks import Identity
from hooks.base import Component
from models.config import TransformerConfig


class Linear(Component, nn.Linear):
    """`x weight^T + bias`."""

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros if the map has no bias."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias


def dropout(config: TransformerConfig, present: bool = True) -> nn.Dropout | Identity:
    """Return the dropout of a config.

    The result is an identity if the dropout is not `present`, or if its probability is zero.
    """
    return nn.Dropout(config.dropout) if present and config.dropout else Identity()
