"""The ends of a stack: the embeddings before its blocks, the norm and the logits after them.

1. The stream that enters the first block is a term of the embedding of tokens, or the sum of this
   term and position vectors (`embeddings_of`).
2. A norm reads the stream from the last block (`final_norm_of`).
3. In a text, this norm and a linear map compute the logits (`unembed_of`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooks.base import is_close, is_same
from models.attached.original import embedding_of, text_config
from models.attached.parts import Summand, TracedNorm, factors_of, norm_of, summand
from models.attached.probe import Call, ProbeRun


class Embeddings(NamedTuple):
    """The embeddings whose sum enters the first block.

    Attributes:
        tokens: the term of the embedding of tokens.
        positions: the module that returns position vectors; None without these vectors.
        is_inside: whether the embedding of tokens runs inside the module that runs the blocks.
    """

    tokens: Summand
    positions: nn.Module | None
    is_inside: bool


def embeddings_of(
    model: Any, root: nn.Module, probe: ProbeRun, first: Call, stream: Tensor
) -> Embeddings | None:
    """Return the embeddings of a stack; None if the embedding of tokens does not enter the stream.

    Args:
        model: the model.
        root: the module that runs the blocks.
        probe: the run in which the blocks were called.
        first: the call of the first block.
        stream: the stream that enters the first block, [batch, pos, d_model].
    """
    embedding = embedding_of(root)
    before = [call for call in probe.single if call.ended < first.began and call.output is not None]
    tokens = next((call for call in before if call.module is embedding), None)
    if tokens is None or tokens.output is None or tokens.output.shape != stream.shape:
        return None
    term, positions = _terms(model, tokens, before, stream)
    began = next((call.began for call in probe.calls if call.module is root), -1)
    return Embeddings(term, positions, is_inside=tokens.began >= began)


def _terms(
    model: Any, tokens: Call, before: Sequence[Call], stream: Tensor
) -> tuple[Summand, nn.Module | None]:
    """Return the term of the embedding, and the module that returns the position vectors.

    The module is None if the stream is not the sum of the term and the output of a module.

    Args:
        model: the model.
        tokens: the call of the embedding.
        before: the calls before the first block.
        stream: the stream that enters the first block.
    """
    factors = [1.0, *factors_of(text_config(model)), stream.shape[-1] ** 0.5]
    alone = summand(torch.zeros_like(stream), stream, calls=[tokens], factors=factors)
    if alone is not None:
        return alone[1], None
    for call in before:
        vectors = _for_each_text(call.output, stream)
        if vectors is None:
            continue
        explained = summand(vectors, stream, calls=[tokens], factors=factors)
        if explained is not None:
            return explained[1], call.module
    return Summand(tokens.module, 1.0, tokens.is_overwritten), None


def _for_each_text(vectors: Tensor | None, like: Tensor) -> Tensor | None:
    """Return position vectors with a row for each text.

    The result is None if the tensor does not have the shape of position vectors.

    Args:
        vectors: the output of a module, [pos, d_model] or with axes in front.
        like: the stream, [batch, pos, d_model].
    """
    if vectors is None or vectors.ndim < 2 or vectors.shape[-2:] != like.shape[-2:]:
        return None
    return vectors.view(-1, *vectors.shape[-2:]).expand_as(like)


def final_norm_of(
    root: nn.Module, probe: ProbeRun, last: Call, has_streams: bool
) -> TracedNorm | None:
    """Return the norm that reads the stream from the last block; None without a single such norm.

    Args:
        root: the module that runs the blocks.
        probe: the run in which the blocks were called.
        last: the call of the last block.
        has_streams: whether the stream has several vectors for each token. The norm may then read
            their sum.
    """
    end = next((call.ended for call in probe.calls if call.module is root), math.inf)
    for call in probe.single:
        if not last.ended < call.began < end:
            continue
        # Nothing is computed between the last block and its norm, so there is no rounding.
        if call.inputs and is_same(call.inputs[0], last.output) and (norm := norm_of(call)):
            return norm
    return _norm_before_logits(probe, last) if has_streams else None


def _norm_before_logits(probe: ProbeRun, last: Call) -> TracedNorm | None:
    """Return the norm after the last block whose output the map to the logits reads."""
    later = [call for call in probe.single if call.began > last.ended and call.inputs]
    logits = probe.logits
    assert logits is not None
    heads = [
        call for call in later if call.output is not None and call.output.shape == logits.shape
    ]
    for call in later:
        for head in heads:
            # The map reads the same tensor, so there is no rounding.
            if is_same(head.inputs[0], call.output) and (norm := norm_of(call)):
                return norm
    return None


@dataclass(frozen=True)
class Unembedding:
    """A sequence of modules, whose last output is multiplied by a factor and gets a soft cap.

    Attributes:
        modules: the modules from the final norm, if there is one, to the unembedding.
        factor: the number by which the last output is multiplied.
        cap: the soft cap of the logits; 0 means no cap.
    """

    modules: tuple[nn.Module, ...]
    factor: float
    cap: float

    def __call__(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos vocab"]:
        """Return the logits of a residual stream, with the final norm applied."""
        for module in self.modules:
            resid = module(resid)
        return self.finished(resid)

    def finished(self, logits: Tensor) -> Tensor:
        """Return the logits, from the output of the last module: times the factor, with the cap."""
        logits = logits if self.factor == 1 else logits * self.factor
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def unembed_of(model: Any, probe: ProbeRun, last: Call) -> Unembedding | None:
    """Return the modules after the blocks, if they compute the logits.

    The result is None if the model has no logits, or if these modules do not compute them.

    Args:
        model: the model.
        probe: the run in which the blocks were called.
        last: the call of the last block.
    """
    if hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None:
        return None
    modules: list[nn.Module] = []
    before = last
    for call in probe.single:
        # Each module reads the same tensor that the module before returned.
        if call.began > before.ended and call.inputs and is_same(call.inputs[0], before.output):
            modules.append(call.module)
            before = call
    logits = probe.logits
    output = before.output
    if output is None or logits is None or output.shape != logits.shape:
        return None
    config = text_config(model)
    config_cap = getattr(config, "final_logit_softcapping", None) or 0.0
    factors = factors_of(config)
    for factor in (1.0, *factors, *(1 / factor for factor in factors)):
        for cap in dict.fromkeys((config_cap, 0.0)):
            # Try the cap of the config first. If it is far above all logits of this run, it changes
            # less than rounding, so the run fits both with and without it.
            unembedding = Unembedding(tuple(modules), factor, cap)
            if is_close(unembedding.finished(output), logits, output * factor):
                return unembedding
    return None
