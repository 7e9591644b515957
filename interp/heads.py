"""Scores of attention heads: how much a head looks at the token before, or at an earlier copy's next."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.run import runner_of


@torch.no_grad()
def previous_token_scores(
    model: nn.Module, tokens: Int[Tensor, "batch pos"]
) -> Float[Tensor, "layer head"]:
    """Mean attention, 0 to 1, that each head pays to the position before the query.

    Args:
        model: a model with the point `pattern`.
        tokens: at least two positions of text.

    Raises:
        ValueError: if there is only one position.
        ModeError: if the model is in training mode.
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"a previous token needs two positions, not {tokens.shape[1]}")
    return _diagonal(model, tokens, 1).mean((1, -1))


@torch.no_grad()
def induction_scores(
    model: nn.Module, repeated: Int[Tensor, "batch pos"], period: int
) -> Float[Tensor, "layer head"]:
    """Mean attention, 0 to 1, from each token of later copies to what followed its earlier copy.

    As in Olsson et al. 2022, "In-context learning and induction heads".

    Args:
        model: a model with the point `pattern`.
        repeated: random tokens with that period; see `repeated_tokens`.
        period: the length of what is repeated, at least 2.

    Raises:
        ValueError: if the tokens do not repeat with that period.
        ModeError: if the model is in training mode.
    """
    if not 2 <= period < repeated.shape[1]:
        raise ValueError(
            f"period is 2 to {repeated.shape[1] - 1} for {repeated.shape[1]} positions, not {period}"
        )
    if not torch.equal(repeated[:, period:], repeated[:, :-period]):
        raise ValueError(f"the tokens do not repeat with period {period}")
    # Queries of the first copy have no earlier copy: the diagonal starts at the first that has.
    return _diagonal(model, repeated, period - 1)[..., 1:].mean((1, -1))


def repeated_tokens(
    vocab_size: int, period: int, batch: int = 8, copies: int = 2, seed: int = 0
) -> Int[Tensor, "batch pos"]:
    """Uniformly random tokens, each row repeated `copies` times: [batch, copies * period]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, period), generator=generator).repeat(1, copies)


def _diagonal(
    model: nn.Module, tokens: Int[Tensor, "batch pos"], back: int
) -> Float[Tensor, "layer batch head query"]:
    """Attention from each query that has one to the key `back` positions before it."""
    _, cache = runner_of(model).run_with_cache(tokens, names="*.pattern")
    return cache.stack("pattern").diagonal(-back, dim1=-2, dim2=-1)
