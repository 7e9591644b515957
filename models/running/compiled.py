"""Steps of a generation as one compiled graph.

1. Read the prompts as in any generation, with a `KVCache`.
2. Move the keys and values into the buffers of a `StaticCache`. Each later step then has the same
   shapes, and its position is a tensor, so `torch.compile` traces it once.
3. Before each step, ask which edits act on its column (`hooks.steps`). Steps with the same edits
   run the same graph, with these edits baked in. A step whose hooks no graph can apply runs without
   a graph, on the same buffers.
4. At the end, leave the graph without hooks and the buffers with the model. The next generation
   with the same sizes uses them again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooks.base import (
    carried,
    compiled,
    keep_in_place,
    refuse,
    require_kind,
    skip_token_checks,
    without_gradients,
)
from hooks.shared import StepEdit, StepHooks, edits_of_step
from models.running.kvcache import KVCache
from models.running.prompts import IN_TRAINING
from models.running.static_cache import StaticCache
from models.transformer import Transformer

# The number of positions of the buffers is a multiple of this number, so that generations of
# similar lengths use the same graph.
STEP = 64
# Each set of edits needs a graph. Steps with further sets of edits run without a graph.
MOST_GRAPHS = 4


class CompiledSteps:
    """A function that reads tokens and returns logits, and runs the steps as compiled graphs.

    Args:
        model: the model.
        cache: an empty cache.
        read: the function that reads tokens into `cache` without a graph: the prompts in its first
            call, and then the tokens of one step.
        mask: True at the columns that are not padding, [batch, pos], on the CPU: the prompts and
            all new tokens. None without padding.
        end: the largest number of columns.
        options: the arguments of `torch.compile`.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        read: Callable[[Tensor], Tensor],
        mask: Bool[Tensor, "batch _end"] | None,
        end: int,
        options: Mapping[str, Any],
    ) -> None:
        self._model = model
        self._cache = cache
        self._read = read
        self._mask = mask
        self._capacity = min(-(-end // STEP) * STEP, model.config.n_ctx)
        self._options = options
        self._kept: Kept | None = None
        self._hooked: list[tuple[list[StepEdit], StepHooks, _Run]] = []

    @without_gradients
    def __call__(self, tokens: Int[Tensor, "batch _pos"]) -> Float[Tensor, "batch vocab"]:
        """Return the logits after the last token.

        Raises:
            ValueError: if the model is in training mode.
            RuntimeError: if a step cannot be compiled.
        """
        column = self._cache.length
        if not column:
            return self._read(tokens)
        if self._model.training:
            raise ValueError(IN_TRAINING)
        if self._kept is None:
            self._kept = self._loaded()
        static = self._kept.cache
        real = None if self._mask is None else self._mask[:, : column + 1]
        edits = edits_of_step(self._model, column, real)
        run = None if edits is None else self._graph(self._kept, edits)
        if run is None:
            logits = self._read(tokens)
            static.commit()
            return logits
        # A mode or an option may ask for CUDA graphs, which must know where a step begins.
        if tokens.is_cuda and self._options:
            torch.compiler.cudagraph_mark_step_begin()
        with skip_token_checks():
            logits = run(self._model, static, tokens)
        self._cache.commit(column + 1, real)
        # The next step may write into the memory of the graph's result.
        return logits.clone()

    def close(self) -> None:
        """Remove the hooks of graphs, and leave the graph without hooks with the model."""
        for _, hooks, _ in self._hooked:
            hooks.close()
        self._hooked.clear()
        if self._kept is not None:
            vars(self._model)[KEPT] = self._kept
            self._kept = None

    def _loaded(self) -> "Kept":
        """Return the buffers and the graph that the model has kept, or new ones, with the prompts
        loaded.
        """
        layers = [layer.about for layer in self._cache.layers]
        key = (self._capacity, layers, torch.is_inference_mode_enabled(), dict(self._options))
        # No other generation may use the buffers now, so the model does not keep them meanwhile.
        kept: Kept | None = carried(self._model, KEPT)
        vars(self._model).pop(KEPT, None)
        if kept is None or kept.key != key:
            kept = Kept(key, StaticCache(self._cache, self._capacity), self._compiled())
            for tensor in kept.cache.tensors:
                keep_in_place(tensor)
        n_padding = None
        if self._mask is not None:
            n_padding = (~self._mask).sum(1, keepdim=True)
        kept.cache.load(self._cache, n_padding)
        return kept

    def _graph(self, kept: "Kept", edits: list[StepEdit]) -> "_Run | None":
        """Return the function that runs a step with some edits; None if there are too many graphs.

        Args:
            kept: the buffers, and the graph without hooks.
            edits: the edits that act in the step.
        """
        # Hooks that do not act in this step must not become a part of the graph that the model
        # keeps, so it runs only without any hooks.
        if not edits:
            return kept.run
        for known, _, known_run in self._hooked:
            if known == edits:
                return known_run
        if len(self._hooked) == MOST_GRAPHS:
            return None
        hooks = StepHooks(edits)
        step = self._compiled()

        def run(model: Transformer, cache: StaticCache, tokens: Tensor) -> Tensor:
            return hooks.call(step, model, cache, tokens)

        self._hooked.append((edits, hooks, run))
        return run

    def _compiled(self) -> "_Run":
        """Return the function of one step, which is compiled in its first call."""
        return compiled(_step, **{"fullgraph": True, "dynamic": False, **self._options})


_Run = Callable[[Transformer, StaticCache, Tensor], Tensor]

KEPT = "compiled_step"
"""The attribute of a model that contains its `Kept`."""


class Kept:
    """The compiled step and the buffers that a model keeps for its next generation.

    A copy of the model and a stored model have an empty `Kept`.

    Args:
        key: the sizes and options that a generation must have to use them.
        cache: the buffers.
        run: the compiled step, without hooks.
    """

    def __init__(self, key: Any, cache: StaticCache, run: _Run) -> None:
        self.key = key
        self.cache = cache
        self.run = run

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _step(model: Transformer, cache: StaticCache, tokens: Tensor) -> Tensor:
    """Return the logits [batch, vocab] after one new token of each row."""
    return model(tokens, kv_cache=cache, last=1)[:, -1]


def compile_options(value: Any) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` for the option `compiled`; None if it is False.

    Raises:
        TypeError: if the option is neither a bool nor a mapping, or an argument is unknown.
    """
    words = "True, False, or arguments of torch.compile, such as dict(mode='reduce-overhead')"
    require_kind("compiled", value, (bool, Mapping), words=words)
    if isinstance(value, bool):
        return {} if value else None
    refuse(value, torch.compile, "torch.compile")
    return dict(value)
