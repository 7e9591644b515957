"""The forward of an attached model: the texts of a run, where it starts, and the values at points.

A text may be read in several runs: each run reads a piece, for example one new token, and gets the
cache or the state of the run before among its arguments. Edits count positions from the start of
the text, so the position at which a piece starts is needed. It is read from the first of these that
exists:

1. a mask with more columns than there are new tokens;
2. a cache of keys, which counts the positions that it has seen;
3. any other object, or list of tensors, that was an argument or an output of an earlier run: the
   state of a model without keys.

Virtual tokens, which an adapter adds before every text (prefix tuning), do not count.

During the run, wires pass values through points. A wire is a hook on one of the model's modules. It
passes the module's input or output to a point, and replaces it by the result of the point (`fire`).
If no hook is active at the point, nothing is computed, and the module's own tensor is used. Some
modules join rows and positions in one axis. The forward stores the numbers of rows and positions
(`texts_read`), so that a point shows two axes.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError, HookPoint, start_of_piece
from hooks.base import (
    Piece,
    Shards,
    Words,
    carried,
    forwards_in,
    in_chunks,
    logits_in,
    mark_model,
    mark_padding,
    memory_of,
    padding_messages,
    prompt_read,
    reading,
    row_ends,
    shown,
    tensors_in,
    with_first_tensor,
)
from hooks.shared import Wire, is_listened_to
from models.attached.generating import Generation, generation_now
from models.attached.original import HOOKED
from models.attached.unchanged import Unchanged, raise_for
from models.checks import should_read
from models.running.masks import as_boolean

NEW_CACHE, OLD_CACHES = "cache", ("past_key_values", "cache_params")
"""The names of the cache argument: since `transformers` 5.24, and before.

The newer versions warn about the old names.
"""

# The numbers of rows and positions of this run, for modules that join them in one axis.
texts_read: ContextVar[tuple[int, ...]] = ContextVar("texts", default=())


class Replaced:
    """A callable that replaces a method of a module, for example `forward`, while it is attached.

    Args:
        module: the module.
        name: the name of the method.

    Attributes:
        inner: the method that is replaced.
        replaced: the same method if it was an attribute of this module, and not of its class;
            otherwise None. `restore_methods` sets it again.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.inner = getattr(module, name)
        self.replaced = vars(module).get(name)


