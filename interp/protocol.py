"""What the analyses ask of a model beyond its hook points, and how they run it."""

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

    A model of your own needs only those that the analysis at hand asks for. Weights multiply row
    vectors, `x @ W`. Several heads may share the key and value weights of one `kv_head`.
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
        """Logits at the last positions from the stream that leaves the last block; 0 means all."""

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits that a residual stream leads to, final norm included."""


# Not `-> LanguageModel`: where types are checked at run time, that would ask for all parts.
def of(model: nn.Module, *parts: str) -> Any:
    """The `LanguageModel` that analyses use for `model`: the model itself.

    Args:
        model: any module.
        parts: the names in `LanguageModel` that the analysis needs.

    Raises:
        TypeError: if the model lacks one of them.
    """
    # A weight view is computed when an instance is asked for it, so the class is asked first.
    lacking = [p for p in parts if not (hasattr(type(model), p) or hasattr(model, p))]
    if lacking:
        raise TypeError(
            f"the model must have {' and '.join(parts)}; got {type(model).__name__} without "
            f"{' and '.join(lacking)} (models.from_hf makes a model that has them)"
        )
    return model


def logits_of(output: Any) -> Float[Tensor, "batch pos vocab"]:
    """The logits in what a model returned: the output itself, or its attribute `logits`."""
    return output if isinstance(output, Tensor) else output.logits


def run_with_cache(model: nn.Module, *args: Any, **options: Any) -> tuple[Any, ActivationCache]:
    """The model's output with a cache; arguments as for `HookedRunner.run_with_cache`.

    Args:
        model: any module.
        args, options: what the model is called with, and which points to keep.
    """
    return HookedRunner(model).run_with_cache(*args, **options)


def runner_of(model: nn.Module) -> HookedRunner:
    """A runner of a model whose runs can be compared with each other.

    Raises:
        ModeError: if some of the model is in training mode, where dropout draws anew in each run.
    """
    if any(module.training for module in model.modules()):
        raise ModeError("the model must be in eval mode, as dropout differs between runs: call model.eval()")  # fmt: skip
    return HookedRunner(model)
