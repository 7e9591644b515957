"""Explain an attention score: a sum over pairs of a source of the query and a source of the key.

With the scales of norms fixed as in the run, a head's query and key are sums over the outputs of
earlier parts of the model. Their product is therefore a sum over pairs (Kamath et al. 2025,
"Tracing Attention Computation Through Feature Interactions"):

1. Take the output of each part at the position of the query and at the position of the key. Map the
   first to a query and the second to a key, with the head's weights (`interp.graph.scores`).
2. The effect of a pair is the product of a query vector and a key vector. Check that all pairs add
   up to the score, up to the rounding of the pairs. If a difference of two scores is explained, its
   pairs can be much smaller than the rounding, because two keys cancel. Then use the rounding of
   the pairs of both scores.
3. Find the largest pairs. Only the pairs of some sources of the query are in memory at once. Keep
   the sources of these pairs, and add up all other sources as `rest`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from hooks import ActivationCache, CacheError
from hooks.base import (
    Index,
    Selection,
    is_integer,
    is_rounding,
    require_gradients,
    require_integer,
    shown,
    sum_rounding,
    to_device,
    without_gradients,
)
from interp.graph.graph import Graph
from interp.graph.scores import BlockScores
from interp.inputs.cached import text_of_values
from interp.inputs.copies import groups_of_cache
from interp.numbers.precision import like
from interp.numbers.ranks import largest_rows
from interp.reading.components import ResidualComponents
from interp.results.result import Result

_BLOCK = 2**22
"""The number of pairs that are computed together."""

PartOfScore = Literal["q", "k", "against"]
Sources = Float[Tensor, "source example d_head"]


class AskedPlace(NamedTuple):
    """The attention score to explain: of one head, one query and one key.

    Attributes:
        head: the layer and the head.
        query: the position that attends, or one position for each example.
        key: the position that is attended to, or one position for each example. Default: the key
            with the most attention.
        against: another key, or `mean`, to explain the difference of two scores. Default: explain
            the score itself.
    """

    head: tuple[int, int]
    query: Index
    key: Index | None = None
    against: Index | Literal["mean"] | None = None


class AskedScore(NamedTuple):
    """A score to explain, or the difference of a score from other scores.

    Attributes:
        weights: the weights of positions, by side. For `q`, the weight is 1 at the position of the
            query. For `k`, it is 1 at the position of the key. If the score is compared with other
            keys, there is also the side `against`, with the share of each of these keys.
        total: the score, or the difference.
        about: the place of the score, in words.
    """

    weights: Mapping[PartOfScore, Float[Tensor, "batch pos"]]
    total: Float[Tensor, " batch"]
    about: Mapping[str, Any]


@without_gradients
def attention_attribution(
    model: nn.Module,
    cache: ActivationCache,
    head: tuple[int, int],
    query: "Index" = -1,
    key: "Index | None" = None,
    against: Index | Literal["mean"] | None = None,
    *,
    k: int = 30,
) -> Result:
    """Return a head's attention score as a sum over pairs of the model's parts.

    The score of a query and a key is a sum over pairs of parts: one part contributes to the query,
    and one part contributes to the key. The parts are the parts of `decompose`, and `bias`, the sum
    of all biases. If the model caps its scores, the score before the cap is explained.

    Args:
        model: the model of the run, with the parts that a graph needs; see `decompose`.
        cache: the cache of a run that cached all points, for example a lazy cache.
        head: the layer and the head.
        query: the position that attends, or one position for each example; -1 is the last real
            token. Default: -1.
        key: the position that is attended to, or one position for each example. Default: the key
            with the most attention.
        against: another key, to explain the difference of the two scores; or `mean`, the mean of
            all keys, weighted by the pattern. Default: explain the score itself.
        k: the number of the largest pairs whose sources are listed. All other sources are added up
            as `rest`. Default: 30.

    Returns:
        A result with the axes `query_source`, `key_source` and `example`, whose values add up to
        the score. Each row or column therefore adds up to the effect of one source on one side.
        Pairs can cancel, so `about` contains the score and the sum of the absolute values of all
        pairs.

    Raises:
        TypeError: if the model lacks a part.
        ValueError: if norms are applied to the sum of stream and sublayer (`norm_place="post"`), if
            `models.from_hf` does not support an attached model, if the head does not exist, if k is
            below 1, or if PyTorch's inference mode is on.
        SelectionError: if the position does not exist, or is padding.
        CacheError: if the cache is of another model, a point is missing, or the pairs do not add up
            to the score.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "part KV8 and part K", lazy=True)
    >>> pairs = attention_attribution(model, cache, (1, 0))
    >>> pairs.about["head"], bool(abs(pairs.values.sum() - pairs.about["score"]) < 1e-3)
    ('a1.h0', True)
    """
    require_gradients()
    parts = ResidualComponents(model, cache)
    text = text_of_values(cache, parts.at(parts.last).shape[:2])
    if text is None:
        raise CacheError(
            "a score needs a whole cache of a run on tokens; got a cache that does not know "
            "the tokens of its values"
        )
    layer, _ = checked_head(parts.graph, head)
    attention = parts.graph.layers[layer].attention
    stream = parts.at(parts.graph.names[attention.reads]).to(parts.dtype)
    context = parts.model.context(text.tokens, **text.kwargs)
    scores = BlockScores(parts.graph.layers[layer], stream, context)
    place = AskedPlace(head=head, query=query, key=key, against=against)
    asked = asked_score(scores, place, words=text.words(model), mask=parts.mask)
    _require_unedited(parts, scores, asked=asked, head=head)
    names, (of_query, *of_keys) = _sources(parts, scores, asked=asked, head=head)
    table = pair_table(
        scores.scale * of_query,
        of_keys,
        asked=asked,
        names=names,
        k=k,
        dtype=parts.rounding_dtype,
    )
    return replace(table, groups=groups_of_cache(cache, table.values))


def _require_unedited(
    parts: ResidualComponents, scores: BlockScores, asked: AskedScore, head: tuple[int, int]
) -> None:
    """Check that the computed scores give the same output of the head, at the query, as the run.

    Raises:
        CacheError: if the outputs are different, because the head was edited in the run.
    """
    layer, number = head
    attention = parts.graph.layers[layer].heads.divided
    in_run = parts.at(parts.graph.names[attention.z])[:, :, number]
    v = scores.v[:, :, scores.part("k", number)[1]]
    at_query = asked.weights["q"]
    now = torch.einsum("bij,bi,bje->be", scores.pattern[:, number], at_query, v)
    if not is_rounding(like(in_run, now)[at_query.bool()], now, parts.rounding_dtype).all():
        raise CacheError(
            f"head {head} must have the same output in the run and now; was the head edited in "
            "the run?"
        )


def _sources(
    parts: ResidualComponents, scores: BlockScores, asked: AskedScore, head: tuple[int, int]
) -> tuple[list[str], list[Sources]]:
    """Return the contribution of each source to the query and to the keys of a score.

    The first source, `bias`, is all biases together. Every other source is a component, such as a
    head of an earlier layer.

    Returns:
        The names of the sources, and a table of contributions for each entry of `asked.weights`:
        the query, the key and, in a comparison, the other keys.
    """
    layer, number = head
    linear, scale = parts.norm_in_run(parts.graph.layers[layer].attention.norm)
    sides = [(*scores.part(side, number), weights) for side, weights in asked.weights.items()]
    names = ["bias"]
    contributions: list[list[Tensor]] = []
    for readings, index, weights in sides:
        read_bias = readings.directions(index) @ like(linear.bias, weights)
        constant = read_bias + readings.constant[:, :, index]
        contributions.append([torch.einsum("bpe,bp->be", constant, weights)[None]])
    for group in parts(layer):
        names += group.names
        read = linear.after(to_device(group.vectors(), scale.device)) / scale
        # Some attention kernels return NaN at padding. Remove it, because 0 * NaN would be NaN.
        if parts.mask is not None:
            read = read.masked_fill(~to_device(parts.mask, read.device)[..., None], 0)
        for of_side, (readings, index, weights) in zip(contributions, sides, strict=True):
            directions = readings.directions(index)
            of_group = torch.einsum("wbpd,bped,bp->wbe", like(read, weights), directions, weights)
            of_side.append(of_group)
    return names, [torch.cat(of_side) for of_side in contributions]


def asked_score(
    scores: BlockScores,
    place: AskedPlace,
    words: Sequence[str] | None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> AskedScore:
    """Return a score of a block, or its difference from other scores, and the weights of its
    positions.

    Args:
        scores: the scores of the block.
        place: the place of the score.
        words: the text at each position.
        mask: True at real tokens, [batch, pos]; None if all tokens are real.

    Raises:
        SelectionError, ValueError: if the position does not exist, or is padding.
    """
    layer, number = place.head
    batch, _, n_pos, _ = scores.pattern.shape
    against = place.against
    about = {"head": f"a{layer}.h{number}"}

    def at(name: str, pos: Index) -> Tensor:
        chosen = Selection.one_each(pos).columns(n_pos, name, batch=batch, real=mask)
        columns = sorted({*chosen.flatten().tolist()})
        descriptions = [
            f"{column} {words[column]!r}" if words and words[column] else f"{column}"
            for column in columns[:3]
        ]
        if len(columns) > 3:
            descriptions.append("...")
        about[name] = ", ".join(descriptions)
        return functional.one_hot(chosen.expand(batch, 1)[:, 0], n_pos).to(scores.pattern)

    at_query = at("query", place.query)
    pattern = torch.einsum("bij,bi->bj", scores.pattern[:, number], at_query)
    at_key = at("key", pattern.argmax(-1).tolist() if place.key is None else place.key)
    weights: dict[PartOfScore, Tensor] = {"q": at_query, "k": at_key}
    if isinstance(against, str):
        if against != "mean":
            raise ValueError(f"against must be a position or 'mean'; got {shown(against)}")
        weights["against"] = pattern
        about["against"] = against
    elif against is not None:
        weights["against"] = at("against", against)
    difference = at_key - weights["against"] if "against" in weights else at_key
    total = torch.einsum("bij,bi,bj->b", scores.scores[:, number], at_query, difference)
    return AskedScore(weights, total, about)


def checked_head(graph: Graph, head: tuple[int, int]) -> tuple[int, int]:
    """Return the layer and the head, after a check that they exist.

    Args:
        graph: the graph of the model.
        head: the layer and the number of the head.

    Raises:
        TypeError: if the head is not two whole numbers.
        ValueError: if the head does not exist.
    """
    is_pair = isinstance(head, tuple | list) and len(head) == 2 and all(map(is_integer, head))
    layer, number = head if is_pair else (-1, -1)
    sizes = [block.n_heads for block in graph.layers]
    if not (0 <= layer < len(sizes) and 0 <= number < sizes[layer]):
        error = ValueError if is_pair else TypeError
        raise error(
            f"head must be (layer, head), of {len(sizes)} layers with {max(sizes)} heads; got "
            f"{head}"
        )
    return layer, number


def pair_table(
    query: Sources,
    keys: Sequence[Sources],
    asked: AskedScore,
    names: Sequence[str],
    k: int,
    dtype: torch.dtype,
) -> Result:
    """Return the products of all sources of a query with all sources of a key.

    The `k` largest pairs are listed with their sources. All other sources are added up as `rest`.

    Args:
        query: the contribution of each source to the query, scaled.
        keys: the contribution of each source to the key. If two keys are compared, also the
            contribution of each source to the other key.
        asked: the score that all pairs add up to.
        names: the names of the sources.
        k: the number of pairs.
        dtype: the dtype whose rounding limits the gap between the sum of the pairs and the score.

    Returns:
        A result with the axes `query_source`, `key_source` and `example`, in the unit of scores.

    Raises:
        ValueError: if k is below 1.
        CacheError: if the pairs do not add up to the score.
    """
    require_integer("k", k)
    key = keys[0] if len(keys) == 1 else keys[0] - keys[1]
    places, sizes = _largest_pairs(query, key, k)
    compared = sizes
    if len(keys) == 2:
        compared = _sizes_of_pairs(query, keys[0]) + _sizes_of_pairs(query, keys[1])
    total = torch.einsum("ed,ed->e", query.sum(0), key.sum(0))
    difference = (total - like(asked.total, query)).abs()
    gap = float((difference / compared.clamp(min=1e-30)).max())
    # A NaN must raise too, and every comparison with NaN is false.
    if not gap <= sum_rounding(dtype):
        raise CacheError(
            f"pairs must add up to the score; got a gap of {gap:.2g} of their summed sizes: was "
            "the run edited, or were weights changed?"
        )
    axes = ("query_source", "key_source")
    chosen_sources = (places // len(key), places % len(key))
    tables = []
    labels: dict[str, list[str]] = {}
    for axis, values, chosen in zip(axes, (query, key), chosen_sources, strict=True):
        # A source can be in several pairs. List each source once, in the order of the pairs.
        rows = [*dict.fromkeys(chosen.tolist())]
        rest = values.sum(0, keepdim=True) - values[rows].sum(0, keepdim=True)
        tables.append(torch.cat([values[rows], rest]))
        labels[axis] = [*(names[row] for row in rows), "rest"]
    about = {
        **asked.about,
        "score": float(f"{asked.total.mean().item():.6g}"),
        "summed sizes of all pairs": float(f"{sizes.mean().item():.6g}"),
        "gap": float(f"{gap:.2g}"),
    }
    table = torch.einsum("aed,bed->abe", *tables)
    return Result(table, (*axes, "example"), labels=labels, unit="score", about=about)


def _largest_pairs(
    query: Sources, key: Sources, k: int
) -> tuple[Int[Tensor, " pair"], Float[Tensor, " example"]]:
    """Return the largest pairs, and the sum of the absolute values of all pairs.

    Pairs are numbered `query_source * n_key_sources + key_source`. The size of a pair is the mean
    of its absolute value over examples. Only the pairs of a block of query sources are in memory at
    once.
    """
    sizes = query.new_zeros(query.shape[1])
    best = query[:0, 0, 0]
    places = key.new_zeros(0).long()
    for first, pairs in _blocks_of_pairs(query, key):
        sizes += pairs.sum((0, 1))
        means = pairs.mean(-1).flatten()
        smallest = best[-1] if len(best) == k else -1
        larger = (means > smallest).nonzero()[:, 0]
        best = torch.cat([best, means[larger]])
        places = torch.cat([places, first * len(key) + larger])
        order = largest_rows(best, k)
        best = best[order]
        places = places[order]
    return places, sizes


def _sizes_of_pairs(query: Sources, key: Sources) -> Float[Tensor, " example"]:
    """Return the sum of the absolute values of all pairs."""
    return sum(
        (pairs.sum((0, 1)) for _, pairs in _blocks_of_pairs(query, key)),
        query.new_zeros(query.shape[1]),
    )


def _blocks_of_pairs(
    query: Sources, key: Sources
) -> Iterator[tuple[int, Float[Tensor, "query_source key_source example"]]]:
    """Yield the first query source of each block, and the absolute values of the block's pairs."""
    step = max(1, _BLOCK // (len(key) * query.shape[1]))
    for first in range(0, len(query), step):
        yield first, torch.einsum("aed,bed->abe", query[first : first + step], key).abs()
