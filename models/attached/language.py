"""The parts of an attached model that `interp` needs besides its points: `interp.protocol.LanguageModel`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks.shared import (
    FakeTensor,
    Scoped,
    Session,
    hooks_disabled,
    inside,
    is_listened_to,
    tensors_in,
    to_device,
    without_gradients,
)
from models.attached.configs import base_of, text_config
from models.attached.context import CACHES, AttachedContext, context_of
from models.attached.example import parameters_of, uncached
from models.attached.probe import logits_of, tokens_for
from models.attached.stacks import Stack
from models.attached.sums import HALF, agree, is_same
from models.attached.unembedding import unembed_of
from models.attached.view import PlainView
from models.checkpoints.huggingface import from_memory
from models.checkpoints.huggingface.families import FAMILIES
from models.mode import mode
from models.text.texts import ReadsText, read
from models.text.token_batch import is_tokens
from models.transformer import Transformer
from models.weights import BlockWeights

Unembed = Callable[[Float[Tensor, "batch pos d_model"]], Float[Tensor, "batch pos vocab"]]

# Whether a run is one that finds out how the model counts positions.
_alone = Scoped("alone", False)

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attached model, under our names.

    Attributes:
        vocab_size: the number of logits.
        n_ctx: the longest text; a model that does not say reads any.
        n_layers, n_heads, d_model, logit_cap: as in `models.TransformerConfig`.
    """

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int
    logit_cap: float


class AttachedTexts(ReadsText):
    """The reading of texts of an attached model. Analyses use no more of a model whose blocks read something else.

    Attributes:
        model: the model.
        uncached: the arguments of a run whose keys nobody needs later.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._runs = model, base_of(model)
        self._parameters = parameters_of(model)
        # What texts are given as.
        self._reads = "input_ids" if "input_ids" in self._parameters else self._parameters[0]
        self.uncached = uncached(model)

    def run(self, tokens: Tensor, **arguments: Any) -> Any:
        """The model's output."""
        return self.model(**{self._reads: tokens, **self.uncached, **arguments})

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of `forward` with tokens and mask in place of texts, and tensors on the model's device."""
        named = self._named(args, kwargs)
        texts = named.get(self._reads)
        if isinstance(texts, Mapping) and "attention_mask" not in named:
            others = {*self._parameters} - {self._reads, "attention_mask"}
            kwargs |= {name: texts[name] for name in texts if name in others}
            texts = {name: texts[name] for name in texts if name not in others}
        if device := self._text_device():
            moved = [
                to_device(x, device) if isinstance(x, Tensor) else x
                for x in (*args, *kwargs.values())
            ]
            args, kwargs = (
                tuple(moved[: len(args)]),
                dict(zip(kwargs, moved[len(args) :], strict=True)),
            )
        if texts is None or is_tokens(texts):
            return args, kwargs
        cache = next((named[name] for name in CACHES if name in named), None)
        tokens, mask = read(self, texts, named.get("attention_mask"), cache)
        if mask is not None:
            kwargs = {**kwargs, "attention_mask": mask}
        return ((tokens, *args[1:]), kwargs) if args else (args, {**kwargs, self._reads: tokens})

    def _named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._parameters, args, strict=False)) | kwargs

    def _text_device(self) -> torch.device | None:
        device = next(self.model.parameters()).device
        return None if device.type == "meta" else device  # weights may be kept elsewhere


