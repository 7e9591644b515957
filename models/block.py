"""Transformer blocks: one class for each form, with a forward that reads like its equation."""

import torch
from jaxtyping import Float
from torch import Tensor

from hooks import HookPoint
from models.attention import Attention
from models.config import TransformerConfig
from models.context import ContextOrMask
from models.mlp import MLP
from models.norm import ByConfig, norm

ADDED = "what the sublayer adds: the norm of its output"


class Block(ByConfig):
    """Attention, then the MLP; each reads the residual stream and adds to it (GPT-2).

    Other forms, such as `PostNormBlock`, are made instead if the config says so. `norm_place` chooses
    the norms: `ln1` and `ln2` of what the sublayers read, `ln1_post` and `ln2_post` of what they add.
    Absent norms are identities. It is called as `Attention` is, alone or by a model.

    Args:
        config: sizes and choices.
        layer: the index of the block.

    >>> import torch
    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=2, d_model=4)
    >>> Block(config)(torch.ones(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        before = config.norm_place != "output"
        after = config.norm_place in ("output", "sandwich")
        self.resid_pre = HookPoint("batch pos d_model", "residual stream entering the block")
        self.ln1 = norm(config, before)
        self.attn = Attention(config, layer)
        self.ln1_post = norm(config, after, ADDED)
        self.attn_out = HookPoint("batch pos d_model", "what attention adds to the residual stream")
        if config.mlp != "none":
            if not config.parallel:
                self.resid_mid = HookPoint(
                    "batch pos d_model", "residual stream between the two sublayers"
                )
            self.ln2 = norm(config, before)
            self.mlp = MLP(config)
            self.ln2_post = norm(config, after, ADDED)
            self.mlp_out = HookPoint(
                "batch pos d_model", "what the MLP adds to the residual stream"
            )
        self.resid_post = HookPoint("batch pos d_model", "residual stream leaving the block")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.attn.qkv.weight.device

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving the block, from the one entering it."""
        resid = self.resid_pre(resid)
        attn_out = self.attn_out(self.ln1_post(self.attn(self.ln1(resid), context)))
        resid = self.resid_mid(resid + attn_out)
        mlp_out = self.mlp_out(self.ln2_post(self.mlp(self.ln2(resid))))
        return self.resid_post(resid + mlp_out)


class PostNormBlock(Block, when=lambda config: config.norm_place == "post"):
    """After each sublayer, the norm of the sum of stream and sublayer (Vaswani et al. 2017)."""

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.ln1 = norm(config, meaning="the norm of stream and attention's output together")
        self.ln2 = norm(config, meaning="the norm of stream and the MLP's output together")

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving the block, from the one entering it."""
        resid = self.resid_pre(resid)
        resid = self.resid_mid(self.ln1(resid + self.attn_out(self.attn(resid, context))))
        return self.resid_post(self.ln2(resid + self.mlp_out(self.mlp(resid))))


class ParallelBlock(Block, when=lambda config: config.parallel):
    """Attention and the MLP read the same stream, and both are added to it (GPT-NeoX)."""

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving the block, from the one entering it."""
        resid = self.resid_pre(resid)
        attn_out = self.attn_out(self.ln1_post(self.attn(self.ln1(resid), context)))
        mlp_out = self.mlp_out(self.ln2_post(self.mlp(self.ln2(resid))))
        return self.resid_post(resid + attn_out + mlp_out)


class AttentionBlock(Block, when=lambda config: config.mlp == "none"):
    """Attention without an MLP."""

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], context: ContextOrMask = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving the block, from the one entering it."""
        resid = self.resid_pre(resid)
        attn_out = self.attn_out(self.ln1_post(self.attn(self.ln1(resid), context)))
        return self.resid_post(resid + attn_out)
