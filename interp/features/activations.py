"""Nonlinearities of dictionaries: from pre-activations [... feature] to features of the same shape."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

Features = Float[Tensor, "*rows feature"]


class JumpReLU(nn.Module):
    """`pre` where it exceeds a threshold and 0, and 0 elsewhere (Rajamanoharan et al., 2024).

    Args:
        threshold: one for each feature, or one for all.
        relu: whether negative values above a negative threshold become 0.
    """

    threshold: Tensor

    def __init__(
        self, threshold: Float[Tensor, " feature"] | Float[Tensor, ""], relu: bool = True
    ) -> None:
        super().__init__()
        self.relu = relu
        self.register_buffer("threshold", threshold)

    def scaled(self, by: Float[Tensor, " feature"]) -> "JumpReLU":
        """Return one that gives `by` times the features for `by` times the pre-activations."""
        return JumpReLU(self.threshold * by, self.relu)

    def forward(self, pre: Features) -> Features:
        """Return the features."""
        return (pre.relu() if self.relu else pre) * (pre > self.threshold)


class TopK(nn.Module):
    """The `k` largest pre-activations of each row (Gao et al., 2024).

    Args:
        k: how many are kept.
        by: whether `value` or `size` says which are the largest.
        relu: whether the negative ones among them become 0.
    """

    def __init__(self, k: int, by: str = "value", relu: bool = True) -> None:
        super().__init__()
        self.k, self.by, self.relu = k, by, relu

    def extra_repr(self) -> str:
        """The settings, for the printed module."""
        return f"k={self.k}, by={self.by!r}, relu={self.relu}"

    def top(self, pre: Features) -> tuple[Float[Tensor, "*rows k"], Tensor]:
        """Return the kept features of each row and their numbers [... k]."""
        order = pre.abs() if self.by == "size" else pre
        numbers = order.topk(self.k, dim=-1, sorted=False).indices
        kept = pre.gather(-1, numbers)
        return kept.relu() if self.relu else kept, numbers

    def forward(self, pre: Features) -> Features:
        """Return the features."""
        kept, numbers = self.top(pre)
        return torch.zeros_like(pre).scatter(-1, numbers, kept)


class GroupMax(nn.Module):
    """The largest of each of `k` groups of neighbours, where it is positive (sparsify)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def extra_repr(self) -> str:
        """The settings, for the printed module."""
        return f"k={self.k}"

    def forward(self, pre: Features) -> Features:
        """Return the features."""
        groups = pre.relu().unflatten(-1, (self.k, -1))
        kept, numbers = groups.max(-1, keepdim=True)
        return torch.zeros_like(groups).scatter(-1, numbers, kept).flatten(-2)


class Gated(nn.Module):
    """Magnitudes where a gate with the same weights is open (Rajamanoharan et al., 2024).

    Args:
        b_gate: bias of the gate.
        r_mag: logarithm of what a magnitude's weights are multiplied by.
        b_mag: bias of the magnitude.
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
        """Return one that gives `by` times the features for `by` times the pre-activations."""
        return Gated(self.b_gate * by, self.r_mag, self.b_mag * by)

    def forward(self, pre: Features) -> Features:
        """Return the features."""
        return (pre * self.r_mag.exp() + self.b_mag).relu() * (pre + self.b_gate > 0)
