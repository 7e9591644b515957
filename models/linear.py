"""Linear: an `nn.Linear` whose bias can be read also where there is none."""

from jaxtyping import Float
from torch import Tensor, nn

from hooks.shared import Component


class Linear(Component, nn.Linear):
    """`x weight^T + bias`."""

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
