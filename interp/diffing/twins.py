"""Two models with the same points: checks, texts that both read, and values of both.

1. `require_same` compares the sizes, the points and the axes. One error names the first difference.
2. `TwoModels.read` converts the texts to tokens with both tokenizers, which must agree.
3. `TwoModels.batches` yields padded batches of tokens, each on the device of its model.
4. `TwoModels.capture` runs both models until the last requested point. One model with an adapter
   runs twice, the second time with the adapter off.
5. `TwoModels.by_layer` passes the streams of both models to a function, one layer at a time. If the
   blocks can be called one by one, both models run in step, and only one layer of each is in
   memory. Otherwise the streams of the tuned model are stored, and the base runs after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, Point
from hooks.base import (
    Text,
    Texts,
    all_to_device,
    each_text,
    progress_of,
    require_integer,
    require_kind,
)
from hooks.shared import Session, is_listened_to
from interp.inputs.texts import padded, text_for
from interp.protocol import n_logits, of, require_points, runner_of
from interp.runs.adapters import WithoutAdapter, adapter_off, require_adapter
from interp.runs.models import require_same_points, require_same_tokens

# The sizes that the configs of both models must share, if both configs have them.
_SIZES = ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp")


class Batch(NamedTuple):
    """A batch of texts, as each of two models reads it.

    Attributes:
        numbers: the numbers of the texts.
        tuned, base: the texts, on the device of each model.
    """

    numbers: range
    tuned: Text
    base: Text


class TwoModels:
    """A tuned model and its base.

    Args:
        tuned: the tuned model, in evaluation mode.
        base: the base, in evaluation mode. None or `without_adapter(tuned)`: `tuned` with its
            adapters off.

    Attributes:
        tuned, base: the models; the same object for a model with an adapter.
        runner, base_runner: their runners.
        is_one: True if `tuned` and `base` are one model with an adapter.

    Raises:
        TypeError: if a model is not a module, or has no hook points.
        ModeError: if a model is in training mode.
        ValueError: if the models differ, or one model has no adapter; see `require_same` and
            `require_adapter`.
    """

    def __init__(self, tuned: nn.Module, base: nn.Module | WithoutAdapter | None) -> None:
        if isinstance(base, WithoutAdapter) and base.model is tuned:
            base = None
        self.tuned = tuned
        self.runner = runner_of(tuned)
        require_points(self.runner)
        self.is_one = base is None or base is tuned
        self.base = tuned
        self.base_runner = self.runner
        if self.is_one:
            require_adapter(tuned)
        else:
            require_kind("base", base, nn.Module, "a model, or None for a model with an adapter")
            assert isinstance(base, nn.Module)
            self.base = base
            self.base_runner = runner_of(base)
            require_points(self.base_runner)
            require_same(self.runner, self.base_runner)

    def as_base(self) -> AbstractContextManager[None]:
        """Return a `with` in which `base` computes as the base: one model has its adapters off."""
        return adapter_off(self.tuned) if self.is_one else nullcontext()

    def read(self, texts: Texts) -> list[list[int]]:
        """Return the tokens of each text, without padding.

        Raises:
            ValueError: if there is no text, a text is wrong, or the tokenizers of the models return
                different tokens. The error names the first such text.
        """
        rows = []
        for number, text in enumerate(each_text(texts)):
            (row,) = padded([text], self.tuned, [number]).listed()
            rows.append(row)
            if self.is_one or not isinstance(text, str):
                continue
            if getattr(of(self.base), "tokenizer", None) is None:
                continue
            (base_row,) = text_for(self.base, text).listed()
            require_same_tokens([row], [base_row], number)
        if not rows:
            raise ValueError("texts must contain at least one text; got no text")
        return rows

    def batches(self, rows: list[list[int]], size: int) -> Iterator[Batch]:
        """Yield batches of at most `size` texts, which differ in size by one text at most.

        Args:
            rows: the tokens of each text.
            size: the largest number of texts in a batch.
        """
        require_integer("batch", size)
        n_batches = -(-len(rows) // size)
        bounds = [number * len(rows) // n_batches for number in range(n_batches + 1)]
        for start, end in progress_of(pairwise(bounds), "batches", n_batches):
            numbers = range(start, end)
            text = padded(rows[start:end], self.tuned, numbers)
            other = text if self.is_one else padded(rows[start:end], self.base, numbers)
            yield Batch(numbers, text, other)

    def capture(
        self, batch: Batch, names: Iterable[str]
    ) -> tuple[ActivationCache, ActivationCache]:
        """Return values of both models at some points. The runs stop after the last point.

        Args:
            batch: the texts.
            names: the names of the points.
        """
        names = [*names]
        tuned = _capture(self.tuned, self.runner, batch.tuned, names)
        with self.as_base():
            return tuned, _capture(self.base, self.base_runner, batch.base, names)

    def by_layer(
        self,
        batch: Batch,
        names: Mapping[int, str],
        visit: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Call a function with the streams of both models, layer by layer.

        Args:
            batch: the texts.
            names: the name of the stream's point in each layer, in the order of the layers.
            visit: the function. It gets the value of the tuned model and the value of the base at
                each point, in the order of the names.
        """
        both = (self.tuned, self.runner), (self.base, self.base_runner)
        if not self.is_one and all(_has_steps(*one, names) for one in both):
            steps = _streams(*both[0], batch.tuned, names), _streams(*both[1], batch.base, names)
            for tuned, base in zip(*steps, strict=True):
                visit(tuned, base)
            return
        cache = _capture(self.tuned, self.runner, batch.tuned, [*names.values()])
        streams = [cache[name] for name in names.values()]
        del cache
        streams.reverse()

        def compared(value: Tensor, point: Point) -> None:
            visit(streams.pop(), value)

        with self.as_base(), self.base_runner.hooks(dict.fromkeys(names.values(), compared)):
            _capture(self.base, self.base_runner, batch.base, [[*names.values()][-1]])


