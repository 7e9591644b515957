"""Receiver heads, against loops over tokens in numpy and the kurtosis of scipy."""

import numpy as np
import pytest
import scipy.stats
import torch

from hooks import CacheError
from interp import Steps, receiver_heads, run_with_cache
from models import TransformerConfig, attach, from_hf
from tests.interp.steps.masked import GPT2, random_model
from tests.reference import randomised

LAYERS, HEADS, POS, VOCAB = 3, 4, 17, 31
TOKENS = torch.randint(VOCAB, (POS,), generator=torch.Generator().manual_seed(1)).tolist()
SPANS = [range(0, 2), range(2, 5), range(5, 6), range(6, 10), range(10, 12), range(12, 16)]
SPANS += [range(16, 17)]


def by_hand(patterns, spans, distance):
    """The kurtosis [layer, head] of patterns [layer, head, query, key]."""
    n_layers, n_heads = patterns.shape[:2]
    scores = np.zeros((n_layers, n_heads))
    for layer in range(n_layers):
        for head in range(n_heads):
            received = []
            for j in range(len(spans) - distance):
                means = []
                for i in range(j + distance, len(spans)):
                    weights = [patterns[layer, head, q, k] for q in spans[i] for k in spans[j]]
                    means.append(np.mean(weights))
                received.append(np.mean(means))
            scores[layer, head] = scipy.stats.kurtosis(received, fisher=True, bias=True)
    return scores


@pytest.fixture(scope="module")
def model():
    sizes = dict(vocab_size=VOCAB, n_ctx=19, n_heads=HEADS, d_model=24)
    return randomised(TransformerConfig(**sizes, n_layers=LAYERS), scale=0.3)


@pytest.mark.parametrize("distance", [1, 3, 4])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_kurtosis_is_that_of_scipy(model, distance, lazy):
    steps = Steps(model, TOKENS, "", by=SPANS)
    options = {"lazy": True} if lazy else {"names": "*.pattern"}
    _, cache = run_with_cache(model, steps.text, **options)
    result = receiver_heads(model, cache, steps, distance=distance)
    assert result.axes == ("layer", "head", "example")
    patterns = torch.stack([cache["pattern", layer][0] for layer in range(LAYERS)])
    wanted = by_hand(patterns.double().numpy(), SPANS, distance)
    np.testing.assert_allclose(result.values[..., 0].numpy(), wanted, rtol=1e-3, atol=1e-3)


def test_an_attached_model_has_the_patterns_of_transformers():
    theirs = random_model(*GPT2)
    out = theirs(torch.tensor([TOKENS]), output_attentions=True)
    wanted = by_hand(torch.cat(out.attentions).double().numpy(), SPANS, 2)
    plain = from_hf(theirs)
    with attach(theirs):
        for each in (theirs, plain):
            steps = Steps(each, TOKENS, "", by=SPANS)
            _, cache = run_with_cache(each, torch.tensor([TOKENS]), names="*.pattern")
            values = receiver_heads(each, cache, steps, distance=2).values[..., 0]
            np.testing.assert_allclose(values.numpy(), wanted, rtol=1e-3, atol=1e-3)


def test_errors(model):
    steps = Steps(model, TOKENS, "", by=SPANS)
    _, cache = run_with_cache(model, steps.text, names="*.pattern")
    with pytest.raises(ValueError, match="at least 8"):
        receiver_heads(model, cache, steps, distance=5)
    with pytest.raises(ValueError, match="distance"):
        receiver_heads(model, cache, steps, distance=0)
    with pytest.raises(TypeError, match="Steps"):
        receiver_heads(model, cache, SPANS)
    other = Steps(model, [*TOKENS[1:], 0], "", by=SPANS)
    with pytest.raises(ValueError, match="other tokens"):
        receiver_heads(model, cache, other)
    shorter = Steps(model, TOKENS[:-1], "", by=SPANS[:-1])
    with pytest.raises(ValueError, match=r"\[1, head, 16, 16\]"):
        receiver_heads(model, cache, shorter, distance=1)
    _, partial = run_with_cache(model, steps.text, names="*.z")
    with pytest.raises(CacheError, match="pattern"):
        receiver_heads(model, partial, steps)