def restore_methods(model: nn.Module) -> None:
    """Give the modules of a model the methods that they had before `attach`."""
    for module in model.modules():
        for name in ("forward", "generate", "get_encoder", "get_decoder"):
            method = vars(module).get(name)
            if isinstance(method, Replaced):
                delattr(module, name)
                if method.replaced is not None:
                    setattr(module, name, method.replaced)


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
        """Return the output of the model's own `generate`.

        Raises:
            TypeError: if a text is given instead of tokens.
        """
        first = next(iter(args), None)
        if isinstance(first, str | list):
            raise TypeError(
                f"generate of transformers needs a tensor of tokens; got {shown(first)}: write "
                "models.generate_text(model, texts, max_new_tokens=9), or "
                "model.generate(attached.to_tokens(text).tokens, max_new_tokens=9) after "
                "attached = attach(model)"
            )
        model: Any = getattr(self.inner, "__self__", None)
        generation = Generation(model, args, kwargs)
        with generation_now.set(generation), in_chunks(generation.prompt()):
            output = self.inner(*args, **kwargs)
        if (ends := row_ends()) is not None:
            running = generation.running(output)
            if running is not None:
                ends.note(model, running)
        return output


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
        """Return the output of the module's own forward.

        Raises:
            ValueError: if the mask has other rows than the tokens, another number of columns
                although no argument contains earlier positions, or other numbers than 0 and 1.
        """
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
        mask = self._mask_in(args, kwargs)
        real = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if isinstance(mask, Tensor) and mask.ndim == 3 and mask.flatten(0, 1).shape == texts:
            real = mask.flatten(0, 1)
        if real is not None and tokens.numel():
            has_earlier = self._grows and any(True for _ in _states([*args, *kwargs.values()]))
            _require_mask(real, texts, has_earlier)
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

    def _mask_in(self, args: Any, kwargs: Any) -> Any:
        """Return the argument `attention_mask`, or None."""
        return kwargs.get("attention_mask", args[self._mask] if len(args) > self._mask else None)

    def _piece(
        self,
        texts: Any,
        real: Tensor | None,
        others: dict[str, Tensor],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run the model inside a context that tells edits which columns of the texts the run reads.

        The run may be a step of a generation, which reads only the next piece of each text. The
        column where the piece starts follows from the mask, the cache or the earlier runs.

        Args:
            texts: the number of texts and the number of positions of this run.
            real: the mask of real tokens, from the first column of the texts; None without a mask.
            others: masks of other texts that the run reads, by the axis of their columns.
            args, kwargs: the arguments of the run.

        Returns:
            The output of the model.
        """
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
        # The arguments of the first piece contain no cache. With `use_cache`, the model may create
        # a cache in this run.
        began = None
        generation = generation_now.get()
        if start is None and generation is not None:
            start = 0
            generation.began = generation.began or texts[1]
            began = generation.began
        if start is None:
            start = 0 if kwargs.get("use_cache") else start_of_piece()
        has_other_mask = real is None and self._mask_in(args, kwargs) is not None
        if generation is not None and has_other_mask:
            real = generation.columns_read(texts[0], start + texts[1], self.inner)
            if real is not None and (ends := row_ends()) is not None:
                ends.note_mask(getattr(self.inner, "__self__", None), real)
        piece = Piece(start, real, moved=moved, began=began, others=others)
        if generation is not None:
            piece.unknown_end = generation.why_no_end
            piece.copies = generation.copies(texts[0], self.inner)
            generation.count(self.inner)
        prompt = prompt_read()
        chunk = prompt and prompt.chunk(start or 0, real, n_columns=texts[1])
        if chunk is not None:
            piece.n_later = chunk.n_later
            piece.of_run = chunk.of_run
        with reading(piece):
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

    It turns texts into tokens, and checks that modules and numbers have not changed since `attach`.

    Args:
        model: the model.

    Attributes:
        unchanged: the modules and numbers that must not change.
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
        self.unchanged = Unchanged()
        self.prepare: Callable[..., tuple[Any, Any]] | None = None
        self.reads_texts = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the model's own forward.

        Raises:
            HookError: if a module on the way to a point was replaced, as adapters do, or if a
                number or the attention function has changed since `attach`.
            TypeError: if the model's forward does not know an argument.
        """
        raise_for(self.unchanged.changed_module())
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        raise_for(self.unchanged.changed_number())
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
        if self.reads_texts:
            output = super().__call__(*args, **kwargs)
            mask = self._mask_in(args, kwargs)
        else:
            output = self.inner(*args, **kwargs)
            mask = kwargs.get("decoder_attention_mask")
        is_mask_of_columns = isinstance(mask, Tensor) and mask.ndim == 2
        # A tensor selects columns one by one, so the mask has other columns than the logits.
        if is_mask_of_columns and not isinstance(kwargs.get("logits_to_keep"), Tensor):
            mark_padding(logits_in(output), mask)
        if isinstance(model := getattr(self.inner, "__self__", None), nn.Module):
            mark_model(logits_in(output), model)
        return output


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


def _require_mask(mask: Tensor, texts: Sequence[int], has_earlier: bool) -> None:
    """Check that a mask has a row for each text, a column for each token, and only 0 and 1.

    Numbers are not checked if they cannot be read, or inside `skip_token_checks`.

    Args:
        mask: the mask, [batch, key].
        texts: the shape of the new tokens, [batch, pos].
        has_earlier: whether the mask may also have columns for earlier tokens.

    Raises:
        ValueError: if the mask has another shape, or other numbers.
    """
    rows, columns = mask.shape
    has_columns = columns >= texts[1] if has_earlier else columns == texts[1]
    if rows != texts[0] or not has_columns:
        raise ValueError(padding_messages.mask_shape("attention_mask", texts, mask.shape))
    if mask.dtype != torch.bool and should_read(mask):
        as_boolean("attention_mask", mask.cpu())


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


def rows_and_positions(stream: Tensor) -> tuple[int, int]:
    """Return the numbers of rows and positions of a stream.

    If rows and positions share an axis, as for images of different sizes, there is one row.
    """
    return (stream.shape[0], stream.shape[1]) if stream.ndim > 2 else (1, len(stream))


def rows_first(point: HookPoint, stream: Tensor) -> Tensor:
    """Return a stream with the axes of its point.

    Some models have the axis of streams first, [stream, batch, pos, d_model]. Their points have the
    attribute `streams_first`, and show [batch, pos, stream, d_model].
    """
    return stream.movedim(0, 2) if carried(point, "streams_first") else stream


def fire(point: HookPoint, value: Tensor) -> Tensor:
    """Pass a value through a point, and return the result in the layout of the value.

    If rows and positions share an axis of the value, the point sees them as two axes. If the value
    has the axis of streams first, the point sees it third. If a model is split over processes, the
    point sees the heads and neurons of all processes.
    """
    if not is_listened_to(point):
        return point(value) if value.ndim == len(point.axes) else value
    if carried(point, "streams_first"):
        read = rows_first(point, value)
        new = point(read)
        return value if new is read else new.movedim(2, 0)
    texts = texts_read.get()
    apart = value
    if value.ndim != len(point.axes):
        are_joined = len(value) == math.prod(texts)
        apart = value.view(*texts, *(value.shape[1:] if are_joined else (-1,)))
    shards: Shards | None = carried(point, "shards")
    whole = shards.joined(apart) if shards else apart
    new = point(whole)
    # A hook may have run a model, which changes this variable, so restore it.
    texts_read.set(texts)
    if new is whole:
        return value
    return (shards.part(new) if shards else new).view_as(value)


# Wires are dataclasses and not functions, because `deepcopy` of a model must also copy the points
# in its hooks. Otherwise the copy would use the points of the original.


@dataclass(eq=False)
class Output(Wire):
    """Passes a module's output through a point.

    Attributes:
        point: the point.
        factor: the factor by which the model multiplies the output.
        is_overwritten: whether the model later writes into the output.
    """

    point: HookPoint
    factor: float = 1.0
    is_overwritten: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the result of the point; None if it does not change."""
        value = output if isinstance(output, Tensor) else next(tensors_in(output))
        if self.factor == 1 and not self.is_overwritten:
            new = fire(self.point, value)
        elif not is_listened_to(self.point):
            return None
        else:
            scaled = value * self.factor
            new = fire(self.point, scaled)
            new = value if new is scaled else new / self.factor
        return None if new is value else with_first_tensor(output, new)


@dataclass(eq=False)
class Computed(Wire):
    """Passes a value that is computed from a module's output through a point.

    Without a hook at the point, the value is not computed. `passed` computes it.
    """

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point; None if nothing changes."""
        return self.passed(module, args, output) if is_listened_to(self.point) else None

    def passed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return the output with the changes of the point, for a point with a hook."""
        raise NotImplementedError
