"""Two models with the same points: checks, texts that both read, and values of both.

The base is the original model. The tuned model was trained further.

1. `require_same` compares the sizes, the points and the axes. One error names the first difference.
2. `TwoModels.read` converts the texts to tokens with both tokenizers, which must agree.
3. `TwoModels.batches` yields padded batches of tokens, each on the device of its model.
4. `TwoModels.capture` runs both models until the last requested point. One model with an adapter
   runs twice, the second time with the adapter off.
5. `TwoModels.by_layer` passes the streams of both models to a function, one layer at a time. When
   the tuned model reaches a layer, the block of the base runs too (`_streams`), so only one layer
   of each model is in memory. Before, an attached base runs once, and the arguments of its blocks
   are recorded (`_steps_of`). If the blocks of the base cannot be called one by one, the streams of
   the tuned model are stored, and the base runs after it (`_stored`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
    tensors_in,
)
from hooks.shared import Session, first_tensor, is_listened_to, replay
from interp.inputs.texts import padded, require_edits_of_all_texts, text_for
from interp.protocol import n_logits, of, require_points, runner_of
from interp.runs.adapters import WithoutAdapter, adapter_off, require_adapter
from interp.runs.models import require_same_points, require_same_tokens

# The sizes that the configs of both models must share, if both configs have them.
_SIZES = ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp")


class BatchOfTwo(NamedTuple):
    """A batch of texts, as each of two models reads it.

    Attributes:
        numbers: the numbers of the texts.
        tuned, base: the texts, on the device of each model. With `with_next`, a further row may be
            the next text.
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
        """Return a context manager inside which a single model has its adapters off."""
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

    def batches(
        self, rows: list[list[int]], size: int, with_next: bool = False
    ) -> Iterator[BatchOfTwo]:
        """Yield batches of at most `size` texts, which differ in size by one text at most.

        Args:
            rows: the tokens of each text.
            size: the largest number of texts in a batch.
            with_next: whether each of several batches also has a row for the text after its last
                text. The text after the last of all texts is the first. A single batch has all
                texts, and no further row.

        Raises:
            HookError: if an active edit selects some of the texts.
        """
        require_integer("batch", size)
        require_edits_of_all_texts(self.tuned, self.base)
        n_batches = -(-len(rows) // size)
        bounds = [number * len(rows) // n_batches for number in range(n_batches + 1)]
        for start, end in progress_of(pairwise(bounds), "batches", n_batches):
            numbers = [*range(start, end)]
            if with_next and n_batches > 1:
                numbers.append(end % len(rows))
            rows_here = [rows[number] for number in numbers]
            text = padded(rows_here, self.tuned, numbers)
            other = text if self.is_one else padded(rows_here, self.base, numbers)
            yield BatchOfTwo(range(start, end), text, other)

    def capture(
        self, batch: BatchOfTwo, names: Iterable[str]
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
        batch: BatchOfTwo,
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
        with self.as_base():
            steps = _steps_of(self.base_runner, batch.base, names)
        if steps is None:
            self._stored(batch, names, visit)
            return
        base_streams = _streams(self.base_runner, steps, names)

        def compared(value: Tensor, point: Point) -> None:
            with self.as_base():
                base = next(base_streams)
            visit(value, base)

        with self.runner.hooks(dict.fromkeys(names.values(), compared)):
            _capture(self.tuned, self.runner, batch.tuned, [[*names.values()][-1]])

    def _stored(
        self,
        batch: BatchOfTwo,
        names: Mapping[int, str],
        visit: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Do the work of `by_layer` with the streams of the tuned model in memory."""
        cache = _capture(self.tuned, self.runner, batch.tuned, [*names.values()])
        streams = [cache[name] for name in names.values()]
        del cache
        streams.reverse()

        def compared(value: Tensor, point: Point) -> None:
            visit(streams.pop(), value)

        with self.as_base(), self.base_runner.hooks(dict.fromkeys(names.values(), compared)):
            _capture(self.base, self.base_runner, batch.base, [[*names.values()][-1]])


class _Step(NamedTuple):
    """The call of one block.

    Attributes:
        block: the block.
        args, kwargs: its arguments besides the stream, which is the first argument.
    """

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Steps(NamedTuple):
    """A run whose blocks can be called one by one.

    Attributes:
        stream: the stream that enters the first block.
        calls: the call of each block.
    """

    stream: Tensor
    calls: Sequence[_Step]


def _steps_of(runner: HookedRunner, text: Text, names: Mapping[int, str]) -> _Steps | None:
    """Return the calls of a model's blocks, or None if the blocks cannot be called one by one.

    A model with hooks runs as a whole, because hooks may act outside the blocks.

    Args:
        runner: the runner of the model.
        text: the texts.
        names: the name of the stream's point in each layer.
    """
    model = runner.model
    language: Any = of(model)
    blocks = [*getattr(language, "blocks", ())]
    if [*names] != [*range(len(blocks))] or is_listened_to(model):
        return None
    # The methods of an attached model have other arguments.
    is_plain = language is model and hasattr(language, "context")
    if is_plain:
        context = language.context(text.tokens, **text.kwargs)
        stream = language.input_resid(text.tokens, context)
        return _Steps(stream, [_Step(block, (context,), {}) for block in blocks])
    return _recorded(runner, blocks, text, last=[*names.values()][-1])


def _recorded(runner: HookedRunner, blocks: Sequence[nn.Module], text: Text, last: str) -> _Steps:
    """Run an attached model until its last block, and return the calls of its blocks.

    `models.attach` has checked that each block reads the output of the block before it.

    Args:
        runner: the runner of the model.
        blocks: its blocks.
        text: the texts.
        last: the name of the stream's point in the last layer. The run stops there.
    """
    streams: list[Tensor] = []
    calls: list[_Step] = []

    def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
        if not calls:
            streams.append(args[0])
        calls.append(_Step(block, args[1:], kwargs))

    with Session() as session:
        for block in blocks:
            session.before(block, partial(enter, block))
        _capture(runner.model, runner, text, [last])
    return _Steps(streams[0], calls)


def _streams(runner: HookedRunner, steps: _Steps, names: Mapping[int, str]) -> Iterator[Tensor]:
    """Yield the value of the stream's point in each layer. Only one layer is in memory.

    Args:
        runner: the runner of the model.
        steps: the calls of its blocks.
        names: the name of the point in each layer.
    """
    stream = steps.stream
    for call, name in zip(steps.calls, names.values(), strict=True):
        point = runner.points[name]
        device = next(call.block.parameters()).device
        args, kwargs = call.args, call.kwargs
        # A block whose weights are stored elsewhere, on `meta`, moves its inputs itself.
        if device.type != "meta":
            stream, args, kwargs = all_to_device((stream, args, kwargs), device)
        values: list[Any] = []
        output = replay(call.block, (stream, *args), kwargs, [(point.module, values.append)])
        stream = next(tensors_in(output))
        yield first_tensor(values.pop(), point)


def _capture(
    model: nn.Module, runner: HookedRunner, text: Text, names: list[str]
) -> ActivationCache:
    """Return the values of one model at some points."""
    return runner.capture(text.tokens, names=names, **_arguments(model, text))


def _arguments(model: nn.Module, text: Text) -> dict[str, Any]:
    """Return the arguments of a run besides the tokens. The run stores no keys and values."""
    return {**getattr(of(model), "uncached", {}), **text.arguments(model)}


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
