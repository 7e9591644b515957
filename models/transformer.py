"""Transformer: embeddings, blocks and unembedding.

Continue with `block.py`, then `attention.py`, `mlp.py` and `norm.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks import FusedUnlessHooked, HookPoint, Identity
from hooks.base import (
    HintedClass,
    HintsAtNames,
    NoOthers,
    Texts,
    hides_others,
    mark_model,
    mark_padding,
    refuse,
    require_integer,
    require_kind,
    shown,
    to_device,
)
from models.block import block_of
from models.checks import check_tokens, should_read
from models.config import TransformerConfig
from models.dot_product import SoftCap
from models.initialisation import initialise
from models.linear import Linear, dropout
from models.norm import LayerNorm, RMSNorm, norm
from models.positions import (
    NoPositions,
    NoRotation,
    Rotary,
    Sinusoidal,
    added_positions,
    rotary,
)
from models.running.context import Context, ContextNeeds, make_context
from models.running.kvcache import KVCache
from models.running.pieces import divided_call, in_pieces
from models.running.static_cache import StaticCache
from models.text.texts import ReadsText, read
from models.weights import BlockWeights, tie


class TokenEmbedding(nn.Embedding):
    """A vector for each token, multiplied by a scale: sqrt(d_model) in Gemma, 1 in other models."""

    scale: float

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.vocab_size, config.d_model)
        self.scale = config.embed_scale

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the vectors of the tokens, on the device of the weights.

        Tokens are checked on the CPU. Tokens on an accelerator are copied to the CPU for this
        check, except inside `models.skip_token_checks()`.

        Raises:
            ValueError: if a token is outside the vocabulary; the error names the first such token.
        """
        if not (tokens.is_cpu and self.weight.is_cpu):
            # Without this check, an accelerator would abort or return arbitrary values.
            self._check(tokens)
        tokens = to_device(tokens, self.weight.device)
        try:
            vectors = torch.embedding(self.weight, tokens.long())
        except IndexError:
            self._check(tokens)
            raise
        # The scale is rounded to the dtype of the weights, as in the training of models with a
        # scale.
        return vectors if self.scale == 1 else vectors * vectors.new_full((), self.scale)

    def _check(self, tokens: Tensor) -> None:
        """Check that tokens are in the vocabulary, if their numbers may be read.

        Raises:
            ValueError: if a token is outside; the error names the first such token.
        """
        if not should_read(tokens):
            return
        outside = ((tokens < 0) | (tokens >= self.num_embeddings)).nonzero()
        if len(outside):
            n, pos = outside[0].tolist()
            raise ValueError(
                f"tokens must be 0 to {self.num_embeddings - 1}; got {tokens[n, pos].item()} at "
                f"row {n}, position {pos}"
            )


