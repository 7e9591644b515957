"""Scores of heads, for heads whose weights are written by hand, and for random patterns.

The expected scores of random patterns are computed one key at a time.
"""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from hooks import CacheError, HookPoint, UnknownNameError
from interp import head_scores, repeated_tokens, run_with_cache
from models import attach
from tests import tiny
from tests.interp.planted import attention_only

V, N, MARK = 31, 29, 30
# The residual stream has three parts: the token, its position, and the token before it.
TOKEN, PLACE, BEFORE = slice(0, V), slice(V, V + N), slice(V + N, 2 * V + N)
SHARP = 100.0
SHARES = ("previous_token", "first_token", "duplicate_token", "induction", "span")
# The layer and head of each planted head. The head `EVEN` attends to all tokens equally.
PLANTED = dict(zip(SHARES, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], strict=True))
EVEN = (1, 2)


@pytest.fixture(scope="module")
@torch.no_grad()
def planted():
    model = attention_only(n_tokens=V, n_ctx=N, d_head=V + N, d_model=2 * V + N)
    model.token_embedding.weight[:, TOKEN] = torch.eye(V)
    model.position_embedding.weight[:, PLACE] = torch.eye(N)

    def plant(kind, asking, query, asked, key, itself):
        """Set the weights of a head, so that its scores are products of queries and keys.

        `itself` is a smaller score of the position itself. If it is positive, the head attends to
        the position itself when no key matches.
        """
        layer, head = PLANTED[kind]
        attn = model.blocks[layer].attn
        attn.W_Q[head, asking, : query.shape[1]] = SHARP * query
        attn.W_K[head, asked, : key.shape[1]] = key
        attn.W_Q[head, PLACE, V:] = itself * SHARP * torch.eye(N)
        attn.W_K[head, PLACE, V:] = torch.eye(N)

    tokens, places, always = torch.eye(V), torch.eye(N), torch.ones(V, 1)
    plant("previous_token", PLACE, places.roll(1, 0), PLACE, places, 0.5)
    plant("first_token", TOKEN, always, PLACE, places[:, [0]], 0.5)
    plant("duplicate_token", TOKEN, tokens, TOKEN, tokens, -0.5)
    plant("induction", TOKEN, tokens, BEFORE, tokens, 0.5)
    plant("span", TOKEN, always, TOKEN, tokens[:, [MARK]], 0.5)
    layer, head = PLANTED["previous_token"]
    model.blocks[layer].attn.W_V[head, TOKEN, :V] = tokens
    model.blocks[layer].attn.W_O[head, :V, BEFORE] = tokens
    return model


def texts():
    """Return two texts, in which any two kinds of heads attend to the same token for at most one
    query.
    """
    drawn = torch.Generator().manual_seed(0)
    letters = [torch.randperm(MARK, generator=drawn).tolist() for _ in range(2)]
    return [
        [a, MARK, x, y, b, c, x, d, e, y, *more[: N - 10]] for a, x, y, b, c, d, e, *more in letters
    ]


def test_planted_heads_are_found_and_no_other(planted):
    tokens = torch.tensor(texts())
    _, cache = run_with_cache(planted, tokens, names="*.pattern")
    for kind, place in PLANTED.items():
        options = {"span": torch.tensor([[1], [1]])} if kind == "span" else {}
        found = head_scores(planted, cache, kind, **options)
        assert found.axes == ("layer", "head", "example")
        assert found.values[place].min() > 0.99
        others = [head for head in PLANTED.values() if head != place]
        assert max(found.values[other].max() for other in others) < 0.05
        assert found.bounds == (0, 1)


def test_entropy_and_distance_of_planted_heads(planted):
    tokens = torch.tensor(texts())
    _, cache = run_with_cache(planted, tokens, names="*.pattern")
    entropy, distance = (
        head_scores(planted, cache, kind=kind).mean() for kind in ("entropy", "distance")
    )
    queries = range(1, N)
    assert head_scores(planted, cache, "entropy").bounds == (0, math.inf)
    assert entropy[EVEN] == pytest.approx(statistics.mean(math.log(q + 1) for q in queries))
    assert distance[EVEN] == pytest.approx(statistics.mean(q / 2 for q in queries))
    assert entropy[PLANTED["first_token"]] == pytest.approx(0, abs=1e-9)
    assert distance[PLANTED["first_token"]] == pytest.approx(statistics.mean(queries))
    assert distance[PLANTED["previous_token"]] == pytest.approx(1)


