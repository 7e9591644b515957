"""LayerNorm, with what it divides by and what it gives named."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint


class LayerNorm(nn.Module):
    """`(x - mean) / scale * weight + bias`, with `scale = sqrt(variance + eps)` (Ba et al. 2016).

    Args:
        d_model: the size of the normalized axis.
        eps: what is added to the variance, which divides by `d_model`.
    """

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.scale = HookPoint("batch pos 1", "what the norm divides by")
        self.normalized = HookPoint(
            "batch pos d_model", "what the sublayer reads: the norm's output, gain and bias applied"
        )

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The norm of each position's vector."""
        return self.normalized(self.normalize(x))

    def _fused(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    @FusedUnlessHooked("scale", fused=_fused)
    def normalize(self, x: Tensor) -> Tensor:
        """The explicit norm, whose divisor can be seen."""
        centred = x - x.mean(-1, keepdim=True)
        # The squared length over d_model: the variance without a tensor of squares.
        variance = torch.linalg.vector_norm(centred, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = self.scale((variance + self.eps).sqrt())
        return torch.addcmul(self.bias, centred / scale, self.weight)
