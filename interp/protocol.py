"""What the analyses need from a model besides its hook points, and how they run it."""

from typing import Any, Protocol

from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache, HookedRunner, ModeError


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
    """

    config: Sizes
    blocks: nn.ModuleList
    W_E: Float[Tensor, "vocab d_model"]
    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer kv_head d_model d_head"]
    W_V: Float[Tensor, "layer kv_head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    W_U: Float[Tensor, "d_model vocab"]

    def context(self, tokens: Int[Tensor, "batch pos"], attention_mask: Any = None) -> Any:
        """What the blocks read besides the residual stream: masks and positions."""

    def input_resid(
        self, tokens: Int[Tensor, "batch pos"], context: Any = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that enters the first block."""

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
    """Returns `model` itself, after a check that it has the parts of `LanguageModel` that are used.

    Args:
        model: any module.
        parts: the names in `LanguageModel` that the analysis needs.

    Raises:
        TypeError: if the model lacks one of them.
    """
    # The class first, because reading a weight view from the instance computes it.
    lacking = [p for p in parts if not (hasattr(type(model), p) or hasattr(model, p))]
    if lacking:
        raise TypeError(
            f"the model must have {' and '.join(parts)}; got {type(model).__name__} without "
            f"{' and '.join(lacking)} (models.from_hf makes a model that has them)"
        )
    return model


def logits_of(output: Any) -> Float[Tensor, "batch pos vocab"]:
    """The logits of a model's output: the output itself, or its attribute `logits`."""
    return output if isinstance(output, Tensor) else output.logits


def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """The model's output with a cache; see `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: the model's arguments, and the options of the cache.
    """
    return HookedRunner(model).run_with_cache(*args, **options)


def runner_of(model: nn.Module) -> HookedRunner:
    """A runner for comparable runs of a model, without dropout.

    Raises:
        ModeError: if any part of the model is in training mode.
    """
    if any(module.training for module in model.modules()):
        raise ModeError("the model must be in evaluation mode: call model.eval() first")
    return HookedRunner(model)
