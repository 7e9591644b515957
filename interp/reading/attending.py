"""Reasons of attention: a score as the sum, over pairs of sources, of what one gives the query and the other the key.

With the scales of norms as in the run, a head's query and key are sums of what earlier parts of the model wrote, so their
product is a sum over pairs (Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions"):

1. Take what each part wrote at the query's position and at the key's, and read it as the head does (`interp.graph.scores`).
2. The pairs are the product of the two tables. Their sum is the score, which is checked: it may miss by rounding of the pairs.
   Where two scores are compared, the pairs of both count, because the pairs of their difference may cancel.
3. Keep the sources of the largest pairs, found block by block, and add up all others as `rest`.
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
"""Pairs that are looked at together."""

Side = Literal["q", "k", "against"]
Sources = Float[Tensor, "source example d_head"]


@without_gradients
def why_attends(
    model: nn.Module,
    cache: ActivationCache,
    head: tuple[int, int],
    query: Index = -1,
    key: Index | None = None,
    against: Index | Literal["mean"] | None = None,
    *,
    k: int = 30,
) -> Result:
    """Find which pairs of a model's parts make a head look where it looks: its score as a sum of pairs.

    The score of a query and a key, before a cap and the mask, is the sum over pairs of what one part gives the query and
    another the key. Parts are those of `decompose`, and `bias`: all biases together.

    Args:
        model: see `decompose`.
        cache: the cache of a run that kept all points, such as a lazy one.
        head: the layer and the head.
        query: the position that looks, or one for each example; -1 is the last real token.
        key: the position that is looked at, or one for each example; by default where the head looks most.
        against: another key, to explain the difference of the two scores; or `mean`, the mean of all keys as the pattern
            weighs them.
        k: how many of the largest pairs have sources of their own. All other sources are added up as `rest`.

    Returns:
        A result with the axes `query_source`, `key_source` and `example`, whose values add up to the score; so each row, or column,
        adds up to what one source does on one side. Pairs cancel: `about` has the sum of all pairs' sizes beside the score.

    Raises:
        TypeError, ValueError: as for `decompose`; or if there is no such head, or k is below 1.
        SelectionError: if there is no such position, or it is padding.
        CacheError: if the cache is of another model or lacks a point, or the pairs do not add up to the score.

    >>> from interp import run_with_cache
    >>> from models import load
    >>> model = load("pydoc-4l")
    >>> _, cache = run_with_cache(model, "part KV8 and part K", lazy=True)
    >>> pairs = why_attends(model, cache, (1, 0))
    >>> pairs.about["head"], bool(abs(pairs.values.sum() - pairs.about["score"]) < 1e-3)
    ('a1.h0', True)
    """
    parts = ResidualComponents(model, cache)
    text = text_of_values(cache, parts.at(parts.last).shape[:2])
    if text is None:
        raise CacheError(
            "a score needs a whole cache of a run that was given tokens; got a cache that does not know "
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
        raise CacheError(f"head {head} must do in the run what it does now; was it edited there?")
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
        if parts.mask is not None:  # some kernels give NaN at padding
            read = read.masked_fill(~to_device(parts.mask, read.device)[..., None], 0)
        for held, (readings, which, weights) in zip(sources, sides, strict=True):
            directions = readings.directions(which)
            held.append(torch.einsum("wbpd,bped,bp->wbe", like(read, weights), directions, weights))
    of_query, *of_keys = (torch.cat(held) for held in sources)
    table = pair_table(scores.scale * of_query, of_keys, asked, names, k, parts.dtype)
    return replace(table, groups=groups_of_cache(cache, table.values))


class AskedPlace(NamedTuple):
    """The place of a score that is to be explained; for the fields see `why_attends`."""

    head: tuple[int, int]
    query: Index
    key: Index | None = None
    against: Index | Literal["mean"] | None = None


class AskedScore(NamedTuple):
    """A score that is to be explained, or how far it is above others.

    Attributes:
        weights: by side, the weights of positions: 1 at the query `q`; 1 at the key `k`; and at `against`, where there are keys
            to compare with, their shares.
        total: the score.
        about: where it is, in words.
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
    """Return a score of a block, with the weights of its positions.

    Args:
        scores: the scores of the block.
        place: the place of the score.
        words: the text at each position.
        mask: True at real tokens, [batch, pos]; None if all are.

    Raises:
        SelectionError, ValueError: if there is no such position, or it is padding.
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
    """The layer and the head.

    Raises:
        ValueError: if there is no such head.
    """
    layer, number = head if isinstance(head, Sequence) and len(head) == 2 else (-1, -1)
    sizes = [each.heads.stop - each.heads.start for each in graph.layers]
    if not (0 <= layer < len(sizes) and 0 <= number < sizes[layer]):
        raise ValueError(
            f"head must be (layer, head), of {len(sizes)} layers with {max(sizes)} heads; got {head}"
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
    """The products of all sources of a query with all of a key, of which the largest have a place of their own.

    Args:
        query: what each source gives the query, scaled.
        keys: what each source gives the key and, where there are keys to compare with, what it gives these.
        asked: the score that all pairs add up to.
        names: of the sources.
        k: how many pairs.
        dtype: that of the run, whose rounding pairs may miss.

    Raises:
        ValueError: if k is below 1.
        CacheError: if the pairs do not add up to the score.
    """
    require_integer("k", k)
    is_difference = len(keys) > 1
    key = keys[0] - keys[1] if is_difference else keys[0]
    sizes, best, places = query.new_zeros(query.shape[1]), query[:0, 0, 0], key.new_zeros(0).long()
    compared = torch.zeros_like(sizes)  # the sizes of the pairs of both scores, which may be equal
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
            f"pairs must add up to the score; they miss {gap:.2g} of their summed sizes: was the run edited, or were weights "
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
