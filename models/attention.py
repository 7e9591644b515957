"""Causal attention, as a function of q, k and v and as a module with hook points."""

from functools import partial
from typing import ClassVar

from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint, Identity
from hooks.base import Component, require_kind
from hooks.shared import is_listened_to
from models.checks import should_read
from models.config import TransformerConfig
from models.dot_product import SoftCap, require_room_for_scores, softmax
from models.kernels import by_blocks, fused
from models.linear import Linear, dropout
from models.norm import QKNorm
from models.positions import NoRotation, Rotary, rotary
from models.running.context import Context, ContextNeeds, ContextOrMask, make_context
from models.running.masks import Visible, masked
from models.weights import AttentionWeights


class Attention(AttentionWeights, Component):
    """Causal attention, `softmax(scale q k^T) v` in each head (Vaswani et al. 2017).

    One linear map computes queries, keys and values. `n_heads / n_kv_heads` query heads share a key
    head. `attention_of` builds the class for a config. Outside a model, weights are initialised
    like the weights of `nn.Linear`; a `Transformer` initialises them by `init`.

    The point `scores` is before the mask, so the scores of later keys are not zero.
    `interp.svd_targets` returns QKᵀ with zeros instead.

    Args:
        config: sizes and choices.
        layer: the index of the block.

    >>> import torch
    >>> from models.dot_product import causal_mask
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> attention, x = Attention(config), torch.randn(1, 3, 4)
    >>> torch.allclose(attention(x), attention(x, causal_mask(3)), atol=1e-6)
    True
    """

    acts_through: ClassVar[str] = "z"
    """The point through which all other points change the output; see `hooks.replay.early_ends`."""

    layer: int
    window: int
    is_causal: bool
    all_heads: int
    scale: float
    q_norm: QKNorm | Identity
    k_norm: QKNorm | Identity
    rotary: Rotary | NoRotation
    cap: SoftCap | Identity
    pattern_dropout: nn.Dropout
    output_dropout: nn.Dropout | Identity
    q: HookPoint
    k: HookPoint
    v: HookPoint
    scores: HookPoint
    pattern: HookPoint
    z: HookPoint

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        require_kind("config", config, TransformerConfig, words="a TransformerConfig")
        self.layer = layer
        self.window = config.windows[layer]
        self.is_causal = config.causal
        self.d_head = config.d_head
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.all_heads = sum(self.heads)
        self.scale = config.attn_scale / (layer + 1 if config.attn_scale_by_layer else 1)
        width = config.n_heads * config.d_head
        self.qkv = Linear(config.d_model, self.all_heads * config.d_head, config.qkv_bias)
        normed = config.qk_norm != "none"
        self.q_norm = QKNorm(config.n_heads, config) if normed else Identity()
        self.k_norm = QKNorm(config.n_kv_heads, config) if normed else Identity()
        self.rotary = rotary(config, self.window)
        self.cap = SoftCap(config.attn_cap) if config.attn_cap else Identity()
        self.output = Linear(width, config.d_model, config.out_bias)
        self.pattern_dropout = nn.Dropout(config.dropout)
        self.output_dropout = dropout(config, config.dropout_place == "output")
        self.q = HookPoint("batch pos head d_head", "queries as they enter the dot product")
        self.k = HookPoint("batch pos kv_head d_head", "keys as they enter the dot product")
        self.v = HookPoint("batch pos kv_head d_head", "values")
        self.scores = HookPoint(
            "batch head query key", "q·k·scale before the mask: not zero above the diagonal"
        )
        self.pattern = HookPoint("batch head query key", "softmax of the masked scores over keys")
        self.z = HookPoint("batch pos head d_head", "pattern·v, before the output projection")

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors that attention adds to the residual stream.

        Args:
            x: the normalized stream.
            context: the context that a model passes to its blocks. Outside a model, a mask or None;
                see `ContextOrMask`.

        Raises:
            ValueError: if a mask does not fit `x`.
        """
        if not isinstance(context, Context):
            needs = ContextNeeds(
                windows={self.window},
                n_heads=self.heads[0],
                is_causal=self.is_causal,
                rotate=partial(self.rotary.rotation, dtype=x.dtype),
            )
            may_read = should_read(x)
            context = make_context(x, needs, may_read=may_read, query_key_mask=context)
        return self.mix(*self.project(x), context)

    def project(
        self, x: Float[Tensor, "batch pos d_model"]
    ) -> tuple[
        Float[Tensor, "batch pos head d_head"],
        Float[Tensor, "batch pos kv_head d_head"],
        Float[Tensor, "batch pos kv_head d_head"],
    ]:
        """Return queries, keys and values, before QK-norm and rotary embeddings.

        They are linear in `x`.
        """
        qkv = self.qkv(x).view(*x.shape[:2], self.all_heads, self.d_head)
        return qkv.split_with_sizes(self.heads, 2)

    def mix(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos kv_head d_head"],
        v: Float[Tensor, "batch pos kv_head d_head"],
        context: Context,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors that attention adds to the residual stream.

        Args:
            q, k, v: the results of `project`, before QK-norm and rotary embeddings.
            context: the context of the run.
        """
        # Under autocast, norms and rotary embeddings return float32, and values have half
        # precision.
        rotation = context.rotation_of(self.window)
        q = self.q(self.rotary(self.q_norm(q), rotation).type_as(v)).transpose(1, 2)
        k = self.k(self.rotary(self.k_norm(k), rotation).type_as(v)).transpose(1, 2)
        k, v = context.extended(self.layer, k, self.v(v).transpose(1, 2))
        z = self.z(self.attend(q, k, v, context.masks[self.window]).transpose(1, 2))
        return self.output_dropout(self.output(z.flatten(2)))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Visible) -> Tensor:
        """Return the output of each head from a fused kernel."""
        probability = self.pattern_dropout.p if self.pattern_dropout.training else 0.0
        return fused(q, k, v, mask, self.scale, probability)

    def _explicit(
        self,
        q: Float[Tensor, "batch head query d_head"],
        k: Float[Tensor, "batch kv_head key d_head"],
        v: Float[Tensor, "batch kv_head key d_head"],
        mask: Visible,
    ) -> Float[Tensor, "batch head query d_head"]:
        """Return the output of each head.

        Without a mask, a query sees all keys up to its own position.

        Args:
            q, k, v: the queries, keys and values of the heads.
            mask: the keys that each query may see.
        """
        require_room_for_scores(q, k)
        # b batch, h heads, i queries, j keys, d d_head; n of the heads share each of g key heads.
        q = rearrange(self.scale * q, "b (g n) i d -> b g n i d", g=k.shape[1])
        scores = einsum(q, k, "b g n i d, b g j d -> b g n i j")
        scores = self.cap(self.scores(scores.flatten(1, 2)))  # [b, h, i, j]
        is_hooked = is_listened_to(self.scores) or is_listened_to(self.cap)
        scores = masked(scores, mask, may_write=not is_hooked)
        # Without a mask, each query sees itself, unless an edit sets this score to -inf.
        pattern = softmax(scores, may_lack_keys=mask is not None or is_hooked)
        pattern = self.pattern(pattern)  # [b, h, i, j]
        weights = self.pattern_dropout(pattern).unflatten(1, q.shape[1:3])  # [b, g, n, i, j]
        z = einsum(weights, v, "b g n i j, b g j d -> b g n i d")
        return z.flatten(1, 2)  # [b, h, i, d]

    attend = FusedUnlessHooked("scores", "pattern", fused=_fused)(_explicit)


class CappedAttention(Attention):
    """Attention with scores capped before the mask (Gemma 2)."""

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Visible) -> Tensor:
        """Return the output of each head, computed for one block of queries at a time."""
        return by_blocks(self._explicit, q, k, v, mask)

    attend = FusedUnlessHooked("scores", "pattern", fused=_fused)(Attention._explicit)


def attention_of(config: TransformerConfig, layer: int = 0) -> Attention:
    """Return the attention for a config."""
    kind = CappedAttention if config.attn_cap else Attention
    return kind(config, layer)
