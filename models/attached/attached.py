"""The object of an attached model: the parts that analyses use, its texts, and how to detach it."""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from hooks import HookedRunner, HookPoint, HookPoints
from hooks.base import (
    ModelHandle,
    Text,
    agree,
    attribute_hint,
    carried,
    explains_calls,
    generator,
    has_shards,
    logits_rounding,
    prompts_moved,
    remove_hooks,
    require_module,
    tensors_in,
    to_device,
    without_gradients,
)
from hooks.shared import Session, Wire, hooks_disabled, inside, is_listened_to
from models.attached.context import CACHES, AttachedContext, divided_call, repeatable_context
from models.attached.forward import Forward, restore_methods
from models.attached.layout import BlockLayout
from models.attached.original import (
    HOOKED,
    AttachedSizes,
    KernelName,
    base_of,
    configs_of,
    embedding_of,
    is_config,
    is_encoder_decoder,
    kernel_name,
    logits_of,
    parameters_of,
    sizes_of,
    table_of,
    tokens_for,
    uncached,
)
from models.attached.padding import PaddedPositions
from models.attached.parts import Unembedding
from models.attached.points import TOP, PointsOfBlocks
from models.attached.settings import AttachSettings
from models.attached.stacks import Stack, Tower
from models.attached.view import PlainView
from models.checkpoints.huggingface import from_memory
from models.checkpoints.huggingface.families import FAMILIES
from models.mode import mode
from models.running.pieces import in_pieces
from models.text.texts import ReadsText, read
from models.transformer import Transformer
from models.weights import BlockWeights

# The parts of `LanguageModel` that exist only if some blocks read a text.
_STEPS = ("context", "context_of", "input_resid", "run_block", "in_pieces", "logits", "plain")
_LEAST_GRADIENT = 1e-6
"""A gradient at a token counts as 0 if it is at most this share of the largest gradient."""