@torch.no_grad()
def test_keys_after_the_query_of_an_encoder_have_a_positive_distance():
    pytest.importorskip("transformers", reason="needs the extra hf")
    model = tiny.redraw(tiny.model("BertForMaskedLM", attn_implementation="eager"), 0.3)
    tokens, mask = torch.randint(3, 23, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    run = model(tokens, attention_mask=mask, output_attentions=True)
    expected = []
    for text, length in ((0, 9), (1, 6)):
        place = np.arange(length)
        sizes = np.abs(place[:, None] - place)
        patterns = [weights[text, :, :length, :length].numpy() for weights in run.attentions]
        expected.append([(weights * sizes).sum(-1)[:, 1:].mean(-1) for weights in patterns])
    attach(model)
    _, cache = run_with_cache(model, tokens, attention_mask=mask, names="*.pattern")
    distance = head_scores(model, cache, kind="distance")
    assert distance.values.min() > 1
    np.testing.assert_allclose(
        distance.values.numpy(), np.moveaxis(np.array(expected), 0, -1), rtol=1e-5
    )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", [*SHARES, "entropy", "distance"])
def test_padding_does_not_count(planted, kind, left):
    rows = [texts()[0][: N - 1], texts()[1]]
    tokens, mask = torch.full((2, N), MARK), torch.zeros(2, N)
    for n, row in enumerate(rows):
        where = slice(N - len(row), N) if left else slice(len(row))
        tokens[n, where], mask[n, where] = torch.tensor(row), 1

    def scored(tokens, mask, mark):
        _, cache = run_with_cache(planted, tokens, attention_mask=mask, names="*.pattern")
        options = {"span": torch.tensor(mark)} if kind == "span" else {}
        return head_scores(planted, cache, kind, **options).values

    found = scored(tokens, mask, [[1 + left], [1]])
    alone = [scored(torch.tensor([row]), torch.ones(1, len(row)), [[1]]) for row in rows]
    torch.testing.assert_close(found, torch.cat(alone, -1), rtol=0, atol=1e-12)


class Fixed(nn.Module):
    """A model whose attention patterns are given, [layer, batch, head, query, key]."""

    def __init__(self, pattern):
        super().__init__()
        self.weights = pattern
        self.blocks = nn.ModuleList(nn.Module() for _ in pattern)
        for block in self.blocks:
            block.pattern = HookPoint("batch head query key")

    def forward(self, tokens, attention_mask=None):
        for block, weights in zip(self.blocks, self.weights, strict=True):
            block.pattern(weights)
        return tokens


def one_by_one(kind, weights, tokens, real, span, queries):
    """Return the score of one head on one text, computed query by query from its pattern
    `weights`.
    """
    kept = [n for n, is_real in enumerate(real) if is_real]
    found = []
    for at, query in enumerate(kept):
        earlier, seen = kept[:at], weights[query]
        copies = [n for n, key in enumerate(earlier) if tokens[key] == tokens[query]]
        after = span and query > max(span)
        keys = {
            "current_token": [query],
            "previous_token": earlier[-1:],
            "first_token": earlier[:1],
            "duplicate_token": [kept[n] for n in copies],
            "induction": [kept[n + 1] for n in copies],
            "span": span if after else [],
        }
        if query not in queries or at == 0:
            continue
        if kind == "entropy":
            found.append(-sum(p * math.log(p) for p in seen if p > 0))
        elif kind == "distance":
            found.append(sum(seen[key] * (at - n) for n, key in enumerate(kept)))
        elif keys[kind]:
            found.append(sum(seen[key] for key in keys[kind]))
    return statistics.mean(found)


@pytest.mark.parametrize("kind", ["current_token", *SHARES, "entropy", "distance"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-6)])
def test_scores_are_means_over_keys_and_queries_one_by_one(kind, dtype, atol):
    layers, batch, heads, pos = 2, 3, 5, 7
    real = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1, 0]])
    tokens = torch.tensor([[3, 1, 1, 3, 1, 4, 3], [1, 1, 1, 2, 2, 1, 5], [6, 6, 0, 6, 6, 0, 6]])
    allowed = real[:, None, :, None] * real[:, None, None] * torch.ones(pos, pos).tril()
    drawn = torch.rand(layers, batch, heads, pos, pos) * allowed
    pattern = (drawn / drawn.sum(-1, keepdim=True).clamp(min=1e-9)).to(dtype)
    span = torch.tensor([[0, 2], [3, 2], [2, 2]])
    queries = torch.tensor([[1, 3, 6], [-2, 4, -1], [4, -1, -1]])
    model = Fixed(pattern)
    _, cache = run_with_cache(model, tokens, attention_mask=real, names="*.pattern")
    options = {"span": span} if kind == "span" else {}
    own = [[1, 3, 6], [5, 4, 6], [4, 5]]
    mask = torch.tensor([[column in row for column in range(pos)] for row in own])
    for asked, chosen in (
        (None, [range(pos)] * batch),
        (queries, own),
        (mask, own),
        ([3, 4], [[3, 4]] * batch),
    ):
        found = head_scores(model, cache, kind, queries=asked, **options).values
        for layer, head, row in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
            seen = pattern[layer, row, head].double().tolist()
            own = list(set(span[row].tolist())) if kind == "span" else []
            expected = one_by_one(kind, seen, tokens[row], real[row], own, chosen[row])
            assert found[layer, head, row].item() == pytest.approx(expected, abs=atol)


