"""Linear: `nn.Linear`, which a CPU runs faster where no gradients are recorded."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooks._torch import Component, linear_by_onednn, may_use_onednn

# Below it a call of oneDNN costs more than it saves.
LARGE = 2**17


class Linear(Component, nn.Linear):
    """`x weight^T + bias`, as `nn.Linear`.

    Where no gradients are recorded, large matrices are multiplied by oneDNN, so results with and without
    gradients differ by rounding: about 1e-6 of the largest value.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.is_large = d_in * d_out >= LARGE

    def forward(self, x: Float[Tensor, "*axes d_in"]) -> Float[Tensor, "*axes d_out"]:
        """The map of each row."""
        if self.is_large and may_use_onednn(x, self.weight):
            return linear_by_onednn(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
