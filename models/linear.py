"""Linear maps whose bias can be read also where there is none, and dropout."""

from jaxtyping import Float
from torch import Tensor, nn

from hooks import Identity
from hooks.base import Component
from models.config import TransformerConfig


class Linear(Component, nn.Linear):
    """`x weight^T + bias`."""

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias


def dropout(config: TransformerConfig, present: bool = True) -> nn.Module:
    """The config's dropout, or an identity if it is not `present` or its probability is zero."""
    return nn.Dropout(config.dropout) if present and config.dropout else Identity()
