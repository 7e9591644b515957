"""Transformer blocks: one class for each form. Each forward reads like its equation.

A sublayer is attention or the MLP. A branch is a sublayer with the norms before and after it: it
reads the residual stream, and adds its output to the stream.
"""

import dataclasses
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks import HookPoint, Identity
from hooks.base import Component
from models.attention import Attention, attention_of
from models.config import TransformerConfig
from models.mlp import MLP, mlp_of
from models.norm import LayerNorm, RMSNorm, norm
from models.running.context import ContextOrMask

ADDED = "what the sublayer adds: the norm of its output"


@dataclasses.dataclass
class Branch:
    """One sublayer of a block: it adds `added(after(sublayer(norm(stream))))` to the stream.

    A branch at `resid_pre` reads the stream that enters the block. A later branch reads the stream
    after all earlier branches were added.

    Attributes:
        reads: the point of the stream that the branch reads.
        norm: the norm before the sublayer.
        sublayer: attention or the MLP.
        after: the norm of the sublayer's output.
        added: the point of the vector that is added to the stream.
        joined: the norm that is applied to the sum of the stream and the added vector. None if the
            block has no such norm.
        kind: `attn`, `mlp`, or `mixer` for a sublayer without attention that moves information
            between positions.
    """

    reads: nn.Module
    norm: nn.Module
    sublayer: nn.Module
    after: nn.Module
    added: nn.Module
    joined: nn.Module | None = None
    kind: Literal["attn", "mixer", "mlp"] | None = None

    def __call__(
        self, stream: Float[Tensor, "batch pos d_model"], *context: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the branch adds to the stream, from the stream that it reads."""
        return self.finished(self.sublayer(self.norm(stream), *context))

    def finished(
        self, output: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the vector that the branch adds to the stream, from the sublayer's output."""
        return self.added(self.after(output))


class Block(Component):
    """Attention, then the MLP; each reads the residual stream and adds to it (GPT-2).

    `block_of` builds the class for a config, such as `PostNormBlock`. `norm_place` chooses the
    norms: `ln1` and `ln2` before the sublayers, `ln1_post` and `ln2_post` after them. Absent norms
    are identities. A model passes a `Context` to its blocks. Outside a model, pass a mask or None;
    see `ContextOrMask`.

    Args:
        config: sizes and choices.
        layer: the index of the block.

    >>> import torch
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> block, stream = Block(config), torch.randn(1, 3, 4)
    >>> middle = stream + block.attn(block.ln1(stream))
    >>> torch.allclose(block(stream), middle + block.mlp(block.ln2(middle)), atol=1e-6)
    True
    """

    resid_pre: HookPoint
    ln1: LayerNorm | RMSNorm | Identity
    attn: Attention
    ln1_post: LayerNorm | RMSNorm | Identity
    attn_out: HookPoint
    resid_mid: HookPoint
    ln2: LayerNorm | RMSNorm | Identity
    mlp: MLP
    ln2_post: LayerNorm | RMSNorm | Identity
    mlp_out: HookPoint
    resid_post: HookPoint

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        before = config.norm_place != "output"
        after = config.norm_place in ("output", "sandwich")
        self.resid_pre = HookPoint("batch pos d_model", "residual stream entering the block")
        self.ln1 = norm(config, before)
        self.attn = attention_of(config, layer)
        self.ln1_post = norm(config, after, ADDED)
        self.attn_out = HookPoint("batch pos d_model", "what attention adds to the residual stream")
        if config.mlp != "none":
            if not config.parallel:
                self.resid_mid = HookPoint(
                    "batch pos d_model", "residual stream between the two sublayers"
                )
            self.ln2 = norm(config, before)
            self.mlp = mlp_of(config)
            self.ln2_post = norm(config, after, ADDED)
            self.mlp_out = HookPoint(
                "batch pos d_model", "what the MLP adds to the residual stream"
            )
        self.resid_post = HookPoint("batch pos d_model", "residual stream leaving the block")

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sublayers that `forward` adds to the stream, in order. Analyses use them."""
        return self._attention(), self._mlp(self.resid_mid)

    def _attention(self) -> Branch:
        """Return the branch of attention."""
        return Branch(self.resid_pre, self.ln1, self.attn, self.ln1_post, self.attn_out)

    def _mlp(self, reads: nn.Module) -> Branch:
        """Return the branch of the MLP, which reads the stream at a point."""
        return Branch(reads, self.ln2, self.mlp, self.ln2_post, self.mlp_out)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.attn.qkv.weight.device

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block, from the stream that enters it.

        Args:
            resid: the stream that enters the block.
            context: the context of the run; outside a model, a mask or None.
        """
        resid = self.resid_pre(resid)
        attention, mlp = self.branches
        resid = self.resid_mid(resid + attention(resid, context))
        return self.resid_post(resid + mlp(resid))


class PostNormBlock(Block):
    """After each sublayer, the norm of the sum of stream and sublayer (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.ln1 = norm(config, meaning="the norm of stream and attention's output together")
        self.ln2 = norm(config, meaning="the norm of stream and the MLP's output together")

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sublayers: attention and the MLP. After each of them, the sum of the stream and the
        sublayer's output is normalized.
        """
        none = Identity()
        return (
            Branch(self.resid_pre, none, self.attn, none, self.attn_out, self.ln1),
            Branch(self.resid_mid, none, self.mlp, none, self.mlp_out, self.ln2),
        )

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block, from the stream that enters it."""
        resid = self.resid_pre(resid)
        attention, mlp = self.branches
        resid = self.resid_mid(self.ln1(resid + attention(resid, context)))
        return self.resid_post(self.ln2(resid + mlp(resid)))


class ParallelBlock(Block):
    """Attention and the MLP read the same stream, and both are added to it (GPT-NeoX)."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The sublayers: attention and the MLP. Both read the stream that enters the block."""
        return self._attention(), self._mlp(self.resid_pre)

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block, from the stream that enters it."""
        resid = self.resid_pre(resid)
        attention, mlp = self.branches
        return self.resid_post(resid + attention(resid, context) + mlp(resid))


class AttentionBlock(Block):
    """Attention without an MLP."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Attention alone."""
        return (self._attention(),)

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that leaves the block, from the stream that enters it."""
        resid = self.resid_pre(resid)
        (attention,) = self.branches
        return self.resid_post(resid + attention(resid, context))


def block_of(config: TransformerConfig, layer: int = 0) -> Block:
    """Return the block for a config."""
    if config.mlp == "none":
        return AttentionBlock(config, layer)
    if config.norm_place == "post":
        return PostNormBlock(config, layer)
    return ParallelBlock(config, layer) if config.parallel else Block(config, layer)
