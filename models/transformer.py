"""The transformer. Continue with `block.py`, then `attention.py`, `mlp.py` and `norm.py`."""

from functools import partial
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint, Identity
from hooks.base import (
    HintedClass,
    HintsAtNames,
    NoOthers,
    Texts,
    refuse,
    require_integer,
    require_kind,
    to_device,
)
from models.block import block_of
from models.checks import check_tokens, should_read
from models.config import TransformerConfig
from models.dot_product import SoftCap
from models.initialisation import initialise
from models.linear import Linear, dropout
from models.norm import norm
from models.positions import added_positions, rotary
from models.running.context import Context, make_context
from models.running.kvcache import KVCache
from models.text.texts import ReadsText, read
from models.weights import BlockWeights, tie


class TokenEmbedding(nn.Embedding):
    """A vector for each token, times a scale: sqrt(d_model) in Gemma, otherwise 1."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.vocab_size, config.d_model)
        self.scale = config.embed_scale

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The vectors of the tokens, on the device of the weights.

        Tokens on the CPU are checked there. Those on an accelerator are read back for that, except
        inside `models.trusted()`.

        Raises:
            ValueError: if a token is outside the vocabulary; it names the first.
        """
        if not (tokens.is_cpu and self.weight.is_cpu):
            self._check(tokens)  # an accelerator would abort, or return arbitrary values
        tokens = to_device(tokens, self.weight.device)
        try:
            vectors = torch.embedding(self.weight, tokens.long())
        except IndexError:
            self._check(tokens)
            raise
        # The scale is rounded to the weights' dtype, as in the training of models with a scale.
        return vectors if self.scale == 1 else vectors * vectors.new_full((), self.scale)

    def _check(self, tokens: Tensor) -> None:
        if not should_read(tokens):
            return
        outside = ((tokens < 0) | (tokens >= self.num_embeddings)).nonzero()
        if len(outside):
            row, pos = outside[0].tolist()
            raise ValueError(
                f"tokens must be 0 to {self.num_embeddings - 1}; got {tokens[row, pos].item()} at "
                f"row {row}, position {pos}"
            )


