"""The forward of an attached model: finds the positions and the padding that a run reads.

A text may be read in several runs: each run reads a piece, for example one new token, and gets the
cache or the state of the run before among its arguments. Edits count positions from the start of
the text, so the position at which a piece starts is needed. It is read from the first of these that
exists:

1. a mask with more columns than there are new tokens;
2. a cache of keys, which counts the positions that it has seen;
3. any other object, or list of tensors, that was an argument or an output of an earlier run: the
   state of a model without keys.

Virtual tokens, which an adapter adds before every text (prefix tuning), do not count.
`PaddedPositions` tests in runs of a few tokens how the model counts positions next to padding. It
raises an error for padding that changes the output of a text.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks import HookError, start_of_piece
from hooks.base import (
    HALF,
    FakeTensor,
    Piece,
    Scoped,
    Words,
    agree,
    forwards_in,
    is_close,
    is_fully_sharded,
    is_same,
    logits_rounding,
    memory_of,
    reading,
    tensors_in,
    without_gradients,
)
from hooks.shared import hooks_disabled
from models.attached.original import HOOKED, is_encoder_decoder, logits_of, table_of, tokens_for
from models.attached.wires import Output, Replaced, texts_read
from models.mode import mode

NEW_CACHE, OLD_CACHES = "cache", ("past_key_values", "cache_params")
"""The names of the cache argument: since `transformers` 5.24, and before.

The newer versions warn about the old names.
"""

_generation = Scoped[dict[str, int] | None]("generation", None)


class Generate(Replaced):
    """A replacement of a model's `generate`, which stores the length of the prompt for its runs.

    So hooks know where the prompt ends, even if each run reads the whole text again.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, "generate")
        self.__wrapped__ = self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model's own `generate`."""
        with _generation.set({}):
            return self.inner(*args, **kwargs)


