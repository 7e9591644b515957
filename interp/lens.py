"""The logit lens: what the residual stream would predict if the model ended at each layer."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.protocol import LanguageModel
from interp.run import runner_of


@dataclass(frozen=True)
class LogitLens:
    """Predictions from the residual stream, layer by layer.

    Attributes:
        logits: of the stream entering each block, then of the one leaving the last, which are the
            model's own.
    """

    logits: Float[Tensor, "layer batch pos vocab"]

    def probabilities(self) -> Float[Tensor, "layer batch pos vocab"]:
        """The softmax of the logits."""
        return self.logits.softmax(-1)


@torch.no_grad()
def logit_lens(model: nn.Module, tokens: Int[Tensor, "batch pos"]) -> LogitLens:
    """Unembeds the residual stream between all blocks (nostalgebraist 2020).

    Args:
        model: a model with the points `resid_pre` and `resid_post`, and with `unembed`.
        tokens: what to run it on.

    Raises:
        TypeError: if the model has no `unembed`.
        ModeError: if it is in training mode.
    """
    if not hasattr(model, "unembed"):
        raise TypeError(
            f"logit_lens needs a model with `unembed`, and {type(model).__name__} has none; "
            "models.from_hf makes one of a transformers model"
        )
    _, cache = runner_of(model).run_with_cache(tokens, names=["*.resid_pre", "*.resid_post"])
    streams = [*cache.stack("resid_pre"), cache["resid_post", -1]]
    unembed = cast(LanguageModel, model).unembed
    return LogitLens(torch.stack([unembed(stream) for stream in streams]))
