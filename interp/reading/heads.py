"""Scores of attention heads: how much each head attends to a kind of key in every text."""

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from hooks import ActivationCache, CacheError, HookError
from hooks.base import (
    Index,
    Selection,
    Text,
    at_least_float32,
    progress_bar,
    real_of,
    real_positions,
    require_integer,
    require_kind,
    seeded,
    shows_progress,
    stacked,
    unknown_name,
    without_gradients,
)
from interp.inputs.cached import mask_of, text_of_values
from interp.inputs.copies import groups_of_cache
from interp.kinds import require_cache
from interp.numbers.precision import like
from interp.protocol import of
from interp.results.result import Result

_SHARE = "share of attention"
_UNITS = {
    "current_token": _SHARE,
    "previous_token": _SHARE,
    "first_token": _SHARE,
    "duplicate_token": _SHARE,
    "induction": _SHARE,
    "span": _SHARE,
    "entropy": "nats",
    "distance": "tokens",
}


@shows_progress
@without_gradients
def head_scores(
    model: nn.Module,
    cache: ActivationCache,
    kind: str | Shaped[Tensor, "query key"] = "previous_token",
    *,
    span: "Index | None" = None,
    queries: "Index | None" = None,
    progress: bool = True,
) -> Result:
    """Return a score of each head's attention, as a mean over the queries of each text.

    | kind | score | unit |
    | --- | --- | --- |
    | `current_token` | attention to the query's own token | 0 to 1 |
    | `previous_token` | attention to the token before the query | 0 to 1 |
    | `first_token` | attention to the first token of the text | 0 to 1 |
    | `duplicate_token` | attention to earlier copies of the query's token | 0 to 1 |
    | `induction` | attention to the tokens after earlier copies (Olsson et al. 2022) | 0 to 1 |
    | `span` | attention to the columns of a span | 0 to 1 |
    | `entropy` | entropy of the attention | nats |
    | `distance` | mean distance from the query to the keys | tokens |
    | a tensor | attention to each key times its factor [query, key] | the factors' unit |

    The mean ignores queries that have no key of the kind:

    - for every kind, the first token of a text;
    - for `duplicate_token` and `induction`, the first copy of a token;
    - for `span`, the queries before and in the span;
    - for a tensor, the queries whose row contains only zeros.

    Padding is ignored too. The tokens before and after a token are the nearest real tokens.

    Args:
        model: the model of the run.
        cache: the cache of a run that cached `pattern` at all positions.
        kind: a kind from the table; or a tensor, the pattern to look for, which is True or 1 where
            the query should attend to the key.
        span: the columns of the kind `span`, such as a span of `Pairs`, in any form that `edits`
            accept.
        queries: use only queries in these columns, in the same forms. Default: all queries.
        progress: whether to show a progress bar or, outside a terminal, lines of progress.

    Returns:
        A result with the axes `layer`, `head` and `example`.

    Raises:
        UnknownNameError: if the kind is unknown.
        CacheError: if the cache is of another model, or the pattern of a layer is missing.
        ValueError: if a tensor does not have the shape of the cache's patterns; if the cache does
            not contain all positions, or does not know the tokens that a kind needs; if a span is
            missing or does not fit the cache; or if all queries of an example are ignored.

    >>> from hooks import HookedRunner
    >>> from models import load
    >>> model, tokens = load("pydoc-4l"), repeated_tokens(vocab_size=90, period=20)
    >>> cache = HookedRunner(model).capture(tokens, names="*.pattern")
    >>> scores = head_scores(model, cache, "induction")
    >>> scores.top(1)
    layer 3, head 0  +0.7474  [+0.7035, +0.7868]
    >>> offset = torch.ones(40, 40).tril(-19).triu(-19)  # from a token to the token after its copy
    >>> head_scores(model, cache, offset).top(1)
    layer 3, head 0  +0.733  [+0.7029, +0.7668]
    """
    name = kind if isinstance(kind, str) else "the pattern"
    if isinstance(kind, str) and kind not in _UNITS:
        raise unknown_name(kind, _UNITS, f"kind of score (of {', '.join(_UNITS)})")
    # Raise an error if the model and the cache are exchanged.
    of(model)
    require_cache(cache, model)
    try:
        n_layers = len(cache.layer_names("pattern"))
    except HookError as error:
        raise CacheError(f"scores of heads need names='*.pattern': {error}") from None
    scorer = _Scorer(cache, kind, span=span, queries=queries, name=name)
    with progress_bar("layers", n_layers) as count:

        def score(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "head batch"]:
            scores = scorer.scores(pattern)
            count()
            return scores

        values = stacked(cache.map_layers("pattern", score))
    unit = _UNITS.get(name, "unit of the factors")
    return Result(
        values,
        ("layer", "head", "example"),
        unit=unit,
        about={"kind": name},
        bounds={_SHARE: (0.0, 1.0), "nats": (0.0, math.inf)}.get(unit),
        groups=groups_of_cache(cache, values, scorer.text),
    )