def test_a_pattern_of_ones_own_is_scored_by_its_factors():
    tokens, mask = torch.tensor([[4, 2, 6, 1]] * 2), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    attention = torch.tensor(
        [[1.0, 0, 0, 0], [0.25, 0.75, 0, 0], [0.5, 0.125, 0.375, 0], [0.5, 0.25, 0.125, 0.125]]
    )
    padded = torch.tensor([[0.0] * 4, [0, 1, 0, 0], [0, 0.25, 0.75, 0], [0, 0.5, 0.25, 0.25]])
    model = Fixed(torch.stack([attention, padded])[None, :, None])
    _, cache = run_with_cache(model, tokens, attention_mask=mask, names="*.pattern")
    before = torch.ones(4, 4).tril(-1).triu(-1)
    for dtype in (torch.bool, torch.long, torch.float64):
        own = head_scores(model, cache, before.to(dtype)).values
        torch.testing.assert_close(own, head_scores(model, cache, "previous_token").values)
    factors = torch.tensor([[9.0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0], [0, -4, 12, 0]])
    # In the second text, the first column is padding. So only the last query has a factor for a
    # real key.
    scores = head_scores(model, cache, factors)
    assert scores.values.tolist() == [
        [[(2 * 0.5 - 4 * 0.25 + 12 * 0.125) / 2, -4 * 0.5 + 12 * 0.25]]
    ]
    assert scores.unit == "unit of the factors"
    with pytest.raises(ValueError, match=r"\[4, 4\]; got \[4, 3\]"):
        head_scores(model, cache, factors[:, :3])
    with pytest.raises(ValueError, match="example 0"):
        head_scores(model, cache, torch.zeros(4, 4))


def test_scores_that_make_no_sense(model, unchecked):
    tokens = repeated_tokens(23, period=3, batch=2)
    _, cache = run_with_cache(model, tokens, names="*.pattern")
    _, part = run_with_cache(model, tokens, names="*.pattern", pos=slice(2, 5))
    _, lacking = run_with_cache(model, tokens, names="blocks.1.attn.pattern")
    different = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 1, 4, 5, 6]])
    _, differing = run_with_cache(model, different, names="*.pattern")
    # `at` reorders the values of a cache, but not the tokens of its run.
    unknown = cache.at(batch=[1, 0])
    _, several = run_with_cache(
        model, tokens, run=lambda tokens: model(tokens.clone()), names="*.pattern"
    )
    for kind in ("induction", "duplicate_token"):
        expected = head_scores(model, cache, kind).values
        assert torch.equal(head_scores(model, several, kind).values, expected)
    left = torch.tensor([[0] + [1] * 5] * 2)
    _, padded = run_with_cache(model, tokens, attention_mask=left, names="*.pattern")
    wrong = [
        ((part,), {}, "3 queries and 6 keys"),
        ((cache.at(batch=0),), {}, "whole texts"),
        ((cache, "span"), {}, "span"),
        ((cache, "induction"), {"span": 3}, "span"),
        ((unknown, "induction"), {}, "knows its tokens"),
        ((differing, "induction"), {}, "example 0"),
        ((cache,), {"queries": 6}, "queries"),
        ((cache,), {"queries": 0}, "example 0"),
        ((cache,), {"queries": [0, 1, 1, 0, 0, 1]}, r"\.bool\(\)"),
        ((cache,), {"queries": [[1], [2], [3]]}, "2 examples.*got 3"),
        ((padded, "span"), {"span": 0}, "padding"),
    ]
    for given, options, said in wrong:
        with pytest.raises(ValueError, match=said):
            head_scores(model, *given, **options)
    with pytest.raises(UnknownNameError, match="previous_token"):
        head_scores(model, cache, kind="previous")
    with pytest.raises(CacheError, match=r"pattern"):
        head_scores(model, lacking)