class StackForward(Replaced):
    """The forward of a module that runs a stack of blocks.

    It records the shape and the padding of the texts that the points see, and where the piece that
    this run reads starts.

    Args:
        model: the module.
        grows: whether a run may read the next piece of a text. Otherwise each run reads whole
            texts. Default: True.

    Attributes:
        embedded: the hook of `embed`, for a run with embeddings instead of tokens.
        virtual: the number of virtual tokens before each text; None before the first run.
    """

    def __init__(self, model: nn.Module, grows: bool = True) -> None:
        super().__init__(model)
        # With this attribute, `inspect.signature` returns the signature of the original forward.
        self.__wrapped__ = self.inner
        names = [*inspect.signature(self).parameters, "attention_mask"]
        self._mask = names.index("attention_mask")
        self._grows = grows
        self._reads_tokens = "input_ids" in names
        self.embedded: Output | None = None
        self.virtual: int | None = None
        # The result of `_mark` for the cache at the end of the last run.
        self._last_mark: tuple[int, ...] | None = None
        # A state may be a list of tensors, to which no attribute can be added. So the memory of the
        # tensors in the last one is stored, and the number of columns that were read until then.
        self._end_of_list: tuple[list[int], int] = ([], 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward."""
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        embeddings = kwargs.get("inputs_embeds")
        if self.embedded is not None and embeddings is not None:
            new = self.embedded(self.embedded.point, (), embeddings)
            kwargs["inputs_embeds"] = embeddings if new is None else new
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        tokens = next(tensors_in((args, named)), torch.empty(0, 0))
        if tokens.ndim == 3 and not tokens.is_floating_point():
            # The tokens are [batch, choice, pos], for multiple choice. Blocks see each choice as a
            # row.
            tokens = tokens.flatten(0, 1)
        texts = tokens.shape[:2]
        token = texts_read.set(texts)
        mask = kwargs.get("attention_mask", args[self._mask] if len(args) > self._mask else None)
        real = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if isinstance(mask, Tensor) and mask.ndim == 3 and mask.flatten(0, 1).shape == texts:
            real = mask.flatten(0, 1)
        encoded = kwargs.get("encoder_attention_mask")
        others: dict[str, Tensor] = {}
        if isinstance(encoded, Tensor) and encoded.ndim == 2:
            others["encoder_pos"] = encoded
        try:
            if not self._grows:
                real = real if self._reads_tokens else None
                with reading(Piece(None, real, others=others)):
                    return self.inner(*args, **kwargs)
            return self._piece(texts, real, others=others, args=args, kwargs=kwargs)
        finally:
            texts_read.reset(token)

    def _piece(
        self,
        texts: Any,
        real: Tensor | None,
        others: dict[str, Tensor],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Return the output of a run that may read the next piece of a text."""
        cache = next(filter(is_cache, (*args, *kwargs.values())), None)
        moved = (
            cache is not None
            and self._last_mark not in (None, _mark(cache))
            and bool(_n_cached(cache))
        )
        start = self._start(texts[1], real, [*args, *kwargs.values()])
        if self.virtual is None:
            self.virtual = start or 0
        if self.virtual and start is not None:
            start = start - self.virtual
            real = None if real is None else real[:, self.virtual :]
        # A first piece has no cache among its arguments. With `use_cache`, the model may create it
        # in this run.
        began = None
        if start is None and (generation := _generation.get()) is not None:
            start = 0
            began = generation.setdefault("began", texts[1])
        if start is None:
            start = 0 if kwargs.get("use_cache") else start_of_piece()
        with reading(Piece(start, real, moved=moved, began=began, others=others)):
            output = self.inner(*args, **kwargs)
        self._last_mark = None if cache is None else _mark(cache)
        self._note_end([cache, *_fields(output)], (start or 0) + texts[1])
        return output

    def _start(self, n_pos: int, real: Tensor | None, arguments: list[Any]) -> int | None:
        """Return the column of the text at which this run's piece starts, virtual tokens included.

        The result is None if no argument shows that this is a piece.
        """
        if real is not None and real.shape[1] > n_pos:
            return real.shape[1] - n_pos
        for state in _states(arguments):
            if is_cache(state) and (n_cached := _n_cached(state)):
                return n_cached
            if isinstance(state, list | tuple):
                memory, end = self._end_of_list
                if memory and memory == [*map(memory_of, tensors_in(state))]:
                    return end
            elif _END in vars(state) and not _is_fresh(state):
                return int(vars(state)[_END]) + (self.virtual or 0)
            if is_cache(state):
                return 0
        return None

    def _note_end(self, values: list[Any], end: int) -> None:
        """Store the column at which a run ended, with the states that a later run may get."""
        for state in _states(values):
            if isinstance(state, list | tuple):
                self._end_of_list = [*map(memory_of, tensors_in(state))], end
            elif not _n_cached(state):
                # The number is an attribute of the state, so a copy of the state has it too.
                vars(state)[_END] = end


class Forward(StackForward):
    """The forward of an attached model.

    It turns texts into tokens, and checks that the modules have not been replaced since `attach`.

    Args:
        model: the model.

    Attributes:
        places: the modules with hooks of points, each with its parent and its name there.
        prepare: a function that replaces texts among the arguments by tokens.
        reads_texts: whether this forward records the texts. In a model with an encoder and a
            decoder, it is False, because the forwards of these two record them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._config = vars(model).get("config")
        self._words = Words(self, *forwards_in(model))
        self._model = type(model).__name__
        # `generate` passes a mask to every model, and the mask marks the padding.
        self._words.known.add("attention_mask")
        parameters = inspect.signature(self).parameters
        # Adapters, and code for older versions of `transformers`, pass the cache under a name that
        # the model no longer has.
        self._old_names = set(OLD_CACHES) - parameters.keys() if NEW_CACHE in parameters else set()
        self._words.known |= self._old_names
        self.places: list[tuple[nn.Module, str, nn.Module]] = []
        self.prepare: Callable[..., tuple[Any, Any]] | None = None
        self.reads_texts = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model's own forward.

        Raises:
            HookError: if a module with the hook of a point was replaced, as adapters do, or the
                attention function has changed since `attach`.
            TypeError: if the model's forward does not know an argument.
        """
        for parent, name, module in self.places:
            if getattr(parent, name, None) is not module:
                raise HookError(
                    f"the model's modules must not change after attach; {name!r} of a "
                    f"{type(parent).__name__} was replaced: call attach(model) again"
                )
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        kernel = str(getattr(self._config, "_attn_implementation", HOOKED))
        if not kernel.startswith(HOOKED):
            raise HookError(
                f"the attention function must not change after attach; it was set to {kernel!r}: "
                "call detach(model), then attach(model)"
            )
        for name in self._old_names & kwargs.keys() if NEW_CACHE not in kwargs else ():
            kwargs[NEW_CACHE] = kwargs.pop(name)
        self._words.require(kwargs, (), f"the {self._model}")
        if self.prepare is not None:
            args, kwargs = self.prepare(*args, **kwargs)
        call = super().__call__ if self.reads_texts else self.inner
        return call(*args, **kwargs)


# The name of the attribute of a state with the number of columns that have been read.
_END = "_columns_read"


def is_cache(value: Any) -> bool:
    """Return whether an argument is a cache of keys and values of `transformers`."""
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length")


def own_cache(cache: Any) -> Any:
    """Return the part of a cache for attention among the model's own positions.

    The cache of a decoder with an encoder has two parts.
    """
    return getattr(cache, "self_attention_cache", cache)


def _states(values: list[Any]) -> Iterator[Any]:
    """Yield the values that may be a cache, which a later run gets as an argument.

    A cache is an object, such as a `DynamicCache`, or a list of tensors.
    """
    for value in values:
        is_object = hasattr(value, "__dict__") and not isinstance(value, Tensor | Mapping)
        is_list = isinstance(value, list) and all(isinstance(part, Tensor) for part in value)
        if is_object or (is_list and value):
            yield value


def _fields(output: Any) -> list[Any]:
    """Return the values of an output that is a mapping or a tuple; else an empty list."""
    if isinstance(output, Mapping):
        return [*output.values()]
    return [*output] if isinstance(output, tuple) else []


def _mark(cache: Any) -> tuple[int, ...]:
    """Return the identity of a cache, and the memory addresses of its keys.

    The addresses change when the rows of the cache are reordered, as in a beam search.
    """
    keys = (getattr(layer, "keys", None) for layer in getattr(own_cache(cache), "layers", ()))
    return id(cache), *(memory_of(key) for key in keys if isinstance(key, Tensor))


def _n_cached(cache: Any) -> int:
    """Return the number of positions that a cache has seen.

    Layers without keys, such as linear attention, do not count.
    """
    layers = getattr(own_cache(cache), "layers", ())
    with_keys = (layer for layer in layers if hasattr(layer, "get_seq_length"))
    return max((int(layer.get_seq_length()) for layer in with_keys), default=0)


def _is_fresh(state: Any) -> bool:
    """Return whether all layers of a state report that they contain nothing yet.

    This is also the case after a reset. A state without layers gives False.
    """
    layers = getattr(state, "layers", ())
    for layer in layers:
        has_state = getattr(layer, "has_previous_state", None)
        if any(has_state.values()) if isinstance(has_state, dict) else has_state:
            return False
    return bool(layers)


# Whether the current run tests how the model counts positions.
_alone = Scoped("alone", False)


class PaddedPositions:
    """The positions that a model needs if texts are padded.

    Args:
        attached: the model's parts.
        takes_positions: whether the model has an argument for positions.
    """

    def __init__(self, attached: Any, takes_positions: bool) -> None:
        self._attached = attached
        self._takes_positions = takes_positions
        self._reads_padding: dict[tuple[str, bool], bool] = {}

    def of(self, mask: Shaped[Tensor, "batch pos"], copies_text: bool = False) -> dict[str, Tensor]:
        """Return the argument `position_ids` for padded texts; empty if the model does not need it.

        The positions count only columns without padding. They are needed if some padding comes
        before a token, and the model accepts positions.

        Args:
            mask: True at real tokens.
            copies_text: whether the decoder gets no text in the run. Some models then copy the text
                of their encoder to the decoder. Default: False.

        Raises:
            ValueError: if the model accepts no positions and counts padding, or if padding changes
                its output.
        """
        if _alone.get() or mask.is_meta or isinstance(mask, FakeTensor):
            return {}
        real = mask.bool()
        is_start = real[:, 1:] & ~real[:, :-1]
        is_end = real[:, :-1] & ~real[:, 1:]
        # Compute both together, so that an accelerator is synchronized only once.
        has_left, has_right = torch.stack([is_start.any(), is_end.any()]).tolist()
        if has_left:
            self._require_unread("left", copies_text)
        if has_right:
            self._require_unread("right", copies_text)
        if not has_left or not self._attached.has("run_block"):
            return {}
        if (first := self._first_position) is not None:
            return {"position_ids": self._counted(mask, first)}
        if self._counts_padding:
            raise ValueError(
                f"texts must be padded on the right for a {type(self._attached.model).__name__}, "
                "which accepts no positions and counts padding; got padding before a token"
            )
        return {}

    def _require_unread(self, side: str, copies_text: bool) -> None:
        """Require that padding on a side does not change the output of a text.

        It changes the output of some models. A classifier may read the first column, a convolution
        reads past the end of a text, and a decoder that copies the text of its encoder also copies
        the padding.

        Raises:
            ValueError: if padding changes the output. The error states which texts the model can
                read.
        """
        if not self._is_read(side, copies_text):
            return
        model = self._attached.model
        other_side = "left" if side == "right" else "right"
        if copies_text and not self._is_read(side, copies_text=False):
            raise ValueError(
                f"a padded {type(model).__name__} must be given decoder_input_ids, because without "
                f"them its decoder reads input_ids with the padding; got padding on the {side}"
            )
        if not self._is_read(other_side, copies_text):
            rule = f"must be padded on the {other_side}"
        elif getattr(model.config, "pad_token_id", None) is None:
            rule = "must have one length, or the model a config.pad_token_id"
        else:
            rule = "must have one length"
        raise ValueError(
            f"texts {rule}, because padding on the {side} changes the output of a "
            f"{type(model).__name__}; got padding there"
        )

    def _is_read(self, side: str, copies_text: bool) -> bool:
        """Return the result of `_changes_output`, which runs once for each pair of arguments."""
        question = (side, copies_text)
        if question not in self._reads_padding:
            self._reads_padding[question] = self._changes_output(*question)
        return self._reads_padding[question]

    @without_gradients
    def _changes_output(self, side: str, copies_text: bool) -> bool:
        """Return whether one column of padding on a side changes the output of a text."""
        attached = self._attached
        model = attached.model
        if any(map(is_fully_sharded, model.modules())):
            # The run needs all processes. A process without padding would not take part in it, and
            # the others would wait.
            return False
        if table_of(model) is None:
            # The model reads no tokens.
            return False
        pad = attached.pad_token
        tokens = tokens_for(model)[:1]
        # A classifier may find the end of a text by the first padding token.
        tokens = tokens[:, tokens[0] != pad]
        n_pos = tokens.shape[1]
        padding = tokens.new_full((1, 1), pad)
        columns = [padding, tokens] if side == "left" else [tokens, padding]
        padded = torch.cat(columns, 1)
        mask = torch.ones_like(padded)
        mask[:, 0 if side == "left" else -1] = 0
        more: dict[str, Tensor] = {}
        if is_encoder_decoder(model) and not copies_text:
            more["decoder_input_ids"] = tokens[:, :3]
        try:
            alone = self._logits_alone(tokens, **more)
            if side == "left" and attached.has("run_block") and self._first_position is not None:
                more["position_ids"] = self._counted(mask, self._first_position)
            beside = self._logits_alone(padded, attention_mask=mask, **more)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # The model needs more arguments than these tokens. If the decoder copies a text with
            # padding on the left, its output depends on the padding without a test.
            return copies_text and side == "left"
        if beside.shape[1:2] == (n_pos + 1,) and alone.shape[1:2] == (n_pos,):
            beside = beside[:, 1:] if side == "left" else beside[:, :-1]
        tolerance = logits_rounding(alone.dtype)
        return beside.shape == alone.shape and not agree(beside, alone, tolerance)

    def _counted(self, mask: Tensor, first: int) -> Tensor:
        """Return the positions of real tokens, counted from `first`."""
        return (mask.long().cumsum(1) - 1).clamp(min=0) + first

    @cached_property
    def _first_position(self) -> int | None:
        """The position that the model gives to the first token in a run without positions.

        Later positions count up from it. The position is 0, or the id of the padding token plus 1
        (2 if there is no such id), as in RoBERTa. Both are tried, and the first that gives the
        logits of a run without positions is returned. The value is None if the model accepts no
        positions, or if neither gives these logits.
        """
        if not self._takes_positions:
            return None
        model = self._attached.model
        tokens = tokens_for(model)
        pad = getattr(model.config, "pad_token_id", None)
        columns = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        alone = self._logits_alone(tokens)
        for first in (0, pad + 1 if isinstance(pad, int) else 2):
            shifted = self._logits_alone(tokens, position_ids=columns + first)
            # In half precision, other positions may give almost the same logits. The right
            # positions give the same bits, because the model does the same arithmetic on the same
            # shapes.
            if is_same(shifted, alone) or (alone.dtype not in HALF and agree(shifted, alone, 1e-3)):
                return first
        return None

    @cached_property
    @without_gradients
    def _counts_padding(self) -> bool:
        """True if a column of padding before a text changes its logits."""
        attached = self._attached
        tokens = tokens_for(attached.model)
        mask = torch.ones_like(tokens).index_fill(1, tokens.new_zeros(1), 0)
        with mode(attached.model, training=False), _alone.set(True):
            with_mask = attached.context(tokens, attention_mask=mask, **attached.uncached)
            late, stream = (
                hooks_disabled(attached.input_resid, part, context)
                for part, context in ((tokens, with_mask), (tokens[:, 1:], None))
            )
        # Compare the streams, because half precision may hide the vectors of positions in the
        # logits. A linear map of the embeddings rounds differently with fewer rows, so the
        # comparison has a tolerance.
        is_equal = is_close if stream.dtype in HALF else agree
        if not is_equal(late[:, 1:], stream):
            return True
        padded = self._logits_alone(tokens, attention_mask=mask)[:, 1:]
        return not agree(padded, self._logits_alone(tokens[:, 1:]), 1e-3)

    @without_gradients
    def _logits_alone(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of a run without hooks, and without positions added by this class."""
        with mode(self._attached.model, training=False), _alone.set(True):
            return logits_of(hooks_disabled(self._attached.run_base, tokens, **arguments))
