"""Scores of explanations, with simulated judges whose scores are known."""

import json
import math
import re

import numpy as np
import pytest
import torch

from interp.features import load_sae, score_explanation, splice
from tests.shipped import pydoc

FEATURE, SIZE = 332, 9
TEXTS = [
    "def f(x): return x + 1",
    "class A: pass; the part KV8 of 3",
    "import os.path as x; y = 2",
    "for x in range(10): print(x)",
    "the list of all parts that are sold",
    "raise ValueError('no such key')",
    "with open(path) as file: pass",
]
NEAR = 5


@pytest.fixture(scope="module")
def sae():
    return load_sae("pydoc-4l/resid_post")


@pytest.fixture(scope="module")
def values(sae):
    """Return the values of all features in each context, [pos feature], by the context's text."""
    found = {}
    with splice(pydoc(), sae) as runner:
        for text in TEXTS:
            features = runner.capture(text, names="*.features")["features", 2][0]
            for start in range(0, len(text), SIZE):
                found[text[start : start + SIZE]] = features[start : start + SIZE].numpy()
    return found


def shown(prompt):
    return prompt.partition("Text: ")[2].partition("\n\nAnswer:")[0]


def asked(prompt):
    """Return the context in a prompt, and the set of marked positions."""
    text, marked = "", set()
    for part in re.split("(<<.>>)", shown(prompt)):
        if re.fullmatch("<<.>>", part):
            marked.add(len(text))
            text += part[2]
        else:
            text += part
    return text, marked


def truth(values, prompt):
    """Return the right answer to a prompt."""
    text, marked = asked(prompt)
    feature = values[text][:, FEATURE]
    if "<<" not in prompt:
        return feature.max() > 0
    return {*np.flatnonzero(feature >= 0.3 * feature.max())} == marked and feature.max() > 0


def scored(sae, judge, **options):
    options = dict(context=SIZE, n=8, near=NEAR) | options
    return score_explanation(pydoc(), sae, FEATURE, "the letter x", TEXTS, judge, **options)


def all_scores(score):
    for test in ("detection", "fuzzing"):
        for against in ("random", "near"):
            for whose in ("given", "another feature's", "none"):
                yield score.of(test, against, whose)


def test_a_judge_that_knows_the_answer_has_1(sae, values):
    score = scored(sae, lambda prompt: "Yes." if truth(values, prompt) else "no")
    assert all(found.value == found.high == 1 for found in all_scores(score))
    counts = score.of("fuzzing", "near")
    assert counts.n_active == sum(found[:, FEATURE].max() > 0 for found in values.values())
    assert counts.n_other >= 3
    # Wilson's interval of n right answers of n begins at n / (n + z²), and both shares are 1.
    ends = [1 - n / (n + 1.959964**2) for n in counts[3:]]
    assert counts.low == pytest.approx(1 - math.hypot(*ends) / 2)


@pytest.mark.parametrize("reply", ["yes", "NO, it is not", 0.9, 0.1, np.float32(0.8)])
def test_a_judge_that_always_says_the_same_has_a_half(sae, reply):
    score = scored(sae, lambda prompt: reply)
    assert all(found.value == 0.5 for found in all_scores(score))
    assert score.unclear == 0


def test_a_judge_that_guesses_has_a_half_within_its_interval(sae):
    draws = np.random.default_rng(4)
    score = scored(sae, lambda prompt: float(draws.random()), n=40)
    inside = [found.low <= 0.5 <= found.high for found in all_scores(score)]
    assert sum(inside) >= 11


def test_a_judge_that_reads_the_explanation_is_right_with_this_one_only(sae, values):
    def judge(prompt):
        return truth(values, prompt) if "feature: the letter x" in prompt else "yes"

    score = scored(sae, judge)
    for test in ("detection", "fuzzing"):
        assert score.of(test).value == 1
        assert score.of(test, whose="another feature's").value == 0.5
        assert score.of(test, whose="none").value == 0.5


def test_the_contexts_are_of_their_kinds(sae, values):
    score = scored(sae, lambda prompt: "perhaps")
    rows = sae.W_dec.double().numpy()
    cosines = rows @ rows[FEATURE] / np.linalg.norm(rows, axis=1)
    similar = np.argsort(-cosines)[1 : NEAR + 1]
    seen = {}
    for answer in score.answers:
        text, marked = asked(answer.prompt)
        seen.setdefault(answer.kind, set()).add(text)
        active = (values[text] > 0).any(0)
        assert active[FEATURE] == (answer.kind == "active")
        assert answer.kind != "near" or active[similar].any()
        assert bool(marked) == (answer.test == "fuzzing")
    assert not seen["random"] & seen["near"]
    # An answer that is neither yes nor no is wrong.
    assert score.unclear == len(score.answers)
    assert all(found.value == 0 for found in all_scores(score))


def test_tokens_with_a_share_of_the_largest_value_are_marked(sae, values):
    """The feature has values between 0.3 and 0.9 of its largest value in many contexts."""
    shares = {}
    for features in values.values():
        for feature in np.flatnonzero((features > 0).any(0)):
            relative = features[:, feature] / features[:, feature].max()
            between = ((relative > 0.35) & (relative < 0.85)).any()
            shares[feature] = shares.get(feature, 0) + between
    feature = int(max(shares, key=shares.get))
    assert shares[feature] >= 3
    score = score_explanation(
        pydoc(), sae, feature, "x", TEXTS, lambda prompt: "no", context=SIZE, n=40
    )
    checked = 0
    for answer in score.answers:
        if (answer.test, answer.kind) == ("fuzzing", "active"):
            text, marked = asked(answer.prompt)
            of_context = values[text][:, feature]
            assert marked == {*np.flatnonzero(of_context >= 0.3 * of_context.max())}
            checked += 1
    assert checked >= 9


def test_seeds_repeat_and_results_are_strict_json(sae):
    one, again, other = (scored(sae, lambda prompt: "no", n=3, seed=seed) for seed in (1, 1, 2))
    assert one.answers == again.answers != other.answers
    tables = json.loads(json.dumps(one.as_json(), allow_nan=False))["tables"]
    assert len(tables["score.value"]["values"]) == 12
    assert len(tables["answer.prompt"]["values"]) == len(one.answers) == 3 * 3 * 3 * 2
    assert len(repr(one).splitlines()) == 8


def test_wrong_arguments_and_answers_are_named(sae):
    with pytest.raises(TypeError, match="judge must return .*; got NoneType"):
        scored(sae, lambda prompt: None)
    with pytest.raises(ValueError, match="between 0 and 1; got 7"):
        scored(sae, lambda prompt: 7)
    with pytest.raises(ValueError, match="feature 332 is active in none of 1"):
        score_explanation(pydoc(), sae, FEATURE, "x", ["KV8"], lambda prompt: "no")
    with pytest.raises(ValueError, match=r"index in \[0, "):
        score_explanation(pydoc(), sae, 10**6, "x", TEXTS, lambda prompt: "no")


def test_a_feature_of_padded_texts_is_the_feature_of_each_text_alone(sae, values):
    for batch in (1, 4):
        score = scored(sae, lambda prompt: "yes" if truth(values, prompt) else "no", batch=batch)
        assert score.of("fuzzing", "near").value == 1
        assert torch.tensor([answer.is_right for answer in score.answers]).all()
