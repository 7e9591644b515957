"""Reasons of attention: a score as a sum over pairs of sources, one for the query and one for the
key.

With the scales of norms fixed as in the run, a head's query and key are sums over the outputs of
earlier parts of the model. Their product is therefore a sum over pairs (Kamath et al. 2025,
"Tracing Attention Computation Through Feature Interactions"):

1. Take the output of each part at the query's position and at the key's, and map both as the head
   does (`interp.graph.scores`).
2. Multiply the two tables to get the pairs. Check that their sum is the score, up to the rounding
   of the pairs. If two scores are compared, the rounding is that of the pairs of both, because the
   pairs of their difference may cancel.
3. Find the largest pairs, block by block. Keep their sources, and add up all other sources as
   `rest`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from hooks import ActivationCache, CacheError
from hooks.base import (
    Index,
    Selection,
    is_rounding,
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

Side = Literal["q", "k", "against"]
Sources = Float[Tensor, "source example d_head"]


@without_gradients
def attention_attribution(
    model: nn.Module,
    cache: ActivationCache,
    head: tuple[int, int],
    query: Index = -1,
    key: Index | None = None,
    against: Index | Literal["mean"] | None = None,
    *,
    k: int = 30,
) -> Result:
    """Return a head's attention score as a sum over pairs of the model's parts.

    The score of a query and a key, before a cap and the mask, is a sum over pairs: one part
    contributes to the query, and one part contributes to the key. The parts are the parts of
    `decompose`, and `bias`: all biases together.

    Args:
        model: see `decompose`.
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
        TypeError, ValueError: as for `decompose`; or if the head does not exist, or k is below 1.
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
    place = AskedPlace(head, query, key, against)
    asked = asked_score(scores, place, text.words(model), parts.mask)
    in_run = parts.at(parts.graph.names[attention.sublayer.z])[:, :, head[1]]
    v, at_query = scores.v[:, :, scores.part("k", head[1])[1]], asked.weights["q"]
    z = torch.einsum("bij,bi,bje->be", scores.pattern[:, head[1]], at_query, v)
    if not is_rounding(like(in_run, z)[at_query.bool()], z, parts.dtype).all():
        raise CacheError(
            f"head {head} must have the same output in the run and now; was the head edited in "
            "the run?"
        )
    linear, scale = parts.norm_in_run(attention.norm)
    names, sources = ["bias"], [list[Tensor]() for _ in asked.weights]
    sides = [(*scores.part(side, head[1]), weights) for side, weights in asked.weights.items()]
    for held, (readings, which, weights) in zip(sources, sides, strict=True):
        read_bias = readings.directions(which) @ like(linear.bias, weights)
        constant = read_bias + readings.constant[:, :, which]
        held.append(torch.einsum("bpe,bp->be", constant, weights)[None])
    for group in parts(layer):
        names += group.names
        read = linear.after(to_device(group.vectors(), scale.device)) / scale
        # Some kernels return NaN at padding.
        if parts.mask is not None:
            read = read.masked_fill(~to_device(parts.mask, read.device)[..., None], 0)
        for held, (readings, which, weights) in zip(sources, sides, strict=True):
            directions = readings.directions(which)
            held.append(torch.einsum("wbpd,bped,bp->wbe", like(read, weights), directions, weights))
    of_query, *of_keys = (torch.cat(held) for held in sources)
    table = pair_table(scores.scale * of_query, of_keys, asked, names, k, parts.dtype)
    return replace(table, groups=groups_of_cache(cache, table.values))


class AskedPlace(NamedTuple):
    """The place of the score to explain; for the fields see `attention_attribution`."""

    head: tuple[int, int]
    query: Index
    key: Index | None = None
    against: Index | Literal["mean"] | None = None


class AskedScore(NamedTuple):
    """A score to explain, or the difference of a score from other scores.

    Attributes:
        weights: by side, the weights of positions: 1 at the query for `q`; 1 at the key for `k`;
            and, if the score is compared with other keys, the shares of these keys for `against`.
        total: the score, or the difference.
        about: the place of the score, in words.
    """

    weights: Mapping[Side, Float[Tensor, "batch pos"]]
    total: Float[Tensor, " batch"]
    about: Mapping[str, Any]


