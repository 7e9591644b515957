"""Analyses of attached models, compared with the plain copies of `from_hf`."""

import functools
import itertools
import types

import pytest
import torch

from hooks import HookedRunner, HookError
from interp import (
    Pairs,
    activation_patching,
    attribution_patching,
    edge_attribution,
    edge_patching,
    graph,
    head_scores,
    logit_diff,
    logit_lens,
    ov_circuit,
    path_patching,
    positional_scores,
    qk_circuit,
    repeated_tokens,
    run_circuit,
    singular_tokens,
    token_directions,
)
from models import attach, from_hf
from tests.attachable import BATCH, POS, VOCAB, agree, made

close = functools.partial(agree, tolerance=1e-4)

FAMILIES = ["gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "opt"]


@functools.lru_cache(maxsize=1)
def world(name):
    model = made(name)
    plain = from_hf(model)
    clean, corrupted = torch.randint(3, VOCAB, (2, BATCH, POS))
    metric = logit_diff(right=5, wrong=11)
    return types.SimpleNamespace(
        model=model, plain=plain, clean=clean, corrupted=corrupted, metric=metric
    )


def check(w, table):
    """Check that a table of effects of the attached model equals the table of the plain model."""
    theirs = table(w.plain)
    with attach(w.model):
        ours = table(w.model)
    for what in ("values", "base", "target"):
        close(getattr(ours, what), getattr(theirs, what), what)
    assert (ours.axes, ours.labels) == (theirs.axes, theirs.labels)


SITES = {"resid_pre": "pos", "z": "head", "pattern": "head", "v": "head", "mlp_out": "pos"}


@pytest.mark.sampled(32)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", FAMILIES)
def test_patching(name, site):
    w = world(name)
    given = (Pairs(w.clean, w.corrupted, metric=w.metric), site, ["layer", SITES[site]])
    check(w, lambda model: activation_patching(model, *given))
    check(w, lambda model: attribution_patching(model, *given))


# Readings of weights. The models of these tests differ in their weights and norms, and gemma2 also
# scales its embeddings.
WEIGHTS = {
    "ov": lambda model, fold: ov_circuit(model, fold=fold).norm(),
    "qk": lambda model, fold: qk_circuit(model, fold=fold, distance=3).norm(),
    "tokens": lambda model, fold: singular_tokens(model, 1, 2, fold=fold).read_scores,
    "logits": lambda model, fold: token_directions(model, torch.arange(5), fold),
    "positions": lambda model, fold: positional_scores(model, n_pos=POS).values,
}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_weights(name):
    w = world(name)
    for (what, reading), fold in itertools.product(WEIGHTS.items(), (True, False)):
        theirs = reading(w.plain, fold)
        with attach(w.model):
            close(reading(w.model, fold), theirs, f"{what} with {fold=}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_readings(name):
    w, tokens = world(name), repeated_tokens(VOCAB, period=4, batch=BATCH)
    found = []
    with attach(w.model):
        for model in (w.plain, w.model):
            _, cache = HookedRunner(model).run_with_cache(tokens)
            lens = logit_lens(model, cache, top_k=VOCAB)
            kinds = ("previous_token", "induction", "entropy")
            heads = (head_scores(model, cache, kind).values for kind in kinds)
            found.append((lens.target_probabilities, lens.probabilities, *heads))
            assert len(lens.tokens) == 3
    for ours, theirs in zip(found[1], found[0], strict=True):
        close(ours, theirs, name)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "opt"])
def test_graphs(name):
    w, hooks = world(name), {"blocks.1.mlp_out": lambda value, point: value * 0}
    pairs, edges = Pairs(w.clean, w.corrupted, metric=w.metric), ["a0.h1->a1.h1<q>", "input->m1"]
    for analysis in (
        edge_attribution,
        functools.partial(edge_patching, edges=edges),
        path_patching,
    ):
        check(w, functools.partial(analysis, pairs=pairs))
    with torch.no_grad(), attach(w.model):
        logits = [w.model(text, use_cache=False).logits for text in (w.clean, w.corrupted)]
        nodes = graph.Graph(w.model)
        cache = HookedRunner(w.model).capture(w.clean, names=[*nodes.needed, "*.attn_out"])
        wrote = nodes.contributions(cache)[[*nodes.layers[1].heads.writers]].sum(0)
        close(wrote, cache["attn_out", 1], "the sum over heads")
        for circuit, expected in ((nodes.edges, logits[0]), ([], logits[1])):
            close(run_circuit(w.model, pairs, circuit), expected, "a whole or empty circuit")
        with HookedRunner(w.model).hooks(hooks), pytest.raises(HookError, match="hook"):
            run_circuit(w.model, pairs, [])
