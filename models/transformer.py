"""The transformer. Read top-down: MLP, block, model; attention and norm have files of their own."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import HookPoint
from models.attention import Attention
from models.config import TransformerConfig
from models.norm import LayerNorm
from models.weights import BlockWeights


class MLP(nn.Module):
    """`gelu(x W_in + b_in) W_out + b_out`, with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.d_model, config.d_mlp)
        self.output = nn.Linear(config.d_mlp, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = HookPoint("batch pos d_mlp", "before the nonlinearity")
        self.post = HookPoint("batch pos d_mlp", "after the nonlinearity")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the MLP adds to the residual stream, from the normalized stream."""
        hidden = self.post(F.gelu(self.pre(self.input(x)), approximate="tanh"))
        return self.dropout(self.output(hidden))

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """Input weights, a view."""
        return self.input.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Output weights, a view."""
        return self.output.weight.T

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"]:
        """Input biases."""
        return self.input.bias

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output biases."""
        return self.output.bias


class Block(nn.Module):
    """Attention, then the MLP; each reads a norm of the residual stream and adds to it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.resid_pre = HookPoint("batch pos d_model", "residual stream entering the block")
        self.ln1 = LayerNorm(config.d_model, config.norm_eps)
        self.attn = Attention(config)
        self.attn_out = HookPoint("batch pos d_model", "what attention adds to the residual stream")
        self.resid_mid = HookPoint("batch pos d_model", "residual stream between the two sublayers")
        self.ln2 = LayerNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_out = HookPoint("batch pos d_model", "what the MLP adds to the residual stream")
        self.resid_post = HookPoint("batch pos d_model", "residual stream leaving the block")

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving the block, from the one entering it."""
        resid = self.resid_pre(resid)
        resid = self.resid_mid(resid + self.attn_out(self.attn(self.ln1(resid))))
        return self.resid_post(resid + self.mlp_out(self.mlp(self.ln2(resid))))


class Transformer(BlockWeights):
    """Tokens to logits; `input_resid`, `blocks` and `unembed` are the steps of the forward pass.

    Initialised as GPT-2: weights from N(0, 0.02²), those that write to the residual stream
    from N(0, 0.02² / (2 n_layers)), biases zero.

    Args:
        config: the sizes; see `TransformerConfig`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.n_ctx, config.d_model)
        self.embed = HookPoint("batch pos d_model", "token embeddings")
        self.pos_embed = HookPoint("batch pos d_model", "additive position encodings")
        self.embed_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.ln_final = LayerNorm(config.d_model, config.norm_eps)
        self.unembedding = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.apply(self._initialise)
        if config.tied_unembed:
            self.unembedding.weight = self.token_embedding.weight

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos vocab"]:
        """Logits of the next token at every position.

        Raises:
            ValueError: if there are more positions than `config.n_ctx`.
        """
        resid = self.input_resid(tokens)
        for block in self.blocks:
            resid = block(resid)
        return self.unembed(resid)

    def input_resid(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream entering the first block: token plus position embeddings."""
        n_pos = tokens.shape[1]
        if n_pos > self.config.n_ctx:
            raise ValueError(f"{n_pos} tokens do not fit the context of {self.config.n_ctx}")
        positions = self.position_embedding(torch.arange(n_pos, device=tokens.device))
        pos_embed = self.pos_embed(positions.expand(len(tokens), -1, -1))
        return self.embed_dropout(self.embed(self.token_embedding(tokens)) + pos_embed)

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits that a residual stream leads to: the final norm, then the unembedding."""
        return self.unembedding(self.ln_final(resid))

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (Attention, MLP)):
            nn.init.normal_(module.output.weight, std=0.02 / math.sqrt(2 * self.config.n_layers))