def asked_score(
    scores: BlockScores,
    place: AskedPlace,
    words: Sequence[str] | None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> AskedScore:
    """Return a score of a block, and the weights of its positions.

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
        chosen = Selection.one_each(pos).columns(n_pos, name, batch, mask)
        several = sorted({*chosen.flatten().tolist()})
        said = [f"{n} {words[n]!r}" if words and words[n] else f"{n}" for n in several[:3]]
        about[name] = ", ".join([*said, *["..."][: len(several) > 3]])
        return functional.one_hot(chosen.expand(batch, 1)[:, 0], n_pos).to(scores.pattern)

    at_query = at("query", place.query)
    pattern = torch.einsum("bij,bi->bj", scores.pattern[:, number], at_query)
    at_key = at("key", pattern.argmax(-1).tolist() if place.key is None else place.key)
    weights: dict[Side, Tensor] = {"q": at_query, "k": at_key}
    if isinstance(against, str):
        if against != "mean":
            raise ValueError(f"against must be a position or 'mean'; got {shown(against)}")
        weights["against"], about["against"] = pattern, against
    elif against is not None:
        weights["against"] = at("against", against)
    difference = at_key - weights["against"] if "against" in weights else at_key
    total = torch.einsum("bij,bi,bj->b", scores.scores[:, number], at_query, difference)
    return AskedScore(weights, total, about)


def checked_head(graph: Graph, head: tuple[int, int]) -> tuple[int, int]:
    """Return the layer and the head, after a check that they exist.

    Raises:
        ValueError: if the head does not exist.
    """
    layer, number = head if isinstance(head, Sequence) and len(head) == 2 else (-1, -1)
    sizes = [each.heads.stop - each.heads.start for each in graph.layers]
    if not (0 <= layer < len(sizes) and 0 <= number < sizes[layer]):
        raise ValueError(
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
    """Return the products of all sources of a query and all sources of a key; only the largest are
    listed.

    Args:
        query: the contribution of each source to the query, scaled.
        keys: the contribution of each source to the key and, if other keys are compared, its
            contribution to these.
        asked: the score that all pairs add up to.
        names: the names of the sources.
        k: the number of pairs.
        dtype: the dtype of the run; the sum of the pairs may differ from the score by its rounding.

    Raises:
        ValueError: if k is below 1.
        CacheError: if the pairs do not add up to the score.
    """
    require_integer("k", k)
    is_difference = len(keys) > 1
    key = keys[0] - keys[1] if is_difference else keys[0]
    sizes, best, places = query.new_zeros(query.shape[1]), query[:0, 0, 0], key.new_zeros(0).long()
    # The absolute values of the pairs of both scores. The two scores may be equal.
    compared = torch.zeros_like(sizes)
    step = max(1, _BLOCK // (len(key) * len(sizes)))
    for first in range(0, len(query), step):
        pairs = torch.einsum("aed,bed->abe", query[first : first + step], key).abs()
        sizes += pairs.sum((0, 1))
        for one in keys if is_difference else ():
            compared += (
                torch.einsum("aed,bed->abe", query[first : first + step], one).abs().sum((0, 1))
            )
        means = pairs.mean(-1).flatten()
        here = (means > (best[-1] if len(best) == k else -1)).nonzero()[:, 0]
        best, places = torch.cat([best, means[here]]), torch.cat([places, first * len(key) + here])
        kept = largest_rows(best, k)
        best, places = best[kept], places[kept]
    miss = (torch.einsum("ed,ed->e", query.sum(0), key.sum(0)) - like(asked.total, query)).abs()
    whole = compared if is_difference else sizes
    if not (gap := float((miss / whole.clamp(min=1e-30)).max())) <= sum_rounding(dtype):
        raise CacheError(
            f"pairs must add up to the score; got a gap of {gap:.2g} of their summed sizes: was "
            "the run edited, or were weights "
            "changed?"
        )
    tables, labels, axes = [], dict[str, list[str]](), ("query_source", "key_source")
    for axis, values, chosen in zip(
        axes, (query, key), (places // len(key), places % len(key)), strict=True
    ):
        rows = [*dict.fromkeys(chosen.tolist())]
        rest = values.sum(0, keepdim=True) - values[rows].sum(0, keepdim=True)
        tables.append(torch.cat([values[rows], rest]))
        labels[axis] = [*(names[n] for n in rows), "rest"]
    facts = {"score": asked.total, "summed sizes of all pairs": sizes}
    said = {name: float(f"{value.mean().item():.6g}") for name, value in facts.items()}
    about = {**asked.about, **said, "gap": float(f"{gap:.2g}")}
    table = torch.einsum("aed,bed->abe", *tables)
    return Result(table, (*axes, "example"), labels=labels, unit="score", about=about)
