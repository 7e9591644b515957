"""What the analyses ask of a model beyond its hook points."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Sizes(Protocol):
    """The sizes that analyses read from `model.config`."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def n_layers(self) -> int:
        """Number of blocks."""


@runtime_checkable
class LanguageModel(Protocol):
    """An `nn.Module` from tokens to logits, with hook points under the usual names."""

    @property
    def config(self) -> Sizes:
        """The model's sizes."""

    def __call__(self, tokens: Int[Tensor, "batch pos"], /) -> Float[Tensor, "batch pos vocab"]:
        """Logits of the next token at every position."""

    def unembed(
        self, resid: Float[Tensor, "batch pos d_model"], /
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits that a residual stream leads to, final norm included."""


@runtime_checkable
class AttentionWeights(Protocol):
    """A model that shows the weights of its OV circuits, as row vectors meet them: `x @ W`."""

    @property
    def W_V(self) -> Float[Tensor, "layer kv_head d_model d_head"]:
        """Value projections; each key head serves as many heads as there are to one of it."""

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output projections."""
