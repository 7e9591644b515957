"""Linear: an `nn.Linear` that is faster on a CPU while no gradients are recorded."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooks._torch import Component, is_plain, linear_by_onednn

# Smaller matrices stay in the processor's cache, and choosing a kernel costs more than it saves.
LARGE = 2**17


class Linear(Component, nn.Linear):
    """`x weight^T + bias`, like `nn.Linear`.

    On a CPU, large matrices use other kernels while no gradients are recorded. Results with and without
    gradients then differ by rounding: about 1e-6 of the largest value.
    """

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        super().__init__(d_in, d_out, bias)
        self.is_large = d_in * d_out >= LARGE

    def forward(self, x: Float[Tensor, "*axes d_in"]) -> Float[Tensor, "*axes d_out"]:
        """The map applied to each row."""
        if not (self.is_large and is_plain(x, self.weight)):
            return F.linear(x, self.weight, self.bias)
        product = _side_by_side if x.numel() <= 2 * x.shape[-1] else linear_by_onednn
        return product(x, self.weight, self.bias)

    @property
    def offset(self) -> Float[Tensor, " d_out"]:
        """The bias; zeros where there is none."""
        return self.weight.new_zeros(self.out_features) if self.bias is None else self.bias


def _side_by_side(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The map applied to one or two rows, with a part of the matrix for each thread.

    Generation multiplies one row by each matrix. Some BLAS libraries use only one thread for that; here
    all threads work. Where the library uses all threads itself, this costs a few hundredths.
    """
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    parts = torch.get_num_threads()
    whole = len(weight) // parts * parts
    rows = x.reshape(-1, x.shape[-1])
    matrices = weight[:whole].unflatten(0, (parts, -1)).mT
    out = torch.baddbmm(bias[:whole].view(parts, 1, -1), rows.expand(parts, -1, -1), matrices)
    out = out.transpose(0, 1).reshape(*x.shape[:-1], whole)
    if whole == len(weight):
        return out
    return torch.cat([out, F.linear(x, weight[whole:], bias[whole:])], -1)
