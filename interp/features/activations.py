"""Nonlinearities of dictionaries.

They map pre-activations [... feature] to features of the same shape.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

FeatureValues = Float[Tensor, "*rows feature"]


class JumpReLU(nn.Module):
    """The pre-activations above both a threshold and 0, and 0 elsewhere (Rajamanoharan et al.,
    2024).

    Args:
        threshold: one threshold for each feature, or a single threshold for all features.
        relu: whether negative values above a negative threshold are set to 0. Default: True.

    >>> JumpReLU(torch.tensor(0.7))(torch.tensor([3.0, 0.5, -2.0, 1.0]))
    tensor([3., 0., 0., 1.])
    """

    threshold: Tensor
    relu: bool

    def __init__(
        self, threshold: Float[Tensor, " feature"] | Float[Tensor, ""], relu: bool = True
    ) -> None:
        super().__init__()
        self.relu = relu
        self.register_buffer("threshold", threshold)

    def scaled(self, by: Float[Tensor, " feature"]) -> "JumpReLU":
        """Return a nonlinearity that fits pre-activations which are `by` times as large.

        Its features are `by` times the features of this nonlinearity.
        """
        return JumpReLU(self.threshold * by, self.relu)

    def forward(self, pre: FeatureValues) -> FeatureValues:
        """Return the pre-activations above the threshold, and 0 elsewhere."""
        return (pre.relu() if self.relu else pre) * (pre > self.threshold)


class TopK(nn.Module):
    """The `k` largest pre-activations of each row, and 0 elsewhere (Gao et al., 2024).

    Args:
        k: the number of features that are kept in each row.
        by: the order of pre-activations: `value`, or `size`, the absolute value. Default: `value`.
        relu: whether negative values among the `k` largest are set to 0. Default: True.

    >>> TopK(2, by="size", relu=False)(torch.tensor([3.0, 0.5, -2.0, 1.0]))
    tensor([ 3.,  0., -2.,  0.])
    """

    k: int
    by: Literal["value", "size"]
    relu: bool

    def __init__(self, k: int, by: Literal["value", "size"] = "value", relu: bool = True) -> None:
        super().__init__()
        self.k = k
        self.by = by
        self.relu = relu

    def extra_repr(self) -> str:
        """The settings, for the printed module."""
        return f"k={self.k}, by={self.by!r}, relu={self.relu}"

    def top(self, pre: FeatureValues) -> tuple[Float[Tensor, "*rows k"], Tensor]:
        """Return the `k` largest features of each row and their indices, both [... k]."""
        order = pre.abs() if self.by == "size" else pre
        numbers = order.topk(self.k, dim=-1, sorted=False).indices
        largest = pre.gather(-1, numbers)
        return largest.relu() if self.relu else largest, numbers

    def forward(self, pre: FeatureValues) -> FeatureValues:
        """Return the `k` largest pre-activations of each row, and 0 elsewhere."""
        values, numbers = self.top(pre)
        return torch.zeros_like(pre).scatter(-1, numbers, values)


class GroupMax(nn.Module):
    """The largest positive value in each of `k` groups of neighbouring features, and 0 elsewhere.

    At most `k` features are active at each position. The library sparsify trains dictionaries with
    this nonlinearity.

    Args:
        k: the number of groups, which divides the number of features.

    >>> GroupMax(2)(torch.tensor([3.0, 0.5, -2.0, 1.0]))  # two groups of two features
    tensor([3., 0., 0., 1.])
    """

    k: int

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def extra_repr(self) -> str:
        """The settings, for the printed module."""
        return f"k={self.k}"

    def forward(self, pre: FeatureValues) -> FeatureValues:
        """Return the largest pre-activation of each group if it is positive, and 0 elsewhere."""
        groups = pre.relu().unflatten(-1, (self.k, -1))
        values, numbers = groups.max(-1, keepdim=True)
        return torch.zeros_like(groups).scatter(-1, numbers, values).flatten(-2)


class Gated(nn.Module):
    """Magnitudes where a gate is open, and 0 elsewhere (Rajamanoharan et al., 2024).

    The gate and the magnitude share their weights up to a factor for each feature.

    Args:
        b_gate: the bias of the gate.
        r_mag: the logarithm of the factor by which the weights of the magnitude are multiplied.
        b_mag: the bias of the magnitude.

    >>> gated = Gated(b_gate=torch.tensor([-1.0]), r_mag=torch.zeros(1), b_mag=torch.tensor([2.0]))
    >>> gated(torch.tensor([[3.0], [0.5]])).flatten()  # the gate opens above 1
    tensor([5., 0.])
    """

    b_gate: Tensor
    r_mag: Tensor
    b_mag: Tensor

    def __init__(
        self,
        b_gate: Float[Tensor, " feature"],
        r_mag: Float[Tensor, " feature"],
        b_mag: Float[Tensor, " feature"],
    ) -> None:
        super().__init__()
        self.register_buffer("b_gate", b_gate)
        self.register_buffer("r_mag", r_mag)
        self.register_buffer("b_mag", b_mag)

    def scaled(self, by: Float[Tensor, " feature"]) -> "Gated":
        """Return a nonlinearity that fits pre-activations which are `by` times as large.

        Its features are `by` times the features of this nonlinearity.
        """
        return Gated(self.b_gate * by, self.r_mag, self.b_mag * by)

    def forward(self, pre: FeatureValues) -> FeatureValues:
        """Return the magnitudes of the features whose gate is open, and 0 for the others."""
        return (pre * self.r_mag.exp() + self.b_mag).relu() * (pre + self.b_gate > 0)
