"""The logit lens: what the residual stream would predict if the model ended at each layer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache
from hooks.transfer import stacked, to_device
from interp.columns import at_least_float32
from interp.protocol import LanguageModel, of

_LOGITS_AT_ONCE = 2**23  # 32 MiB in float32


@dataclass(frozen=True)
class LogitLens:
    """Predictions from the stream entering each block and, last, from the stream after all blocks.

    Probabilities are 0 to 1. They are in float32 when the model is in half precision.

    Attributes:
        tokens: the likeliest next tokens, best first.
        probabilities: their probabilities.
        target_probabilities: the probabilities of the targets.
        target_ranks: how many tokens are likelier than the target; 0 for the likeliest.
    """

    tokens: Int[Tensor, "layer batch pos top"]
    probabilities: Float[Tensor, "layer batch pos top"]
    target_probabilities: Float[Tensor, "layer batch pos"]
    target_ranks: Int[Tensor, "layer batch pos"]


@torch.no_grad()
def logit_lens(
    model: nn.Module,
    cache: ActivationCache,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    targets: Int[Tensor, "batch pos"] | None = None,
    top_k: int = 5,
) -> LogitLens:
    """Unembeds the residual stream between all blocks (nostalgebraist 2020).

    It reads a few positions at a time, so its memory grows with `top_k` and not with the vocabulary.

    Args:
        model: the model of the run, with `unembed` and `config`.
        cache: the cache of a run that kept every `resid_pre` and the last `resid_post`.
        tokens: the tokens of the run; not read here.
        targets: tokens to follow through the layers; by default those that the model predicts.
        top_k: how many of the likeliest tokens to keep.

    Raises:
        TypeError: if the model has no `unembed` or no `config`.
        UnknownNameError, CacheError: if the stream of some layer is not in the cache.
    """
    language: LanguageModel = of(model, "unembed", "config")
    streams = stacked([*cache.stack("resid_pre"), cache["resid_post", -1]])
    shape, size = streams.shape[:-1], max(1, _LOGITS_AT_ONCE // language.config.vocab_size)

    def logits(rows: Tensor) -> Tensor:
        return at_least_float32(language.unembed(rows[None])[0])

    if targets is None:
        targets = torch.cat([logits(r).argmax(-1) for r in streams[-1].flatten(0, 1).split(size)])
    followed = targets.flatten().repeat(shape[0])
    parts = zip(streams.flatten(0, 2).split(size), followed.split(size), strict=True)
    columns = zip(*(_read(logits(rows), target, top_k) for rows, target in parts), strict=True)
    return LogitLens(*(torch.cat(column).unflatten(0, shape) for column in columns))


def _read(
    logits: Float[Tensor, "row vocab"], targets: Int[Tensor, " row"], top_k: int
) -> tuple[Tensor, ...]:
    """The columns of `LogitLens`."""
    wanted = logits.gather(-1, to_device(targets, logits.device)[:, None])
    best = logits.topk(top_k)
    total = logits.logsumexp(-1, keepdim=True)
    ranks = (logits > wanted).sum(-1)
    return best.indices, (best.values - total).exp(), (wanted - total).exp()[:, 0], ranks
