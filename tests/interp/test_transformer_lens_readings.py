"""Comparison with TransformerLens on the same weights: decompositions, direct attribution and
scores of heads.

TransformerLens gets processed weights if it needs them; our readings fold norms themselves. With
version 2.18 the difference is at most 1e-6 of the largest value.
"""

import copy
import re

import pytest
import torch

from hooks import HookedRunner
from interp import accumulated_logits, decompose, direct_logit_attribution, head_scores
from tests.interp.twins import FORMS, close, twins
from tests.reference import LAYERS, POS, some_tokens

TOKENS, RIGHT, WRONG = (some_tokens(seed)[:3] for seed in (1, 2, 3))


def renamed(label):
    """Return our name of a component from the label of TransformerLens."""
    label = re.sub(r"^L(\d+)H(\d+)$", r"a\1.h\2", label)
    label = re.sub(r"^L(\d+)N(\d+)$", r"m\1.n\2", label)
    return re.sub(r"^(\d+)_mlp_out$", r"m\1", label)


@pytest.fixture(scope="module", params=FORMS)
def models(request):
    """Return a model and the TransformerLens model with the same weights, in float64."""
    return twins(request.param)


@pytest.fixture
def runs(models):
    """Our model and its cache, and two caches of TransformerLens: with raw and processed
    weights.
    """
    ours, raw = models
    processed = copy.deepcopy(raw)
    # Do not fold the biases of values. Otherwise the outputs of heads would not include them.
    processed.fold_value_biases = lambda state: state
    processed.process_weights_()
    # `setup` gives names to the points of the new norms.
    processed.setup()
    with torch.no_grad():
        _, cache = HookedRunner(ours).run_with_cache(TOKENS)
        return ours, cache, *(model.run_with_cache(TOKENS)[1] for model in (raw, processed))


@torch.no_grad()
@pytest.mark.parametrize("neurons", [False, True])
@pytest.mark.parametrize("before", [None, 1])
def test_parts_of_the_stream_agree(runs, neurons, before):
    ours, cache, theirs, _ = runs
    neurons = neurons and ours.config.mlp != "none"  # a model without MLPs has no neurons
    found = decompose(ours, cache, before=before, neurons=neurons)
    layer = LAYERS if before is None else before
    options = dict(expand_neurons=neurons, apply_ln=False, return_labels=True)
    stack, labels = theirs.get_full_resid_decomposition(layer, **options)
    expected = dict(zip(map(renamed, labels), stack, strict=True))
    bias = expected.pop("bias")
    biases = [name for name in found.names if name.endswith("bias")]
    assert {*found.names} - {*biases} == expected.keys()
    for name, value in expected.items():
        close(found[name], value)
    close(sum((found[name] for name in biases), torch.zeros_like(bias)), bias)


@torch.no_grad()
def test_direct_attribution_and_accumulated_streams_agree(runs):
    ours, cache, _, theirs = runs
    found = direct_logit_attribution(ours, cache, right=RIGHT, wrong=WRONG)
    stack, labels = theirs.get_full_resid_decomposition(
        expand_neurons=False, apply_ln=False, return_labels=True
    )
    expected = theirs.logit_attrs(stack, tokens=RIGHT, incorrect_tokens=WRONG)
    for label, value in zip(map(renamed, labels), expected, strict=True):
        if label != "bias":
            close(found.select(component=label).values.T, value)
    middle = "blocks.0.resid_mid" in cache  # parallel blocks do not have this point
    stack, labels = theirs.accumulated_resid(incl_mid=middle, apply_ln=False, return_labels=True)
    biases = theirs.model.b_U[RIGHT] - theirs.model.b_U[WRONG]
    expected = theirs.logit_attrs(stack, tokens=RIGHT, incorrect_tokens=WRONG) + biases
    found = accumulated_logits(ours, cache, right=RIGHT, wrong=WRONG)
    assert found.labels["stream"] == tuple(labels)
    close(found.values.mT, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["previous_token", "duplicate_token", "induction"])
def test_scores_of_heads_agree(models, kind):
    """TransformerLens divides by the number of all queries, and this package divides by the number
    of queries that can have the pattern.
    """
    from transformer_lens.head_detector import detect_head

    ours, theirs = models
    tokens = torch.randint(5, (4, POS))
    _, cache = HookedRunner(ours).run_with_cache(tokens)
    found = head_scores(ours, cache, kind).values
    theirs.to_tokens = lambda text: text
    for row, text in enumerate(tokens):
        repeated = sum(bool((text[:n] == text[n]).any()) for n in range(POS))
        counted = POS - 1 if kind == "previous_token" else repeated
        close(found[..., row] * counted / POS, detect_head(theirs, text[None], f"{kind}_head"))
