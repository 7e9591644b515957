"""The parts of a model that analyses need in addition to its hook points, and runs of a model."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeGuard, TypeVar, overload, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, ModeError
from hooks.base import (
    Output,
    Returns,
    explains_calls,
    has_shards,
    is_compiled,
    language_of,
    require_module,
    uncompiled,
)

R = TypeVar("R")
Method = TypeVar("Method", bound=Callable[..., Any])

STACKS = ("encoder", "decoder", "vision", "audio")
"""The prefixes of points whose positions are not positions of the model's texts.

A second stack of a kind has a number in its prefix, such as `vision_2`.
"""


def is_of_text(name: str) -> bool:
    """Return True if the positions of a point are positions of the texts.

    >>> is_of_text("blocks.3.resid_pre"), is_of_text("vision.blocks.3.resid_pre")
    (True, False)
    """
    return name.partition(".")[0].partition("_")[0] not in STACKS


def has_text_of_logits(name: str) -> bool:
    """Return True if the positions of a point are positions of the texts that the logits predict.

    In an encoder-decoder model, these are the texts of the decoder.

    >>> has_text_of_logits("decoder.blocks.3.resid_pre")
    True
    >>> has_text_of_logits("encoder.blocks.3.resid_pre")
    False
    """
    return is_of_text(name) or name.startswith("decoder.")


def optional(method: Method) -> Method:
    """Mark a method of a protocol as optional: every analysis also runs without it.

    Later versions add only optional methods to a protocol.
    """
    vars(method)["is_optional"] = True
    return method


class Sizes(Protocol):
    """The sizes that a model's `config` has."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def n_ctx(self) -> int:
        """The largest number of positions."""

    @property
    def n_layers(self) -> int:
        """The number of blocks."""

    @property
    def n_heads(self) -> int:
        """The number of heads of each block."""

    @property
    def d_model(self) -> int:
        """The size of the residual stream."""


