"""The parts of a model that analyses need besides its hook points, and its runs."""

from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, ModeError
from hooks.base import is_compiled, is_fully_sharded, language_of, require_module, uncompiled

STACKS = ("encoder", "decoder", "vision", "audio")
"""The first parts of names whose positions are not those of the texts that a model reads. Further ones have numbers."""


def is_of_text(name: str) -> bool:
    """Whether the positions of a point are those of the texts.

    >>> is_of_text("blocks.3.resid_pre"), is_of_text("vision.blocks.3.resid_pre")
    (True, False)
    """
    return name.partition(".")[0].partition("_")[0] not in STACKS


class Sizes(Protocol):
    """The sizes that a model's `config` has."""

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int


class LanguageModel(Protocol):
    """The parts of a model that analyses use. `models.Transformer` has all of them.

    Your own model needs only the parts that the analysis uses. Weights multiply row vectors, `x @ W`.
    Several heads may share the key and value weights of one `kv_head`.

    A graph (`interp.graph`, circuits) also needs blocks that declare their `branches` (see `models.block.Branch`):
    attention, and then the MLP if there is one. Each adds `added(after(sublayer(norm(stream))))` to the stream,
    which it reads at the point `reads`, before or after what attention adds; `added` is a point too.

    The `sublayer` of attention is `mix(*project(x), context)`. `project` gives the queries, keys and values of
    each head, linear in what it reads, by `W_Q`, `b_Q` and their like; `mix` makes of them what attention adds, by
    a point `z` and by `W_O` and `b_O`. A norm is a LayerNorm or an RMSNorm with a point `scale` of what it
    divides by, or an identity. Beside PyTorch's own it must have `centres`, whether it subtracts the mean; `weight`
    and `bias` are its gain and its bias, or None.
    """

    config: Sizes
    blocks: nn.ModuleList
    W_E: Float[Tensor, "vocab d_model"]
    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer kv_head d_model d_head"]
    W_V: Float[Tensor, "layer kv_head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    W_U: Float[Tensor, "d_model vocab"]

    def context(self, tokens: Int[Tensor, "batch pos"], *, attention_mask: Any = None) -> Any:
        """The context that blocks read besides the residual stream: masks and positions."""

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: Any = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the first block."""

    def run_block(
        self, layer: int, resid: Float[Tensor, "batch pos d_model"], context: Any
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that leaves a block, from the one that enters it."""

    def logits(
        self, resid: Float[Tensor, "batch pos d_model"], last: int
    ) -> Float[Tensor, "batch _last vocab"]:
        """Logits of the `last` positions, from the stream after the last block; 0 means all."""

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits from a residual stream, including the final norm."""


# Not `-> LanguageModel`: a type check at run time would then require all parts.
def of(model: nn.Module, *parts: str) -> Any:
    """The parts of `LanguageModel` that are used: `model` itself, or what an attached model carries.

    Args:
        model: any module.
        parts: the names in `LanguageModel` that the analysis needs.

    Raises:
        TypeError: if the model lacks one of them, or is no module.
    """
    require_module(model)
    require_uncompiled(model)
    language = language_of(model)
    # The class first, because reading a weight view from the instance computes it.
    has = getattr(language, "has", lambda p: hasattr(type(model), p) or hasattr(model, p))
    lacking = [part for part in parts if not has(part)]
    if lacking:
        hint = (
            "models.attach gives a transformers model them, models.from_hf makes one that has them"
        )
        if language is not model and "unembed" in lacking:
            hint = "the modules after its blocks give no logits of tokens"
        if language is not model and not hasattr(language, "blocks"):
            hint = "it has no blocks of a text alone, whose last stream the logits are read from"
        raise TypeError(
            f"the model must have {' and '.join(parts)}; got {type(model).__name__} without "
            f"{' and '.join(lacking)} ({hint})"
        )
    return language


def require_uncompiled(model: nn.Module) -> None:
    """Refuse a compiled model: its code was made once, and does not see the hooks that analyses set.

    Raises:
        TypeError: saying which model to give.
    """
    if is_compiled(model):
        inner = uncompiled(model)
        remedy = (
            "compiled._orig_mod, the model inside" if inner is not model else "a copy that is not"
        )
        raise TypeError(
            "the model must not be compiled, because analyses set other hooks in each run; got a compiled "
            f"{type(inner).__name__}: give {remedy}"
        )


def n_logits(model: nn.Module) -> int:
    """Return the size of the output vocabulary, which most models share with the input's.

    Raises:
        TypeError: if the model has no `config`.
    """
    config = of(model, "config").config
    return int(getattr(config, "vocab_size_out", config.vocab_size))


def require_points(runner: HookedRunner) -> None:
    """Refuses a model without any hook point, whose values have none of our names.

    Raises:
        TypeError: if it has none.
    """
    if not any(point.axes for point in runner.points.values()):
        raise TypeError(
            f"the model must have hook points; got {type(runner.model).__name__} without any "
            "(models.attach gives a transformers model our points)"
        )


def plain(model: nn.Module, *parts: str) -> Any:
    """A model whose blocks and norms have weights under our names: `model`, or for an attached one a plain view.

    That is made at each call, and may share memory with the attached one: do not write into its weights. Its
    points have the names that the attached model's have.

    Raises:
        TypeError: if the model lacks one of the parts, or its weights are sharded (FSDP).
        ValueError: if it is attached, and `models.from_hf` refuses its config or, where that does not know its
            family, a part of its blocks was not found.
    """
    language = of(model, *parts)
    if any(map(is_fully_sharded, model.modules())):
        raise TypeError(
            "a model whose parts are computed alone must have whole weights; "
            f"{type(model).__name__} is sharded by FSDP: load its full state dict into a model "
            "without FSDP, and use that"
        )
    return language if language is model else language.plain()


def logits_of(output: Any) -> Float[Tensor, "batch pos vocab"]:
    """The logits of a model's output: the output itself, or its attribute `logits`. Those of a classifier are one position's."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits[:, None] if logits.ndim == 2 else logits


def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """The model's output with a cache; see `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: the model's arguments, and the options of the cache.

    >>> from models import load
    >>> logits, cache = run_with_cache(load("pydoc-4l"), "def f(x):", names="blocks.2.resid_post")
    >>> cache["resid_post", 2].shape
    torch.Size([1, 9, 128])
    """
    return HookedRunner(model).run_with_cache(*args, **options)


def runner_of(model: nn.Module) -> HookedRunner:
    """A runner for comparable runs of a model, without dropout.

    Raises:
        TypeError: if it is no module.
        ModeError: if any part of the model is in training mode.
    """
    require_module(model)
    require_uncompiled(model)
    if any(module.training for module in model.modules()):
        raise ModeError("the model must be in evaluation mode: call model.eval() first")
    return HookedRunner(model)