class _Scorer:
    """Scores of the heads of one layer after the other.

    The first pattern determines the shape of all patterns. The weights of a score are computed on
    the CPU, and copied once to each device.

    Args:
        cache: the cache.
        kind, span, queries: see `head_scores`.
        name: the name of the score, for errors.

    Attributes:
        text: the texts of the cache, on the CPU, after the first layer; None if they are unknown.
    """

    text: Text | None = None

    def __init__(
        self,
        cache: ActivationCache,
        kind: str | Tensor,
        *,
        span: Index | None,
        queries: Index | None,
        name: str,
    ) -> None:
        self._cache = cache
        self._kind = kind
        self._span = span
        self._queries = queries
        self._name = name
        self._weights: Tensor | None = None
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def scores(self, pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "head batch"]:
        """Return the scores of one layer's heads, in at least float32.

        Raises:
            ValueError: for the same reasons as in `head_scores`.
        """
        if self._weights is None:
            self._weights = self._weights_for(pattern.shape)
        values = at_least_float32(pattern)
        if self._name == "entropy":
            values = torch.special.entr(values)
        place = values.device, values.dtype
        if place not in self._copies:
            self._copies[place] = like(self._weights, values)
        rows = rearrange(values, "batch head query key -> batch head (query key)")
        columns = rearrange(self._copies[place], "batch query key -> batch (query key) 1")
        return rearrange(rows @ columns, "batch head 1 -> head batch")

    def _weights_for(self, shape: Sequence[int]) -> Float[Tensor, "batch query key"]:
        """Return the weight of each attention weight in the score, and set `text`.

        Args:
            shape: the shape of a pattern.
        """
        batch, *_, n_queries, n_pos = shape
        if n_queries != n_pos or len(shape) != 4:
            raise ValueError(
                f"the cache must contain whole texts, without pos= and kv_cache=; got {n_queries} "
                f"queries and {n_pos} keys, {list(shape)}"
            )
        text = text_of_values(self._cache, (batch, n_pos))
        real = real_of(mask_of(self._cache, (batch, n_pos)), (batch, n_pos)).cpu()
        tokens = None
        if text is not None:
            # Copy the tokens once, for the keys and for the copies of a text.
            tokens = text.tokens.cpu()
            self.text = Text(tokens, None if text.attention_mask is None else real)
        factors, is_counted = _factors(self._kind, tokens, real=real, span=self._span)
        if self._queries is not None:
            is_counted &= Selection(self._queries).inside(real, "queries")
        return _mean_over_queries(factors, is_counted, self._name)


def _mean_over_queries(
    factors: Shaped[Tensor, "batch query key"], is_counted: Bool[Tensor, "batch query"], name: str
) -> Float[Tensor, "batch query key"]:
    """Scale factors so that the sum of all factors times attention weights is a mean over queries.

    At counted queries, each factor is divided by the number of counted queries of the example. The
    factors of all other queries become 0.

    Args:
        factors: the factor of each attention weight in the score.
        is_counted: True at the queries that are counted.
        name: the name of the score, for errors.

    Raises:
        ValueError: if an example has no counted query.
    """
    if not is_counted.any(1).all():
        raise ValueError(
            f"each example must have a query with a key for {name}; got none in example "
            f"{int(is_counted.any(1).int().argmin())} (texts of repeated_tokens have queries for "
            "every kind)"
        )
    return factors * (is_counted / is_counted.sum(1, keepdim=True).double())[..., None]


