"""Sampling, compared with `transformers`, with distributions by hand, and with counts of draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import Sampling

VOCAB = 7
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def of(*probabilities):
    """Return logits [1, vocab] of a distribution. A constant is added, which must not matter."""
    return torch.tensor([probabilities]).log() + 3


def left(logits, **options):
    """Return the probabilities from which the sampling draws the token of the first row."""
    return Sampling(**options).cut(logits).softmax(-1)[0].tolist()


def about(*probabilities):
    return pytest.approx(probabilities, abs=1e-6)


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_logits_in_float64_stay_in_float64():
    """Two logits are equal in float32, and their difference is two temperatures."""
    logits = torch.tensor([[1000.0, 1000.0 + 2e-5, 999.0]], dtype=torch.float64)
    odds = np.exp([0.0, 2.0])
    probabilities = [*(odds / odds.sum()), 0.0]
    assert left(logits, temperature=1e-5) == pytest.approx(probabilities, abs=1e-4)
    assert left(logits, temperature=1e-5, top_k=1) == [0.0, 1.0, 0.0]


# The tokens that the options exclude.

FOUR = of(0.4, 0.3, 0.2, 0.1)


def test_logits_are_left_alone_and_may_forbid_tokens():
    logits = FOUR.clone()
    logits[0, 1] = -torch.inf
    before = logits.clone()
    cut = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.2)
    assert cut.cut(logits)[0, 1] == -torch.inf
    assert torch.equal(logits, before)


# Ties.


def test_of_tied_tokens_the_first_ones_are_left():
    """In half precision, several logits are often equal.

    Of equal logits, the first tokens are kept, so top-k with k=1 is the greedy token.
    """
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 2.0]])
    for k in (1, 2, 3):
        kept = [p > 0 for p in left(logits, temperature=1.0, top_k=k)]
        assert kept == [False, True, k > 1, k > 2, False]
    assert Sampling().choose(logits, []).item() == 1
    assert left(logits, temperature=1.0, top_p=0.0) == [0, 1, 0, 0, 0]
    assert sum(p > 0 for p in left(torch.zeros(1, 8), temperature=1.0, top_p=0.5)) == 4


# Against transformers.


@EXAMPLES
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.05, 4),
    top_k=st.none() | st.integers(1, VOCAB + 3),
    top_p=st.none() | st.floats(0.05, 0.99),
    min_p=st.none() | st.floats(0, 1),
)
def test_the_cuts_match_transformers(seed, temperature, top_k, top_p, min_p):
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, VOCAB, generator=generator) * 3
    warpers = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p else []
    warpers += [transformers.MinPLogitsWarper(min_p)] if min_p is not None else []
    theirs = logits
    for warper in warpers:
        theirs = warper(torch.zeros(3, 1, dtype=torch.int64), theirs)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = sampling.cut(logits)
    assert torch.equal(ours == -torch.inf, theirs == -torch.inf)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)


# Draws.


def test_tokens_are_drawn_as_often_as_they_are_probable():
    """Pearson's chi-square test.

    With two degrees of freedom, 13.8 is exceeded once in a thousand.
    """
    draws, sampling = 3000, Sampling(temperature=0.5, top_k=3)
    drawn = sampling.choose(FOUR.expand(draws, -1), generators(11) * draws)
    counts = torch.bincount(drawn, minlength=4)
    expected = draws * torch.tensor([16, 9, 4]) / 29
    assert counts[3] == 0
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8


def test_each_row_draws_from_its_own_generator():
    logits = torch.zeros(5, 1000)
    sampling = Sampling(temperature=1.0)
    together = sampling.choose(logits, generators(4, 9, 4, 5, 6)).tolist()
    alone = [sampling.choose(logits[:1], generators(seed)).item() for seed in (4, 9, 4, 5, 6)]
    assert together == alone
    assert len(set(together)) == 4


# Greedy.


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9.9e-7])
def test_below_a_millionth_the_most_probable_token_is_taken(temperature):
    """Two logits are so close that sampling at any other temperature would draw both tokens."""
    logits = torch.tensor([[1.0, 2.0, 2.0 + 1e-9, 0.0]], dtype=torch.float64).repeat(64, 1)
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    drawn = Sampling(temperature=temperature).choose(logits, [generator] * 64)
    assert drawn.tolist() == [2] * 64
    assert torch.equal(generator.get_state(), before)


# What is refused.


@pytest.mark.parametrize(
    "options",
    [
        *(dict(temperature=value) for value in (-0.1, math.inf, math.nan)),
        *(dict(top_k=value, temperature=1.0) for value in (0, -4)),
        *(dict(top_p=value, temperature=1.0) for value in (-0.1, 1.1, math.nan)),
        *(dict(min_p=value, temperature=1.0) for value in (-0.1, 1.1)),
        *(dict(top_k=3), dict(top_p=0.5, temperature=1e-7), dict(min_p=0.0)),
    ],
)
def test_options_out_of_range_are_named(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=name) as caught:
        Sampling(**options)
    assert str(value if options.get("temperature") == 1.0 else "temperature") in str(caught.value)


@pytest.mark.parametrize(
    ("value", "temperatures"),
    [(torch.nan, (0.0, 1.0)), (torch.inf, (1.0,)), (-torch.inf, (0.0, 1.0))],
)
def test_logits_that_are_no_numbers_are_named(value, temperatures):
    logits = torch.zeros(3, 5)
    logits[1] = value
    for temperature in temperatures:
        with pytest.raises(ValueError, match=f"finite; got {value} in row 1"):
            Sampling(temperature=temperature).choose(logits, generators(1, 2, 3))


def test_the_most_probable_token_may_be_infinitely_so():
    logits = torch.tensor([[0.0, torch.inf, 1.0], [-torch.inf, -torch.inf, 2.0]])
    assert Sampling().choose(logits, []).tolist() == [1, 2]