class Transformer(HintsAtNames, ReadsText, BlockWeights, metaclass=HintedClass):
    """A decoder-only transformer: tokens to logits. With a `tokenizer` it also reads strings.

    The forward pass has the steps `context`, `input_resid`, `blocks` and `unembed`. Blocks may be on
    several devices: stream and context follow, once per change of device.

    Args:
        config: sizes and choices; see `TransformerConfig`.

    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model, tokens = Transformer(config), torch.tensor([[3, 0, 6], [2, 5, 1]])
    >>> model(tokens).shape
    torch.Size([2, 3, 7])
    """

    # No step of it writes into a value of a point, so caches need no copies. True makes them copy again.
    overwrites_values = False

    def __init__(self, config: TransformerConfig) -> None:
        require_kind("config", config, TransformerConfig, "a TransformerConfig")
        super().__init__()
        self.config = config
        self.token_embedding = TokenEmbedding(config)
        self.position_embedding = added_positions(config)
        self.embed = HookPoint("batch pos d_model", "token embeddings")
        added = config.positions in ("learned", "sinusoidal")
        self.pos_embed = (
            HookPoint("batch pos d_model", "additive position encodings") if added else Identity()
        )
        self.rotary = rotary(config)
        self.ln_embed = norm(config, config.embed_norm, "the embeddings' norm: the stream's start")
        self.embed_dropout = dropout(config)
        self.blocks = nn.ModuleList(block_of(config, layer) for layer in range(config.n_layers))
        self.ln_final = norm(config, config.final_norm, "what the unembedding reads")
        self.unembedding = Linear(config.d_model, config.vocab_size_out, config.unembed_bias)
        self.logit_cap = SoftCap(config.logit_cap) if config.logit_cap else Identity()
        if config.tied_unembed:
            tie(self)
        initialise(self, config)

    @property
    def is_causal(self) -> bool:
        """Whether the logits at a position do not depend on later tokens."""
        return self.config.causal

    def forward(
        self,
        tokens: Texts | Float[Tensor, "batch _pos d_model"],
        *,
        attention_mask: Shaped[Tensor, "batch _key"] | None = None,
        kv_cache: KVCache | None = None,
        last: int = 0,
        query_key_mask: Shaped[Tensor, "..."] | None = None,
        starting_at_layer: int | None = None,
        **others: Unpack[NoOthers],
    ) -> Float[Tensor, "batch _pos vocab"]:
        """Logits of the next token at every position.

        Args:
            tokens: the tokens, on the CPU or the model's device; with a cache, those after the cached
                ones. Those on an accelerator are read back once, for a check (see `models.trusted`). Texts in
                any other form are read by `to_tokens`, and padded on the right.
            attention_mask: which tokens, including cached ones, are not padding: boolean, or 0 and 1.
                Each row gets the same values as without its padding, left or right. Ignore the values
                at padding.
            kv_cache: earlier keys and values; the new ones are added to it.
            last: return logits of only this many last positions; 0 means all.
            query_key_mask: which keys each query sees: [query, key], [batch, query, key] or
                [batch, head, query, key]; boolean, or 0 and 1. It replaces the causal rule and
                windows, not padding. The last two forms broadcast over axes of size 1.
            starting_at_layer: start with this block. `tokens` is then the residual stream that enters it,
                [batch, pos, d_model]; with the number of layers only the unembedding runs.

        Raises:
            ValueError: if tokens are outside the vocabulary, or do not fit the context, the masks or
                the cache.
            TypeError: if there is no such keyword.
        """
        refuse(others, self.forward, "the model")
        start = starting_at_layer
        require_integer("starting_at_layer", 0 if start is None else start, 0, len(self.blocks))
        tokens, attention_mask = read(self, tokens, attention_mask, kv_cache)
        require_integer("last", last, 0)
        context = self.context(
            tokens if start is None else _tokens_unread(tokens),
            attention_mask=attention_mask,
            kv_cache=kv_cache,
            query_key_mask=query_key_mask,
        )
        with context.piece():
            resid = self.input_resid(tokens, context) if start is None else tokens
            for block in self.blocks if start is None else self.blocks[start:]:
                # The blocks of a large model may be on several devices.
                if (device := getattr(block, "device", resid.device)) != resid.device:
                    resid, context = resid.to(device), context.to(device)
                resid = block(resid, context)
            logits = self.logits(resid, last)
        context.commit()
        return logits

    def context(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        attention_mask: Shaped[Tensor, "batch _key"] | None = None,
        kv_cache: KVCache | None = None,
        query_key_mask: Shaped[Tensor, "..."] | None = None,
    ) -> Context:
        """Return what the blocks read besides the stream. For arguments and errors see `forward`."""
        check_tokens(tokens)
        config, (batch, new) = self.config, tokens.shape
        if kv_cache is not None:
            kv_cache.reserve(config, batch, new)
        elif new > config.n_ctx:
            raise ValueError(f"tokens must fit the context of {config.n_ctx}; got {new}")
        if not config.causal:
            query_key_mask = full_mask(tokens, query_key_mask, kv_cache)
        weight = self.token_embedding.weight
        if tokens.device != weight.device:
            # Only the embedding needs the numbers.
            tokens = tokens.new_empty(tokens.shape, device=weight.device)
        rotate = partial(self.rotary.rotation, dtype=weight.dtype)
        masks = (attention_mask, query_key_mask)
        return make_context(tokens, set(config.windows), config.n_heads, rotate, *masks, kv_cache)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: Context | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream entering the first block: token plus position embeddings.

        Args:
            tokens: the tokens.
            context: the context of the same tokens; None for whole texts without padding.
        """
        context = self.context(tokens) if context is None else context
        embed = self.embed(self.token_embedding(tokens))
        positions = to_device(context.positions, embed.device)
        added = self.position_embedding(positions).to(embed.dtype).expand_as(embed)
        return self.embed_dropout(self.ln_embed(embed + self.pos_embed(added)))

    def run_block(
        self, layer: int, resid: Float[Tensor, "batch pos d_model"], context: Context
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving a block, from the one entering it. Both are on the block's device."""
        return self.blocks[layer](resid, context)

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits from a residual stream: the final norm, then the unembedding and its cap.

        They are on the unembedding's device, where the final norm must be too.
        """
        resid = resid.to(self.unembedding.weight.device)
        return self.logit_cap(self.unembedding(self.ln_final(resid)))

    def _logits_of_last(self, resid: Tensor, last: int) -> Tensor:
        return self.unembed(resid[:, -last:])

    @FusedUnlessHooked("ln_final", "unembedding", "logit_cap", fused=_logits_of_last)
    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Logits of the `last` positions; 0 means all. With hooks there, all are computed."""
        return self.unembed(resid)[:, -last:]

    @property
    def device(self) -> torch.device:
        """The device of the token embeddings, where a run begins."""
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the token embeddings, and of the residual stream."""
        return self.token_embedding.weight.dtype

    def prepare_inputs(
        self, tokens: Texts | Float[Tensor, "batch _pos d_model"], **arguments: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The arguments of `forward` with tokens and mask in place of texts, to know what a run reads."""
        masks = arguments.pop("attention_mask", None), arguments.get("kv_cache")
        tokens, mask = read(self, tokens, *masks)
        return (tokens,), arguments if mask is None else {**arguments, "attention_mask": mask}

    def _text_device(self) -> torch.device:
        return self.device

    def extend_context(self, n_ctx: int) -> None:
        """Lets the model read `n_ctx` positions, which may be more than in its training.

        Sinusoidal and rotary positions are computed for any length, but beyond the training length the
        model may predict badly. The config changes, so a saved model keeps the new length.

        Raises:
            ValueError: if positions are learned, as there are no vectors for other positions.
        """
        if self.config.positions == "learned":
            raise ValueError(
                f"positions must not be learned to change n_ctx from {self.config.n_ctx}; got {n_ctx}"
            )
        self.config = self.config.replace(n_ctx=n_ctx)

    def count_parameters(self) -> int:
        """The number of trainable parameters; tied weights count once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


def full_mask(tokens: Tensor, mask: Tensor | None, kv_cache: KVCache | None) -> Tensor:
    """The mask of a model that is not causal: every query sees every key, unless the caller says otherwise.

    Raises:
        ValueError: if there is a cache of keys: earlier values depend on later tokens.
    """
    if kv_cache is not None:
        raise ValueError("kv_cache must be None for a model with causal=False; got a KVCache")
    n_pos = tokens.shape[1]
    return tokens.new_ones(n_pos, n_pos, dtype=torch.bool) if mask is None else mask


def _tokens_unread(stream: Tensor) -> Tensor:
    """Return placeholder tokens for a run that starts from a stream: only their number counts.

    Raises:
        ValueError: if the stream is none.
    """
    if stream.ndim != 3 or not stream.is_floating_point():
        got = f"{stream.dtype} {list(stream.shape)}"
        raise ValueError(f"starting_at_layer needs a stream [batch, pos, d_model]; got {got}")
    return stream.new_zeros(stream.shape[:2], dtype=torch.int64)
