"""A result of each kind, made from small inputs, for tests of files and of the record."""

import copy
import functools
import math
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch import nn

import interp
from hooks import HookedRunner
from interp import Pairs
from interp.alignment import align, null_spaces
from interp.claims import Test, Verdict
from interp.claims.claim import Claim
from interp.diffing import compare_models
from interp.directions import difference_of_means, erasure, probe, sparse_probes, steering_curve
from interp.features import (
    Crosscoder,
    crosscoder_cards,
    evaluate_sae,
    feature_cards,
    latent_scaling,
    load_sae,
    load_transcoders,
    score_explanation,
)
from interp.graph import Graph, circuits
from interp.spectral import svd
from interp.store import plan, statistics
from tests.shipped import pydoc

TEXT, OTHER = "KV81; KV8", "KV84; KV8"
NUMBERS = [f"part AB{number}" for number in range(6)]
WORDS = [f"part {word}" for word in "one two ten six all new".split()]


@functools.cache
def shared():
    """Return what several results need: pairs, a cache, a graph with scores, and dictionaries."""
    model = pydoc()
    pairs = Pairs([TEXT, f"a{TEXT}"], [OTHER, f"a{OTHER}"], ("1", "4")).read_by(model)
    _, cache = HookedRunner(model).run_with_cache(TEXT, lazy=True)
    scores = interp.edge_attribution(model, pairs)
    graph = Graph(model)
    return SimpleNamespace(
        model=model,
        pairs=pairs,
        cache=cache,
        graph=graph,
        scores=scores,
        circuit=circuits.top(graph, scores, 10),
        sae=load_sae("pydoc-4l/resid_post"),
    )


def tiny_crosscoder():
    """Return a crosscoder of two members and two features. Member a lacks the second feature."""
    eye, one = torch.eye(2), torch.eye(2) * torch.tensor([1.0, 0.0])
    zeros = torch.zeros(2)
    coded = [torch.stack([0 * eye, eye]), torch.stack([one, eye]), zeros, torch.zeros(2, 2)]
    return Crosscoder(*coded, nn.ReLU(), names=["a", "b"])


def aligned(s):
    """Return an alignment of a few steps."""
    texts = ([f"KV{n}1; KV{n}" for n in range(4)], [f"KV{n}4; KV{n}" for n in range(4)])
    pairs = Pairs(*texts, ("1", "4")).read_by(s.model)
    return align(s.model, pairs[:2], k=2, test=pairs[2:], layers=2, epochs=1)


@functools.cache
def traced():
    """Return an attribution graph of a short text."""
    transcoders = load_transcoders("pydoc-4l/transcoders")
    return interp.attribution_graph(pydoc(), TEXT, transcoders, targets=2, max_features=12)


@functools.cache
def changed():
    """Return the differences between the model and a copy with one changed matrix."""
    tuned = copy.deepcopy(pydoc())
    with torch.no_grad():
        tuned.blocks[2].mlp.output.weight.mul_(1.3)
    return compare_models(tuned, pydoc(), [TEXT, OTHER])


