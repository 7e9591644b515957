"""The unembedding of an attached model, with the final norm before it."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.attached.configs import text_config
from models.attached.probe import Call, ProbeRun
from models.attached.sums import factors_of, is_close, is_same


@dataclass(frozen=True)
class Unembedding:
    """Modules in sequence, then a factor and a soft cap.

    Attributes:
        modules: the final norm, if any, to the unembedding.
        factor, cap: of the logits; a cap of 0 is none.
    """

    modules: tuple[nn.Module, ...]
    factor: float
    cap: float

    def __call__(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Logits from a residual stream, including the final norm."""
        for module in self.modules:
            resid = module(resid)
        return self.finished(resid)

    def finished(self, logits: Tensor) -> Tensor:
        """Logits from what the last module gives."""
        logits = logits if self.factor == 1 else logits * self.factor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def unembed_of(model: Any, probe: ProbeRun, last: Call) -> Unembedding | None:
    """The modules after the blocks, if they give the logits. A model without a head gives no logits."""
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None:
        return None
    modules: list[nn.Module] = []
    at, after = last.output, last.ended
    for call in probe.single:
        # The same tensor, handed on from module to module.
        if call.began > after and call.inputs and is_same(call.inputs[0], at):
            modules.append(call.module)
            at, after = call.output, call.ended
    logits = probe.logits
    if at is None or logits is None or at.shape != logits.shape:
        return None
    config = text_config(model)
    cap = getattr(config, "final_logit_softcapping", None) or 0.0
    held = factors_of(config)
    for factor in (1.0, *held, *(1 / value for value in held)):
        for bound in dict.fromkeys(
            (cap, 0.0)
        ):  # a cap far above all logits changes less than rounding
            unembedding = Unembedding(tuple(modules), factor, bound)
            if is_close(unembedding.finished(at), logits, at * factor):
                return unembedding
    return None
