"""Forward hooks that pass values of an attached model through its points.

1. A wire is a hook on one of the model's modules. It hands the module's input or output to a point, and puts what the
   point gives in its place (`fire`).
2. While nobody listens at the point nothing is computed, and the module's own tensor goes on.
3. `Forward` stands in for the model's forward: it turns texts into tokens, and says which piece of which texts a run
   reads, so that edits count positions from the start of the text.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hooks import HookError, HookPoint, start_of_piece
from hooks._torch import memory_of
from hooks.pieces import Piece, reading
from hooks.point import tensors_in, with_first_tensor
from hooks.processes import Shards
from hooks.session import Wire, is_listened_to
from hooks.words import Words
from models.attached.norms import Norm

# Dataclasses, because a copy of the model must have hooks that know the copy's points.

# The rows and positions of this run, for modules that see them as one axis.
_texts: ContextVar[tuple[int, ...]] = ContextVar("texts", default=())


def fire(point: HookPoint, value: Tensor) -> Tensor:
    """Return what the point makes of a value. Where rows and positions share an axis, it sees them apart.

    It sees heads and neurons of all processes that the model is split over.
    """
    if not is_listened_to(point):
        return point(value) if value.ndim == len(point.axes) else value
    texts = _texts.get()
    apart = value if value.ndim == len(point.axes) else value.view(*texts, -1)
    shards: Shards | None = vars(point).get("shards")
    whole = shards.joined(apart) if shards else apart
    new = point(whole)
    _texts.set(texts)  # a hook may have run a model
    if new is whole:
        return value
    return (shards.part(new) if shards else new).view_as(value)


def is_cache(value: Any) -> bool:
    """Whether an argument is a cache of keys and values of `transformers`."""
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length")


def _mark(cache: Any) -> tuple[int, ...]:
    """The memory of a cache's keys. It is another after its rows were chosen anew, as in a beam search."""
    keys = (getattr(layer, "keys", None) for layer in getattr(cache, "layers", ()))
    return id(cache), *(memory_of(key) for key in keys if isinstance(key, Tensor))


def _held(cache: Any) -> int:
    """The number of positions that a cache has seen. Layers that keep no keys, as linear attention, do not count."""
    layers = [layer for layer in getattr(cache, "layers", ()) if hasattr(layer, "get_seq_length")]
    return max((int(layer.get_seq_length()) for layer in layers), default=0)


@dataclass(eq=False)
class Output(Wire):
    """Passes a module's output through a point.

    Attributes:
        point: the point.
        factor: what the model multiplies the output with.
        is_overwritten: whether the model writes into it later.
    """

    point: HookPoint
    factor: float = 1.0
    is_overwritten: bool = False

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output with what the point gives."""
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
class Input(Wire):
    """Passes what a module reads through a point.

    Attributes:
        point: the point.
        is_shared: whether others read the same tensor later, and must see an edit too.
    """

    point: HookPoint
    is_shared: bool = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with what the point gives."""
        value = next(tensors_in((args, kwargs)))
        if not self.is_shared:
            new = fire(self.point, value)
            return None if new is value else with_first_tensor((args, kwargs), new)
        if is_listened_to(self.point):
            shown = value.clone()  # a cache may keep it
            new = fire(self.point, shown)
            if new is not shown:
                value.copy_(new)
        return None


@dataclass(eq=False)
class BlockInput(Input):
    """Passes the stream that enters a block through a point."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The arguments with what the point gives."""
        if not torch.compiler.is_compiling():
            _texts.set(next(tensors_in((args, kwargs))).shape[:2])
        return super().__call__(module, args, kwargs)


@dataclass(eq=False)
class Scale(Wire):
    """Passes what a norm divides by through a point. An edit rescales the norm's output."""

    point: HookPoint
    norm: Norm

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Any:
        """The output, rescaled if the point changes the scale."""
        if not is_listened_to(self.point):
            return None
        scale = self.norm.scale(next(tensors_in((args, kwargs))))
        new = fire(self.point, scale)
        return None if new is scale else self.norm.rescaled(output, scale, new)


@dataclass(eq=False)
class Positions(Wire):
    """Passes the vectors of positions, which rows may share, through a point with a row for each text."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Return what the point gives, or None if nobody listens."""
        if not is_listened_to(self.point):
            return None
        vectors = output.view(-1, *output.shape[-2:]).expand(*_texts.get(), -1)
        return fire(self.point, vectors)


@dataclass(eq=False)
class Routing(Wire):
    """Passes the weights of the experts that each position goes to through a point."""

    point: HookPoint

    def __call__(self, module: nn.Module, args: Any) -> Any:
        """The arguments with what the point gives."""
        at = next(n for n, part in enumerate(args[1:], 1) if part.is_floating_point())
        return (*args[:at], fire(self.point, args[at]), *args[at + 1 :])


class Forward:
    """A model's forward that tells points which piece of which texts they see.

    Args:
        model: the model.

    Attributes:
        replaced: the forward that somebody else had put on the model, if any.
        embedded: the hook of `embed`, for a run that is given embeddings instead of tokens.
        places: the modules that points listen to, each with its parent and its name there.
        prepare: makes tokens of texts among the arguments.
    """

    def __init__(self, model: nn.Module) -> None:
        self.replaced = vars(model).get("forward")
        self._inner = model.forward
        self.__wrapped__ = model.forward  # its signature is this one's
        self._words, self._model = Words(self), type(model).__name__
        names = [*inspect.signature(self).parameters, "attention_mask"]
        self._mask = names.index("attention_mask")
        self.places: list[tuple[nn.Module, str, nn.Module]] = []
        self.embedded: Output | None = None
        self.prepare: Callable[..., tuple[Any, Any]] | None = None
        self._left: tuple[int, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model's own forward.

        Raises:
            HookError: if a module that a point listens to was replaced, as adapters do.
            TypeError: if the model's forward does not know an argument.
        """
        for parent, name, module in self.places:
            if getattr(parent, name, None) is not module:
                raise HookError(
                    f"the model's modules must be those that were there at attach; {name!r} of a "
                    f"{type(parent).__name__} is another: attach after adapters are added"
                )
        if torch.compiler.is_compiling():
            return self._inner(*args, **kwargs)
        self._words.require(kwargs, (), f"the {self._model}")
        if self.prepare is not None:
            args, kwargs = self.prepare(*args, **kwargs)
        embeddings = kwargs.get("inputs_embeds")
        if self.embedded is not None and embeddings is not None:
            new = self.embedded(self.embedded.point, (), embeddings)
            kwargs["inputs_embeds"] = embeddings if new is None else new
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        texts = next(tensors_in((args, named)), torch.empty(0, 0)).shape[:2]
        token = _texts.set(texts)
        cache = next(filter(is_cache, (*args, *kwargs.values())), None)
        moved = cache is not None and self._left not in (None, _mark(cache)) and bool(_held(cache))
        try:
            mask = kwargs.get(
                "attention_mask", args[self._mask] if len(args) > self._mask else None
            )
            real = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
            # A model that is told to cache may make the cache itself, for the first piece of a text.
            start = 0 if kwargs.get("use_cache") else start_of_piece()
            if cache is not None:
                start = _held(cache) if real is None else real.shape[1] - texts[1]
            with reading(Piece(start, real, moved)):
                output = self._inner(*args, **kwargs)
            self._left = None if cache is None else _mark(cache)
            return output
        finally:
            _texts.reset(token)
