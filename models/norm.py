"""LayerNorm and RMSNorm with hook points."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint, Identity
from hooks.base import Component, at_least_float32, is_unwatched
from models.config import TransformerConfig

READ = "what the sublayer reads: the norm's output, gain and bias applied"


class LayerNorm(Component):
    """`(x - mean) / scale * weight + bias`, with `scale = sqrt(variance + eps)` (Ba et al. 2016).

    Args:
        d_model: the size of the normalized axis.
        eps: the number that is added to the variance, whose divisor is `d_model`. Default: 1e-5, as
            in PyTorch.
        learned: whether there is a gain.
        bias: whether there is a bias in addition to the gain.
        meaning: the meaning of the output, for the table of points.
        axis: the name of the normalized axis.

    >>> LayerNorm(2, eps=3.0)(torch.tensor([[[1.0, 3.0]]])).tolist()
    [[[-0.5, 0.5]]]
    """

    centres: ClassVar[bool] = True
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    shape: tuple[int]
    eps: float
    scale: HookPoint
    normalized: HookPoint

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-5,
        learned: bool = True,
        bias: bool = True,
        meaning: str = READ,
        axis: str = "d_model",
    ) -> None:
        super().__init__()
        self.shape = (d_model,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model)) if learned else None
        self.bias = nn.Parameter(torch.zeros(d_model)) if learned and bias else None
        self.scale = HookPoint("batch pos 1", "what the norm divides by")
        self.normalized = HookPoint(f"batch pos {axis}", meaning)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector of each position, normalized."""
        return self.normalized(self.normalize(x))

    def _fused(self, x: Tensor) -> Tensor:
        """Return the normalized vectors, computed by one kernel."""
        return torch.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    @FusedUnlessHooked("scale", fused=_fused)
    def normalize(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Return each vector after the norm. Its divisor passes through the point `scale`."""
        precise = at_least_float32(x)
        weight = self.weight
        if weight is not None and x.dtype == weight.dtype == precise.dtype and is_unwatched(x):
            # This is one kernel instead of seven. It cannot be used with gradients: autograd would
            # not follow its divisor.
            zero = torch.zeros_like(weight)
            normal, _, inverse = torch.native_layer_norm(x, self.shape, weight, zero, self.eps)
            unedited = inverse * self.scale(inverse.reciprocal())
            return torch.addcdiv(zero if self.bias is None else self.bias, normal, unedited)
        centred = precise - precise.mean(-1, keepdim=True)
        normal = centred / self.scale(_root_mean_square(centred, self.eps))
        if self.weight is not None:
            normal = (
                normal * self.weight
                if self.bias is None
                else torch.addcmul(self.bias, normal, self.weight)
            )
        return normal.to(x.dtype)


class RMSNorm(Component):
    """`x / scale * weight`, with `scale = sqrt(mean(x²) + eps)` (Zhang & Sennrich 2019).

    Args:
        d_model: the size of the normalized axis.
        eps: the number that is added to the mean square. Default: 1e-6, as in Llama.
        learned: whether there is a gain.
        meaning: the meaning of the output, for the table of points.

    >>> RMSNorm(2, eps=12.5)(torch.tensor([[[3.0, 4.0]]])).detach()
    tensor([[[0.6000, 0.8000]]])
    """

    centres: ClassVar[bool] = False
    weight: nn.Parameter | None
    shape: tuple[int]
    eps: float
    scale: HookPoint
    normalized: HookPoint

    def __init__(
        self, d_model: int, eps: float = 1e-6, learned: bool = True, meaning: str = READ
    ) -> None:
        super().__init__()
        self.shape = (d_model,)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model)) if learned else None
        self.scale = HookPoint("batch pos 1", "what the norm divides by")
        self.normalized = HookPoint("batch pos d_model", meaning)

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector of each position, normalized."""
        return self.normalized(self.normalize(x))

    def _fused(self, x: Tensor) -> Tensor:
        """Return the normalized vectors, computed by one kernel."""
        return torch.rms_norm(x, self.shape, self.weight, self.eps)

    @FusedUnlessHooked("scale", fused=_fused)
    def normalize(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Return each vector after the norm. Its divisor passes through the point `scale`."""
        precise = at_least_float32(x)
        normal = precise / self.scale(_root_mean_square(precise, self.eps))
        return (normal if self.weight is None else normal * self.weight).to(x.dtype)


class QKNorm(nn.Module):
    """RMSNorm of queries or keys before rotation (Henry et al. 2020; OLMo 2).

    Args:
        n_heads: the number of heads.
        config: the config, which chooses between separate heads and one vector, and gives eps and
            the gain.
    """

    centres: ClassVar[bool] = False
    weight: nn.Parameter | None
    first: int
    eps: float

    def __init__(self, n_heads: int, config: TransformerConfig) -> None:
        super().__init__()
        self.first = -1 if config.qk_norm == "head" else -2
        self.eps = config.norm_eps
        size = config.d_head if config.qk_norm == "head" else n_heads * config.d_head
        self.weight = nn.Parameter(torch.ones(size)) if config.qk_norm_learned else None

    def forward(
        self, x: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Return the normalized vectors."""
        flat = x.flatten(self.first)
        return torch.rms_norm(flat, flat.shape[-1:], self.weight, self.eps).view(x.shape)


def norm(
    config: TransformerConfig, present: bool = True, meaning: str = READ
) -> LayerNorm | RMSNorm | Identity:
    """Return the norm of a config.

    Args:
        config: the config, which chooses the kind of norm.
        present: whether there is a norm. Without it, the result is an identity.
        meaning: the meaning of the output, for the table of points.
    """
    if not present or config.norm == "none":
        return Identity()
    if config.norm == "rmsnorm":
        return RMSNorm(
            config.d_model, config.norm_eps, learned=config.norm_learned, meaning=meaning
        )
    learned, bias = config.norm_learned, config.norm_bias
    return LayerNorm(config.d_model, config.norm_eps, learned=learned, bias=bias, meaning=meaning)


def _root_mean_square(x: Tensor, eps: float) -> Tensor:
    """Return `sqrt(mean(x²) + eps)` along the last axis, whose size becomes 1."""
    # The squared length divided by the size is the mean square, without a tensor of squares.
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
    return (mean_square + eps).sqrt()