@runtime_checkable
class Adapter(Protocol):
    """The output map of attention or of an MLP with an adapter, such as a LoRA adapter.

    The output of the map is the sum of two terms: `x @ weight + bias` with the weights of the base
    model, and the term of the adapter. The methods return the two terms separately.
    """

    def base(self) -> tuple[Float[Tensor, "d_in d_model"], Float[Tensor, " d_model"]]:
        """Return the weight and the bias of the base model, without the adapter."""

    def share(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_model"]:
        """Return the term of the adapter for inputs `x` of the map."""


class LanguageModel(Protocol):
    """The parts of a model that analyses use. `models.Transformer` has all of them, and
    `models.attach` finds them in other models.

    Your own model needs only the parts that the analysis uses; an error names a missing part.
    Weights multiply row vectors, `x @ W`. Several heads may share the key and value weights of one
    `kv_head`.

    Some analyses, such as circuits, build a graph of the model (`interp.graph`). They also need
    `branches` of each block: a sequence with attention and then the MLP, if there is one. Each
    branch computes a vector that is added to the residual stream:

        added(after(sublayer(norm(stream))))

    Make branches with the class `models.block.Branch`, or with another class that has its methods.
    They have these attributes:

    - `reads`: the hook point of the stream that the branch reads. For the MLP, it is before or
      after the point where the output of attention is added.
    - `norm` and `after`: the norms before and after the sublayer.
    - `sublayer`: attention, the MLP, or a mixer. A mixer is another module that moves information
      between positions.
    - `added`: the hook point of the vector that is added to the stream.
    - `joined`: None. A graph is impossible if the sum of the stream and the vector is normalized.
    - `kind`: `attn`, `mlp` or `mixer`. It can be left out: then the first branch is attention, and
      the others are MLPs.

    A norm is an identity, or a LayerNorm or RMSNorm with a hook point `scale`, the number that it
    divides by. Its `weight` is the gain and its `bias` is the bias; both may be None. A norm of
    another class than PyTorch's also needs `centres`, which is True if the norm subtracts the mean.

    Attention is divided into heads if it has two methods:

    - `project(x)` returns the queries, keys and values of each head. They are linear in `x`, by
      `W_Q`, `b_Q` and so on.
    - `mix(q, k, v, context)` returns the output of attention, through a hook point `z` and with
      `W_O` and `b_O`. So `sublayer(x, context)` equals `mix(*project(x), context)`.

    Attention without `project`, and a mixer, is a single node of the graph. It is called as
    `sublayer(x, context)`. Without `W_O`, it needs a tensor `weight`, from which the graph learns
    the dtype and the device of the block.

    A sublayer may have an `adapter` (see `Adapter`), such as a LoRA adapter. The weights of the
    sublayer then contain the adapter. Sums of components show the adapter as a separate part: they
    take heads and neurons from `adapter.base()`, and the new part from `adapter.share(x)`. For an
    MLP, x is the value of its point `post`.

    >>> import torch
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> tokens = model.to_tokens("def f(x):").tokens
    >>> context = model.context(tokens)
    >>> stream = model.input_resid(tokens, context)
    >>> for layer in range(model.config.n_layers):
    ...     stream = model.run_block(layer, stream, context)
    >>> torch.allclose(model.unembed(stream), model(tokens), atol=1e-4)
    True
    """

    @property
    def config(self) -> Sizes:
        """The sizes of the model."""

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order."""

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """The token embeddings."""

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """The weights from the input of attention to queries."""

    @property
    def W_K(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """The weights from the input of attention to keys."""

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """The weights from the input of attention to values."""

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """The weights from the values that attention mixes to its output."""

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """The unembedding, from the stream after the final norm to logits."""

    def context(self, tokens: Int[Tensor, "batch pos"], *, attention_mask: Any = None) -> Any:
        """Return the context of the blocks, which they read in addition to the residual stream.

        The context contains, for example, masks and positions.

        Args:
            tokens: the texts.
            attention_mask: the mask of padding; None without padding.
        """

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: Any = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that enters the first block.

        Args:
            tokens: the texts.
            context: the result of `context`. Default: the context of texts without padding.
        """

    def run_block(
        self, layer: int, resid: Float[Tensor, "batch pos d_model"], context: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream after a block.

        Args:
            layer: the number of the block.
            resid: the residual stream that enters the block.
            context: the result of `context`.
        """

    @optional
    def in_pieces(self, n_positions: int) -> AbstractContextManager[None]:
        """Return a context manager inside which blocks compute at most `n_positions` at once.

        Optional: `interp.suppressed` uses this method to save memory, and runs without it too.

        Args:
            n_positions: the largest number of positions.
        """

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Return the logits of the last positions, from the stream after the last block.

        Args:
            resid: the residual stream after the last block.
            last: the number of last positions; 0 for all positions.
        """

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream, including the final norm."""


# Not `-> LanguageModel`: a type check at run time would then require all parts.
def of(model: nn.Module, *parts: str) -> Any:
    """Return the object with the parts of `LanguageModel`.

    This is the model itself or, for an attached model, the object that `models.attach` added.

    Args:
        model: any module.
        parts: the names in `LanguageModel` that the analysis needs.

    Raises:
        TypeError: if a part is missing, or the model is not a module.
    """
    require_module(model)
    require_uncompiled(model)
    language = language_of(model)
    # Check the class first, because reading a weight view from the instance computes it.
    has_part = getattr(
        language, "has", lambda part: hasattr(type(model), part) or hasattr(model, part)
    )
    missing = [part for part in parts if not has_part(part)]
    if missing:
        hint = (
            "models.attach gives a transformers model them, models.from_hf makes one that has them"
        )
        if language is not model and "unembed" in missing:
            hint = "the modules after its blocks give no logits of tokens"
            if (n_streams := getattr(language, "n_streams", 1)) > 1:
                hint = f"its residual stream has {n_streams} vectors for each token"
        if language is not model and not hasattr(language, "blocks"):
            hint = "it has no blocks of a text alone, whose last stream the logits are read from"
        raise TypeError(
            f"the model must have {' and '.join(parts)}; got {type(model).__name__} without "
            f"{' and '.join(missing)} ({hint})"
        )
    return language


def require_uncompiled(model: nn.Module) -> None:
    """Check that a model is not compiled, because compiled code ignores the hooks of analyses.

    Raises:
        TypeError: if the model is compiled. The error names the model to use instead.
    """
    if is_compiled(model):
        inner = uncompiled(model)
        is_wrapper = inner is not model
        remedy = "compiled._orig_mod, the model inside" if is_wrapper else "a copy that is not"
        raise TypeError(
            "the model must not be compiled, because analyses register different hooks in each "
            "run; "
            f"got a compiled {type(inner).__name__}: give {remedy}"
        )


def require_one_vector(axes: Sequence[str], name: str) -> None:
    """Check that a residual stream has one vector for each token.

    Args:
        axes: the axes of the stream.
        name: the name of its point.

    Raises:
        ValueError: if it has several vectors for each token, on an axis `stream`.
    """
    if "stream" in axes:
        raise ValueError(
            f"the residual stream must have one vector for each token; got the axes "
            f"{' '.join(axes)} at {name} (other analyses, such as activation_patching, can read "
            "this model)"
        )


def n_logits(model: nn.Module) -> int:
    """Return the size of the output vocabulary, which is the input vocabulary in most models.

    Raises:
        TypeError: if the model has no `config`.
    """
    config = of(model, "config").config
    return int(getattr(config, "vocab_size_out", config.vocab_size))


def few_logits(model: nn.Module, last: int) -> dict[str, int]:
    """Return the argument with which a model returns only the logits of its last positions.

    The result is empty for a model without this argument, which returns all logits.

    Args:
        model: any module.
        last: the number of last positions.
    """
    parameters = inspect.signature(model.forward).parameters
    names = ["logits_to_keep"]
    # A module without a method `logits` may use this name for something else.
    if of(model) is model and hasattr(model, "logits"):
        names.append("last")
    return {name: last for name in names if name in parameters}


def require_points(runner: HookedRunner) -> None:
    """Check that a model has hook points, which give its values the names of this project.

    Raises:
        TypeError: if the model has no hook points.
    """
    if not any(point.axes for point in runner.points.values()):
        raise TypeError(
            f"the model must have hook points; got {type(runner.model).__name__} without any "
            "(models.attach adds hook points to a transformers model)"
        )


def rounding_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose rounding limits the difference of a value in a run and computed again.

    A model of `transformers` rotates queries and keys in float32, and many normalize in float32,
    also if the weights are in float64.

    Args:
        model: the model of the run.
        dtype: the dtype of the value in the run.
    """
    is_attached = language_of(model) is not model
    return torch.float32 if is_attached and dtype == torch.float64 else dtype


def plain(model: nn.Module, *parts: str) -> Any:
    """Return a model whose weights have this project's names.

    This is the model itself, or a plain view of an attached model. The view is created at each
    call, and may share memory with the attached model, so do not change its weights. Its points
    have the names of the attached model's points.

    Args:
        model: any module.
        parts: the names in `LanguageModel` that the analysis needs.

    Raises:
        TypeError: if a part is missing, or the weights are sharded (FSDP).
        ValueError: if the model is attached, and `models.from_hf` does not support its config or,
            for a family that it does not know, a part of a block was not found.
    """
    language = of(model, *parts)
    if has_shards(model):
        raise TypeError(
            "the parts of a model can be computed only from whole weights; got "
            f"{type(model).__name__}, sharded by FSDP (load its full state dict into a model "
            "without FSDP, or use an analysis that only runs the model, such as "
            "activation_patching or attribution_patching)"
        )
    return language if language is model else language.plain()


def logits_of(output: Any) -> Float[Tensor, "batch pos vocab"]:
    """Return the logits of a model's output, which is a tensor or has an attribute `logits`.

    The logits of a classifier, [batch, class], become logits with one position.
    """
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[:, None] if logits.ndim == 2 else logits


@overload
def run_with_cache(
    model: nn.Module, *args: Any, run: Callable[..., R], **options: Any
) -> tuple[R, ActivationCache]: ...


@overload
def run_with_cache(
    model: Returns[Output], *args: Any, **options: Any
) -> tuple[Output, ActivationCache]: ...


# The second form also fits other functions, which the runner refuses.
@explains_calls  # type: ignore[misc]
def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """Run a model once, and return its output and a cache of its values.

    See `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: the model's arguments, and the options of the cache.

    Returns:
        The output of the model, for a language model logits [batch, pos, vocab]; and the cache, by
        the names of points.

    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> logits, cache = run_with_cache(model, "impor", names="blocks.*.resid_post")
    >>> model.to_text(logits[0, -1].argmax())
    't'
    >>> [round(cache["resid_post", layer][0, -1].norm().item()) for layer in range(4)]
    [8, 8, 9, 9]
    """
    return HookedRunner(model).run_with_cache(*args, **options)


def is_maker(value: object) -> TypeGuard[Callable[[], Any]]:
    """Return whether a value is a function that makes a model, and not a model or its runner.

    >>> is_maker(nn.ReLU), is_maker(nn.ReLU()), is_maker(HookedRunner(nn.ReLU()))
    (True, False, False)
    """
    return callable(value) and not isinstance(value, nn.Module | HookedRunner)


def runner_of(model: nn.Module) -> HookedRunner:
    """Return a runner of a model in evaluation mode, so that its runs have no dropout.

    Raises:
        TypeError: if the model is not a module.
        ModeError: if any part of the model is in training mode.
    """
    require_module(model)
    require_uncompiled(model)
    for name, module in model.named_modules():
        if module.training:
            part = f"module {name}" if name else "the model"
            raise ModeError(
                f"the model must be in evaluation mode: call model.eval() first; {part} is in "
                "training mode"
            )
    return HookedRunner(model)