# For each result, a function that makes it from the shared values.
MADE = {
    "activation_patching": lambda s: interp.activation_patching(s.model, s.pairs, "z"),
    "normalized": lambda s: interp.activation_patching(s.model, s.pairs, "z").normalized(),
    "edge_attribution": lambda s: s.scores,
    "logit_lens": lambda s: interp.logit_lens(s.model, s.cache),
    "decompose": lambda s: interp.decompose(s.model, s.cache),
    "composition_scores": lambda s: interp.composition_scores(s.model, "K", draws=2),
    "max_activating": lambda s: interp.max_activating(s.model, [TEXT], "blocks.1.mlp_out", k=3),
    "tuned_lens": lambda s: interp.tuned_lens(s.model, [TEXT, OTHER], steps=2),
    "jacobian_lens": lambda s: interp.jacobian_lens(s.model, [TEXT[:2], OTHER[3:6]], skip=0),
    "compare_effects": lambda s: interp.compare_effects(s.scores, s.scores),
    "circuit_curve": lambda s: interp.circuit_curve(
        s.model, s.pairs, s.graph, s.scores, shares=[0.1, 0.5]
    ),
    "patch_top_k": lambda s: interp.patch_top_k(
        s.model, s.pairs, estimate=interp.attribution_patching(s.model, s.pairs, "z"), k=2
    ),
    "circuit": lambda s: s.circuit,
    "acdc": lambda s: interp.acdc(s.model, s.pairs[:1], 2.0),
    "faithfulness": lambda s: interp.faithfulness(s.model, s.pairs, s.circuit),
    "pairs": lambda s: s.pairs,
    "align": aligned,
    "null_spaces": lambda s: null_spaces(
        s.model, s.pairs, "blocks.2.resid_post", torch.eye(128)[0]
    ),
    "evaluate_circuit": lambda s: interp.evaluate_circuit(s.model, s.pairs, s.circuit),
    "evaluate_sae": lambda s: evaluate_sae(s.model, s.sae, [TEXT, OTHER]),
    "feature_cards": lambda s: feature_cards(s.model, s.sae, [TEXT], [5, 332], k=2),
    "crosscoder": lambda s: tiny_crosscoder(),
    "crosscoder_cards": lambda s: crosscoder_cards(
        [s.model, s.model],
        Crosscoder(
            *[torch.stack([torch.eye(128)] * 2)] * 2,
            torch.zeros(128),
            torch.zeros(2, 128),
            nn.ReLU(),
        ),
        [TEXT],
        [3],
        0,
        point="blocks.2.resid_post",
    ),
    "latent_scaling": lambda s: latent_scaling(
        tiny_crosscoder(), [[torch.eye(2), torch.eye(2)]], "b"
    ),
    "score_explanation": lambda s: score_explanation(
        s.model, s.sae, 332, "x", [TEXT, OTHER], lambda p: "no", n=2
    ),
    "dictionary": lambda s: s.sae,
    "attribution_graph": lambda s: traced(),
    "intervene": lambda s: traced().intervene({traced().nodes[0].id: 0.0}),
    "claim": lambda s: Claim.circuit(s.model, s.pairs, s.circuit, "x", faithful=0.7),
    "verify": lambda s: Verdict(
        "x", {"base": "3"}, (Test("a", "fails", measured=0.5), Test("b", "holds"))
    ),
    "compare_models": lambda s: changed(),
    "weights of compare_models": lambda s: changed().top(1),
    "lens of compare_models": lambda s: changed().lens(-1, draws=1),
    "difference_of_means": lambda s: difference_of_means(s.model, (NUMBERS, WORDS)),
    "erasure": lambda s: erasure(s.model, (NUMBERS, WORDS)),
    "steering_curve": lambda s: steering_curve(
        s.model,
        difference_of_means(s.model, (NUMBERS, WORDS)),
        [TEXT],
        [0.0, 1.0],
        interp.log_prob("1"),
        others=["def f(", "import"],
    ),
    "svd_targets": lambda s: interp.svd_targets(s.model, s.cache),
    "svd": lambda s: svd(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]])),
    "ov_circuit": lambda s: interp.ov_circuit(s.model),
    "singular_tokens": lambda s: interp.singular_tokens(s.model, 0, 1, k=2, top=3),
    "steps": lambda s: interp.Steps(s.model, "One. Two.", " Three."),
    "resampled": lambda s: interp.resampled(
        s.model,
        interp.Steps(s.model, "One.", " It is 3."),
        n=2,
        max_new_tokens=4,
        threshold=1.0,
    ),
    "plan": lambda s: plan(s.model, [TEXT], "blocks.1.mlp_out"),
    "statistics": lambda s: statistics(s.model, [TEXT], "blocks.1.mlp_out"),
    "circuit_auroc": lambda s: interp.circuit_auroc(s.scores, s.circuit),
    "a tensor": lambda s: torch.tensor([[1.0, math.inf], [math.nan, 2.0]]),
}
NEEDS_SKLEARN = {
    "probe": lambda s: probe(s.model, (NUMBERS, WORDS), folds=3, draws=1),
    "sparse_probes": lambda s: sparse_probes(
        s.model, s.sae, (NUMBERS, WORDS), k=(1, 2), folds=3, draws=1
    ),
}
if find_spec("sklearn"):
    MADE |= NEEDS_SKLEARN