class AttachedLanguage(AttachedTexts):
    """The steps and sizes of an attached model, and its reading of texts.

    `unembed` is there if the modules after the blocks, the final norm first, give the logits in sequence, up to
    a factor and a soft cap. Weights by our names are there if `models.from_hf` knows the family; they are read
    anew at each access.

    Attributes:
        config: the sizes.
        blocks: the model's own blocks.
        unembed: logits from a residual stream.
        layouts: the modules of the blocks.
    """

    unembed: Unembed

    def __init__(self, model: Any, stack: Stack) -> None:
        super().__init__(model)
        probe, chain = stack.probe, stack.chain
        assert probe.logits is not None
        config = text_config(model)
        n_ctx = next((n for name in LENGTHS if (n := getattr(config, name, None))), sys.maxsize)
        heads, d_model = getattr(config, "num_attention_heads", 0), chain[0].inputs[0].shape[-1]
        unembed = unembed_of(model, probe, chain[-1])
        cap = 0.0 if unembed is None else unembed.cap
        self.config = Sizes(probe.logits.shape[-1], n_ctx, len(chain), heads, d_model, cap)
        self.blocks = nn.ModuleList(call.module for call in chain)
        self.layouts = stack.layouts
        self._family = getattr(getattr(model, "config", None), "model_type", None)
        if unembed is not None:
            self.unembed = unembed

    def positions_of(self, mask: Shaped[Tensor, "batch pos"]) -> dict[str, Tensor]:
        """Positions for texts with padding before a token, for a model that takes them: columns without padding.

        Raises:
            ValueError: if the model takes none, and counts padding.
        """
        if mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        late = mask[:, 1:].bool() & ~mask[:, :-1].bool()
        if not bool(late.any()):
            return {}
        if (first := self._first_position) is not None:
            return {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0) + first}
        if self._counts_padding:
            raise ValueError(
                f"texts must be padded on the right for a {type(self.model).__name__}, which takes no positions and "
                "counts padding; got padding before a token"
            )
        return {}

    @cached_property
    def _first_position(self) -> int | None:
        """The position that the model gives the first token by itself; None if it takes no positions, or counts otherwise."""
        if "position_ids" not in self._parameters:
            return None
        tokens, pad = tokens_for(self.model), getattr(self.model.config, "pad_token_id", None)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        alone = self._logits_alone(tokens)
        for first in (0, pad + 1 if isinstance(pad, int) else 2):
            given = self._logits_alone(tokens, position_ids=columns + first)
            # In half precision other positions may give almost the same, but these the same bits.
            if is_same(given, alone) or (alone.dtype not in HALF and agree(given, alone, 1e-3)):
                return first
        return None

    @cached_property
    @without_gradients
    def _counts_padding(self) -> bool:
        """Whether a column of padding before a text changes its logits."""
        tokens = tokens_for(self.model)
        mask = torch.ones_like(tokens).index_fill(1, tokens.new_zeros(1), 0)
        with mode(self.model, training=False), _alone.set(True):
            given = AttachedContext({"attention_mask": mask, **self.uncached})
            late, stream = (
                hooks_disabled(self.input_resid, part, context)
                for part, context in ((tokens, given), (tokens[:, 1:], None))
            )
        # Vectors of positions, which half precision may hide in the logits.
        if not is_same(late[:, 1:], stream):
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        return not agree(padded, self._logits_alone(tokens[:, 1:]), 1e-3)

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Logits of a run that nobody sees, and that gets no positions but these."""
        with mode(self.model, training=False), _alone.set(True):
            named = {self._reads: tokens, **self.uncached, **arguments}
            output = hooks_disabled(self._runs, **named)
        return logits_of(output)

    def with_positions(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """The arguments of `forward` with tokens, mask and positions; with a cache, those of the new tokens.

        Positions that the caller gives stay.

        Raises:
            ValueError: as for `to_tokens` and `positions_of`.
        """
        args, kwargs = self.prepare_inputs(*args, **kwargs)
        named = self._named(args, kwargs)
        new = next(tensors_in([named.get(name) for name in (self._reads, "inputs_embeds")]), None)
        mask = named.get("attention_mask")
        is_padded = (
            isinstance(mask, Tensor) and mask.ndim == 2 and named.get("position_ids") is None
        )
        if mask is None or not is_padded or new is None or _alone.get():
            return args, kwargs
        positions = self.positions_of(mask)
        return args, kwargs | {name: value[:, -new.shape[1] :] for name, value in positions.items()}

    def context(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> AttachedContext:
        """The context of a run, which blocks read besides the residual stream: the arguments of the model."""
        return AttachedContext(arguments)

    def context_of(
        self, calls: Sequence[Any], model_arguments: dict[str, Any]
    ) -> AttachedContext | None:
        """The context of a run, from how it called the blocks; None if they cannot be called again."""
        return context_of(list(self.blocks), calls, model_arguments)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: AttachedContext | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the first block."""
        with Session() as session:
            session.before(self.blocks[0], _stop)
            try:
                self.model(tokens, **(context.given if context else {}))
            except _Reached as reached:
                return reached.args[0]
        raise RuntimeError("the model must call its first block")

    def run_block(
        self, layer: int, resid: Float[Tensor, "batch pos d_model"], context: AttachedContext
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream leaving a block, from the one entering it. The context is from `context_of`."""
        return next(tensors_in(self.blocks[layer](resid, **context.arguments(layer))))

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Logits of the `last` positions; 0 means all. With hooks there, all are computed."""
        after = getattr(self.unembed, "modules", ())
        if any(is_listened_to(part) for module in after for part in inside(module)):
            return self.unembed(resid)[:, -last:]
        return self.unembed(resid[:, -last:])

    def plain(self) -> Transformer | PlainView:
        """The model as a plain transformer, which shares its memory where layouts are the same; or as a `PlainView`.

        Raises:
            ValueError: as for `models.from_hf` or `PlainView`.
        """
        if self._family not in FAMILIES:
            return hooks_disabled(PlainView, self)
        made = from_memory(self.model, keep=True)
        made.tokenizer = self.tokenizer
        return made

    def has(self, part: str) -> bool:
        """Whether there is a part of `LanguageModel`. To read a weight takes long."""
        if part.startswith(("W_", "b_")):
            return self._family in FAMILIES and hasattr(BlockWeights, part)
        return hasattr(self, part)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("W_", "b_")) and self.has(name):
            return getattr(self.plain(), name)
        raise AttributeError(name)


class _Reached(BaseException):
    """Ends a run at the first block, and holds the stream. `except Exception` in the model does not catch it."""


def _stop(args: Any, kwargs: Any) -> None:
    raise _Reached(next(iter((*args, *kwargs.values()))))
