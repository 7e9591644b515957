"""Causal multi-head attention, with every value on its way named."""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint
from models.config import TransformerConfig


def softmax_in_place(scores: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """The softmax over the last axis, written over `scores` unless autograd needs them.

    A matrix of T² numbers less to allocate: two thirds of the time at T = 1024.
    """
    return torch.softmax(scores, -1, out=None if scores.requires_grad else scores)


class Attention(nn.Module):
    """`softmax(q k^T / sqrt(d_head), over earlier keys) v`, head by head (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.scale = config.d_head**-0.5
        self.query = nn.Linear(config.d_model, config.d_model)
        self.key = nn.Linear(config.d_model, config.d_model)
        self.value = nn.Linear(config.d_model, config.d_model)
        self.output = nn.Linear(config.d_model, config.d_model)
        self.pattern_dropout = nn.Dropout(config.dropout)
        self.output_dropout = nn.Dropout(config.dropout)
        self.q = HookPoint("batch pos head d_head", "queries as they enter the dot product")
        self.k = HookPoint("batch pos kv_head d_head", "keys as they enter the dot product")
        self.v = HookPoint("batch pos kv_head d_head", "values")
        self.scores = HookPoint("batch head query key", "q·k·scale before the mask")
        self.pattern = HookPoint("batch head query key", "softmax of the masked scores over keys")
        self.z = HookPoint("batch pos head d_head", "pattern·v, before the output projection")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What attention adds to the residual stream, from the normalized stream."""
        q = self.q(self.split_heads(self.query(x)))
        k = self.k(self.split_heads(self.key(x)))
        v = self.v(self.split_heads(self.value(x)))
        z = self.z(self.attend(q, k, v))
        return self.output_dropout(self.output(z.flatten(2)))

    def split_heads(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """The same numbers, head by head."""
        return x.unflatten(-1, (self.n_heads, -1))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = self.pattern_dropout.p if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return z.transpose(1, 2)

    @FusedUnlessHooked("scores", "pattern", fused=_fused)
    def attend(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos head d_head"],
        v: Float[Tensor, "batch pos head d_head"],
    ) -> Float[Tensor, "batch pos head d_head"]:
        """What each head reads: [batch, pos, head, d_head]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # batch head pos d_head
        scores = self.scores(q * self.scale @ k.transpose(-1, -2))
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        pattern = self.pattern(softmax_in_place(torch.where(future, -torch.inf, scores)))
        return (self.pattern_dropout(pattern) @ v).transpose(1, 2)

    def _heads_in(self, weight: Tensor) -> Tensor:
        return rearrange(weight, "(head d) model -> head model d", head=self.n_heads)

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """Query projections, a view."""
        return self._heads_in(self.query.weight)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:
        """Key projections, a view."""
        return self._heads_in(self.key.weight)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:
        """Value projections, a view."""
        return self._heads_in(self.value.weight)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projections, a view: `attn_out = sum over heads of z @ W_O + b_O`."""
        return rearrange(self.output.weight, "model (head d) -> head d model", head=self.n_heads)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """Query biases, a view."""
        return rearrange(self.query.bias, "(head d) -> head d", head=self.n_heads)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:
        """Key biases, a view."""
        return rearrange(self.key.bias, "(head d) -> head d", head=self.n_heads)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:
        """Value biases, a view."""
        return rearrange(self.value.bias, "(head d) -> head d", head=self.n_heads)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return self.output.bias
