"""Known circuits: two heads whose weights are written by hand, and the induction heads of the
bundled model.
"""

import pytest
import torch

from interp import (
    Pairs,
    activation_patching,
    edits,
    head_scores,
    logit_diff,
    repeated_tokens,
    run_with_cache,
)
from models import next_token_loss
from tests.interp.planted import END, INDUCTION, PREVIOUS, TEXTS, B, C, D, E, V, W, induction
from tests.shipped import pydoc


@pytest.fixture(scope="module")
def planted():
    return induction()


NOTHING = set()
EXPECTED = {
    # The texts differ in the token that is copied.
    (4, C): {
        "resid_pre": {(0, 4), (1, 4)},
        "attn_out": {(1, END)},
        "z": {INDUCTION},
        "v": {INDUCTION},
    },
    # The texts differ in the earlier copy of the last token. The previous-token head writes it into
    # the next position, which the induction head finds.
    (3, E): {
        "resid_pre": {(0, 3), (1, 4)},
        "attn_out": {(0, 4), (1, END)},
        "z": {PREVIOUS, INDUCTION},
        "v": {PREVIOUS},
        "k": {INDUCTION},
        "scores": {INDUCTION},
        "pattern": {INDUCTION},
    },
    # The texts differ in the last token. Both tokens occur earlier in the text.
    (END, D): {
        "resid_pre": {(0, END), (1, END)},
        "attn_out": {(1, END)},
        "z": {INDUCTION},
        "q": {INDUCTION},
        "scores": {INDUCTION},
        "pattern": {INDUCTION},
    },
}


@pytest.mark.parametrize(("changed", "places"), EXPECTED.items())
def test_patching_names_the_planted_places_and_no_other(planted, changed, places):
    pos, token = changed
    corrupted = TEXTS.clone()
    corrupted[:, pos] = token
    pairs = Pairs(TEXTS, corrupted, metric=logit_diff(B, C if token == C else W))
    for site in ("resid_pre", "attn_out", "z", "q", "k", "v", "scores", "pattern"):
        share = activation_patching(planted, pairs, site).normalized().mean()
        expected = torch.zeros_like(share)
        for layer, place in places.get(site, NOTHING):
            expected[layer, place] = 1
        torch.testing.assert_close(share, expected, rtol=0, atol=1e-6)


def test_detectors_and_ablation_name_the_planted_heads(planted):
    tokens = repeated_tokens(V, period=5, batch=17)
    _, cache = run_with_cache(planted, tokens, names=["*.pattern", "*.z"])
    assert head_scores(planted, cache).mean()[PREVIOUS] == pytest.approx(1)

    def second_copy(logits):
        return next_token_loss(logits, tokens)[:, 5:].mean(1)

    ablation = edits.mean(cache)
    found = activation_patching(planted, Pairs(tokens, metric=second_copy), "z", edit=ablation)
    hurt = (found.mean() > 1e-6).nonzero().tolist()
    assert hurt == [[*PREVIOUS], [*INDUCTION]]


def test_ablation_of_induction_heads_costs_the_bundled_model_most():
    """The most important heads are the previous-token head and the induction heads. The induction
    heads matter in the order of their scores.
    """
    model, period = pydoc(), 20
    tokens = repeated_tokens(model.config.vocab_size, period, batch=16)
    _, cache = run_with_cache(model, tokens, names=["*.pattern", "*.z"])

    def second_copy(logits):
        return next_token_loss(logits, tokens)[:, period - 1 :].mean(1)

    ablation = edits.mean(cache)
    found = activation_patching(model, Pairs(tokens, metric=second_copy), "z", edit=ablation)
    scores = head_scores(model, cache, "induction").mean().flatten()
    ranked = [divmod(n, 4) for n in scores.argsort(descending=True)[:3].tolist()]
    first = divmod(int(head_scores(model, cache).mean().argmax()), 4)
    top = found.top(16)
    named = [(place.where["layer"], place.where["head"]) for place in top]
    assert named[:4] == [first, *ranked]
    assert min(place.low for place in top[:4]) > 0.2 > 0.15 > max(place.high for place in top[4:])
