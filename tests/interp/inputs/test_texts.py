"""Analyses that run texts in batches of their own, under edits that are already active."""

import copy

import pytest
import torch

from hooks import HookedRunner, HookError
from interp import Pairs, edits, evaluate_sae, jacobian_lens, max_activating, tuned_lens
from interp.alignment import align
from interp.diffing.streams import stream_change
from interp.diffing.twins import TwoModels
from interp.directions import Contrast, difference_of_means, probe
from interp.features import feature_cards, load_sae
from interp.store import statistics
from tests.shipped import pydoc

TEXTS = ["def f(x): return x", "class A: pass", "import os", "part KV8", "return None"]
POINT = "blocks.1.resid_post"


def sae():
    return load_sae("pydoc-4l/resid_post")


ANALYSES = {
    "statistics": lambda model: statistics(model, TEXTS, POINT, batch=2),
    "means": lambda model: difference_of_means(model, Contrast(TEXTS[:2], TEXTS[2:]), POINT),
    "probe": lambda model: probe(model, Contrast(TEXTS, TEXTS[::-1]), POINT),
    "maxima": lambda model: max_activating(model, TEXTS, "blocks.1.mlp.post", neuron=3, batch=2),
    "sae": lambda model: evaluate_sae(model, sae(), TEXTS, batch=2),
    "cards": lambda model: feature_cards(model, sae(), TEXTS, [5]),
    "tuned lens": lambda model: tuned_lens(model, TEXTS, steps=2, batch=2),
    "change": lambda model: changed(model),
    "Jacobian lens": lambda model: jacobian_lens(model, TEXTS),
}


def changed(model):
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.blocks[0].mlp.W_out.mul_(1.1)
    return stream_change(TwoModels(model, tuned), [[3, 1, 4], [1, 5], [9]], batch=2)


@pytest.mark.parametrize("receipts", [False, True])
@pytest.mark.parametrize("name", ANALYSES)
def test_edits_of_some_texts_are_refused_in_batches_of_an_analysis(name, receipts):
    model = pydoc()
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache(TEXTS[:2], names="blocks.0.mlp_out")
    values = cache["mlp_out", 0]
    listed = (
        edits.zero(batch=1),
        edits.zero(pos=[[1], [0]]),
        edits.replace(cache, pos=-1),
        edits.add(values[:, :1]),
        edits.add(values[:, 0], pos=0),
    )
    for edit in listed:
        with (
            pytest.raises(HookError, match="leave out batch="),
            runner.hooks({"blocks.0.mlp_out": edit}, receipts=receipts),
        ):
            ANALYSES[name](model)


def test_edits_of_all_texts_act_in_batches_of_an_analysis():
    model = pydoc()
    runner = HookedRunner(model)
    _, cache = runner.run_with_cache("import", names="embed")
    one_value = cache["embed"][0, -1]
    # These edits add one value to the embeddings of all texts.
    added = [edits.add(one_value), edits.add(cache["embed"][:, -1:])]
    hooks = [("blocks.0.mlp_out", edits.zero(pos=-1))]
    with runner.hooks([*hooks, *(("embed", edit) for edit in added)]):
        means = [statistics(model, TEXTS, POINT, batch=size)[POINT].mean for size in (1, 2, 5)]
    alone = []
    for text in TEXTS:

        def zero(value, point):
            value[:, -1] = 0

        add = lambda value, point: value + 2 * one_value  # noqa: E731
        with runner.hooks({"blocks.0.mlp_out": zero, "embed": add}):
            alone.append(runner.capture(text, names=POINT)[POINT][0])
    for mean in means:
        torch.testing.assert_close(mean.float(), torch.cat(alone).mean(0), rtol=1e-4, atol=1e-4)


def test_edits_of_some_texts_are_refused_in_runs_of_some_pairs(monkeypatch):
    """`Pairs.solved` and `align` run some of the pairs at a time."""
    model = pydoc()
    clean, corrupted = ["def __ini", "import o"] * 8, ["def __nam", "import s"] * 8
    clean = [f"{'abcdefgh'[n // 2]} {text}" for n, text in enumerate(clean)]
    corrupted = [f"{'abcdefgh'[n // 2]} {text}" for n, text in enumerate(corrupted)]
    pairs = Pairs(clean, corrupted, [("t", "e"), ("s", "y")] * 8).read_by(model)
    runner = HookedRunner(model)
    hooks = {"blocks.0.mlp_out": edits.zero(batch=1)}

    def aligned(model):
        return align(model, pairs[:12], k=2, test=pairs[12:], epochs=1, batch=3)

    with runner.hooks(hooks):
        # All pairs run in one batch.
        assert len(pairs.solved(model))
    monkeypatch.setattr("interp.pairs.pairs._TOKENS_AT_ONCE", 30)
    for analysis in (pairs.solved, aligned):
        with pytest.raises(HookError, match="leave out batch="), runner.hooks(hooks):
            analysis(model)
