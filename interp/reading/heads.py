"""Scores of attention heads: previous-token heads and induction heads."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooks import ActivationCache
from interp.columns import at_least_float32


def previous_token_scores(
    model: nn.Module, cache: ActivationCache, tokens: Int[Tensor, "batch pos"] | None = None
) -> Float[Tensor, "layer head"]:
    """Mean attention, 0 to 1, of each head to the position before the query.

    Padding counts like any other position, so the texts should have none.

    Args:
        model: the model of the run; not read here.
        cache: the cache of a run that kept `pattern` at all positions.
        tokens: the tokens of the run; not read here.

    Raises:
        ValueError: if the cache does not hold every query and key, or there is only one position.
    """
    return _diagonal(cache, 1).mean((1, -1))


def induction_scores(
    model: nn.Module, cache: ActivationCache, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head"]:
    """Mean attention, 0 to 1, from each repeated token to the token after its previous copy.

    As in Olsson et al. 2022, "In-context learning and induction heads".

    Args:
        model: the model of the run; not read here.
        cache: the cache of a run that kept `pattern` at all positions.
        tokens: the tokens of the run, random ones repeated at least once; see `repeated_tokens`.

    Raises:
        ValueError: if the tokens do not repeat with a period of 2 or more, or do not have the cache's
            shape; or as for `previous_token_scores`.
    """
    tokens = tokens.cpu()  # read once
    copies = range(1, tokens.shape[1] // 2 + 1)
    period = next((p for p in copies if torch.equal(tokens[:, p:], tokens[:, :-p])), 0)
    if period < 2:
        raise ValueError(
            "tokens must repeat with a period of 2 to half their number; got a row that begins with "
            f"{tokens[0, :8].tolist()}"
        )
    diagonal = _diagonal(cache, period - 1)
    cached = (diagonal.shape[1], diagonal.shape[-1] + period - 1)
    if tokens.shape != cached:
        raise ValueError(f"tokens must have the cache's shape, {cached}; got {tuple(tokens.shape)}")
    # Only queries of later copies have an earlier copy. Their diagonal starts one place later.
    return diagonal[..., 1:].mean((1, -1))


def repeated_tokens(
    vocab_size: int, period: int, batch: int = 8, copies: int = 2, seed: int = 0
) -> Int[Tensor, "batch pos"]:
    """Uniformly random tokens, each row repeated `copies` times: [batch, copies * period].

    >>> repeated_tokens(vocab_size=9, period=3, batch=2, copies=2)
    tensor([[8, 0, 2, 8, 0, 2],
            [6, 7, 6, 6, 7, 6]])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, period), generator=generator).repeat(1, copies)


def _diagonal(cache: ActivationCache, back: int) -> Float[Tensor, "layer batch head query"]:
    """Attention from each query to the key `back` positions before it, where there is one."""
    pattern = cache.stack("pattern").detach()
    queries, keys = pattern.shape[-2:]
    if queries != keys or keys <= back:
        raise ValueError(
            f"the cache must hold whole texts of more than {back} positions; got {queries} queries "
            f"and {keys} keys"
        )
    return at_least_float32(pattern.diagonal(-back, dim1=-2, dim2=-1))
