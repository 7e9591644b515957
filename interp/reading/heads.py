"""Scores of attention heads: where each of them looks, in every text."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache
from hooks._torch import without_gradients
from hooks.errors import unknown_name
from hooks.transfer import stacked
from interp.inputs.positions import Index, Selection
from interp.inputs.texts import text_of
from interp.inputs.token_positions import at_least_float32, like, real_of
from interp.protocol import of
from interp.results.result import Result

_SHARE = "share of attention"
_UNITS = {
    "previous_token": _SHARE,
    "first_token": _SHARE,
    "duplicate_token": _SHARE,
    "induction": _SHARE,
    "span": _SHARE,
    "entropy": "nats",
    "distance": "tokens",
}


@without_gradients
def head_scores(
    model: nn.Module,
    cache: ActivationCache,
    kind: str = "previous_token",
    *,
    span: Index | None = None,
    queries: Index | None = None,
) -> Result:
    """Scores of what each head attends to, as a mean over the queries of each text.

    | kind | score | unit |
    | --- | --- | --- |
    | `previous_token` | attention to the token before the query | 0 to 1 |
    | `first_token` | attention to the first token of the text | 0 to 1 |
    | `duplicate_token` | attention to earlier copies of the query's token | 0 to 1 |
    | `induction` | attention to the tokens after those copies (Olsson et al. 2022) | 0 to 1 |
    | `span` | attention to some columns | 0 to 1 |
    | `entropy` | entropy of the attention | nats |
    | `distance` | mean distance from the query to the keys | tokens |

    Queries that have no such key do not count: those before their token's second copy, those up to the end
    of the span, and a text's first token, for every kind. Nor does padding. The tokens before and after
    a token are the nearest real ones.

    Args:
        model: the model of the run, for the number of its blocks.
        cache: the cache of a run that kept `pattern` at all positions.
        kind: one of the table.
        span: for the kind `span`: its columns, such as a span of `Pairs`, in any form that `edits` take.
        queries: count only queries in these columns, likewise.

    Returns:
        A result with the axes `layer`, `head` and `example`.

    Raises:
        UnknownNameError: if there is no such kind, or a layer's pattern is not in the cache.
        CacheError: if the cache is of another model.
        ValueError: if the cache does not hold all positions, does not know the tokens that a kind needs (that of a
            `run=`), a span is missing or does not fit it, or an example has no query that counts.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model, tokens = load("pydoc-4l"), repeated_tokens(vocab_size=90, period=20)
    >>> cache = HookedRunner(model).capture(tokens, names="*.pattern")
    >>> found = head_scores(model, cache, "induction")
    >>> found.select(layer=3).mean().max() > 0.5
    tensor(True)
    """
    if kind not in _UNITS:
        raise unknown_name(kind, _UNITS, "kind of score")
    cache.require_weights_of(model)
    patterns = [cache["pattern", layer] for layer in range(len(of(model, "blocks").blocks))]
    batch, *_, n_queries, n_pos = patterns[0].shape
    if n_queries != n_pos or patterns[0].ndim != 4:
        raise ValueError(
            f"the cache must hold whole texts, without positions= and kv_cache=; got {n_queries} "
            f"queries and {n_pos} keys, {list(patterns[0].shape)}"
        )
    text = text_of(cache)
    tokens, mask = (None, None) if text is None else (text.tokens, text.mask)
    real = real_of(mask, (batch, n_pos)).cpu()
    wanted, counted = _wanted(kind, tokens, real, span)
    if queries is not None:
        counted &= Selection(queries).inside(real, "queries")
    if not counted.any(1).all():
        raise ValueError(
            f"each example must have a query that counts for {kind}; got none in example "
            f"{int(counted.any(1).int().argmin())}"
        )
    weights = wanted * (counted / counted.sum(1, keepdim=True).double())[..., None]
    scores = []
    for pattern in map(at_least_float32, patterns):
        read = torch.special.entr(pattern) if kind == "entropy" else pattern
        own = like(weights, read)
        scores.append((read.flatten(2) @ own.flatten(1)[..., None])[..., 0].T)
    about = {"kind": kind}
    return Result(stacked(scores), ("layer", "head", "example"), unit=_UNITS[kind], about=about)


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


def _wanted(
    kind: str, tokens: Tensor | None, real: Bool[Tensor, "batch pos"], span: Index | None
) -> tuple[Shaped[Tensor, "batch query key"], Bool[Tensor, "batch query"]]:
    """The factors of each key's weight, and the queries that count. On the CPU."""
    rank, columns = real.cumsum(1) - 1, torch.arange(real.shape[1])
    later = real & (rank > 0)
    # The column of the real token before each column, -1 where there is none.
    before = columns.where(real, -1).cummax(1).values.roll(1, 1)
    before[:, 0] = -1
    if (span is None) == (kind == "span"):
        raise ValueError(f"span must be given for the kind 'span' and no other; got {span}")
    if kind == "distance":
        return rank[:, :, None] - rank[:, None], later
    if kind == "entropy":
        return torch.ones(*real.shape, len(columns)), later
    if kind == "previous_token":
        keys = columns == before[..., None]
    elif kind == "first_token":
        keys = later[..., None] & (real & ~later)[:, None]
    elif span is not None:
        inside = Selection(span).inside(real, "span")
        after = columns > columns.where(inside, -1).amax(1, keepdim=True)
        keys = after[..., None] & inside[:, None]
    elif tokens is None:
        raise ValueError(f"{kind} needs a cache that knows its tokens; that of a run= does not")
    else:
        own = tokens.cpu()  # read once
        keys = (own[..., None] == own[:, None]) & real[:, None] & (columns[:, None] > columns)
        if kind == "induction":
            copied = keys.gather(2, before.clamp(min=0)[:, None].expand_as(keys))
            keys = copied & (before >= 0)[:, None]
    return keys, keys.any(2) & real