class Transformer(HintsAtNames, ReadsText, BlockWeights, metaclass=HintedClass):
    """A decoder-only transformer, from tokens to logits. With a `tokenizer` it also reads strings.

    The steps of the forward pass are `context`, `input_resid`, `blocks` and `logits`, which calls
    `unembed`. Blocks may be on several devices: the stream and the context are copied once for each
    change of device.

    Args:
        config: sizes and choices; see `TransformerConfig`.

    >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model, tokens = Transformer(config), torch.tensor([[3, 0, 6], [2, 5, 1]])
    >>> model(tokens).shape  # batch, pos, vocab
    torch.Size([2, 3, 7])
    >>> from models import load
    >>> trained = load("pydoc-4l")
    >>> trained.to_text(trained("impor")[0, -1].argmax())  # the likeliest next token
    't'
    """

    # False declares that no step writes into the value of a point, so caches store values without
    # copies. With True, caches would copy each value.
    overwrites_values: ClassVar[bool] = False

    config: TransformerConfig
    token_embedding: TokenEmbedding
    position_embedding: nn.Embedding | Sinusoidal | NoPositions
    embed: HookPoint
    pos_embed: HookPoint | Identity
    rotary: Rotary | NoRotation
    window_rotary: Rotary | NoRotation
    ln_embed: LayerNorm | RMSNorm | Identity
    embed_dropout: nn.Dropout | Identity
    ln_final: LayerNorm | RMSNorm | Identity
    logit_cap: SoftCap | Identity

    def __init__(self, config: TransformerConfig) -> None:
        require_kind("config", config, TransformerConfig, words="a TransformerConfig")
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
        has_own_base = config.window_rotary is not None
        self.window_rotary = rotary(config, config.window) if has_own_base else NoRotation()
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
        """True if the logits at a position do not depend on later tokens."""
        return self.config.causal

    @hides_others
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
        """Return the logits of the next token at every position.

        Args:
            tokens: the tokens [batch, pos], on the CPU or on the device of the model. With a
                `kv_cache`, only the new tokens. Tokens on an accelerator are copied to the CPU
                once, for a check (see `models.skip_token_checks`). Texts in any other form are
                converted by `to_tokens` and padded on the right.
            attention_mask: a mask [batch, key] of the tokens that are not padding, including cached
                tokens: boolean, or 0 and 1. The values of a row are the same as without padding,
                whether the padding is on the left or on the right. Values at padding have no
                meaning.
            kv_cache: earlier keys and values. The new keys and values are added to it.
            last: the number of last positions whose logits are returned; 0 means all.
            query_key_mask: the keys that each query sees: [query, key], [batch, query, key] or
                [batch, head, query, key]; boolean, or 0 and 1. It replaces the causal mask and
                windows, but not padding. The last two forms broadcast over axes of size 1.
            starting_at_layer: the block to start with. Then `tokens` is the residual stream that
                enters this block, [batch, pos, d_model]. With the number of layers, only the
                unembedding runs.

        Raises:
            ValueError: if tokens are outside the vocabulary, or do not match the context, the masks
                or the cache.
            TypeError: if a keyword is unknown.
        """
        refuse(others, self.forward, "the model")
        start = starting_at_layer
        require_integer(
            "starting_at_layer", 0 if start is None else start, least=0, most=len(self.blocks)
        )
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
        mark_padding(logits, context.real)
        mark_model(logits, self)
        context.commit()
        return logits

    if TYPE_CHECKING:
        # Otherwise a call returns Any, as a call of any module of PyTorch.
        __call__ = forward

    def context(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        attention_mask: Shaped[Tensor, "batch _key"] | None = None,
        kv_cache: KVCache | None = None,
        query_key_mask: Shaped[Tensor, "..."] | None = None,
    ) -> Context:
        """Return the context, which blocks read in addition to the stream.

        Args:
            tokens: the tokens, without cached tokens.
            attention_mask: True or 1 at tokens that are not padding, including cached tokens.
            kv_cache: earlier keys and values.
            query_key_mask: the keys that each query sees, in place of the causal mask; see
                `forward`.

        Raises:
            ValueError: if the tokens are not a matrix of integers or do not fit the context, or if
                a mask or the cache does not fit the tokens.
        """
        check_tokens(tokens)
        may_read = should_read(tokens)
        config = self.config
        batch, n_new = tokens.shape
        if kv_cache is not None:
            require_kind(
                "kv_cache", kv_cache, KVCache, words="a KVCache", call="models.KVCache() makes one"
            )
            kv_cache.reserve(config, batch, n_new)
        elif n_new > config.n_ctx:
            raise ValueError(f"tokens must fit the context of {config.n_ctx}; got {n_new}")
        weight = self.token_embedding.weight
        if tokens.device != weight.device:
            # The context depends only on the shape of the tokens, so their numbers are not copied.
            tokens = tokens.new_empty(tokens.shape, device=weight.device)
        needs = ContextNeeds(
            windows=set(config.windows),
            n_heads=config.n_heads,
            is_causal=config.causal,
            rotate=partial(self.rotary.rotation, dtype=weight.dtype),
            rotate_windows=partial(self.window_rotary.rotation, dtype=weight.dtype),
        )
        if isinstance(kv_cache, StaticCache):
            return kv_cache.context(tokens, needs)
        return make_context(
            tokens,
            needs,
            may_read=may_read,
            attention_mask=attention_mask,
            query_key_mask=query_key_mask,
            kv_cache=kv_cache,
        )

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: Context | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that enters the first block: token plus position embeddings.

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
        """Return the residual stream that leaves a block.

        Input and output are on the device of the block.

        Args:
            layer: the number of the block.
            resid: the stream that enters the block.
            context: the context of the run; see `context`.
        """
        return self.blocks[layer](resid, context)

    def in_pieces(self, n_positions: int) -> AbstractContextManager[None]:
        """Return a context manager inside which blocks compute at most `n_positions` at once.

        So values inside a block need less memory. The results are equal up to rounding. A block
        whose queries see later keys still computes all positions together.

        >>> config = TransformerConfig(vocab_size=7, n_ctx=5, n_layers=1, n_heads=1, d_model=4)
        >>> model, tokens = Transformer(config), torch.tensor([[3, 0, 6, 1, 2]])
        >>> with model.in_pieces(2):
        ...     logits = model(tokens)
        >>> torch.allclose(logits, model(tokens), atol=1e-6)
        True
        """
        return in_pieces(self.blocks, n_positions, divided_call)

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream: the final norm, then the unembedding and its cap.

        The logits are on the device of the unembedding. The final norm must be on the same device.
        """
        is_stream = isinstance(resid, Tensor) and resid.is_floating_point()
        if not is_stream or resid.shape[-1:] != (self.config.d_model,):
            raise TypeError(
                f"resid must be a residual stream [batch, pos, {self.config.d_model}]; got "
                f"{shown(resid)}"
            )
        resid = resid.to(self.unembedding.weight.device)
        return self.logit_cap(self.unembedding(self.ln_final(resid)))

    def _logits_of_last(self, resid: Tensor, last: int) -> Tensor:
        """Return the logits of the last positions, without computing the others."""
        return self.unembed(resid[:, -last:])

    @FusedUnlessHooked("ln_final", "unembedding", "logit_cap", fused=_logits_of_last)
    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Return the logits of the `last` positions; 0 means all.

        If a hook acts on the final norm, the unembedding or the cap, the logits of all positions
        are computed.

        Args:
            resid: the residual stream that leaves the last block.
            last: the number of last positions.
        """
        return self.unembed(resid)[:, -last:]

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt; see `models.running.generation.continuations`."""
        from models.running.generation import continuations

        return continuations(
            self,
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
        )

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
        """Return the arguments of `forward`, with tokens and a mask instead of texts.

        Args:
            tokens: tokens, texts, or embeddings [batch, pos, d_model].
            arguments: the other arguments of `forward`.
        """
        given_mask = arguments.pop("attention_mask", None)
        tokens, mask = read(self, tokens, given_mask, arguments.get("kv_cache"))
        return (tokens,), arguments if mask is None else {**arguments, "attention_mask": mask}

    def _text_device(self) -> torch.device:
        """Return the device on which the tokens of texts are created."""
        return self.device

    def extend_context(self, n_ctx: int) -> None:
        """Allow the model to read `n_ctx` positions, which may be more than in its training.

        Sinusoidal and rotary positions are computed for any length, but beyond the training length
        the model may predict badly. The config changes, so a saved model keeps the new length.

        Raises:
            ValueError: if positions are learned, because other positions have no vectors.
        """
        if self.config.positions == "learned":
            raise ValueError(
                "positions must not be learned, because n_ctx is then fixed to "
                f"{self.config.n_ctx}; got {n_ctx}"
            )
        self.config = self.config.replace(n_ctx=n_ctx)

    def count_parameters(self) -> int:
        """Return the number of trainable parameters. Tied weights count once."""
        trainable = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return sum(parameter.numel() for parameter in trainable)


def _tokens_unread(stream: Tensor) -> Tensor:
    """Return placeholder tokens for a run that starts from a stream. Only their number matters.

    Raises:
        ValueError: if the value is not a stream.
    """
    if stream.ndim != 3 or not stream.is_floating_point():
        got = f"{stream.dtype} {list(stream.shape)}"
        raise ValueError(f"starting_at_layer needs a stream [batch, pos, d_model]; got {got}")
    return stream.new_zeros(stream.shape[:2], dtype=torch.int64)