class Attached(ReadsText, ModelHandle):
    """A model with points, until `remove()` or the end of a `with` statement; see `attach`.

    Functions that take a model also take this object, and use its `model`. It converts strings to
    tokens for the model, and has the parts of `interp.protocol.LanguageModel`. Some models have
    only some of these parts:

    - The steps of a run (`context`, `input_resid`, `run_block`, `logits`) and `config` exist if the
      model has a stack of blocks that reads only a text.
    - `unembed` exists if the modules after the blocks run one after the other, and the output of
      the last one is the logits. The model may still multiply this output by a number and apply a
      soft cap.
    - The weights of `models.Transformer` (`W_Q` and so on) exist if `models.from_hf` supports the
      family. They are read from the model again at each access. LoRA adapters of `peft` that act
      are merged into them: `W_O` is `W + scale * A B`. Adapters of other kinds raise an error.

    Attributes:
        model: the model.
        left_out: the reason for each usual point that is missing from the model or from some block,
            by the end of its name, for example `attn.scores`. For an encoder, a decoder or a tower,
            its name comes first: `encoder.attn.scores`.
        forward: the forward of `base` while it is attached.
        base: the model inside an adapter's wrapper. Without an adapter, it is the model itself.
        uncached: the arguments with which the model creates no cache of keys: `use_cache=False`, or
            nothing for a model without this argument.
        needed: the arguments that every run needs. They are `uncached` for a model that runs only
            without a cache. They are empty for all other models, because without a cache, some of
            these read positions that restart as several texts, and compute another mask.
        config: the sizes.
        blocks: the model's own blocks that read a text.
        unembed: a function that returns the logits of a residual stream.
        layouts: the modules of the blocks.
        n_streams: the number of vectors of the residual stream for each token. With more than one
            vector, streams are [batch, pos, stream, d_model], and the model has no `unembed` and no
            plain form.
        settings: the `AttachSettings` of `attach`. The value is None while `attach` runs.

    >>> from models import attach
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=11, hidden_size=12, intermediate_size=20)
    >>> sizes |= dict(num_hidden_layers=2, num_attention_heads=3)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with attach(llama) as attached:
    ...     attached.config.n_layers, attached.W_Q.shape  # layer, head, d_model, d_head
    (2, torch.Size([2, 3, 12, 4]))
    >>> hasattr(llama, "blocks")  # the points are removed at the end of the block
    False
    """

    forward: Forward
    blocks: nn.ModuleList
    unembed: Unembedding
    config: AttachedSizes
    model: nn.Module
    base: nn.Module
    left_out: dict[str, str]
    uncached: dict[str, Any]
    needed: dict[str, Any]
    layouts: list[BlockLayout]
    n_streams: int
    settings: AttachSettings | None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.left_out = {}
        self.uncached = uncached(model)
        self.needed = {}
        self.base = base_of(model)
        self._argument_names = parameters_of(model)
        # The forward of an adapter's wrapper may pass `*args` on to the model inside.
        kinds = [part.kind for part in inspect.signature(model.forward).parameters.values()]
        is_wrapper = self.base is not model
        self._has_no_names = is_wrapper and inspect.Parameter.VAR_POSITIONAL in kinds[:1]
        # The name of the argument for texts.
        self._reads = (
            "input_ids" if "input_ids" in self._argument_names else self._argument_names[0]
        )
        self._positions = PaddedPositions(self, "position_ids" in self._argument_names)
        self._family = getattr(getattr(model, "config", None), "model_type", None)
        self._configs: dict[nn.Module, tuple[Any, Any]] = {}
        self.settings = None
        self.n_streams = 1
        self._has_streams_first = False
        self._n_withs = 0

    def take_over(self, is_equal: bool = False) -> None:
        """Give the modules configs that ask for attention with points; create the forward.

        Args:
            is_equal: whether the name of this attention is also equal to the name of the model's
                own kernel; see `KernelName`. Default: False.
        """
        self._configs = _own_configs(self.model, KernelName if is_equal else str)
        self.forward = Forward(self.base)

    def read_through(self, stacks: Sequence[Stack]) -> None:
        """Store the blocks of the first stack as `blocks`, and the methods that read strings.

        If the first stack reads no tokens, or belongs to an encoder or a decoder, no blocks are
        stored.
        """
        self.left_out |= _absent_parts(self.model, stacks)
        text = stacks[0]
        if text.texts is not None:
            self._read_text_through(text)
        self.forward.prepare = self.with_positions
        vars(self.model).update(language_parts=self, prepare_inputs=self.prepare_inputs)

    def _read_text_through(self, stack: Stack) -> None:
        """Store a stack as the blocks of the text, with its sizes and the unembedding after it."""
        probe = stack.probe
        chain = stack.chain
        assert probe.logits is not None
        self.blocks = nn.ModuleList(call.module for call in chain)
        self.layouts = stack.layouts
        logit_cap = 0.0
        if stack.stream_axis is not None:
            self.n_streams = chain[0].inputs[0].shape[2]
            self._has_streams_first = stack.stream_axis == 0
        elif stack.unembedding is not None:
            self.unembed = replace(stack.unembedding, unchanged=self.forward.unchanged)
            logit_cap = stack.unembedding.cap
        d_model = chain[0].inputs[0].shape[-1]
        self.config = sizes_of(
            self.model,
            probe.logits.shape[-1],
            n_layers=len(chain),
            d_model=d_model,
            logit_cap=logit_cap,
        )

    def __repr__(self) -> str:
        left_out = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        points = len(HookedRunner(self.model).points)
        return f"Attached({type(self.model).__name__}, {points} points{left_out})"

    def remove(self) -> None:
        """Remove all points from the model, also if the model was attached again in the meantime.

        A second call does nothing.
        """
        current: Attached = carried(self.model, "language_parts") or self
        current.restore_configs()
        detach(self.model)

    def __enter__(self) -> "Attached":
        self._n_withs += 1
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the points at the end of the outermost `with` of this attachment."""
        self._n_withs -= 1
        if not self._n_withs:
            self.remove()

    def __getstate__(self) -> dict[str, Any]:
        # A copy is not inside a `with` statement, so its count starts at 0.
        return vars(self) | {"_n_withs": 0}

    def restore_configs(self) -> None:
        """Replace the copied configs of the modules by the original configs.

        While the model is attached, its modules have copies of their configs. Changes that the user
        made to these copies are also made to the original configs.
        """
        restored = set[int]()
        for module, (config, before) in self._configs.items():
            if id(config) not in restored:
                _carry_changes(module.config, before, config)
            restored.add(id(config))
            module.config = config
        self._configs = {}

    @property
    def kernels(self) -> set[str]:
        """The names of the attention kernels that the model asks for."""
        return {kernel_name(config) for config, _ in self._configs.values()}

    def run(self, tokens: Tensor, **arguments: Any) -> Any:
        """Return the model's output.

        Args:
            tokens: the tokens, [batch, pos].
            arguments: other arguments of the model, such as `attention_mask`.
        """
        return self.model(**{self._reads: tokens, **self.uncached, **arguments})

    def run_base(self, tokens: Tensor, **arguments: Any) -> Any:
        """Return the output of the model inside an adapter's wrapper.

        Args:
            tokens: the tokens, [batch, pos].
            arguments: other arguments of the model, such as `attention_mask`.
        """
        return self.base(**{self._reads: tokens, **self.uncached, **arguments})

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of `forward`, with tokens and a mask instead of texts.

        Tensors are moved to the model's device.

        Args:
            args, kwargs: the arguments of `forward`. Tokens may be texts.
        """
        named = self._named(args, kwargs)
        if self._has_no_names:
            # With names, a cache knows the tokens of its run.
            args, kwargs = (), named
        texts = named.get(self._reads)
        if isinstance(texts, Mapping) and "attention_mask" not in named:
            others = {*self._argument_names} - {self._reads, "attention_mask"}
            kwargs |= {name: texts[name] for name in texts if name in others}
            texts = {name: texts[name] for name in texts if name not in others}
        if device := self._text_device():
            args = tuple(_moved(value, device) for value in args)
            kwargs = {name: _moved(value, device) for name, value in kwargs.items()}
        if texts is None or (isinstance(texts, Tensor) and texts.ndim == 2):
            return args, kwargs
        cache = next((named[name] for name in CACHES if name in named), None)
        tokens, mask = read(self, texts, named.get("attention_mask"), cache)
        if mask is not None:
            kwargs = {**kwargs, "attention_mask": mask}
        return ((tokens, *args[1:]), kwargs) if args else (args, {**kwargs, self._reads: tokens})

    def with_positions(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments for the model's own `forward`, from the arguments of a call.

        Texts become tokens and a mask, as in `prepare_inputs`. If texts have padding, a model that
        accepts positions also gets the position of each token in its text. In a run with cached
        keys, only the new tokens get positions. Positions from the caller are not changed.

        Args:
            args, kwargs: the arguments of `forward`. Tokens may be texts.

        Raises:
            ValueError: if a text cannot become tokens (see `to_tokens`), or if the model cannot
                read texts with this padding (see `PaddedPositions.of`).
        """
        args, kwargs = self.prepare_inputs(*args, **kwargs)
        named = self._named(args, kwargs)
        of_decoder = named.get("decoder_attention_mask")
        if isinstance(of_decoder, Tensor) and of_decoder.ndim == 2:
            self._positions.require_decoder(of_decoder)
        new = next(tensors_in([named.get(name) for name in (self._reads, "inputs_embeds")]), None)
        mask = named.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2 or new is None:
            return args, kwargs
        if isinstance(position_ids := named.get("position_ids"), Tensor):
            self._positions.warn_of_lengths(mask, position_ids)
        if position_ids is not None:
            return args, kwargs
        positions = self._positions.of(mask, self._copies_text(named))
        return args, kwargs | {name: value[:, -new.shape[1] :] for name, value in positions.items()}

    def _copies_text(self, named: Mapping[str, Any]) -> bool:
        """Return whether the model has a decoder that gets no text in a run.

        Some models then copy the text of the encoder to the decoder. Labels [batch, pos] are a
        text. Labels of classes, [batch], are not.

        Args:
            named: the arguments of the run, by name.
        """
        if "decoder_input_ids" not in self._argument_names:
            return False
        texts = [
            named.get(name) for name in ("decoder_input_ids", "decoder_inputs_embeds", "labels")
        ]
        return not any(isinstance(text, Tensor) and text.ndim > 1 for text in texts)

    def _named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments of a run by the names of the parameters."""
        return dict(zip(self._argument_names, args, strict=False)) | kwargs

    def _text_device(self) -> torch.device | None:
        """Return the device of the model's first weight; None if the weight is stored elsewhere."""
        device = next(self.model.parameters()).device
        # A weight on `meta` is stored elsewhere until it is needed.
        return None if device.type == "meta" else device

    def positions_of(self, mask: Shaped[Tensor, "batch pos"]) -> dict[str, Tensor]:
        """Return the position of each token in its text, if padding comes before a token.

        The result is empty if the model does not accept positions; see `PaddedPositions.of`.
        """
        return self._positions.of(mask)

    def length_group(self, length: int) -> tuple[int, ...]:
        """Return the group of a text of some tokens: texts of one group may be in one batch.

        All texts have one group, except in models whose rotary frequencies depend on the longest
        text; see `RotaryLengths`.
        """
        return self._positions.lengths.group(length)

    @cached_property
    @without_gradients
    def is_causal(self) -> bool:
        """True if the logits at a position do not depend on later tokens.

        The value is also True for models that do not return logits at each position, and for
        decoders that read an encoder.
        """
        if is_encoder_decoder(self.model) or table_of(self.model) is None:
            return True
        if has_shards(self.model):
            # Other processes may not take part in this run, and it would wait for them.
            return True
        tokens = tokens_for(self.model)
        changed = torch.cat([tokens[:, :-1], tokens[:, :1]], 1)
        with mode(self.model, training=False):
            reads_later = self._reads_last_token(tokens)
            if reads_later is not None:
                return not reads_later
            try:
                logits, others = (
                    logits_of(hooks_disabled(self.run_base, part)) for part in (tokens, changed)
                )
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                # The model needs more arguments than tokens.
                return True
        if logits.ndim != 3 or logits.shape[1] != tokens.shape[1]:
            return True
        # In a causal model, only rounding may differ between the runs. In most other models, a
        # later token changes the logits much more.
        tolerance = logits_rounding(logits.dtype)
        return agree(logits[:, :-1], others[:, :-1], tolerance)

    def _reads_last_token(self, tokens: Int[Tensor, "batch pos"]) -> bool | None:
        """Return whether earlier logits have a gradient at the embedding of the last token.

        The gradient is 0 in a causal model, and only there. The result is None if there are no
        logits at each position, or no gradient can be computed, for example because a kernel of a
        quantized model has none.
        """
        embedding = embedding_of(self.model)
        if embedding is None:
            return None
        embedded: list[Tensor] = []

        def leaf(output: Tensor) -> Tensor:
            embedded.append(output.detach().clone().requires_grad_())
            return embedded[-1]

        def gradient() -> Tensor:
            with Session() as session:
                session.after(embedding, leaf)
                logits = logits_of(self.run_base(tokens))
            if logits.shape[:-1] != tokens.shape:
                raise ValueError("the model does not return logits at each position")
            logits = logits[:, :-1]
            # The sum of all logits of a position may be constant, so the factors are random.
            factors = torch.randn(logits.shape, generator=generator(0, "factors of logits"))
            return torch.autograd.grad((logits * factors.to(logits)).sum(), embedded)[0]

        try:
            with torch.inference_mode(False), torch.enable_grad():
                gradients = hooks_disabled(gradient)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
        if gradients.shape[:2] != tokens.shape:
            return None
        return bool(gradients[:, -1].abs().max() > _LEAST_GRADIENT * gradients.abs().max())

    @property
    def mask_token(self) -> int | None:
        """The mask token of a masked language model, from the tokenizer or else from the config."""
        token = super().mask_token
        config = getattr(self.model, "config", None)
        return getattr(config, "mask_token_id", None) if token is None else token

    @property
    def pad_token(self) -> int:
        """The padding token, from the config, which classifiers use, or else from the tokenizer.

        A token outside the vocabulary does not count. Without a padding token, the value is 0.
        """
        config = getattr(self.model, "config", None)
        named = [config, getattr(config, "get_text_config", lambda: None)(), self._tokenizer]
        table = table_of(self.model)
        known = range(1 if table is None else len(table))
        for owner in named:
            token = getattr(owner, "pad_token_id", None)
            if isinstance(token, int) and token in known:
                return token
        return 0

    def context(self, tokens: Int[Tensor, "batch pos"], **arguments: Any) -> AttachedContext:
        """Return the context of a run: the arguments that blocks read besides the stream.

        Args:
            tokens: the tokens of the run.
            arguments: other arguments of the model, such as `attention_mask`.
        """
        return AttachedContext(arguments)

    def context_of(
        self, calls: Sequence[Any], model_arguments: dict[str, Any]
    ) -> AttachedContext | None:
        """Return the context of a past run: the arguments that blocks read besides the stream.

        With the context, `run_block` can call the blocks of this run again, one by one.

        Args:
            calls: the recorded arguments of each block in the run, positional and by name.
            model_arguments: the arguments of the model in the run, without the tokens.

        Returns:
            The context; None if the blocks cannot be called again, or if the stream has several
            vectors for each token.
        """
        if self.n_streams > 1:
            return None
        return repeatable_context(list(self.blocks), calls, model_arguments)

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: AttachedContext | None = None
    ) -> Float[Tensor, "batch pos *stream d_model"]:
        """Return the residual stream that enters the first block.

        Args:
            tokens: the tokens.
            context: the context of the same tokens; None for whole texts without padding.
        """
        with Session() as session:
            session.before(self.blocks[0], _stop)
            try:
                self.model(tokens, **self.needed | (context.given if context else {}))
            except _Reached as reached:
                stream: Tensor = reached.args[0]
                return stream.movedim(0, 2) if self._has_streams_first else stream
        raise RuntimeError("the model must call its first block")

    def run_block(
        self,
        layer: int,
        resid: Float[Tensor, "batch pos *stream d_model"],
        context: AttachedContext,
    ) -> Float[Tensor, "batch pos *stream d_model"]:
        """Return the residual stream that leaves a block.

        Args:
            layer: the index of the block.
            resid: the residual stream that enters the block.
            context: a context from `context_of`.
        """
        stream = resid.movedim(2, 0) if self._has_streams_first else resid
        leaving = next(tensors_in(self.blocks[layer](stream, **context.arguments(layer))))
        return leaving.movedim(0, 2) if self._has_streams_first else leaving

    def in_pieces(self, n_positions: int) -> AbstractContextManager[None]:
        """Return a context manager inside which blocks compute at most `n_positions` at once.

        So values inside a block need less memory. The results are equal up to rounding. A block
        whose arguments cannot be divided by position still computes all positions together.

        Args:
            n_positions: the largest number of positions.
        """
        return in_pieces(self.blocks, n_positions, divided_call)

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Return the logits of the `last` positions; 0 means all.

        If a module of the unembedding has a hook, the unembedding runs on all positions, so that
        the hook sees them all.

        Args:
            resid: the residual stream that leaves the last block.
            last: the number of last positions.
        """
        for module in getattr(self.unembed, "modules", ()):
            if any(map(is_listened_to, inside(module))):
                return self.unembed(resid)[:, -last:]
        return self.unembed(resid[:, -last:])

    @without_gradients
    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, without the token that ends a row.

        The model's own `generate` continues the prompts.

        Args:
            prompts: the tokens of each prompt.
            max_new_tokens: the largest number of new tokens.
            temperature: the temperature of random draws; 0 for the most probable tokens.
            seed: the seed of random draws. The generator of PyTorch itself does not change.

        Raises:
            TypeError: if the model has no method `generate`.
            ValueError: if the model has an encoder and a decoder, because it writes another text.
        """
        model: Any = self.model
        if not hasattr(model, "generate"):
            raise TypeError(f"the model must have a method generate; got a {type(model).__name__}")
        if is_encoder_decoder(model):
            raise ValueError(
                "the model must continue its prompts; got an encoder and a decoder: the decoder's "
                "text is attached.to_text(model.generate(tokens, max_new_tokens=9))"
            )
        rows = [torch.tensor([*prompt]) for prompt in prompts]
        device = next(model.parameters()).device
        tokens, mask = Text.padded(rows, self.pad_token, side="left", device=device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        ends = self._end_tokens()
        n_moved = 0 if mask is None else tokens.shape[1]
        with torch.random.fork_rng(), prompts_moved(n_moved):
            torch.manual_seed(seed)
            texts = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens) if mask is None else mask.long(),
                max_new_tokens=max_new_tokens,
                pad_token_id=self.pad_token,
                eos_token_id=[*ends] or None,
                **sampling,
            )
        new_rows = texts[:, tokens.shape[1] :].tolist()
        return [[*itertools.takewhile(lambda token: token not in ends, new)] for new in new_rows]

    def _end_tokens(self) -> list[int]:
        """Return the tokens that end a text: of the generation config, and of the tokenizer."""
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ends = {*getattr(self.tokenizer, "eos_token_ids", ())}
        if named is not None:
            ends |= {named} if isinstance(named, int) else {*named}
        return sorted(ends)

    def plain(self) -> Transformer | PlainView:
        """Return the model as a plain transformer, or as a `PlainView`.

        A plain transformer shares the model's memory if the layouts of the weights are the same. It
        has its own copy of each matrix with an adapter, with the adapter merged.

        Raises:
            ValueError: if `models.from_hf` or `PlainView` raises it.
        """
        if self._family not in FAMILIES:
            return hooks_disabled(PlainView, self.model)
        transformer = from_memory(self.model, keep=True)
        transformer.tokenizer = self.tokenizer
        return transformer

    def has(self, part: str) -> bool:
        """Return whether a part of `LanguageModel` exists, by its name.

        For a weight, only the family of the model is checked, because reading the weight is slow.
        """
        if part.startswith(("W_", "b_")):
            return self._family in FAMILIES and hasattr(BlockWeights, part)
        return hasattr(self, "blocks" if part in _STEPS else part)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            AttributeError: for a weight, which is read from the model at each access.
        """
        if name.startswith(("W_", "b_")):
            raise AttributeError(
                f"{name} of Attached cannot be assigned, because it is read from the model: change "
                "the parameters of the model itself, inside torch.no_grad()"
            )
        if name == "model":
            super().__setattr__(name, value)
        else:
            # Only the model is a child. The other modules are parts of it.
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            return super().__getattr__(name)
        if name.startswith(("W_", "b_")) and self.has(name):
            return getattr(self.plain(), name)
        if name.startswith("_"):
            raise AttributeError(name)
        hint = attribute_hint(name, ["Attached"]) or "; the model is its .model"
        raise AttributeError(f"Attached has no attribute {name!r}{hint}")


@explains_calls
def detach(model: nn.Module) -> None:
    """Remove all points from a model, or from a copy of an attached model.

    A model without points does not change.

    >>> import copy
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from models import attach
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> with attach(model):
    ...     copied = copy.deepcopy(model)
    >>> detach(copied)
    >>> hasattr(copied, "blocks")
    False
    """
    require_module(model)
    if isinstance(model, Transformer):
        return
    for config in configs_of(model).values():
        if config._attn_implementation != kernel_name(config):
            config._attn_implementation_internal = kernel_name(config)
    restore_methods(model)
    for owner in (model, *model.children()):
        for name, points in [*owner.named_children()]:
            is_point = name in TOP and isinstance(points, HookPoint | HookPoints | PointsOfBlocks)
            if is_point or isinstance(points, Tower):
                delattr(owner, name)
    for name in ("language_parts", "prepare_inputs"):
        vars(model).pop(name, None)
    for module in model.modules():
        remove_hooks(module, lambda hook: isinstance(hook, Wire) and not hook.is_part)
        vars(module).pop("hook_points", None)


class _Reached(BaseException):
    """Ends a run at the first block, and carries the stream.

    `except Exception` in the model does not catch it.
    """


def _moved(value: Any, device: torch.device) -> Any:
    """Return a tensor on another device; any other value is returned unchanged."""
    return to_device(value, device) if isinstance(value, Tensor) else value


def _stop(args: Any, kwargs: Any) -> None:
    """Raise an exception that carries the first argument of a block: its stream."""
    raise _Reached(next(iter((*args, *kwargs.values()))))


def _absent_parts(model: nn.Module, stacks: Sequence[Stack]) -> dict[str, str]:
    """Return the reasons why an encoder, a decoder or both are not among the stacks, by name.

    The result is empty for a model that does not have both an encoder and a decoder.
    """
    expected = {"encoder", "decoder"} if is_encoder_decoder(model) else set[str]()
    absent = expected - {stack.name for stack in stacks}
    return dict.fromkeys(absent, "its blocks do not each read the output of the block before")


def _own_configs(model: nn.Module, named: type[str]) -> dict[nn.Module, tuple[Any, Any]]:
    """Give every module of the model a copy of its config that asks for `hooked_attention`.

    Args:
        model: the model.
        named: the class of the name of this attention.

    Returns:
        For each module, its original config and an unchanged copy of it. `_carry_changes` compares
        with this copy later.
    """
    configs = configs_of(model)
    # `deepcopy` looks up earlier copies in these dicts, so modules that share a config also share
    # its copies.
    hooked_copies = dict[int, Any]()
    plain_copies = dict[int, Any]()
    originals = {
        module: (config, deepcopy(config, plain_copies)) for module, config in configs.items()
    }
    for module, config in configs.items():
        module.config = hooked = deepcopy(config, hooked_copies)
        hooked._attn_implementation_internal = named(HOOKED + kernel_name(config))
    return originals


def _carry_changes(changed: Any, before: Any, config: Any) -> None:
    """Copy to `config` each attribute of `changed` whose value differs from its value in `before`.

    If a config contains another config, the attributes of the inner configs are compared.
    """
    for name, value in vars(changed).items():
        if name == "_attn_implementation_internal":
            is_set = not str(value).startswith(HOOKED)
            if is_set and kernel_name(changed) != kernel_name(before):
                setattr(config, name, value)
            continue
        old = vars(before).get(name)
        target = vars(config).get(name)
        if is_config(value) and is_config(old) and is_config(target):
            _carry_changes(value, old, target)
        elif name not in vars(before) or not _same(value, old):
            setattr(config, name, value)


def _same(value: Any, earlier: Any) -> bool:
    """Return whether two values of configs are equal, compared by their `repr`.

    The `repr` of a config contains its values, so two copies of a config are equal.
    """
    return repr(value) == repr(earlier)