def repeated_tokens(
    vocab_size: int, period: int, batch: int = 8, copies: int = 2, seed: int = 0
) -> Int[Tensor, "batch pos"]:
    """Return uniformly random tokens, each row repeated `copies` times: [batch, copies * period].

    Args:
        vocab_size: the tokens are 0 to `vocab_size` - 1.
        period: the number of tokens before the row repeats.
        batch: the number of rows. Default: 8.
        copies: the number of times that each row is repeated. Default: 2.
        seed: the seed of the tokens. Default: 0.

    Returns:
        The tokens, integers from 0 to `vocab_size` - 1, on the CPU.

    Raises:
        ValueError: if a number is below 1.

    >>> repeated_tokens(vocab_size=9, period=3, batch=2, copies=2)
    tensor([[8, 0, 2, 8, 0, 2],
            [6, 7, 6, 6, 7, 6]])
    """
    require_integer("vocab_size", vocab_size)
    require_integer("period", period)
    require_integer("batch", batch)
    require_integer("copies", copies)
    generator = seeded(seed)
    return torch.randint(vocab_size, (batch, period), generator=generator).repeat(1, copies)


def _factors(
    kind: str | Tensor,
    tokens: Int[Tensor, "batch pos"] | None,
    real: Bool[Tensor, "batch pos"],
    span: Index | None,
) -> tuple[Shaped[Tensor, "batch query key"], Bool[Tensor, "batch query"]]:
    """Return the factor by which a score multiplies each attention weight, and a mask of queries.

    The mask is True at queries that have a key of the kind, such as an earlier copy of the token
    for `induction`. Both are on the CPU.
    """
    require_kind(
        "kind", kind, kind=(str, Tensor), words="a name, or a pattern, a tensor [query, key]"
    )
    positions = real_positions(real)
    later = real & (positions > 0)
    n_pos = real.shape[1]
    if (span is None) == (isinstance(kind, str) and kind == "span"):
        raise ValueError(f"span must be given for the kind 'span' only; got {span}")
    if isinstance(kind, Tensor):
        if kind.shape != (n_pos, n_pos):
            raise ValueError(f"a pattern must be [query, key], {[n_pos] * 2}; got {[*kind.shape]}")
        factors = kind.cpu() * real[:, None]
        return factors, (factors != 0).any(2) & later
    if kind == "distance":
        # In an encoder, keys come after the query too.
        return (positions[:, :, None] - positions[:, None]).abs(), later
    if kind == "entropy":
        return torch.ones(*real.shape, n_pos), later
    keys = _attended(kind, tokens, real=real, later=later, span=span)
    return keys, keys.any(2) & real


def _attended(
    kind: str,
    tokens: Int[Tensor, "batch pos"] | None,
    real: Bool[Tensor, "batch pos"],
    later: Bool[Tensor, "batch pos"],
    span: Index | None,
) -> Bool[Tensor, "batch query key"]:
    """Return a mask of the keys that a kind of head attends to.

    `later` marks all real tokens except the first of each text.
    """
    columns = torch.arange(real.shape[1])
    # The column of the real token before each column; -1 if no real token comes before.
    before = columns.where(real, -1).cummax(1).values.roll(1, 1)
    before[:, 0] = -1
    if kind == "current_token":
        return (columns[:, None] == columns) & later[..., None]
    if kind == "previous_token":
        return columns == before[..., None]
    if kind == "first_token":
        return later[..., None] & (real & ~later)[:, None]
    if span is not None:
        inside = Selection(span).inside(real, "span")
        after = columns > columns.where(inside, -1).amax(1, keepdim=True)
        return after[..., None] & inside[:, None]
    if tokens is None:
        raise ValueError(
            f"{kind} needs a cache that knows its tokens; got a cache of a run without tokens, or "
            "a part of a cache (at() does not select tokens)"
        )
    is_copy = (tokens[..., None] == tokens[:, None]) & real[:, None] & (columns[:, None] > columns)
    if kind != "induction":
        return is_copy
    after_copy = is_copy.gather(2, before.clamp(min=0)[:, None].expand_as(is_copy))
    return after_copy & (before >= 0)[:, None]