def _has_steps(model: nn.Module, runner: HookedRunner, names: Mapping[int, str]) -> bool:
    """Return whether the blocks of a model can be called one by one.

    A model with hooks runs as a whole, because hooks may act outside the blocks.

    Args:
        model: the model.
        runner: its runner.
        names: the name of the stream's point in each layer.
    """
    steps = ("context", "input_resid", "run_block", "blocks")
    return (
        of(model) is model
        and all(hasattr(model, step) for step in steps)
        and [*names] == [*range(len(of(model).blocks))]
        and not is_listened_to(model)
    )


def _streams(
    model: nn.Module, runner: HookedRunner, text: Text, names: Mapping[int, str]
) -> Iterator[Tensor]:
    """Yield the value of the stream's point in each layer. Only one layer is in memory.

    Args:
        model: a model whose blocks can be called one by one.
        runner: its runner.
        text: the texts.
        names: the name of the point in each layer.
    """
    language = of(model)
    context = language.context(text.tokens, **text.kwargs)
    stream = language.input_resid(text.tokens, context)
    for layer, name in names.items():
        device = next(language.blocks[layer].parameters()).device
        if device != stream.device:
            stream, context = all_to_device((stream, context), device)
        values: list[Tensor] = []
        with Session() as session:
            session.after(runner.points[name].module, values.append)
            stream = language.run_block(layer, stream, context)
        yield values.pop()


def _capture(
    model: nn.Module, runner: HookedRunner, text: Text, names: list[str]
) -> ActivationCache:
    """Return the values of one model at some points."""
    return runner.capture(text.tokens, names=names, **text.arguments(model))


def require_same(tuned: HookedRunner, base: HookedRunner) -> None:
    """Check that two models have the same sizes, and the same points with the same axes.

    Raises:
        ValueError: if they do not. The error names the first difference.
    """
    for name, size, other in _sizes_of(tuned.model, base.model):
        if size != other:
            raise ValueError(f"both models must have the same {name}; got {size} and {other}")
    require_same_points(tuned, base, "base")


def _sizes_of(tuned: nn.Module, base: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and the two values of each size that both models have."""
    if any(getattr(of(model), "config", None) is None for model in (tuned, base)):
        return
    config, other = of(tuned).config, of(base).config
    for name in _SIZES:
        if hasattr(config, name) and hasattr(other, name):
            yield name, getattr(config, name), getattr(other, name)
    yield "number of logits", n_logits(tuned), n_logits(base)
